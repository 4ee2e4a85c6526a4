"""Pooling of neighbouring tokens into one compressed entry, before its norm.

Ratio 1 has no pooling. At ratio 2 each channel takes a softmax over the two tokens of its
group, in fp32. No position bias, no overlap. Source: spec/backbone.md section 4.3.
"""

from __future__ import annotations

from torch import Tensor


def pool_group(content: Tensor, gate: Tensor) -> Tensor:
    """Return sum over the group of softmax(gate) * content, per channel.

    content, gate  [..., r, D] fp32, r tokens of one group
    returns        [..., D] fp32
    """
    return (gate.softmax(dim=-2) * content).sum(dim=-2)
