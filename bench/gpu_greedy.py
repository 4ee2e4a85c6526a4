"""Greedy text of the shipped model on a GPU beside the CPU's, every difference with its margin.

    python bench/gpu_greedy.py --write      on a CPU: the reference, tests/golden/gpu-greedy.json
    python bench/gpu_greedy.py              on a GPU: prefill, steps in a graph, comparison
The reference is the model's `release` pass, one step per token: prompts, greedy tokens, and of each
token the runner-up with both logits. The GPU runs twice: freely, and fed with the reference's
tokens, which gives its logits of the same two ids in the same context. A first difference of the
free run is called explained only if the reference's margin there is at most the bound: what 99 of
100 margins of the other prompts change by. Two yardsticks stand beside it: what the CPU's own
margins change by when the same tokens run as one pass, and how often it then has another best
token; and, as a control that must be large, the change against another prompt's reference.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import importlib.metadata
import inspect
import json
import shlex
import statistics
import string
import textwrap
import time
import traceback
from pathlib import Path

import torch
from gpu_lines import GpuLines
from record import provenance

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.engine.gpu_generation import prefilled
from finwhale.engine.step import forward_step
from finwhale.model import Numerics
from finwhale.ops import FAST

REFERENCE = Path(__file__).parents[1] / "tests" / "golden" / "gpu-greedy.json"
NEW_TOKENS = 64
SENTENCES = (
    "The keeper of the lighthouse counted the ships each evening and wrote their names in a book",
    "In the last chapter the author returns to the question of why so many people left their homes",
    "import os\n\ndef read_lines(path):\n",
    "def fibonacci(n):\n    ",
    "The parliament is divided into two chambers. The first chamber",
    "1, 2, 3, 4, 5, 6,",
)
# (module, tokens): some contexts stay below the 128 entries that a layer selects, some go beyond.
MODULES = ((textwrap, 40), (heapq, 120), (shlex, 180), (string, 260), (json, 340), (inspect, 420))
CHATS, CHAT_TOKENS = 12, 600  # so many, of as many kinds; longer prompts are left out


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of a folder's weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def prompts(folder: Path) -> list[tuple[str, list[int]]]:
    """Return (kind, ids) of text and chat prompts."""
    from finwhale.conversations.tasks import (
        CHAT_TASKS,
        HELD_OUT_SEED,
        assistant_places,
        chat_example,
    )
    from finwhale.text.prompt import encode_prompt
    from finwhale.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(folder)
    found = [("text", [tokenizer.bos_id, *tokenizer.encode(text)]) for text in SENTENCES]
    for module, tokens in MODULES:
        ids = [tokenizer.bos_id, *tokenizer.encode(inspect.getsource(module))]
        found.append((f"module {module.__name__}", ids[:tokens]))
    chats = []
    for kind in CHAT_TASKS:
        example = chat_example(kind, seed=HELD_OUT_SEED + 2, index=0)
        place = next(iter(assistant_places(example)))
        ids = encode_prompt(
            tokenizer,
            example.messages[:place],
            tools=example.tools or None,
            thinking=example.thinking,
            effort=example.effort,
        )
        if len(ids) <= CHAT_TOKENS:
            chats.append((f"chat {kind}", list(ids)))
    # A spread over the list of kinds, which begins with long prompts.
    return found + [chats[n * len(chats) // CHATS] for n in range(CHATS)]


def write_reference(folder: Path, out: Path, most: int) -> None:
    """Write the CPU's tokens, runners-up, logits, and how far its own margins move."""
    model = load_model(folder, numerics=Numerics.release(), ops=FAST).model
    from finwhale.text.tokenizer import Tokenizer

    eos = Tokenizer.from_file(folder).eos_id
    rows, moved, same = [], [], 0
    for kind, ids in prompts(folder)[:most]:
        state, logits = prefilled(model, ids)
        tokens, seconds, firsts, margins = [], [], [], []
        while True:
            (best, other), (token, second) = logits.topk(2)
            token = int(logits.argmax())
            tokens.append(token)
            seconds.append(int(second))
            firsts.append(round(float(best), 3))
            margins.append(round(float(best - other), 4))
            if token == eos or len(tokens) == NEW_TOKENS:
                break
            with torch.no_grad():
                hidden = forward_step(model, state, torch.tensor([[token]]))[:, -1]
                logits = model.logits(hidden)[0]
        with torch.no_grad():
            whole = model(torch.tensor([[*ids, *tokens[:-1]]]))[0, len(ids) - 1 :]
        at = torch.arange(len(tokens))
        same += int((whole.argmax(-1) == torch.tensor(tokens)).sum())
        again = whole[at, torch.tensor(tokens)] - whole[at, torch.tensor(seconds)]
        moved += [abs(a - b) for a, b in zip(again.tolist(), margins, strict=True)]
        row = {"kind": kind, "ids": ids, "tokens": tokens, "seconds": seconds}
        rows.append(row | {"logits": firsts, "margins": margins})
        print(kind, len(ids), len(tokens), flush=True)
    facts = {
        "what": "greedy tokens of models/finwhale-mini by the model's release pass on a CPU",
        "written_by": "python bench/gpu_greedy.py --write",
        "weights_sha256": digest_of(folder),
        "torch": torch.__version__,
        "cpu_margin_moves": summary(moved) | {"same_best": same},
        "prompts": rows,
    }
    text = json.dumps(facts, separators=(",", ":"))
    out.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {out}: {len(text)} bytes, {len(rows)} prompts, {len(moved)} tokens")
    print(f"the CPU's margins, one pass against steps: {facts['cpu_margin_moves']}")


def summary(values: list[float]) -> dict[str, float]:
    """Return count, root mean square, 99th percentile and largest of absolute changes."""
    ordered = sorted(values) or [0.0]
    return {
        "count": len(ordered),
        "rms": round(statistics.fmean(x * x for x in ordered) ** 0.5, 4),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
        "max": round(ordered[-1], 4),
    }


def started(model, device: str, bench: GpuLines, rows: list[dict]):
    """Return the state and first logits of every prompt, by the torch pass on the device."""
    began = time.monotonic()
    try:
        model.to_device(device)
        states = [prefilled(model, row["ids"]) for row in rows]
    except Exception:
        bench.say(prefill=device, failed=traceback.format_exc()[-1500:])
        device = "cpu"
        model.to_device(device)
        states = [prefilled(model, row["ids"]) for row in rows]
    tokens = sum(len(row["ids"]) for row in rows)
    bench.say(prefill=device, tokens=tokens, s=round(time.monotonic() - began, 2))
    return states


def free_run(decoder, states, rows: list[dict]) -> list[list[int]]:
    """Return the greedy tokens of every prompt, as many as the reference has."""
    found, names = {}, {}
    for n, ((state, logits), row) in enumerate(zip(states, rows, strict=True)):
        found[n] = [int(logits.argmax())]
        if len(row["tokens"]) > 1:
            more = len(row["tokens"]) - 1
            names[n] = decoder.admit(state, found[n][0], max_new_tokens=more)
    while names:
        steps = min(decoder.steps_at_once, *(decoder.num_left(name) for name in names.values()))
        drawn = decoder.decode(list(names.values()), steps).tolist()
        for n, own in zip(list(names), drawn, strict=True):
            found[n] += own
            if not decoder.num_left(names[n]):
                decoder.release(names.pop(n))
    return [found[n] for n in range(len(rows))]


def forced_run(decoder, states, rows: list[dict]) -> list[list[tuple[float, float, int]]]:
    """Return (logit of the token, margin, best id) at every place, fed with the reference."""
    found, names = {}, {}

    def note(n: int, logits) -> None:
        place = len(found[n])
        token, second = rows[n]["tokens"][place], rows[n]["seconds"][place]
        first = float(logits[token])
        found[n].append((first, first - float(logits[second]), int(logits.argmax())))

    for n, ((state, logits), row) in enumerate(zip(states, rows, strict=True)):
        found[n] = []
        note(n, logits)
        if len(row["tokens"]) > 1:
            more = len(row["tokens"]) - 1
            names[n] = decoder.admit(state, row["tokens"][0], max_new_tokens=more)
    while names:
        decoder.decode(list(names.values()), 1)
        logits = decoder.logits[: len(names)].cpu()
        for n, own in zip(list(names), logits, strict=True):
            note(n, own)
            decoder.force(names[n], rows[n]["tokens"][len(found[n]) - 1])
            if not decoder.num_left(names[n]):
                decoder.release(names.pop(n))
    return [found[n] for n in range(len(rows))]


def compare(bench: GpuLines, rows: list[dict], free, forced) -> list[tuple[int, int]]:
    """Print the differences, their margins, and whether the noise of the others explains them.

    Returns (prompt, place) of each, those that it does not explain first.
    """
    found: dict[str, list[tuple[int, int]]] = {"unexplained": [], "explained": []}
    moves = [
        [abs(got[1] - want) for got, want in zip(own, row["margins"], strict=True)]
        for own, row in zip(forced, rows, strict=True)
    ]
    levels = [
        abs(got[0] - want)
        for own, row in zip(forced, rows, strict=True)
        for got, want in zip(own, row["logits"], strict=True)
    ]
    agree = [
        got[2] == token
        for own, row in zip(forced, rows, strict=True)
        for got, token in zip(own, row["tokens"], strict=True)
    ]
    control = [
        abs(got[1] - want)
        for own, row in zip(forced, [*rows[1:], rows[0]], strict=True)
        for got, want in zip(own, row["margins"], strict=False)
    ]
    bench.say(
        teacher_forced=len(agree), same_best=sum(agree),
        margin_moves=summary([x for own in moves for x in own]), logit_moves=summary(levels),
        control_of_another_prompt=summary(control),
    )  # fmt: skip
    counts = {"equal": 0, "explained": 0, "unexplained": 0}
    for n, (row, own) in enumerate(zip(rows, free, strict=True)):
        places = [i for i, (a, b) in enumerate(zip(own, row["tokens"], strict=True)) if a != b]
        if not places:
            counts["equal"] += 1
            continue
        place = places[0]
        others = [x for other, found in enumerate(moves) if other != n for x in found]
        bound = summary(others)["p99"]
        margin = row["margins"][place]
        verdict = "explained" if margin <= bound else "unexplained"
        counts[verdict] += 1
        found[verdict].append((n, place))
        bench.say(
            differs=n, kind=row["kind"], prompt_tokens=len(row["ids"]), at=place,
            cpu=row["tokens"][place], gpu=own[place], runner_up=row["seconds"][place],
            cpu_margin=margin, gpu_margin=round(forced[n][place][1], 4), bound=round(bound, 4),
            verdict=verdict,
        )  # fmt: skip
    bench.say(prompts=len(rows), **counts)
    return [*found["unexplained"], *found["explained"]]


def trace(bench: GpuLines, folder: Path, model, weights, options, places) -> None:
    """Print where the logits of places come from, (row, place) each; on what time is left."""
    from gpu_trace import explain

    for row, place in places:
        if bench.is_late:
            bench.say(kind=row["kind"], at=place, trace="late")
            continue
        try:
            model.to_device("cpu")
            explain(bench, folder, model, weights, options.device, row, place, draws=options.draws)
        except Exception:
            bench.say(kind=row["kind"], at=place, failed=traceback.format_exc()[-1500:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the reference, on a CPU")
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=int, default=10**6, help="the first few alone")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"))
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument(
        "--trace", type=int, default=0, help="differences to trace, unexplained first"
    )
    parser.add_argument("--places", nargs="*", default=[], help="PROMPT:PLACE, traced and no more")
    parser.add_argument("--draws", type=int, default=40, help="the CPU's random orders of a trace")
    options = parser.parse_args()
    folder = options.model or shipped_model()
    if options.write:
        write_reference(folder, options.reference, options.prompts)
        return 0
    from finwhale.gpu.decoder import GpuDecoder
    from finwhale.gpu.operations import decode_operations, table_lines
    from finwhale.gpu.weights import pack_backbone

    bench = GpuLines(options.out, options.limit_s)
    bench.say(**provenance(), triton=importlib.metadata.version("triton"))
    reference = json.loads(options.reference.read_text(encoding="utf-8"))
    if reference["weights_sha256"] != digest_of(folder):
        bench.say(failed="the reference is of other weights: run with --write on a CPU first")
        return 1
    rows = reference["prompts"][: options.prompts]
    bench.say(reference=reference["cpu_margin_moves"], prompts=len(rows), torch=torch.__version__)
    model = load_model(folder, numerics=Numerics.release(), ops=FAST).model
    weights = pack_backbone(model, options.device)
    if options.places:
        pairs = [tuple(map(int, one.split(":"))) for one in options.places]
        trace(bench, folder, model, weights, options, [(rows[n], place) for n, place in pairs])
        return 0
    longest = max(len(row["ids"]) + len(row["tokens"]) for row in rows)
    blocks = sum(-(-(len(row["ids"]) + len(row["tokens"])) // 64) for row in rows)
    decoder = GpuDecoder(
        weights, max_sequences=32, num_blocks=blocks, capacity_tokens=longest, mode=options.mode,
        keep_logits=True,
    )  # fmt: skip
    print("\n".join(table_lines(decode_operations(decoder))), flush=True)
    states = started(model, options.device, bench, rows)
    forced = forced_run(decoder, states, rows)
    bench.say(forced_s=round(time.monotonic() - bench.start, 1))
    differing = compare(bench, rows, free_run(decoder, states, rows), forced)[: options.trace]
    trace(bench, folder, model, weights, options, [(rows[n], place) for n, place in differing])
    bench.say(whole_s=round(time.monotonic() - bench.start, 1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
