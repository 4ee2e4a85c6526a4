"""Matrix products whose rows do not depend on each other's number, compiled for one CPU thread.

A library's product changes its path, and so its bits, with the number of rows, and at one row it
spends more time on preparation than on the sum. Here every product runs in tiles of two rows and
four outputs, one loop over the inner dimension with eight sums; a single row is its own second row.
The weights are read as the checkpoint stores them, [O, K], and are not copied.
Only files named *_numba.py import numba; nothing imports them unless asked (extra `engine`).
Source: the contracts are those of `finwhale.ops.linear` and `Ops.grouped_experts`.
"""

from __future__ import annotations

import hashlib
import math

import llvmlite
import numpy as np
import torch
from llvmlite import binding
from numba import config as numba_config
from numba import njit
from numba.core.codegen import get_host_cpu_features
from torch import Tensor

from finwhale.kernels.fused_numba import _array, _constant, _empty, _sigmoid, exponential


def compiler_features() -> str:
    """Return the processor's features as the compiler sees them, "+name,-name,..."."""
    set_here = vars(numba_config)["CPU_FEATURES"]  # "" for a generic processor
    return get_host_cpu_features() if set_here is None else set_here


def compiled_for() -> str:
    """Return what decides the machine code of the kernels, and with it the order of their sums.

    The processor's model and features as the compiler sees them, or what the environment sets in
    their place; two machines of one instruction set may differ.
    """
    set_here = vars(numba_config)  # made at import, from the environment
    model = set_here["CPU_NAME"] or binding.get_host_cpu_name()
    digest = hashlib.sha256(compiler_features().encode()).hexdigest()[:16]
    return f"llvmlite {llvmlite.__version__} {model} {digest} -O{set_here['OPT']}"


# Sums may be regrouped into vector lanes, once, at compile time: the same for all eight of a tile.
_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})


@_compiled
def _tile(x0, x1, w0, w1, w2, w3):
    """Return the eight dot products of two rows with four weight rows, all [K]."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
    for k in range(x0.shape[0]):
        a0 += x0[k] * w0[k]
        a1 += x0[k] * w1[k]
        a2 += x0[k] * w2[k]
        a3 += x0[k] * w3[k]
        b0 += x1[k] * w0[k]
        b1 += x1[k] * w1[k]
        b2 += x1[k] * w2[k]
        b3 += x1[k] * w3[k]
    return a0, a1, a2, a3, b0, b1, b2, b3


@_compiled
def _multiply(x, weight, out):
    """Write out [T, O] = x [T, K] times weight [O, K] transposed.

    Outputs outside, rows inside: four weight rows stay near the core for all rows of x.
    """
    tokens, outputs = x.shape[0], weight.shape[0]
    for o in range(0, outputs, 4):
        o1, o2, o3 = min(o + 1, outputs - 1), min(o + 2, outputs - 1), min(o + 3, outputs - 1)
        w0, w1, w2, w3 = weight[o], weight[o1], weight[o2], weight[o3]
        for t in range(0, tokens, 2):
            s = min(t + 1, tokens - 1)
            a0, a1, a2, a3, b0, b1, b2, b3 = _tile(x[t], x[s], w0, w1, w2, w3)
            out[t, o] = a0
            out[t, o1] = a1
            out[t, o2] = a2
            out[t, o3] = a3
            out[s, o] = b0
            out[s, o1] = b1
            out[s, o2] = b2
            out[s, o3] = b3


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T; same contract as `finwhale.ops.linear.linear` in fp32. x [..., K]."""
    *lead, width = x.shape
    tokens, outputs = math.prod(lead), weight.shape[0]
    out = _empty(*lead, outputs)
    if tokens:
        _multiply(
            _array("x", x, tokens, width),
            _constant("weight", weight, outputs, width),
            out.reshape(tokens, outputs),
        )
    return torch.from_numpy(out)


@_compiled
def _multiply_groups(x, weight, out):
    for g in range(x.shape[1]):
        _multiply(x[:, g], weight[g], out[:, g])


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `finwhale.ops.linear.grouped_linear` in fp32. x [..., G, K], weight [G * O, K]."""
    *lead, groups, width = x.shape
    tokens, outputs = math.prod(lead), weight.shape[0] // groups
    out = _empty(*lead, groups * outputs)
    if tokens:
        _multiply_groups(
            _array("x", x, tokens, groups, width),
            _constant("weight", weight, groups, outputs, width),
            out.reshape(tokens, groups, outputs),
        )
    return torch.from_numpy(out)


@_compiled
def _route(logits, bias, scaling, ids, weights):
    """Choose the best experts of every row, ties to the lowest id, best first."""
    experts, choices = logits.shape[1], ids.shape[1]
    scores = np.empty(experts, np.float32)
    is_taken = np.empty(experts, np.bool_)
    for t in range(logits.shape[0]):
        own = bias[t if bias.shape[0] > 1 else 0]
        for e in range(experts):
            x = logits[t, e]
            # softplus, as the reference: beyond 20 it is x itself.
            scores[e] = np.sqrt(x if x > 20 else np.log1p(exponential(x)))
            is_taken[e] = False
        total = np.float32(0.0)
        for c in range(choices):
            best = -1
            for e in range(experts):
                if not is_taken[e] and (best < 0 or scores[e] + own[e] > scores[best] + own[best]):
                    best = e
            is_taken[best] = True
            ids[t, c] = best
            weights[t, c] = scores[best]
            total += scores[best]
        for c in range(choices):
            weights[t, c] = weights[t, c] / (total + np.float32(1e-20)) * scaling


def route_experts(logits: Tensor, bias: Tensor, k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return experts [N, k] int64 and weights [N, k]; as `finwhale.ops.moe.route_experts`."""
    rows, experts = logits.shape
    ids, weights = np.empty((rows, k), np.int64), _empty(rows, k)
    _route(
        _array("logits", logits, rows, experts),
        _array("bias", bias, bias.numel() // experts, experts),
        np.float32(scaling),
        ids,
        weights,
    )
    return torch.from_numpy(ids), torch.from_numpy(weights)


@_compiled
def _run_experts(z, ids, weights, gate_up, down, limit, out):
    """Sum the experts of every row in ascending order of their ids; out [T, C] is zero before."""
    tokens, choices = ids.shape
    num_experts, both, _ = gate_up.shape
    width, channels = both // 2, z.shape[1]
    first = np.zeros(num_experts + 1, np.int64)
    for t in range(tokens):
        for c in range(choices):
            first[ids[t, c] + 1] += 1
    for e in range(num_experts):
        first[e + 1] += first[e]
    at = first.copy()
    row = np.empty(tokens * choices, np.int64)
    share = np.empty(tokens * choices, np.float32)
    for t in range(tokens):
        for c in range(choices):
            n = at[ids[t, c]]
            row[n], share[n] = t, weights[t, c]
            at[ids[t, c]] += 1
    most = 0
    for e in range(num_experts):
        most = max(most, first[e + 1] - first[e])
    own = np.empty((most, channels), np.float32)
    hidden = np.empty((most, both), np.float32)
    inner = np.empty((most, width), np.float32)
    result = np.empty((most, channels), np.float32)
    for e in range(num_experts):
        count = first[e + 1] - first[e]
        if count == 0:
            continue
        for n in range(count):
            own[n] = z[row[first[e] + n]]
        _multiply(own[:count], gate_up[e], hidden[:count])
        for n in range(count):
            weight = share[first[e] + n]
            for f in range(width):
                gate = min(hidden[n, f], limit)
                up = max(min(hidden[n, width + f], limit), -limit)
                inner[n, f] = gate * _sigmoid(gate) * up * weight
        _multiply(inner[:count], down[e], result[:count])
        for n in range(count):
            t = row[first[e] + n]
            for c in range(channels):
                out[t, c] += result[n, c]


def grouped_experts(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float,
    swiglu=None,
) -> Tensor:
    """Return the weighted sum of each row's routed experts [T, C] fp32, experts ascending (D12).

    z        [T, C] fp32
    ids      [T, k] int64
    weights  [T, k] fp32
    gate_up  [X, 2F, C] fp32, w1 above w3
    down     [X, C, F] fp32
    swiglu   not used: the clamped SwiGLU of `limit` is compiled in
    """
    out = torch.zeros(z.shape)
    if z.shape[0]:
        _run_experts(
            _array("z", z, *z.shape),
            np.ascontiguousarray(ids.numpy()),
            _array("weights", weights, *weights.shape),
            _array("gate_up", gate_up, *gate_up.shape),
            _array("down", down, *down.shape),
            np.float32(limit),
            out.numpy(),
        )
    return out
