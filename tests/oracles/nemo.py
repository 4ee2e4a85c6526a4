"""Runs nemo-automodel on a checkpoint folder and records what it computed, layer by layer.

Runs inside the oracle environment (`regenerate.sh` builds it), never in ours. The model is built
from the folder's own config.json and tokenizer.json and filled through NeMo's state-dict adapter
with strict keys, in fp32; so a golden also proves that the written layout loads elsewhere.

    python -m tests.oracles.nemo --run tiny --checkpoints DIR --out tests/golden

What a newcomer gets wrong: a golden without its margins. Selections at equal scores are free, so
beside each selection lie the sets `sure` and `possible` that any correct engine stays between.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import attention as nemo_attention
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.geometries import RUNS, SEED, GoldenRun
from tests.oracles.golden_file import write_golden

_quantize = nemo_attention.quantize_cache


class CacheRecorder:
    """Stands in for NeMo's cache rounding: records rows before and after, rounds or passes on.

    Rows are filed as (kind, layer); the format tells the kind, except that a Full layer rounds its
    index keys [B, M, DI] before its index queries [B, T, HI, DI].
    """

    def __init__(self, rounding: bool):
        self.rounding = rounding
        self.layer = -1
        self.before: dict[tuple[str, int], Tensor] = {}
        self.after: dict[tuple[str, int], Tensor] = {}

    def __call__(self, values: Tensor, *, format: str, block_size: int) -> Tensor:
        kind = {"fp8": "window_kv", "nvfp4": "main_kv"}.get(format)
        if kind is None:
            kind = "index_q" if values.ndim == 4 else "index_k"
        rounded = _quantize(values, format=format, block_size=block_size)
        self.before[kind, self.layer] = values.clone()
        self.after[kind, self.layer] = rounded.clone()
        return rounded if self.rounding else values


def load_model(folder: Path) -> DeepseekV41ForCausalLM:
    """Build NeMo's model from a checkpoint folder, fp32, every key accounted for."""
    config = DeepseekV41Config.from_pretrained(str(folder))
    config._name_or_path = str(folder)
    if not (folder / "config.json").read_text().count('"vision_config": {'):
        # NeMo's default is the released 32-layer tower.
        config.vision_config.num_hidden_layers = 0
    for part in (config, config.text_config):
        part.dtype = "float32"
    backend = BackendConfig(
        attn="eager",
        linear="torch",
        rms_norm="torch_fp32",
        rope_fusion=False,
        experts="torch",
        dispatcher="torch",
        gate_precision="float32",
        enable_hf_state_dict_adapter=True,
        enable_fsdp_optimizations=False,
    )
    model = DeepseekV41ForCausalLM(config, backend=backend)
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored.update(load_file(path))
    native = model.state_dict_adapter.from_hf(stored)
    model.load_state_dict({k: v.float() for k, v in native.items()}, strict=True)
    return model.eval()


def draw_ids(run: GoldenRun) -> Tensor:
    """Return token ids [B, T] that avoid specials and the image id, with repeated n-grams."""
    vocab = run.config().text_config.vocab_size
    ids = np.random.default_rng(SEED).integers(3, vocab - 1, size=(run.batch, run.length))
    # A repeated phrase makes equal n-grams and so equal Engram rows at two places.
    ids[:, run.length // 2 : run.length // 2 + 5] = ids[:, 4:9]
    return torch.from_numpy(ids)


def image_mask(run: GoldenRun) -> Tensor:
    """Return [B, T] bool, True at image tokens."""
    mask = torch.zeros(run.batch, run.length, dtype=torch.bool)
    for span in run.images:
        mask[:, slice(*span)] = True
    return mask


def bits(mask: Tensor) -> Tensor:
    """Pack a mask [..., M] into [..., ceil(M / 8)] uint8, first entry in the lowest bit."""
    return torch.from_numpy(np.packbits(mask.numpy(), axis=-1, bitorder="little"))


def between(scores: Tensor, count: int, margin: float) -> tuple[Tensor, Tensor]:
    """Return masks of entries that any top-`count` must and may hold, ties within `margin` free.

    scores  [..., M], -inf where not selectable. An entry is sure if it beats the best one left out
    by more than the margin, and possible if it comes within the margin of the last one taken. The
    margin is relative to the row's largest finite magnitude; with at most `count` selectable
    entries both masks are simply those.
    """
    selectable = scores > -torch.inf
    finite = scores.masked_fill(~torch.isfinite(scores), 0).abs().amax(-1, keepdim=True)
    few = selectable.sum(-1, keepdim=True) <= count
    if count >= scores.shape[-1]:
        return selectable, selectable
    last, first_out = scores.topk(count + 1, dim=-1).values[..., -2:].split(1, dim=-1)
    sure = selectable & (few | (scores > first_out + margin * finite))
    possible = selectable & (few | (scores >= last - margin * finite))
    return sure, possible


class Capture:
    """Forward hooks that file what one run computed under the golden's names."""

    def __init__(self, model: DeepseekV41ForCausalLM, run: GoldenRun, recorder: CacheRecorder):
        self.run, self.recorder, self.text = run, recorder, model.config.text_config
        self.tensors: dict[str, Tensor] = {}
        self.full: dict[str, Tensor] = {}
        self.handles: list = []
        last = self.text.num_hidden_layers - 1
        for name, layer in model.model.layers.items():
            n = int(name)
            self._before(layer.attn, lambda _m, _a, n=n: setattr(self.recorder, "layer", n))
            self._before(layer, lambda _m, a, n=n: self._keep(f"streams.{n}", a[0]))
            if n == last:
                self._after(layer, lambda _m, _a, out: self._keep(f"streams.{last + 1}", out[0]))
            for site, module in (("attn", layer.attn), ("ffn", layer.ffn)):
                norm = layer.attn_norm if site == "attn" else layer.ffn_norm
                self._after(norm, lambda _m, _a, out, k=f"{site}_in.{n}": self._keep(k, out))
                self._after(module, lambda _m, _a, out, k=f"{site}_out.{n}": self._keep(k, out))
            if "selection" not in run.keep:
                continue
            self._after(layer.ffn.gate, lambda m, a, out, n=n: self._gate(m, a, out, n))
            indexer = layer.attn.indexer
            if indexer is not None:
                heads = f"index_weights.{n}"
                self._after(indexer.weights_proj, lambda _m, _a, out, k=heads: self._keep(k, out))
                self._after(indexer, lambda m, _a, out, n=n: self._indexer(m, out, n))

    def _before(self, module, hook) -> None:
        self.handles.append(module.register_forward_pre_hook(hook))

    def _after(self, module, hook) -> None:
        self.handles.append(module.register_forward_hook(hook))

    def stop(self) -> None:
        """Remove all hooks: later forwards leave the capture alone."""
        for handle in self.handles:
            handle.remove()

    def _keep(self, key: str, value) -> None:
        value = getattr(value, "hidden_states", value)  # attention returns a record
        self.full[key] = value.detach().clone()

    def _gate(self, module, args, out, layer: int) -> None:
        weights, ids = out[0], out[1]
        shape = (self.run.batch, self.run.length, -1)
        order = ids.argsort(-1)
        self.tensors[f"gate_ids.{layer}"] = ids.gather(1, order).view(shape).to(torch.int16)
        chosen = weights.gather(1, order).view(shape).float()
        self.tensors[f"gate_weights.{layer}"] = chosen[:, list(self.run.positions)].contiguous()
        # Selection scores again, from the module's own weights, for the distance to a flip.
        logits = torch.nn.functional.linear(args[0].float(), module.weight.float())
        scores = torch.nn.functional.softplus(logits).sqrt()
        bias = module.e_score_correction_bias.expand_as(scores)
        if self.run.images:
            bias = torch.where(image_mask(self.run).flatten()[:, None], module.bias_vl, bias)
        ranked = (scores + bias).sort(-1, descending=True)
        count = ids.shape[-1]
        if not torch.equal(ranked.indices[:, :count].sort(-1).values, ids.gather(1, order)):
            raise RuntimeError(f"layer {layer}: the recomputed router choice differs")
        margin = torch.full((ids.shape[0], 1), torch.inf)
        if count < scores.shape[-1]:
            margin = (ranked.values[:, count - 1] - ranked.values[:, count]).unsqueeze(-1)
        self.tensors[f"gate_margin.{layer}"] = margin.view(shape)[..., 0].contiguous()

    def _indexer(self, module, out, layer: int) -> None:
        """File the selection with what is sure and possible, from recomputed scores."""
        keys, chosen = out.index_keys, out.topk_indices
        filed = self.recorder.after if self.recorder.rounding else self.recorder.before
        queries = filed["index_q", layer]
        scale = module.head_dim**-0.5 * module.num_heads**-0.5
        weights = self.full[f"index_weights.{layer}"] * scale
        scores = torch.einsum("bshd,btd->bsht", queries, keys)
        scores = (scores.relu() * weights.unsqueeze(-1)).sum(2)  # [B, T, M]
        ratio, width = out.compression_ratio, keys.shape[1]
        visible = (torch.arange(self.run.length) + 1) // ratio
        allowed = torch.arange(width) < visible[:, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
        if module.is_candidate_source:
            block = module.candidate_block_size
            padded = torch.nn.functional.pad(scores, (0, -width % block), value=-torch.inf)
            best = padded.unflatten(-1, (-1, block)).amax(-1)
            newest = torch.arange(best.shape[-1]) == ((visible - 1) // block)[:, None]
            best = best.masked_fill(newest, torch.inf)
            # The forced block is in; the rest compete for one place less.
            rest = best.masked_fill(newest, -torch.inf)
            sure, possible = between(rest, module.candidate_topk_blocks - 1, self.run.margin)
            for name, mask in (("sure", sure | newest), ("possible", possible | newest)):
                entries = mask.repeat_interleave(block, -1)[..., :width] & allowed
                self.tensors[f"candidates_{name}.{layer}"] = bits(entries)
            self.tensors[f"candidates.{layer}"] = bits(out.candidates)
        elif module.uses_candidates:
            scores = scores.masked_fill(~out.candidates, -torch.inf)
        sure, possible = between(scores, module.topk, self.run.margin)
        mask = torch.zeros(*chosen.shape[:2], width + 1, dtype=torch.bool)
        mask.scatter_(-1, torch.where(chosen >= 0, chosen, width), True)
        mask = mask[..., :width]
        if bool((sure & ~mask).any()) or bool((mask & ~possible).any()):
            raise RuntimeError(f"layer {layer}: the recomputed scores do not explain the selection")
        self.tensors[f"topk.{layer}"] = chosen.to(torch.int16)
        self.tensors[f"topk_sure.{layer}"] = bits(sure)
        self.tensors[f"topk_possible.{layer}"] = bits(possible)

    def collect(self) -> dict[str, Tensor]:
        """Cut full-width tensors to the run's positions and add the cache rows."""
        kept = {"streams"} & set(self.run.keep)
        if "sublayers" in self.run.keep:
            kept |= {"attn_in", "attn_out", "ffn_in", "ffn_out"}
        positions = list(self.run.positions)
        for key, value in self.full.items():
            if key.split(".")[0] in kept:
                self.tensors[key] = value[:, positions].contiguous()
        if "rows" in self.run.keep:
            for (kind, layer), before in self.recorder.before.items():
                self._cache_rows(kind, layer, before, self.recorder.after[kind, layer])
        return self.tensors

    def _cache_rows(self, kind: str, layer: int, before: Tensor, after: Tensor) -> None:
        """File some rows as they entered the rounding, and some or all as they left it."""
        exact = after.bfloat16()
        if not torch.equal(exact.float(), after):
            raise RuntimeError(f"{kind}.{layer}: a rounded row is not exact in bf16")
        total = before.shape[1]
        some = sorted({p * total // self.run.length for p in self.run.positions})
        kept = some
        if "all_rows" in self.run.keep:
            kept = list(range(total))
        if kind == "index_q":
            some = some[-2:]
        for name, rows, values in (("before", some, before), ("after", kept, exact)):
            self.tensors[f"{kind}_{name}.{layer}"] = values[:, rows].contiguous()
            self.tensors[f"{kind}_{name}_rows.{layer}"] = torch.tensor(rows, dtype=torch.int16)


def capture(run: GoldenRun, folder: Path) -> dict[str, Tensor]:
    """Run NeMo once on `folder` and return the golden's tensors."""
    recorder = CacheRecorder(run.rounding)
    nemo_attention.quantize_cache = recorder
    model = load_model(folder)
    ids = draw_ids(run)
    mask = image_mask(run) if run.images else None
    hooks = Capture(model, run, recorder)
    with torch.no_grad():
        hidden, _ = model.model(ids, image_mask=mask)
        logits = model.lm_head(hidden.float())
    hooks.stop()
    if not bool(torch.isfinite(logits).all()):
        raise RuntimeError(f"{run.name}: logits are not finite")
    tensors = hooks.collect()
    positions = list(run.positions)
    tensors["input_ids"] = ids.to(torch.int32)
    tensors["positions"] = torch.tensor(positions, dtype=torch.int16)
    tensors["logits"] = logits[:, positions].contiguous()
    token_mask = None if mask is None else ~mask
    hashes = model.model.engram_hash(ids, token_mask=token_mask)  # [B, T, Engram layers, J]
    if "selection" in run.keep:
        tensors["engram_hash_ids"] = hashes.to(torch.int32)
    if mask is not None:
        tensors["image_mask"] = mask.to(torch.uint8)
    if run.greedy:
        tensors.update(continue_greedily(model, ids[:1], run.greedy))
    return tensors


def continue_greedily(model, ids: Tensor, steps: int) -> dict[str, Tensor]:
    """Return logits [steps + 1, V] after the prompt and after each greedy token; no cache."""
    rows = []
    with torch.no_grad():
        for _ in range(steps + 1):
            rows.append(model(ids, logits_to_keep=1).logits[:, -1].float())
            ids = torch.cat((ids, rows[-1].argmax(-1, keepdim=True)), dim=1)
    chosen = ids[0, -steps - 1 :].to(torch.int32)
    return {"greedy_logits": torch.cat(rows), "greedy_ids": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="*", choices=sorted(RUNS), default=list(RUNS))
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for run in (RUNS[name] for name in args.run):
        write_golden(
            run.name,
            capture(run, args.checkpoints / run.checkpoint),
            out=args.out,
            package="nemo-automodel",
            command=f"python -m tests.oracles.nemo --run {run.name}",
            seed=SEED,
            notes=f"fp32, weights dequantised, cache rounding {'on' if run.rounding else 'off'}; "
            f"full-width tensors at positions {list(run.positions)} only",
        )
        print(f"nemo-automodel: {run.name}", flush=True)


if __name__ == "__main__":
    main()
