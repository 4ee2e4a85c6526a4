"""Which operation of a decode step on a GPU uses what, and why: a table to print.

Says what is launched for one decoder, nothing about speed. Whoever changes what a step launches
changes this list beside it. The easy mistake: reading "torch" as the host; every line is the device
unless it says otherwise. Source: `finwhale.gpu.step`, docs/gpu-serving.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finwhale.decode_kernels.launch import device_family
from finwhale.decode_kernels.route import MAX_TOKENS

if TYPE_CHECKING:
    from finwhale.gpu.decoder import GpuDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One line: the operation, what runs it, and the reason."""

    operation: str
    uses: str
    why: str


def decode_operations(decoder: GpuDecoder) -> tuple[Operation, ...]:
    """Return the table of a decoder, in the order of a step."""
    c, family = decoder.weights.config, device_family(decoder.device)
    tuned = "measured" if family == "hopper" else "measured on Hopper alone, and served to all"
    rows = [
        (
            "prefill",
            "torch, the model's own release pass, where its weights are",
            "no kernel of the decode room takes more than one token of a sequence",
        ),
        (
            "positions",
            "torch look-ups in tables made once",
            "about twenty small launches, cheap in a graph; no number comes from the host",
        ),
        ("embedding", "torch indexing", "one gather"),
    ]
    if c.engram_layer_ids:
        rows.append(
            (
                "engram",
                "triton engram_gather, engram_update",
                "hash, FP8 rows and rounding in one launch; gate and addition in another",
            )
        )
    rows += [
        (
            "hyper-connections",
            "triton hyper_site",
            "update, coefficients, Sinkhorn, collapse and norm read the streams once",
        ),
        (
            "FP8 and BF16 products",
            "triton linear_fp8",
            "weights are read as stored; torch has no product with 32x32 scales",
        ),
        (
            "window rows, entries, index keys",
            "triton latent_and_window, store_rows, close_groups",
            "norm, RoPE, rounding and scatter in one launch each",
        ),
        (
            "index scores",
            "triton index_scores",
            "reads packed keys through block tables; fp32 throughout (D30)",
        ),
        (
            "selection",
            "triton select_topk_rows, pool_rows",
            "exact with the stated tie rule, which torch.topk does not keep",
        ),
        (
            "attention",
            "triton gather_attention",
            "one softmax over packed window rows and entries; no copy of either",
        ),
        (
            "router",
            f"triton route, {MAX_TOKENS} rows at a time",
            "choice and the lists of work stay on the device",
        ),
        (
            "experts",
            f"triton experts_w4, {MAX_TOKENS} rows at a time",
            "each chosen FP4 matrix is read once per portion of rows",
        ),
        ("head", "triton linear_fp8 over BF16", "fp32 logits of exact products"),
        (
            "draw",
            "triton draw_tokens",
            "the next step's token never leaves the device; temperature alone (D29)",
        ),
        (
            "second stream",
            "entries, index keys, selection" if decoder.step.side else "none on this device",
            "they run beside a layer's products",
        ),
        (
            "launch",
            f"{decoder.mode}, buckets {list(decoder.buckets)}",
            "one graph per bucket, captured when first needed"
            if decoder.mode == "graph"
            else "launched one by one, as asked or for want of a CUDA device",
        ),
        (
            "launch tables",
            f"{'invariant' if decoder.invariant else 'by number of rows'}, device family {family}",
            tuned,
        ),
    ]
    return tuple(Operation(operation=a, uses=b, why=d) for a, b, d in rows)


def table_lines(operations: tuple[Operation, ...]) -> list[str]:
    """Return the table as aligned text, a line each."""
    widths = [max(len(getattr(one, name)) for one in operations) for name in ("operation", "uses")]
    return [f"{one.operation:{widths[0]}}  {one.uses:{widths[1]}}  {one.why}" for one in operations]
