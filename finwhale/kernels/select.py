"""Which implementation of every operation a device gets, decided once when a model is built.

On a GPU: Triton kernels where a plain form would write [T, K, D] or [T, HI, M], grouped products
for the experts, and `torch.compile` around operations that only stream memory. What cannot run
there is refused with its reason; nothing falls back in silence. The kernels of this room are the
only code that imports triton, and are imported here when a GPU is asked for.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from finwhale.config import TextConfig
from finwhale.ops import FAST, Ops, compress, engram, moe, norm, rope


class KernelError(ValueError):
    """A device or a shape that the kernels cannot serve; the message says why."""


def grouped_linear_native(x: Tensor, weight: Tensor) -> Tensor:
    """Same contract as `finwhale.ops.linear.grouped_linear`, multiplied in the dtype of x.

    The products accumulate in fp32 inside the matrix unit.
    """
    groups = x.shape[-2]
    w = weight.to(x.dtype).unflatten(0, (groups, -1))  # [G, O, K]
    flat = x.flatten(0, -3).transpose(0, 1)  # [G, N, K]
    y = torch.bmm(flat, w.transpose(1, 2)).transpose(0, 1)  # [N, G, O]
    return y.reshape(*x.shape[:-2], weight.shape[0])


def training_ops(device: str, *, compiled: bool = True) -> Ops:
    """Return the operations for training on `device` ("cpu" or "cuda").

    compiled  wrap the memory-bound operations in torch.compile; off: the same functions, eager

    Raises KernelError with the reason if the device cannot run them.
    """
    if device == "cpu":
        return FAST
    if device != "cuda":
        raise KernelError(f"device: got {device!r}, expected 'cpu' or 'cuda'")
    if not torch.cuda.is_available():
        raise KernelError("device: 'cuda' was asked for, but torch sees no GPU; use device=cpu")
    return _gpu_ops(compiled)


def training_unsupported(config: TextConfig, sequence_length: int) -> str | None:
    """Return why the kernels cannot train this model on this GPU, or None; asks shapes alone."""
    heads, dim = config.num_attention_heads, config.head_dim
    longest = sequence_length // min([r for r in config.compress_ratios if r], default=1)
    major = torch.cuda.get_device_capability()[0]
    checks = (
        (
            heads & (heads - 1) == 0 and heads <= 64,
            "num_attention_heads",
            heads,
            "a power of two up to 64",
        ),
        (dim & (dim - 1) == 0 and 32 <= dim <= 512, "head_dim", dim, "a power of two in 32..512"),
        (
            config.index_head_dim in (32, 64, 128),
            "index_head_dim",
            config.index_head_dim,
            "32, 64 or 128",
        ),
        (config.hc_mult in (2, 4), "hc_mult", config.hc_mult, "2 or 4"),
        (config.hidden_size % 8 == 0, "hidden_size", config.hidden_size, "a multiple of 8"),
        (
            config.moe_intermediate_size % 8 == 0,
            "moe_intermediate_size",
            config.moe_intermediate_size,
            "a multiple of 8",
        ),
        (longest <= 65536, "sequence_length", sequence_length, "at most 65,536 entries in a row"),
        # Later devices were reported to give empty experts a gradient in the grouped product.
        (major == 9, "device capability", major, "9 (Hopper), the only one these kernels ran on"),
    )
    for ok, name, got, want in checks:
        if not ok:
            return f"{name}: got {got!r}, expected {want}"
    return None


@cache
def _gpu_ops(compiled: bool) -> Ops:
    """Return one record for all models of the process: what it compiled serves them all."""
    from finwhale.kernels import experts, head_loss, hyper, index_scores, sinkhorn
    from finwhale.kernels import sparse_attention as attention

    reason = head_loss.head_loss_unsupported()
    if reason is not None:
        raise KernelError(f"device=cuda: {reason}")
    # One function serves many shapes of one run (every norm has its own width), each compiled once.
    torch._dynamo.config.recompile_limit = 256
    # Shapes of a run never change, so nothing is compiled for more than one.
    wrap = partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda f: f
    return Ops(
        rms_norm=wrap(norm.rms_norm),
        apply_rope=wrap(rope.apply_rope),
        grouped_linear=grouped_linear_native,
        sparse_attention=attention.sparse_attention_triton,
        sparse_attention_with_mass=attention.sparse_attention_with_mass_triton,
        pool_group=wrap(compress.pool_group),
        visible_index_scores=index_scores.visible_index_scores_triton,
        select_topk=index_scores.select_topk_triton,
        hyper_mix=partial(
            hyper.hyper_mix_fused,
            sinkhorn=sinkhorn.sinkhorn_triton,
            coefficients=wrap(hyper._coefficients),
        ),
        hyper_collapse=hyper.hyper_collapse_triton,
        hyper_expand=hyper.hyper_expand_triton,
        engram_rows=wrap(engram.engram_rows),
        engram_gate=wrap(engram.engram_gate),
        route_experts=moe.route_experts,
        clamped_swiglu=wrap(moe.clamped_swiglu),
        grouped_experts=experts.grouped_experts,
        head_loss=head_loss.head_loss_fused,
        round_window_kv=wrap(FAST.round_window_kv),
        round_main_kv=wrap(FAST.round_main_kv),
        round_index=wrap(FAST.round_index),
    )
