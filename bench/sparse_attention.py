"""The sparse attention kernel, forward and backward, beside the plain forms and the floors.

    python bench/sparse_attention.py
Needs a GPU. Times are medians of CUDA events. Floors: the products of window and selected keys
(forward 4 H D per key, backward ten) at 780 TFLOP/s, and one read and write of the tensors at 4.3
TB/s. `gather` materialises [T, K, D]; `masked` multiplies all entries in slices.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import triton
from record import write_result

from finwhale.kernels.sparse_attention import sparse_attention_triton
from finwhale.ops.attention import sparse_attention_masked, sparse_attention_ref

SHAPES = {
    # name: B, T, H, D, M, K
    "mini": (8, 2048, 4, 512, 1024, 128),
    "mini explored": (8, 2048, 4, 512, 1024, 384),
    "small": (8, 2048, 8, 128, 1024, 128),
    "small 8K": (2, 8192, 8, 128, 4096, 128),
}


def inputs(batch, tokens, heads, dim, entries, k):
    g = torch.Generator("cuda").manual_seed(0)
    q, kv, e = (
        torch.randn(*shape, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in ((batch, tokens, heads, dim), (batch, tokens, dim), (batch, entries, dim))
    )
    visible = (torch.arange(tokens, device="cuda") + 1) * entries // tokens
    scores = torch.rand(batch, tokens, entries, generator=g, device="cuda")
    hidden = torch.arange(entries, device="cuda") >= visible[:, None]
    top = scores.masked_fill(hidden, -1).topk(k, -1)
    topk = torch.where(top.values < 0, -1, top.indices)
    sink = torch.zeros(heads, device="cuda").requires_grad_()
    positions = torch.arange(tokens, device="cuda").expand(batch, -1)
    return q, kv, e, topk, sink, positions, 128


def milliseconds(function) -> float:
    return triton.testing.do_bench(function, warmup=20, rep=60, return_mode="median")


def main() -> int:
    for name, shape in SHAPES.items():
        batch, tokens, heads, dim, _, k = shape
        args = inputs(*shape)
        grad = torch.randn_like(args[0])
        keys = 128 + k
        forward = 4 * heads * dim * keys * batch * tokens / 780e9
        moved = 2 * sum(t.numel() for t in args[:3]) * 2 / 4.3e9
        result = {"shape": name, "forward_floor_ms": round(max(forward, moved), 3)}
        result["backward_floor_ms"] = round(max(2.5 * forward, 2 * moved), 3)
        for form, op in {
            "triton": sparse_attention_triton,
            "masked": sparse_attention_masked,
            "gather": sparse_attention_ref,
        }.items():
            if form != "triton" and name == "mini explored":
                continue
            result[f"{form}_forward_ms"] = round(milliseconds(partial(op, *args)), 3)
            out = op(*args)
            backward = partial(torch.autograd.grad, out, args[:3], grad, retain_graph=True)
            result[f"{form}_backward_ms"] = round(milliseconds(backward), 3)
            del out
        print(result)
        write_result("sparse_attention", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
