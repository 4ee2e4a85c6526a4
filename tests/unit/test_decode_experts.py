"""Router and experts of the decode step in Triton's interpreter, or compiled on a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.config.inventory import Storage
from finwhale.decode_kernels.experts_w4 import (
    BENCHED,
    ExpertLaunch,
    ExpertsUnsupportedError,
    ExpertWeights,
    expert_launch,
    experts_w4,
    experts_w4_ref,
)
from finwhale.decode_kernels.route import (
    _LAUNCH,
    RouteLaunch,
    RouteUnsupportedError,
    Routing,
    route,
    route_launch,
    route_ref,
    route_scratch,
    routing_lists,
)
from finwhale.decode_kernels.tiles import (
    pack_fp4_tiles,
    pack_fp8_tiles,
    unpack_fp4_tiles,
)
from finwhale.ops.rounding import round_fp8
from finwhale.ops.weight_formats import quantize_weight

SLOW = pytest.mark.slow  # in the interpreter; compiled they are fast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 10.0
APART = RouteLaunch(rows=32, columns=32, programs=8, warps=4, stages=2, apart=True)
HOPPER = _LAUNCH["hopper"][1]
LAUNCHES = pytest.mark.parametrize(
    "launch",
    [None, APART, pytest.param(HOPPER, marks=SLOW)],
    ids=["table", "apart", "hopper"],
)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def weights_of(experts, channels, width, seed=0):
    g = generator(seed)

    def drawn(rows, columns, storage):
        matrix = torch.randn(rows, columns, generator=g) * columns**-0.5
        matrix *= torch.logspace(-1, 1, rows)[:, None]  # several scales; some gates are clamped
        return quantize_weight(matrix, storage)

    def stack(rows, columns):
        stored = [drawn(rows, columns, Storage.FP4_ROW) for _ in range(experts)]
        codes, scales = zip(*stored, strict=True)
        scales = torch.stack(scales).view(torch.uint8)
        return tuple(t.to(DEVICE) for t in pack_fp4_tiles(torch.stack(codes), scales))

    shared = (
        *pack_fp8_tiles(*drawn(2 * width, channels, Storage.FP8_BLOCK)),
        *pack_fp8_tiles(*drawn(channels, width, Storage.FP8_BLOCK)),
    )
    return ExpertWeights(
        *stack(2 * width, channels), *stack(channels, width), *(t.to(DEVICE) for t in shared)
    )


def choice(tokens, experts, k, seed=0):
    g = generator(seed)
    ids = torch.rand(tokens, experts, generator=g).topk(k).indices
    weights = torch.rand(tokens, k, generator=g)
    return routing_lists(ids.to(DEVICE), weights.to(DEVICE), experts)


def rows(tokens, channels, seed=0):
    return round_fp8((3 * torch.randn(tokens, channels, generator=generator(seed))).bfloat16()).to(
        DEVICE
    )


def agree(got, want, tolerance=1e-2):
    """bf16 outputs whose hidden rows may differ by one FP8 step here and there."""
    assert got.shape == want.shape
    error = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1).clamp_min(1e-30)
    assert float(error.max()) < tolerance


def test_tile_order_is_a_permutation_of_bits():
    codes = torch.randint(0, 256, (3, 64, 48), generator=generator(1), dtype=torch.uint8)
    scales = torch.randint(100, 120, (3, 64, 3), generator=generator(2), dtype=torch.uint8)
    packed, by_word = pack_fp4_tiles(codes, scales)
    assert packed.shape == (3, 2, 3, 512)
    assert by_word.shape == (3, 2, 3, 32)
    back = unpack_fp4_tiles(packed, by_word)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)
    assert int(by_word[1, 1, 2, 4 * 5 + 3]) == int(scales[1, 32 + 24 + 5, 2])
    # Row 8 + 2, columns 6 and 7: lane 4 * 2 + 3, word 1, bits 15, 8, 7, 6 of its two halves.
    one = torch.zeros(32, 16, dtype=torch.uint8)
    one[10, 3] = 0b0110_1001
    words = pack_fp4_tiles(one, scales[0, :32, :1])[0].view(torch.int32).flatten()
    assert words.nonzero().flatten().tolist() == [(4 * 2 + 3) * 4 + 1]
    assert int(words[(4 * 2 + 3) * 4 + 1]) == (1 << 15 | 1 << 6) | (1 << 24 | 1 << 23)
    # Column 8 + 6 is the second pair: those bits one shift to the right of it, by six.
    one = torch.zeros(32, 16, dtype=torch.uint8)
    one[10, 7] = 0b0000_0001
    words = pack_fp4_tiles(one, scales[0, :32, :1])[0].view(torch.int32).flatten()
    assert int(words[(4 * 2 + 3) * 4 + 1]) == 1


def test_a_scale_beyond_the_decoder_is_refused():
    codes, scales = (
        torch.zeros(32, 16, dtype=torch.uint8),
        torch.full((32, 1), 129, dtype=torch.uint8),
    )
    with pytest.raises(ValueError, match="at most 128"):
        pack_fp4_tiles(codes, scales)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "channels", "width"),
    [
        (1, 5, 3, 96, 64),
        (2, 3, 2, 64, 96),
        pytest.param(7, 40, 6, 64, 32, marks=SLOW),
        pytest.param(33, 4, 2, 32, 64, marks=SLOW),
    ],
)
def test_experts_equal_the_reference(tokens, experts, k, channels, width):
    w, routing, x = (
        weights_of(experts, channels, width),
        choice(tokens, experts, k),
        rows(tokens, channels),
    )
    got = experts_w4(x, routing, w, LIMIT)
    want = experts_w4_ref(x, routing, w, LIMIT)
    agree(got, want)
    assert torch.equal(got, experts_w4(x, routing, w, LIMIT))


def test_a_column_of_the_reference_by_hand():
    """One token, one expert, in float64 from the codes."""
    w, x = weights_of(2, 32, 32), rows(1, 32)
    routing = choice(1, 2, 1)
    expert = int(routing.ids)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    value = torch.cat((magnitude, -magnitude))

    def matrix(packed, scales):
        codes, by_row = unpack_fp4_tiles(packed[expert].cpu(), scales[expert].cpu())
        pairs = torch.stack((value[(codes & 15).long()], value[(codes >> 4).long()]), -1).flatten(1)
        return (pairs * 2.0 ** (by_row.float() - 127).repeat_interleave(32, 1)).double()

    gate, up = (
        (x.cpu().double() @ matrix(w.gate_up, w.gate_up_scales).T).bfloat16().double().chunk(2, 1)
    )
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    hidden = gate * torch.sigmoid(gate) * up * float(routing.weights)
    want = round_fp8(hidden.bfloat16()).double() @ matrix(w.down, w.down_scales).T
    for form in (experts_w4, experts_w4_ref):
        agree(form(x, routing, w, LIMIT)[:, 0].cpu(), want)


@pytest.mark.parametrize("tokens", [1, pytest.param(5, marks=SLOW)])
def test_what_the_experts_need_shows_when_it_is_gone(tokens):
    w, routing, x = weights_of(3, 32, 32), choice(tokens, 3, 2), rows(tokens, 32)
    want = experts_w4_ref(x, routing, w, LIMIT).float()

    def moved(*, w=w, routing=routing, limit=LIMIT, x=x):
        return float((experts_w4(x, routing, w, limit).float() - want).norm() / want.norm())

    assert moved() < 1e-2
    assert moved(limit=1.0) > 0.05
    assert moved(routing=routing._replace(weights=routing.weights.flip(1) + 1)) > 0.05
    assert moved(routing=routing._replace(rank=1 - routing.rank)) > 0.05
    assert moved(w=w._replace(down_scales=w.down_scales + 1)) > 0.05
    assert moved(w=w._replace(gate_up=w.gate_up.flip(1))) > 0.05
    assert moved(w=w._replace(shared_down=w.shared_down.flip(-1))) > 0.05


def test_slots_without_an_expert_write_nothing():
    w, x = weights_of(4, 32, 32), rows(3, 32)
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1]], device=DEVICE)
    routing = routing_lists(ids, torch.ones(3, 2, device=DEVICE), 4)
    assert routing.active.tolist() == [0, 2, -1, -1]
    assert routing.starts.tolist() == [0, 1, 1, 3, 3]
    got, want = experts_w4(x, routing, w, LIMIT), experts_w4_ref(x, routing, w, LIMIT)
    agree(got[0], want[0])
    agree(got[1, [0, 2]], want[1, [0, 2]])
    agree(got[2, 2:], want[2, 2:])
    assert not want[2, :2].any()


def test_experts_at_released_counts_of_experts():
    """384 experts, six of them, so ids beyond a byte."""
    w, x = weights_of(1, 32, 32), rows(2, 32)
    w = w._replace(**{n: getattr(w, n).expand(384, -1, -1, -1).contiguous() for n in w._fields[:4]})
    w.down[383].zero_()
    ids = torch.tensor([[383, 256, 0], [255, 383, 1]], device=DEVICE)
    routing = routing_lists(ids, torch.ones(2, 3, device=DEVICE), 384)
    got = experts_w4(x, routing, w, LIMIT)
    agree(got, experts_w4_ref(x, routing, w, LIMIT))
    assert not got[0, 2].any()
    assert not got[1, 2].any()
    assert got[:, [0, 1, 3]].any(-1).all()


def test_tokens_do_not_meet_their_neighbours():
    w, routing, x = weights_of(3, 64, 32), choice(9, 3, 2), rows(9, 64)
    whole = experts_w4(x, routing, w, LIMIT)
    x[:4] = torch.nan
    assert torch.equal(experts_w4(x, routing, w, LIMIT)[4:], whole[4:])


def test_invariant_tokens_do_not_know_how_many_they_are():
    """Router and experts: each token alone has the bits it has among 18."""
    w, (x, gate, bias) = weights_of(3, 64, 32), logits_inputs(18, 3, 64)
    of = x.device, True
    of_route = route_launch(18, *of)
    of_experts = expert_launch(18, *of)
    z = round_fp8(x)

    def run(rows):
        found = route(x[rows], gate, bias, 2, 1.5, of_route)
        return found.weights, experts_w4(z[rows], found, w, LIMIT, of_experts)

    whole = run(slice(0, 18))
    # At the same places of a block of 16: a CPU's matrix product may sum other rows otherwise.
    for rows in (slice(0, 1), slice(16, 18), slice(0, 7)):
        for got, want in zip(run(rows), whole, strict=True):
            assert torch.equal(got, want[rows])
    assert (expert_launch(1, *of), route_launch(1, *of)) == (of_experts, of_route)


def test_empty_and_refused_experts():
    w, routing, x = weights_of(2, 32, 32), choice(1, 2, 1), rows(1, 32)
    none = routing_lists(torch.empty(0, 2, device=DEVICE), torch.empty(0, 2, device=DEVICE), 2)
    assert experts_w4(x[:0], none, w, LIMIT).shape == (0, 3, 32)
    with pytest.raises(ExpertsUnsupportedError, match="gate_up"):
        experts_w4(rows(1, 64), routing, w, LIMIT)
    odd = torch.cat([w.down_scales.flatten()[:1], w.down_scales.flatten()])[1:]
    with pytest.raises(ExpertsUnsupportedError, match="multiples of 4"):
        experts_w4(x, routing, w._replace(down_scales=odd.view(w.down_scales.shape)), LIMIT)


def logits_inputs(tokens, experts, channels, seed=0):
    g = generator(seed)
    x = torch.randn(tokens, channels, generator=g).bfloat16().to(DEVICE)
    w = (torch.randn(experts, channels, generator=g) * channels**-0.5).bfloat16().to(DEVICE)
    return x, w, torch.randn(experts, generator=g).mul(0.1).to(DEVICE)


def same_routing(got: Routing, want: Routing):
    for name in ("ids", "order", "rank", "starts", "active"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    torch.testing.assert_close(got.weights, want.weights, rtol=3e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "channels"),
    [
        (1, 7, 3, 96),
        (1, 384, 6, 512),
        (3, 96, 6, 64),
        (17, 40, 1, 32),
        (63, 33, 2, 32),
        (64, 5, 5, 64),
    ],
)
@LAUNCHES
def test_route_equals_the_reference(tokens, experts, k, channels, launch):
    x, w, bias = logits_inputs(tokens, experts, channels)
    same_routing(route(x, w, bias, k, 1.5, launch), route_ref(x, w, bias, k, 1.5))


@LAUNCHES
def test_route_without_a_comparable_score_takes_the_lowest_ids_once(launch):
    x, w, bias = logits_inputs(3, 12, 64)
    want = route(x, w, bias, 4, 1.5, launch)
    x[1] = torch.nan
    found = route(x, w, bias, 4, 1.5, launch)
    assert found.ids[1].tolist() == [0, 1, 2, 3]
    assert found.rank.view(3, 4)[1].tolist() == [0, 1, 2, 3]
    assert found.weights[1].isnan().all()
    assert torch.equal(found.ids[::2], want.ids[::2])
    assert sorted(found.order.tolist()) == list(range(12))


@LAUNCHES
def test_route_shows_a_score_that_is_nan(launch):
    x, w, bias = logits_inputs(3, 12, 64)
    w[7, 5] = torch.nan
    found = route(x, w, bias, 4, 1.5, launch)
    assert torch.equal(found.ids, route_ref(x, w, bias, 4, 1.5).ids)
    assert (found.ids[:, 0] == 7).all()
    assert found.weights.isnan().all()


@LAUNCHES
def test_route_takes_the_lowest_id_of_equal_scores_and_ignores_a_bias_that_is_nan(launch):
    x, w, bias = logits_inputs(2, 40, 64)
    w[8:24] = w[5]
    bias = torch.zeros_like(bias)
    bias[5:24] += 3
    found = route(x, w, bias, 6, 1.5, launch)
    assert [sorted(row) for row in found.ids.tolist()] != [list(range(8, 14))] * 2
    assert set(found.ids.flatten().tolist()) <= set(range(5, 14))
    same_routing(found, route_ref(x, w, bias, 6, 1.5))
    bias[12] = torch.nan
    assert 12 not in route(x, w, bias, 6, 1.5, launch).ids.flatten().tolist()


@pytest.mark.parametrize("size", [-30.0, -17.0, 0.0, 25.0])
@LAUNCHES
def test_scores_far_from_zero_keep_their_ratios(size, launch):
    """Weights are s / sum(s) * 1.5 with s = sqrt(softplus), in float64."""
    x = torch.full((1, 32), size / 32).bfloat16()
    w = torch.arange(1, 5)[:, None].expand(4, 32).bfloat16() / 2
    zero = torch.zeros(4, device=DEVICE)
    found = route(x.to(DEVICE), w.contiguous().to(DEVICE), zero, 4, 1.5, launch)
    logit = (x.double() @ w.double().T)[0]
    s = torch.log1p(logit.exp()).sqrt()
    want = (s / s.sum() * 1.5)[found.ids[0].long().cpu()]
    torch.testing.assert_close(found.weights[0].double().cpu(), want, rtol=2e-5, atol=0)


@LAUNCHES
def test_bias_picks_and_never_scales(launch):
    x, w, bias = logits_inputs(4, 12, 64)
    plain = route(x, w, torch.zeros_like(bias), 3, 1.5, launch)
    assert not torch.equal(route(x, w, bias * 20, 3, 1.5, launch).ids, plain.ids)
    shifted = route(x, w, torch.full_like(bias, 7.0), 3, 1.5, launch)
    torch.testing.assert_close(shifted.weights.sort().values, plain.weights.sort().values)


def test_route_leaves_nothing_behind_and_refuses_what_it_cannot_hold():
    x, w, bias = logits_inputs(2, 33, 64)
    for launch in (None, APART):
        scratch = route_scratch(2, 33, x.device)  # counters and bits of both calls
        first = route(x, w, bias, 2, 1.5, launch, scratch)
        second = route(x.flip(0), w, bias, 2, 1.5, launch, scratch)
        same_routing(second, route_ref(x.flip(0), w, bias, 2, 1.5))
        assert not torch.equal(first.ids, second.ids)
        assert not scratch.counter.any()
    assert route(x[:0], w, bias, 2, 1.5).ids.shape == (0, 2)
    with pytest.raises(RouteUnsupportedError, match="tokens"):
        route(x.repeat(33, 1), w, bias, 2, 1.5)
    with pytest.raises(RouteUnsupportedError, match="experts"):
        route(x, w, bias, 34, 1.5)


@pytest.mark.parametrize("columns", [128, pytest.param(256, marks=SLOW)])
def test_scales_are_those_of_their_rows_and_groups(columns):
    w, routing, x = weights_of(2, columns, 128), choice(2, 2, 1), rows(2, columns)
    launch = ExpertLaunch(gate_rows=32, down_rows=64, columns=columns, warps=4, stages=2)
    names = "gate_up_scales", "down_scales"
    for name in names:  # another scale for each group and each row of a strip
        scales = getattr(w, name)
        step = torch.arange(scales[0, 0].numel(), device=DEVICE).byte().view(scales[0, 0].shape)
        w = w._replace(**{name: scales - step % 5})
    want = experts_w4_ref(x, routing, w, LIMIT)
    agree(experts_w4(x, routing, w, LIMIT, launch), want)
    for name in names:
        wrong = getattr(w, name).roll(1, -1)
        found = experts_w4(x, routing, w._replace(**{name: wrong}), LIMIT, launch)
        assert not torch.allclose(found.float(), want.float(), rtol=0.05, atol=1e-3), name
    for name in (*names, "shared_gate_up_scales", "shared_down_scales"):
        scales = getattr(w, name)
        wrong = scales.flip(-2 if name in names else -1).contiguous()
        found = experts_w4(x, routing, w._replace(**{name: wrong}), LIMIT, launch)
        assert not torch.allclose(found.float(), want.float(), rtol=0.05, atol=1e-3), name


@pytest.mark.parametrize("splits", [2, 3])
def test_splits_of_one_token_are_added_in_order(splits):
    w, routing, x = weights_of(3, 320, 96), choice(1, 3, 2), rows(1, 320)
    launch = ExpertLaunch(
        gate_rows=64,
        down_rows=64,
        columns=64,
        warps=4,
        stages=2,
        gate_splits=splits,
        shared_splits=5 - splits,
    )
    want = experts_w4_ref(x, routing, w, LIMIT)
    got = experts_w4(x, routing, w, LIMIT, launch)
    agree(got, want)
    parts = torch.full((1 << 16,), torch.nan, device=DEVICE)
    scratch = parts, torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for _ in range(2):  # counters are left clear
        assert torch.equal(experts_w4(x, routing, w, LIMIT, launch, scratch), got)
    for short in ((parts[:64], scratch[1]), (parts, scratch[1][:3])):
        with pytest.raises(ValueError, match="scratch"):
            experts_w4(x, routing, w, LIMIT, launch, short)


@SLOW
@pytest.mark.parametrize("launch", BENCHED, ids=str)
def test_launch_parameters_change_no_row(launch):
    for tokens in (1, 2):
        w, routing, x = weights_of(3, 256, 96), choice(tokens, 3, 2), rows(tokens, 256)
        agree(experts_w4(x, routing, w, LIMIT, launch), experts_w4_ref(x, routing, w, LIMIT))
