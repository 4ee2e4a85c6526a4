"""Prints the figures of docs/conformance.md from the stored goldens and the model as it is now.

python -m tests.oracles.conformance_report
"""

from __future__ import annotations

import torch

from finwhale.model import Numerics
from tests.oracles.geometries import RUNS
from tests.oracles.golden_file import GOLDEN, read_manifest
from tests.parity.compare import relative_errors
from tests.parity.ours import check_parity, golden, loaded, ours, tolerance
from tests.parity.test_ftllm import steps_of
from tests.parity.test_nemo_rounding import WITH_ROWS, differing_codes


def exact_runs() -> None:
    print("| run | layers | tokens | streams | logits | allowed | selections | router choices |")
    print("|---|---|---|---|---|---|---|---|")
    for name, run in RUNS.items():
        if run.rounding:
            continue
        errors, stored = check_parity(run, ours(name)), golden(name)
        rows = sum(v[..., 0].numel() for k, v in stored.items() if k.startswith("topk_sure."))
        rows += sum(v[..., 0].numel() for k, v in stored.items() if k.startswith("candidates."))
        choices = sum(v[..., 0].numel() for k, v in stored.items() if k.startswith("gate_ids."))
        layers = run.config().text_config.num_hidden_layers
        streams = f"{errors['streams']:.1e}" if "streams" in errors else "-"
        print(
            f"| `{name}` | {layers} | {run.batch} x {run.length} | {streams} | "
            f"{errors['logits']:.1e} | {tolerance(run):.0e} | {rows or '-'} | {choices or '-'} |"
        )


def rounded_runs() -> None:
    print("\n| run | logits, median over tokens | worst token |")
    print("|---|---|---|")
    for name, run in RUNS.items():
        if run.rounding:
            positions = golden(name)["positions"].long()
            logits = ours(name).logits[:, positions]
            errors = relative_errors(logits, golden(name)["logits"])
            print(f"| `{name}` | {float(errors.median()):.1e} | {float(errors.max()):.1e} |")
    for name in WITH_ROWS:
        counts, first = differing_codes(name)
        shares = ", ".join(f"{kind} {a} of {b}" for kind, (a, b) in counts.items())
        print(f"\n`{name}`: differing rounded values: {shares}; first differing layer {first}")


def second_engine() -> None:
    print("\n| run | ftllm reads | relative, per step | cosine, prompt | same first choice |")
    print("|---|---|---|---|---|")
    for path in sorted(GOLDEN.glob("ftllm-*.json")):
        run_name, _, export = path.stem.removeprefix("ftllm-").rpartition("-")
        steps = read_manifest(path.stem)["steps"]
        relative = " ".join(f"{s['relative']:.3f}" for s in steps)
        same = sum(s["top1"][0] == s["top1"][1] for s in steps)
        cosine = steps[0]["cosine"]
        print(f"| `{run_name}` | {export} | {relative} | {cosine:.4f} | {same} of {len(steps)} |")


def own_numerics() -> None:
    print("\n| run | ours bf16 | ours release | ftllm BF16 | ftllm FP8/FP4 |")
    print("|---|---|---|---|---|")
    for name in ("peer-noflip", "peer-noflip-fp8", "mini"):
        checkpoint = RUNS[name].checkpoint
        exact = steps_of(name, loaded(checkpoint, Numerics(cache_rounding=False)))[0][0]
        cells = []
        for numerics in (
            Numerics(cache_rounding=False, dtype=torch.bfloat16),
            Numerics(mode="release", cache_rounding=False, dtype=torch.bfloat16),
        ):
            logits = steps_of(name, loaded(checkpoint, numerics))[0][0]
            cells.append(float((logits - exact).norm() / exact.norm()))
        for export in ("bf16", "fp8"):
            if (GOLDEN / f"ftllm-{name}-{export}.json").exists():
                logits = golden(f"ftllm-{name}-{export}")["logits"][0]
                cells.append(float((logits - exact).norm() / exact.norm()))
        print(f"| `{name}` | " + " | ".join(f"{c:.3f}" for c in cells) + " |")


if __name__ == "__main__":
    for part in (exact_runs, rounded_runs, second_engine, own_numerics):
        part()
