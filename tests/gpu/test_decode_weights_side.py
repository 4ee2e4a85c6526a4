"""Decode kernels of the weights compiled for a GPU: released widths, far offsets, CUDA graphs.

The small and odd shapes of `tests/unit/test_decode_{linear,experts,site,ends}.py` run compiled too
where there is a GPU.
"""

import pytest
import torch

if not torch.cuda.is_available():
    # Before triton is imported: the interpreter's tests must be the first to do that on a CPU.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from finwhale.decode_kernels import experts_w4 as experts_file
from finwhale.decode_kernels import hyper_site as site_file
from finwhale.decode_kernels import linear_fp8 as linear_file
from finwhale.decode_kernels import route as route_file
from finwhale.decode_kernels.engram_gate import engram_gather, engram_gather_ref
from finwhale.decode_kernels.experts_w4 import (
    ExpertWeights,
    expert_launch,
    experts_w4,
    experts_w4_ref,
)
from finwhale.decode_kernels.hyper_site import Site, hyper_site, hyper_site_ref, site_scratch
from finwhale.decode_kernels.launch import Overlap
from finwhale.decode_kernels.linear_fp8 import linear_fp8, linear_fp8_ref, linear_launch
from finwhale.decode_kernels.route import route, route_launch, route_ref, route_scratch
from finwhale.decode_kernels.tiles import counters
from finwhale.gpu.step import pre_of, step_overlaps
from finwhale.ops.hyper_connection import HyperMix
from finwhale.ops.rounding import round_fp8

DEVICE = "cuda"
WIDE, INNER, LIMIT = 5120, 2304, 10.0


@pytest.fixture(autouse=True)
def _full_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def some_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)


def fp8(rows, columns):
    """Random tiles of `pack_fp8_tiles`."""
    strips, groups = -(-rows // 32), columns // 32
    tiles = some_bytes(strips, groups, 1024)
    tiles.view(torch.int16).bitwise_and_(~0x4400)  # the highest bit of each exponent: no NaN
    return tiles, (some_bytes(strips, groups) & 7) + 117


def some_site():
    return Site(
        torch.randn(24, 4 * WIDE, device=DEVICE) / 143,
        torch.randn(24, device=DEVICE),
        torch.ones(3, device=DEVICE),
        torch.randn(WIDE, device=DEVICE).bfloat16(),
    )


def activations(*shape):
    return round_fp8(torch.randn(shape, device=DEVICE).bfloat16())


def relative(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm())


def of_routed_and_shared(got, want):
    """Return the error of the routed experts' rows and of the shared one's [T, k + 1, C].

    Apart, because these weights make the shared rows about 75 times as large in norm.
    """
    return relative(got[:, :-1], want[:, :-1]), relative(got[:, -1], want[:, -1])


# Row form, blocks of 16, 32 and 64 rows, several of them; 16 and 64 are compiled on their own.
SHAPES = [(1792, WIDE, 1), (32768, 1280, 1), (8192, 4096, 8), (WIDE, 8192, 1), (4097, 1280, 1)]
PRODUCTS = [(n, *shape) for n in (1, 2, 16, 17, 63, 64, 65) for shape in SHAPES]


@pytest.mark.parametrize(("tokens", "outputs", "width", "groups"), [*PRODUCTS, (1000, *SHAPES[0])])
def test_products_at_released_widths(tokens, outputs, width, groups):
    x, (codes, scales) = activations(tokens, groups * width), fp8(outputs, width)
    how = {"groups": groups, "outputs": outputs, "out_dtype": torch.float32}
    want = linear_fp8_ref(x, codes, scales, **how)
    got = linear_fp8(x, codes, scales, **how)
    assert relative(got, want) < 2e-5  # sums of a matrix unit
    assert all(torch.equal(got, linear_fp8(x, codes, scales, **how)) for _ in range(5))
    wrong = scales.clone()
    wrong[-1] += 3
    assert relative(linear_fp8(x, codes, wrong, **how), want) > 1e-4


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_head_matrix_of_the_release(tokens):
    x = torch.randn(tokens, WIDE, device=DEVICE).bfloat16()
    w = torch.randn(129280, WIDE, device=DEVICE).bfloat16()
    got = linear_fp8(x, w, None, out_dtype=torch.float32)
    assert relative(got, x.float() @ w.float().T) < 2e-5


@pytest.fixture(scope="module")
def released():
    """384 experts of released widths: their matrices reach beyond 2^31 elements."""
    x = 384

    def fp4(rows, columns):
        tiles = x, rows // 32, columns // 32
        return some_bytes(*tiles, 512), (some_bytes(*tiles, 32) & 1) + 118

    return ExpertWeights(
        *fp4(2 * INNER, WIDE), *fp4(WIDE, INNER), *fp8(2 * INNER, WIDE), *fp8(WIDE, INNER)
    )


@pytest.mark.parametrize("tokens", [1, 3, 8, 33, 64])
def test_experts_at_released_widths(tokens, released):
    z = torch.randn(tokens, WIDE, device=DEVICE).bfloat16()
    gate = (torch.randn(384, WIDE, device=DEVICE) * WIDE**-0.5).bfloat16()
    bias = torch.randn(384, device=DEVICE) * 0.01
    routing, want = route(z, gate, bias, 6, 1.5), route_ref(z, gate, bias, 6, 1.5)
    assert float((routing.ids != want.ids).float().mean()) < 0.02  # near-ties of the sums
    x = round_fp8(z)
    want = experts_w4_ref(x, routing, released, LIMIT)
    for launch in (None, *(experts_file.BENCHED if tokens in (1, 33) else ())):
        got = experts_w4(x, routing, released, LIMIT, launch)
        assert max(of_routed_and_shared(got, want)) < 5e-3, launch
        # A step that reads registers which the next one writes shows now and then.
        for _ in range(10):
            assert torch.equal(got, experts_w4(x, routing, released, LIMIT, launch)), launch
    wrong = released._replace(down_scales=released.down_scales + 1)
    routed, shared = of_routed_and_shared(experts_w4(x, routing, wrong, LIMIT), want)
    assert routed > 0.9  # twice the values
    assert shared < 5e-3


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("experts", [96, 384])
def test_every_launch_of_the_router_makes_the_same_lists(tokens, experts):
    z = torch.randn(tokens, WIDE, device=DEVICE).bfloat16()
    gate = (torch.randn(experts, WIDE, device=DEVICE) * WIDE**-0.5).bfloat16()
    bias = torch.randn(experts, device=DEVICE) * 0.01
    scratch = route_file.route_scratch(tokens, experts, DEVICE)
    for launch in route_file.BENCHED:
        for _ in range(2):
            got = route(z, gate, bias, 6, 1.5, launch, scratch)
            want = route_file.routing_lists(got.ids, got.weights, experts)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), launch
            assert not scratch.counter.any()
        ref = route_ref(z, gate, bias, 6, 1.5)
        assert float((got.ids != ref.ids).float().mean()) < 0.02, launch
        same = (got.ids == ref.ids).all(1)
        torch.testing.assert_close(got.weights[same], ref.weights[same], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [8, 64])
def test_every_launch_of_a_product_agrees(tokens):
    x, (codes, scales) = activations(tokens, WIDE), fp8(1792, WIDE)
    want = linear_fp8_ref(x, codes, scales, out_dtype=torch.float32)
    for launch in linear_file.BENCHED:
        got = linear_fp8(x, codes, scales, out_dtype=torch.float32, launch=launch)
        assert relative(got, want) < 2e-5, launch
        for _ in range(10):
            again = linear_fp8(x, codes, scales, out_dtype=torch.float32, launch=launch)
            assert torch.equal(got, again), launch


def test_the_last_experts_lie_beyond_32_bit_offsets(released):
    assert released.gate_up.numel() > 2**32
    x = activations(1, WIDE)
    gate = torch.zeros(384, WIDE, device=DEVICE).bfloat16()
    bias = torch.zeros(384, device=DEVICE)
    bias[378:] = 1.0
    routing = route(x, gate, bias, 6, 1.5)
    assert sorted(routing.ids[0].tolist()) == list(range(378, 384))
    got = experts_w4(x, routing, released, LIMIT)
    assert max(of_routed_and_shared(got, experts_w4_ref(x, routing, released, LIMIT))) < 5e-3


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("parts", [1, 7])
def test_site_at_released_width(tokens, parts):
    streams = torch.randn(tokens, 4, WIDE, device=DEVICE).bfloat16()
    rows = torch.randn(tokens, parts, WIDE, device=DEVICE).bfloat16()
    before = HyperMix(*(torch.rand(tokens, *s, device=DEVICE) for s in ((4,), (4,), (4, 4))))
    incoming = torch.rand(tokens, 4, device=DEVICE)
    site, numbers = some_site(), {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}
    his = streams.clone()
    want = hyper_site_ref(his, rows, before, incoming, site, **numbers)
    for launch in (None, *(site_file.BENCHED if parts == 7 else ())):
        mine = streams.clone()
        got = hyper_site(mine, rows, before, incoming, site, **numbers, launch=launch)
        assert relative(mine, his) < 1e-3, launch
        assert relative(got.x, want.x) < 2e-3, launch
        assert torch.equal(got.x_rounded, round_fp8(got.x)), launch
        for a, b in zip(got.mix, want.mix, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_site_that_makes_the_coefficients_of_logits_at_released_width(tokens):
    site, numbers = some_site(), {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}
    start = torch.randn(tokens, 4, WIDE, device=DEVICE).bfloat16()
    rows = torch.randn(2, tokens, 7, WIDE, device=DEVICE).bfloat16()
    mix = HyperMix(*(torch.rand(tokens, *s, device=DEVICE) for s in ((4,), (4,), (4, 4))))
    his, before = start.clone(), mix
    for parts in rows:
        want = hyper_site_ref(his, parts, before, before.pre, site, **numbers)
        before = want.mix
    for launch in site_file.BENCHED:
        mine, before = start.clone(), mix
        for n, parts in enumerate(rows):
            got = hyper_site(
                mine, parts, before, pre_of(before), site, **numbers, late=not n, launch=launch
            )
            before = got.mix
            assert isinstance(before, HyperMix) or not launch.apart
        assert relative(mine, his) < 1e-3, launch
        assert relative(got.x, want.x) < 2e-3, launch
        for a, b in zip(got.mix, want.mix, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_engram_rows_beyond_32_bit_offsets():
    rows = (1 << 31) // 256 + 1000
    table = (some_bytes(rows, 256) & 0xBF).view(torch.float8_e4m3fn)
    scales = (some_bytes(rows, 8) & 7) + 120
    primes = torch.full((3, 8), 997, device=DEVICE)
    offsets = torch.full((3, 8), rows - 1000, device=DEVICE)
    offsets[0] = 0
    args = (
        torch.randint(0, 99092, (33, 4), device=DEVICE),
        torch.randint(1, 2**40, (4,), device=DEVICE) * 2 + 1,
        primes, offsets, table, scales,
    )  # fmt: skip
    assert torch.equal(engram_gather(*args), engram_gather_ref(*args))


@pytest.mark.parametrize("overlap", [*list(Overlap)[1:], None], ids=str)
@pytest.mark.parametrize("tokens", [1, 8])
def test_overlapping_launches_change_no_bit(tokens, overlap, released):
    """A chain of launches that read each other's results, started early, in a graph.

    None: each kind as the table of a step says. With scratch, as otherwise a fill stands between.
    """
    first, second = fp8(1280, WIDE), fp8(WIDE, 1280)
    x = activations(tokens, WIDE)
    gate = (torch.randn(384, WIDE, device=DEVICE) * WIDE**-0.5).bfloat16()
    bias = torch.zeros(384, device=DEVICE)
    start = torch.randn(tokens, 4, WIDE, device=DEVICE).bfloat16()
    mix = HyperMix(*(torch.rand(tokens, *s, device=DEVICE) for s in ((4,), (4,), (4, 4))))
    scratch = torch.empty(1 << 24, device=DEVICE), counters(DEVICE, 1 << 15)
    of_site, of_route = site_scratch(tokens, WIDE, DEVICE), route_scratch(tokens, 384, DEVICE)
    site, numbers = some_site(), {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}

    def chain(kinds):
        how = {"round_output": True, "scratch": scratch}
        y, streams, before = x, start.clone(), mix
        for n in range(6):
            y = linear_fp8(y, *first, **how, overlap=kinds["wo_a"])
            y = linear_fp8(y, *second, **how, overlap=kinds["wo_b"])
            routing = route(y, gate, bias, 6, 1.5, None, of_route, kinds["route"])
            both = kinds["gate_up"], kinds["down"]
            parts = experts_w4(y, routing, released, LIMIT, None, scratch, both)
            out = hyper_site(
                streams, parts, before, pre_of(before), site, **numbers,
                late=tokens == 1 and n < 5, scratch=of_site, overlap=kinds["site"],
            )  # fmt: skip
            y, before = out.x_rounded, out.mix
        return streams, y, *before

    table = step_overlaps(tokens, DEVICE)
    kinds = table if overlap is None else dict.fromkeys(table, overlap)
    want = chain(dict.fromkeys(table, Overlap.NONE))
    chain(kinds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(kinds)
    for _ in range(5):
        graph.replay()
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


def test_invariant_launches_give_a_token_the_same_bits_in_any_batch(released):
    z = torch.randn(64, WIDE, device=DEVICE).bfloat16()
    gate = (torch.randn(384, WIDE, device=DEVICE) * WIDE**-0.5).bfloat16()
    bias = torch.zeros(384, device=DEVICE)
    codes, scales = fp8(1792, WIDE)
    of = z.device, True

    def run(rows):
        x = z[rows]
        routing = route(x, gate, bias, 6, 1.5, route_launch(1, *of))
        product = linear_fp8(x, codes, scales, launch=linear_launch(1, *of))
        return product, experts_w4(x, routing, released, LIMIT, expert_launch(1, *of))

    whole = run(slice(0, 64))
    for rows in (slice(0, 1), slice(63, 64), slice(5, 13), slice(1, 34)):
        for got, want in zip(run(rows), whole, strict=True):
            assert torch.equal(got, want[rows])


def test_a_graph_replays_what_ran_eagerly(released):
    """Route, experts and site in one graph, on new inputs at each replay."""
    z = torch.randn(8, WIDE, device=DEVICE).bfloat16()
    gate = (torch.randn(384, WIDE, device=DEVICE) * WIDE**-0.5).bfloat16()
    bias = torch.zeros(384, device=DEVICE)
    codes, scales = fp8(1792, WIDE)

    def launch():
        routing = route(z, gate, bias, 6, 1.5)
        return experts_w4(z, routing, released, LIMIT), linear_fp8(z, codes, scales)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch()
    for _ in range(3):
        z.copy_(activations(8, WIDE))
        graph.replay()
        for got, want in zip(captured, launch(), strict=True):
            assert torch.equal(got, want)
