"""Fused head and cross-entropy on a GPU: bf16 products, fp32 logits, loss and gradient at once.

The softmax kernel is liger-kernel's. Its own driver asks the device how many rows have a target,
which a CUDA graph cannot do; a sum needs no such count, so the chunks are driven here. Logits exist
for one chunk at a time and become their own gradient in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from finwhale.ops.head_loss import NO_TARGET

_MAX_BLOCK = 32768


class _HeadLossFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk_rows: int, with_gradients: bool
    ) -> Tensor:
        import triton
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

        wide, vocab = head.to(hidden.dtype), head.shape[0]
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for start in range(0, len(hidden), chunk_rows):
            rows = hidden[start : start + chunk_rows]
            wanted = targets[start : start + chunk_rows].contiguous()
            loss = losses[start : start + chunk_rows]
            if hidden.dtype is torch.float32:
                logits = rows @ wide.t()
            else:
                logits = torch.mm(rows, wide.t(), out_dtype=torch.float32)  # [n, V]
            liger_cross_entropy_kernel[(len(rows),)](
                X_ptr=logits,
                X_stride=logits.stride(0),
                Y_ptr=wanted,
                Y_stride=1,
                weight_ptr=None,
                loss_ptr=loss,
                z_loss_ptr=None,
                loss_stride=1,
                token_accuracy_ptr=None,
                token_accuracy_stride=0,
                predicted_tokens_ptr=None,
                predicted_tokens_stride=0,
                n_cols=vocab,
                n_non_ignore=1,
                sum_non_ignore_weight=1,
                weight_sum=0.0,
                ignore_index=NO_TARGET,
                lse_square_scale=0.0,
                label_smoothing=0.0,
                reduction="sum",
                softcap=None,
                RETURN_Z_LOSS=False,
                RETURN_TOKEN_ACCURACY=False,
                RETURN_PREDICTED_TOKENS=False,
                HAS_WEIGHT=False,
                HAS_SOFTCAPPING=False,
                HAS_GRADIENTS=with_gradients,
                BLOCK_SIZE=min(_MAX_BLOCK, triton.next_power_of_2(vocab)),
                num_warps=16,
            )
            if not with_gradients:
                continue
            narrow = logits.to(hidden.dtype)
            grad_hidden[start : start + chunk_rows] = narrow @ wide
            if hidden.dtype is torch.float32:
                grad_head += narrow.t() @ rows
            else:
                grad_head += torch.mm(narrow.t(), rows, out_dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_head)
        return losses.sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_hidden, grad_head = ctx.saved_tensors
        return (grad_hidden * grad).to(grad_hidden.dtype), grad_head * grad, None, None, None


def head_loss_unsupported() -> str | None:
    """Return why the fused loss cannot run here, or None."""
    try:
        import liger_kernel.ops.cross_entropy  # noqa: F401
    except ImportError as error:
        return f"liger-kernel is not installed ({error}); pip install finwhale[gpu]"
    return None


def head_loss_fused(hidden: Tensor, head: Tensor, targets: Tensor, chunk_rows: int) -> Tensor:
    """Same contract as `finwhale.ops.head_loss.head_loss_ref`."""
    return _HeadLossFn.apply(hidden, head, targets, chunk_rows, torch.is_grad_enabled())
