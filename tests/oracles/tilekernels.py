"""Records what DeepSeek's own plain-torch references compute on small, awkward inputs.

Runs inside the oracle environment. The package's __init__ wants a GPU toolchain, so its torch/
files are loaded one by one behind stub parents. Inputs are stored beside outputs: a test needs
nothing but the golden.

    python -m tests.oracles.tilekernels --package DIR --out tests/golden
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.oracles.geometries import SEED
from tests.oracles.golden_file import write_golden

VERSION = "2.1.0"
NUM_STREAMS = 4


def load_references(root: Path) -> dict[str, types.ModuleType]:
    """Import the reference files of an unpacked wheel."""
    for name, folder in (("tile_kernels", ""), ("tile_kernels.torch", "torch")):
        stub = types.ModuleType(name)
        stub.__path__ = [str(root / "tile_kernels" / folder)]
        sys.modules[name] = stub
    names = ("mhc", "engram", "topk", "cast", "norm", "rope", "swiglu")
    return {name: importlib.import_module(f"tile_kernels.torch.{name}") for name in names}


def _draw(*shape: int, scale: float = 1.0, salt: int = 0) -> Tensor:
    values = np.random.default_rng([SEED, salt, *shape]).standard_normal(shape) * scale
    return torch.from_numpy(values.astype(np.float32))


def hyper_connections(refs) -> dict[str, Tensor]:
    """mHC: projection with one RMS division, split, Sinkhorn, collapse and expand."""
    mhc, n, c = refs["mhc"], NUM_STREAMS, 64
    streams = _draw(2, 9, n, c)
    streams[0, 0] = 0  # the RMS of an all-zero token
    fn = _draw((2 + n) * n, n * c, scale=(n * c) ** -0.5, salt=1)
    base = _draw((2 + n) * n, scale=0.5, salt=2)
    base[2 * n :] *= 16  # so uneven that 20 Sinkhorn steps do not converge, as in the release
    scale = torch.tensor([0.7, 1.1, 0.9])
    raw = mhc.mhc_pre_norm_fn_ref(streams, fn, None, 1e-20)
    pre, post, comb = mhc.mhc_pre_split_mixes_ref(raw, scale, base, n, 2.0, 1e-6)
    comb = mhc.sinkhorn_normalize_ref(comb, repeat=20, eps=1e-6)
    output = _draw(2, 9, c, salt=3)
    return {
        "mhc.streams": streams,
        "mhc.fn": fn,
        "mhc.base": base,
        "mhc.scale": scale,
        "mhc.pre": pre.squeeze(-1),
        "mhc.post": post.squeeze(-1),
        "mhc.comb": comb,
        "mhc.collapsed": mhc.mhc_pre_apply_mix_ref(streams, pre),  # bf16
        "mhc.output": output,
        "mhc.expanded": mhc.mhc_post_ref(output, streams, post, comb),  # bf16
    }


def engram(refs) -> dict[str, Tensor]:
    """Hash rows with the released multipliers' size, and the gate in bf16."""
    ref, tokens, order = refs["engram"], 33, 4
    sizes = torch.tensor([[[97, 101], [103, 107], [109, 113]]], dtype=torch.int32)
    offsets = ref.make_offsets(sizes)
    # As large as the released ones: the products must be exact in 64 bits.
    drawn = np.random.default_rng([SEED, 4]).integers(0, 46_539_438_283_891, size=order)
    multipliers = torch.from_numpy(2 * drawn + 1)[None]
    grams = torch.from_numpy(
        np.random.default_rng([SEED, 5]).integers(0, 99_092, size=(tokens, order)).astype(np.int32)
    )
    n, c = NUM_STREAMS, 64
    hidden = _draw(tokens, n, c, salt=6).bfloat16()
    kv = _draw(tokens, n + 1, c, salt=7).bfloat16()
    kv[3, :n] = 0  # the clamped root of a zero dot product, at the sign of zero
    q_weight, k_weight = (1 + 0.1 * _draw(2, n, c, salt=8)).bfloat16()
    return {
        "engram.grams": grams,
        "engram.multipliers": multipliers[0],
        "engram.primes": sizes[0],
        "engram.offsets": offsets[0].view(order - 1, -1),
        "engram.rows": ref.engram_hash_ref(grams, multipliers, sizes, offsets)[0],
        "engram.hidden": hidden,
        "engram.kv": kv,
        "engram.q_weight": q_weight,
        "engram.k_weight": k_weight,
        "engram.gated": ref.engram_gate_ref(hidden, kv, q_weight, k_weight, 1e-6, 1e-20),
    }


def router(refs) -> dict[str, Tensor]:
    """Square root of softplus far below its underflow, and the biased choice of 6 among 384."""
    ref = refs["topk"]
    logits = _draw(17, 384, scale=3.0, salt=9)
    logits[0] = -30.0  # log(1 + exp(x)) would give exactly zero
    logits[1, 5] = logits[1, 9] = 8.0  # a tie: the lower expert comes first
    bias, image_bias = 0.3 * _draw(2, 384, salt=10)
    is_image = torch.arange(17) % 5 == 2
    ids, weights = ref.moe_topk_gate_forward(
        logits,
        6,
        False,
        1,
        1.5,
        0,
        "sqrtsoftplus",
        bias=bias,
        image_bias=image_bias,
        image_token_mask=is_image,
    )
    return {
        "gate.logits": logits,
        "gate.scores": ref.sqrt_softplus_ref(logits),
        "gate.bias": bias,
        "gate.bias_vl": image_bias,
        "gate.is_image": is_image.to(torch.uint8),
        "gate.ids": ids.to(torch.int16),
        "gate.weights": weights,
    }


def cast_inputs(group: int) -> Tensor:
    """Rows [R, 128] that meet ties, exact powers of two, zeros, floors and both signs."""
    rows = [_draw(24, 128, salt=11), _draw(8, 128, scale=1e-3, salt=12)]
    rows.append(_draw(4, 128, scale=300.0, salt=13))
    ties = torch.zeros(6, 128)
    # Halfway points of E2M1 under a scale of one, largest value 6, both signs.
    points = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties[0] = points.repeat(16)
    ties[1] = -points.repeat(16)
    # The largest value exactly 448 * 2^k and 6 * 2^k: the scale must not go one step up.
    ties[2] = torch.linspace(-448, 448, 128)
    ties[3] = torch.linspace(-6, 6, 128) / 64
    ties[4, :group] = 1e-7  # below the floor of the amax
    ties[5, ::2] = -0.0
    rows.append(ties)
    return torch.cat(rows)


def casts(refs) -> dict[str, Tensor]:
    """The four number formats: FP8 rows and 32x32 blocks, FP4 with E8M0 and with E4M3 scales."""
    cast, back = refs["cast"].cast, refs["cast"].cast_back
    result = {}
    for name, fmt, block, options in (
        ("fp8_row", "e4m3", (1, 32), {"round_sf": True}),
        ("fp8_block", "e4m3", (32, 32), {"round_sf": True}),
        ("mxfp4", "e2m1", (1, 32), {"round_sf": True}),
        ("nvfp4", "e2m1", (1, 16), {"use_e4m3_sf": True}),
    ):
        # bf16 values, as release numerics feed a quantiser.
        x = cast_inputs(block[1]).bfloat16()
        codes, scales = cast(x, fmt, block, **options)
        result[f"cast.{name}.x"] = x
        result[f"cast.{name}.codes"] = codes.view(torch.uint8)
        wide = scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales
        result[f"cast.{name}.scales"] = wide
        result[f"cast.{name}.values"] = back((codes, scales), "fp32", block)
    return result


def smaller_operations(refs) -> dict[str, Tensor]:
    """RMSNorm with the released epsilon, adjacent-pair rotation, and the clamped SwiGLU."""
    x = _draw(5, 96, salt=14)
    x[2] = 0
    x[3] *= 1e-12
    weight = 1 + 0.1 * _draw(96, salt=15)
    angles = torch.outer(torch.arange(7, dtype=torch.float32), 10000.0 ** -(torch.arange(4) / 4))
    q = _draw(7, 3, 8, salt=16)
    rotate = refs["rope"].rotary_embedding_ref
    pair = _draw(6, 64, scale=6.0, salt=17)
    pair[0, :4] = torch.tensor([9.9, 10.0, 10.1, -50.0])
    pair[0, 32:36] = torch.tensor([-10.1, -10.0, 10.1, 3.0])
    row_weight = torch.rand(6, generator=torch.Generator().manual_seed(SEED))
    cos, sin = angles.cos(), angles.sin()
    return {
        "norm.x": x,
        "norm.weight": weight,
        "norm.y": refs["norm"].norm_forward_ref(x, weight, 1e-20)[0],
        "rope.angles": angles,
        "rope.x": q,
        "rope.y": rotate(q, cos, sin, interleaved=True),
        "rope.inverse": rotate(q, cos, sin, interleaved=True, conjugate=True),
        "swiglu.x": pair,
        "swiglu.weight": row_weight,
        "swiglu.y": refs["swiglu"].swiglu_forward(pair, topk_weights=row_weight, clamp_value=10.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path, required=True, help="unpacked wheel")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    refs = load_references(args.package)
    tensors: dict[str, Tensor] = {}
    for record in (hyper_connections, engram, router, casts, smaller_operations):
        tensors.update(record(refs))
    write_golden(
        "tilekernels",
        tensors,
        out=args.out,
        package="tile-kernels",
        version=VERSION,
        command="python -m tests.oracles.tilekernels",
        seed=SEED,
        notes="plain-torch references of the package on CPU; inputs and outputs",
    )


if __name__ == "__main__":
    main()
