"""The hyper-connection site of the decode step, in Triton's interpreter or compiled on a GPU."""

import os
import re
import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="the kernels need triton")

from finwhale.decode_kernels.hyper_site import (
    Site,
    SiteLaunch,
    SiteUnsupportedError,
    hyper_site,
    hyper_site_ref,
    site_launch,
)
from finwhale.ops.hyper_connection import HyperMix, sinkhorn_ref
from finwhale.ops.rounding import round_fp8

SLOW = pytest.mark.slow  # in the interpreter; compiled they are fast
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APART = SiteLaunch(channels=32, warps=4, apart=True)
NUMBERS = {"iterations": 20, "norm_eps": 1e-20, "eps": 1e-6}
# What one launch compiles to for an H200; needs no GPU, but a kernel that is not interpreted.
MACHINE_CODE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from finwhale.decode_kernels.hyper_site import _site_kernel as kernel
constants = dict(CS=64, SP=64, CA=4096, CB=32, PARTS=7, MAKES=False, LATE=False)
constants |= dict(OVERLAP=False, UPCAST=False)
kinds = {"streams": "bf16", "parts": "bf16", "norm": "bf16", "x": "bf16", "rounded": "bf16",
         "z": "bf16", "count": "i32"}
def kind(name):
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return "*" + kinds.get(name[:-4], "fp32")
    return "i32" if name in ("C", "iterations") else "fp32"
names = kernel.arg_names
aligned = {(n,): [["tt.divisibility", 16]] for n, x in enumerate(names) if "_ptr" in x or x == "C"}
source = ASTSource(kernel, {x: kind(x) for x in names}, constants, aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


def inputs(tokens, channels, parts=2, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    streams = (normal(tokens, 4, channels) * torch.tensor([1, 3, 0.1, 10])[:, None]).bfloat16()
    before = HyperMix(
        torch.rand(tokens, 4, generator=g),
        2 * torch.rand(tokens, 4, generator=g),
        torch.rand(tokens, 4, 4, generator=g),
    )
    site = Site(
        normal(24, 4 * channels) * channels**-0.5,
        normal(24),
        torch.tensor([0.7, 1.3, 2.0]),
        normal(channels).bfloat16(),
    )
    rows = normal(tokens, parts, channels).bfloat16()
    incoming = torch.rand(tokens, 4, generator=g)
    return (
        streams.to(DEVICE),
        rows.to(DEVICE),
        HyperMix(*(t.to(DEVICE) for t in before)),
        incoming.to(DEVICE),
        Site(*(t.to(DEVICE) for t in site)),
    )


def run(form, args, **options):
    streams, *rest = args
    streams = streams.clone()
    out = form(streams, *rest, **NUMBERS, **options)
    return streams, out


def close(got, want, rtol):
    error = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30)
    assert float(error) < rtol


def agree(got, want):
    """fp32 coefficients; bf16 rows that may fall on the other side of a rounding."""
    (streams, out), (want_streams, want_out) = got, want
    assert float((streams != want_streams).float().mean()) < 0.01
    close(streams, want_streams, 1e-3)
    close(out.x, want_out.x, 2e-3)
    assert torch.equal(out.x_rounded, round_fp8(out.x))
    for mine, his in zip(out.mix, want_out.mix, strict=True):
        torch.testing.assert_close(mine, his, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "channels", "parts"),
    [
        (1, 32, 7),
        (1, 160, 1),
        (3, 64, 2),
        pytest.param(63, 32, 1, marks=SLOW),
        pytest.param(65, 32, 3, marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    "launch",
    [None, SiteLaunch(channels=32, warps=4), APART],
    ids=["table", "slices", "apart"],
)
def test_site_equals_the_reference(tokens, channels, parts, launch):
    args = inputs(tokens, channels, parts)
    got = run(hyper_site, args, launch=launch)
    agree(got, run(hyper_site_ref, args))
    again = run(hyper_site, args, launch=launch)
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1].mix.comb, again[1].mix.comb)


def two_sites(args, late, tokens=slice(None), launch=None, change=None):
    """Return streams and outputs of two sites, the second fed with what the first made."""
    streams, parts, before, incoming, site = args
    streams = streams[tokens].clone()
    before = HyperMix(*(x[tokens] for x in before))
    options = NUMBERS | {"launch": launch}
    first = hyper_site(streams, parts[tokens], before, incoming[tokens], site, late=late, **options)
    mix = first.mix if change is None else change(first.mix)
    # Of a launch that is apart they are never left.
    pre = None if isinstance(mix, torch.Tensor) else mix.pre
    other = site._replace(fn=site.fn.flip(1).contiguous())
    second = hyper_site(streams, parts[tokens].flip(1), mix, pre, other, late=late, **options)
    return streams, first, second


@pytest.mark.parametrize(("tokens", "channels", "parts"), [(1, 32, 7), (1, 160, 1), (3, 64, 2)])
@pytest.mark.parametrize(
    "launch", [SiteLaunch(channels=64, warps=4), SiteLaunch(channels=32, warps=4)]
)
def test_the_next_site_makes_the_coefficients_of_logits(tokens, channels, parts, launch):
    args = inputs(tokens, channels, parts)
    want_streams, *want = two_sites(args, False, launch=launch)
    streams, *got = two_sites(args, True, launch=launch)
    for mine, his in zip(got, want, strict=True):
        assert mine.mix.shape == (tokens, 24)
        assert torch.equal(mine.x_rounded, round_fp8(mine.x))
        if DEVICE == "cpu":
            assert torch.equal(mine.x, his.x)
    if DEVICE == "cpu":  # compiled, a multiply-add may be fused in one of the two kernels
        assert torch.equal(streams, want_streams)
    close(streams, want_streams, 1e-3)
    close(got[1].x, want[1].x, 2e-3)
    # The logits by their definition: sigmoid and softmax of them are the start of what he has.
    logits = got[1].mix
    pre = torch.sigmoid(logits[:, :4]) + NUMBERS["eps"]
    torch.testing.assert_close(pre, want[1].mix.pre, rtol=2e-4, atol=2e-5)
    post = 2 * torch.sigmoid(logits[:, 4:8])
    torch.testing.assert_close(post, want[1].mix.post, rtol=2e-4, atol=2e-5)
    comb = logits[:, 8:].unflatten(1, (4, 4)).softmax(-1) + NUMBERS["eps"]
    comb = sinkhorn_ref(comb, NUMBERS["iterations"], NUMBERS["eps"])
    torch.testing.assert_close(comb, want[1].mix.comb, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "which", [slice(0, 4), slice(4, 8), slice(8, 24)], ids=["pre", "post", "comb"]
)
def test_each_of_the_logits_shows_when_it_is_wrong(which):
    args = inputs(1, 64)
    want_streams, _, want = two_sites(args, True)

    def moved(logits):
        logits = logits.clone()
        logits[:, which] = logits[:, which].flip(1) + torch.tensor([1.0, -1.0]).to(logits).repeat(
            logits[:, which].shape[1] // 2
        )
        return logits

    streams, _, got = two_sites(args, True, change=moved)
    if which == slice(0, 4):  # pre is the collapse's alone
        assert torch.equal(streams, want_streams)
        streams, want_streams = got.x, want.x
    assert float((streams - want_streams).norm() / want_streams.norm()) > 0.02


def test_logits_of_a_site_are_its_own_and_refused_where_nobody_makes_them():
    streams, parts, _, incoming, site = args = inputs(3, 64)
    slices = SiteLaunch(channels=64, warps=4)
    whole = two_sites(args, True, launch=slices)
    alone = two_sites(args, True, slice(1, 2), launch=slices)
    assert torch.equal(alone[0], whole[0][1:2])
    assert torch.equal(alone[2].x, whole[2].x[1:2])
    # A launch that is apart leaves none.
    assert isinstance(two_sites(args, True, launch=APART)[1].mix, HyperMix)
    logits = whole[1].mix
    for launch, pre in ((APART, None), (slices, incoming)):
        with pytest.raises(SiteUnsupportedError, match="before: expected"):
            hyper_site(streams, parts, logits, pre, site, launch=launch, **NUMBERS)
    for wrong in (logits[:2], logits[:, :16], logits.bfloat16()):
        with pytest.raises(SiteUnsupportedError, match="fp32 logits"):
            hyper_site(streams, parts, wrong, None, site, launch=slices, **NUMBERS)


@pytest.mark.parametrize("apart", [False, True])
def test_a_row_wider_than_one_piece_of_its_norm(apart):
    """5120 channels: 4096 and the rest, in one program or in two."""
    args = inputs(1, 5120, 1)
    launch = SiteLaunch(channels=128, warps=8, apart=apart)
    got, want = run(hyper_site, args, launch=launch), run(hyper_site_ref, args)
    agree(got, want)
    close(got[1].x[:, 4096:], want[1].x[:, 4096:], 2e-3)
    wrong = (*args[:4], args[4]._replace(norm=args[4].norm.roll(1)))
    x = run(hyper_site, wrong, launch=launch)[1].x
    assert float((x[:, 4096:] != want[1].x[:, 4096:]).float().mean()) > 0.5


@pytest.mark.timeout(120)
def test_streams_are_written_behind_a_barrier():
    """Warps load what one of them writes over; the interpreter, one thread, cannot tell."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", MACHINE_CODE], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert not run.returncode, run.stderr[-1000:]
    found = re.findall(r"(ld|st)\.global|(bar)\.sync", run.stdout)
    order = [memory or barrier for memory, barrier in found]
    before = order[: order.index("st")]
    assert before.count("ld") > 20
    assert before[-1] == "bar"
    assert order[len(before) + 1 :].count("st") > 8


@pytest.mark.parametrize("launch", [None, APART], ids=["table", "apart"])
def test_site_without_an_update_leaves_the_streams(launch):
    streams, _, _, incoming, site = inputs(2, 64)
    args = streams, None, None, incoming, site
    got = run(hyper_site, args, launch=launch)
    agree(got, run(hyper_site_ref, args))
    assert torch.equal(got[0], streams)


@pytest.mark.parametrize("launch", [None, APART], ids=["table", "apart"])
def test_coefficients_by_their_definition_in_float64(launch):
    """The formulas of section 6, steps 1 to 3, written out for one token."""
    streams, _, _, incoming, site = inputs(1, 64)
    mix = run(hyper_site, (streams, None, None, incoming, site), launch=launch)[1].mix
    u = streams.double().flatten()
    m = site.fn.double() @ u / (u.square().mean() + 1e-20).sqrt()
    base, scale = site.base.double(), site.scale.double()
    sigmoid = torch.sigmoid
    torch.testing.assert_close(
        mix.pre[0].double(), sigmoid(scale[0] * m[:4] + base[:4]) + 1e-6, rtol=1e-5, atol=1e-6
    )
    post = 2 * sigmoid(scale[1] * m[4:8] + base[4:8])
    torch.testing.assert_close(mix.post[0].double(), post, rtol=1e-5, atol=1e-6)
    r = (scale[2] * m[8:] + base[8:]).view(4, 4).softmax(1) + 1e-6
    r = r / (r.sum(0, keepdim=True) + 1e-6)
    for _ in range(19):
        r = r / (r.sum(1, keepdim=True) + 1e-6)
        r = r / (r.sum(0, keepdim=True) + 1e-6)
    torch.testing.assert_close(mix.comb[0].double(), r, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mix.comb[0].sum(0).cpu(), torch.ones(4), rtol=1e-5, atol=1e-5)


def test_a_projection_of_parts_keeps_the_bits_that_one_part_would_lose():
    """Of numbers just above 1, bf16 alone keeps eight bits: the sums cancel to what is left."""
    streams, _, _, incoming, site = inputs(2, 64)
    ones = torch.ones_like(streams)
    signs = torch.tensor([1.0, -1.0], device=DEVICE).repeat(128)
    tiny = torch.arange(24, device=DEVICE)[:, None] * 2.0**-20
    fn = signs * (1 + tiny * (signs > 0))  # [24, 256]: a row's sum is 128 of its tiny part
    site = site._replace(fn=fn, scale=torch.full_like(site.scale, 64.0), base=site.base * 0)
    mix = run(hyper_site, (ones, None, None, incoming, site), launch=APART)[1].mix
    want = torch.sigmoid(64 * 128 * tiny[:4, 0]) + 1e-6
    torch.testing.assert_close(mix.pre[0], want, rtol=2e-4, atol=0)  # sums of a matrix unit
    assert float((want - want[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("launch", [None, APART], ids=["table", "apart"])
def test_each_ingredient_shows_when_it_is_wrong(launch):
    streams, parts, before, incoming, site = inputs(2, 64)
    want_streams, want = run(hyper_site_ref, (streams, parts, before, incoming, site))

    def moved(**changed):
        given = {"parts": parts, "before": before, "incoming": incoming, "site": site} | changed
        got_streams, got = run(hyper_site, (streams, *given.values()), launch=launch)
        pairs = [(got_streams, want_streams), (got.x, want.x), *zip(got.mix, want.mix, strict=True)]
        return [float((a.float() - b.float()).norm() / b.float().norm()) > 0.02 for a, b in pairs]

    nothing = [False] * 5
    assert moved() == nothing
    # The first index of comb is contracted: its transpose is another matrix.
    assert moved(before=before._replace(comb=before.comb.mT.contiguous()))[0]
    assert moved(before=before._replace(post=before.post.flip(1)))[0]
    assert moved(before=before._replace(pre=before.pre.flip(1))) == nothing
    assert moved(incoming=incoming.flip(1)) == [False, True, False, False, False]
    assert moved(parts=parts.roll(1, 0))[0]
    assert moved(site=site._replace(scale=site.scale * torch.tensor([1, 1, 2.0], device=DEVICE)))[4]
    assert moved(site=site._replace(norm=site.norm.flip(0))) == [False, True, False, False, False]


@pytest.mark.parametrize("launch", [None, APART], ids=["table", "apart"])
def test_tokens_do_not_meet_their_neighbours(launch):
    streams, parts, before, incoming, site = inputs(3, 64)
    whole = run(hyper_site, (streams, parts, before, incoming, site), launch=launch)
    streams[:2] = torch.nan
    got = run(hyper_site, (streams, parts, before, incoming, site), launch=launch)
    assert torch.equal(got[0][2:], whole[0][2:])
    assert torch.equal(got[1].x[2:], whole[1].x[2:])
    assert got[1].x[:2].isnan().all()


def test_one_launch_serves_every_number_of_invariant_tokens():
    device = torch.device(DEVICE)
    assert site_launch(64, device, invariant=True) == site_launch(1, device, invariant=True)


@pytest.mark.parametrize("launch", [None, APART], ids=["table", "apart"])
def test_invariant_tokens_do_not_know_how_many_they_are(launch):
    streams, parts, before, incoming, site = inputs(3, 64)
    launch = site_launch(64, streams.device, invariant=True) if launch is None else launch
    whole = run(hyper_site, (streams, parts, before, incoming, site), launch=launch)
    one = slice(2, 3)
    mix = HyperMix(*(t[one] for t in before))
    alone = run(hyper_site, (streams[one], parts[one], mix, incoming[one], site), launch=launch)
    assert torch.equal(alone[0], whole[0][one])
    assert torch.equal(alone[1].x, whole[1].x[one])
    assert torch.equal(alone[1].mix.comb, whole[1].mix.comb[one])


def test_empty_and_refused_sites():
    streams, parts, before, incoming, site = inputs(2, 64)
    none = HyperMix(*(t[:0] for t in before))
    out = hyper_site(streams[:0], parts[:0], none, incoming[:0], site, **NUMBERS)
    assert out.x.shape == (0, 64)
    with pytest.raises(SiteUnsupportedError, match="expected 4"):
        hyper_site(streams[:, :2], parts, before, incoming, site, **NUMBERS)
    narrow = SiteLaunch(channels=16, warps=4)
    with pytest.raises(SiteUnsupportedError, match="slices of 16"):
        hyper_site(streams, parts, before, incoming, site, **NUMBERS, launch=narrow)
    with pytest.raises(SiteUnsupportedError, match="hidden_size"):
        hyper_site(streams[..., :40], parts, before, incoming, site, **NUMBERS)
