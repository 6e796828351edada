"""Working on some channels at a time: the same network, in less memory."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.lobes.blocks import BasicResidual, DFBottleneckResidual
from speechbrain_rev.lobes.geometry import AUTO
from speechbrain_rev.lobes.layers import can_be_split
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Recompute,
    ReversibleChain,
    flags,
    recompute_blocks,
)
from speechbrain_rev.reversible.chain import CompileWarning
from tests.unit.lobes.encoders import (
    CHUNKED,
    REVERSIBLE,
    assert_same_bits,
    but_slow,
    grads_of,
    narrow,
    on_meta,
    tiny,
    trained,
)
from tests.unit.reversible.chains import EXACT, FLOAT64, distance

SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", REVERSIBLE)
def test_gradients_are_those_of_the_whole(name):
    steps = []
    for settings in (CHUNKED | {"chunk": None, "mode": "store"}, CHUNKED):
        encoder = tiny(name, streams="float", **settings).double()
        for module in () if steps else encoder.modules():
            if isinstance(module, nn.Conv2d):
                # With a hook it is called as a whole, in plain autograd.
                module.register_forward_hook(lambda *_: None)
        steps.append(trained(encoder, narrow(3).double(), precision=FLOAT64))
    assert distance(steps[1], steps[0]) < 1e-12


@pytest.mark.parametrize("kind", [BasicResidual, DFBottleneckResidual])
def test_pieces_add_up_to_the_whole_and_update_its_statistics(kind):
    torch.manual_seed(0)
    whole = kind(8).double()
    parts = copy.deepcopy(whole)
    x = torch.randn(2, 8, 6, 10, dtype=torch.float64)
    pieces = parts.pieces(3)
    assert [p.norm.channels for p in pieces][-1] == whole.norm.channels % 3 or 3
    total = sum(piece(x) for piece in pieces)
    assert distance({"y": total}, {"y": whole(x)}) < EXACT
    assert distance(dict(parts.named_buffers()), dict(whole.named_buffers())) < EXACT


@pytest.mark.parametrize("mode", ["store", "recompute", "reconstruct"])
def test_what_a_hook_keeps_beside_pieces_is_not_added_to(mode):
    torch.manual_seed(0)
    halves = ((DFBottleneckResidual(8), DFBottleneckResidual(8)) for _ in range(3))
    chain = ReversibleChain(
        (AdditiveCoupling(f, g) for f, g in halves), mode=mode, chunk=8
    )
    kept = []

    def keep(module, of_input, of_output):
        kept.extend((x, x.clone()) for x in (*of_input, *of_output) if x is not None)

    for block in chain.blocks:
        block.g.register_full_backward_hook(keep)
    x1, x2 = torch.randn(2, 2, 8, 16, 20)
    sum(y.square().sum() for y in chain(x1, x2.requires_grad_())).backward()
    assert len(kept) == 6
    assert all(torch.equal(x, before) for x, before in kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.conv1.register_forward_hook(lambda *_: None),
        lambda f: nn.utils.parametrizations.weight_norm(f.conv1),
        lambda f: setattr(f, "conv2", nn.Sequential(f.conv2)),
        lambda f: setattr(f, "conv1", nn.Conv2d(8, 8, 3, padding=1)),  # with a bias
        lambda f: setattr(f.conv2, "padding_mode", "circular"),
        lambda f: setattr(f, "forward", f.forward),
        lambda f: f.compile(backend="eager"),
    ],
)
def test_what_is_not_as_it_was_built_is_run_whole(change):
    f = BasicResidual(8)
    change(f)
    assert list(f.pieces(3)) == [f]


def grown(name, frames=200, **settings):
    """Bytes that an utterance adds to a training step, counted without computing."""
    encoder = on_meta(name, **settings)

    def step(batch):
        given = torch.randn(batch, frames, 80, device="meta")
        encoder(given).square().sum().backward()

    few, many = (live_bytes_peak(lambda batch=n: step(batch)) for n in (32, 64))
    return (many - few) / 32


@SLOW
def test_memory_falls_with_the_chunk():
    peaks = [grown("df_revnet89", chunk=n) for n in (None, AUTO, AUTO // 2)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 0.4 * peaks[0]


#: GB per utterance of 2 s, with float streams and with exact ones. Chunks where the peak is
#: cost DF encoders up to 6 % for a quarter of the launches.
FIGURES = {
    "revnet57": (0.0125, 0.0140), "df_revnet89": (0.0126, 0.0140),
    "revnet46": (0.020, 0.022), "df_revnet66": (0.020, 0.022),
    "revnet155": (0.032, 0.036), "revnet140": (0.050, 0.055),
}  # fmt: skip


# Quick is a bottleneck between transitions that are units.
@pytest.mark.parametrize("name", but_slow(FIGURES, "df_revnet66"))
def test_an_utterance_takes_no_more_than_promised(name):
    for streams, most in zip(("float", "exact"), FIGURES[name], strict=True):
        assert grown(name, streams=streams) <= most * 1e9


@pytest.mark.parametrize("mode", but_slow(["store", "recompute"], "recompute"))
def test_small_pieces_hand_down_their_gradients_one_by_one(mode):
    few, many = (grown("revnet57", mode=mode, chunk=n) for n in ("auto", 200_000))
    assert many <= 1.01 * few


@SLOW
@pytest.mark.parametrize("name", REVERSIBLE)
def test_memory_grows_with_frames_and_not_with_depth(name):
    shallow, deep = (grown(name, blocks=(n, 1, 1, n)) for n in (2, 8))
    assert deep <= shallow
    assert grown(name, frames=600) <= 3.01 * grown(name)


@pytest.mark.parametrize(
    ("name", "frozen", "streams"),
    [
        ("revnet46", "none", "exact"),
        ("df_revnet66", "stem", "exact"),
        *(pytest.param(n, "none", "float", marks=SLOW) for n in REVERSIBLE),
    ],
)
def test_a_recomputed_encoder_has_the_same_gradients(name, frozen, streams):
    plain, recomputed = (tiny(name, streams=streams, **CHUNKED).double() for _ in "ab")
    for encoder in (plain, recomputed):
        for parameter_name, parameter in encoder.named_parameters():
            parameter.requires_grad_(not parameter_name.startswith(frozen))
    x, run = narrow(3).double(), Recompute(recomputed)
    assert_same_bits(
        trained(recomputed, x, precision=FLOAT64, run=run),
        trained(plain, x, precision=FLOAT64),
    )


def test_an_encoder_without_gradients_in_a_recomputed_module_gives_the_same():
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = tiny("df_revnet66", **CHUNKED)
            self.student = nn.Linear(24, 32)

        def forward(self, x):
            with torch.no_grad():
                embedding = self.teacher(x).squeeze(1)
            return (self.student(x).mean(dim=1) - embedding).square()

    plain, x = Taught(), narrow()
    recomputed = copy.deepcopy(plain)
    for module in (plain, Recompute(recomputed)):
        torch.mean(module(x)).backward()
    # Beside the rounding of exact streams, which a pass without gradients has not.
    grads, expected = grads_of(recomputed.student), grads_of(plain.student)
    assert distance(grads, expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "mode"), [("revnet46", "store"), ("revnet57", "reconstruct")]
)
def test_all_convolutions_run_under_pinned_flags(name, mode, monkeypatch):
    monkeypatch.setattr(flags, "_decided_by_flags", lambda _: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen, convolve = [], nn.functional.conv2d

    def watched(*arguments, **options):
        seen.append(torch.backends.cudnn.benchmark)
        return convolve(*arguments, **options)

    monkeypatch.setattr(nn.functional, "conv2d", watched)
    trained(tiny(name, mode=mode, **CHUNKED), narrow(3))
    assert seen
    assert not any(seen)


@SLOW
def test_a_compiled_encoder_stores_in_pieces():
    encoder = tiny("df_revnet66", mode="store", **CHUNKED | {"blocks": (1, 0, 0, 0)})
    compiled, x = torch.compile(encoder, backend="eager"), narrow(2, 24)
    with pytest.warns(CompileWarning, match="is no faster"):
        y = compiled(x)
    torch.testing.assert_close(y, encoder(x))


def test_a_unit_that_others_recompute_is_left_to_them():
    encoder = tiny("df_revnet66", mode="store", **CHUNKED)
    assert can_be_split(encoder.stem)
    recompute_blocks(encoder, "stem")
    assert not can_be_split(encoder.stem)


def test_geometry_may_be_numbers():
    encoder, x = tiny("revnet57", **CHUNKED), narrow(2, 24)
    expected = encoder(x)
    for name in ("padding", "stride"):
        setattr(encoder.stages[1].entry.conv, name, 1)
    assert torch.equal(encoder(x), expected)
