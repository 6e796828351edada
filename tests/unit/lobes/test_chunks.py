"""Working on some channels at a time: the same network, in less memory."""

import copy

import pytest
import torch
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES, architecture
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.blocks import BasicResidual, DFBottleneckResidual
from speechbrain_rev.lobes.geometry import AUTO, channels_by_level
from speechbrain_rev.lobes.layers import can_be_split
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import Recompute, recompute_blocks, replay
from tests.unit.lobes.encoders import KINDS
from tests.unit.reversible.chains import BF16, EXACT, FLOAT32, FLOAT64, FP16, distance

SMALL = {"widths": (8, 16, 32, 32), "blocks": (1, 2, 1, 1)}
#: One channel at a time at the first level, some at the others.
CHUNK = 80_000
REVERSIBLE = [name for name in KINDS if ARCHITECTURES[name].reversible]
SLOW = pytest.mark.slow


def is_conv(module):
    return isinstance(module, nn.Conv2d)


def trained(
    name,
    mode,
    chunk,
    precision=FLOAT32,
    streams="exact",
    lengths=None,
    wrap=False,
    frozen="",
    watched=False,
):
    """Gradients, buffers and the output of one step."""
    torch.manual_seed(0)
    encoder = build_encoder(
        name, mode=mode, chunk=chunk, streams=streams, verify="raise", verify_every=1,
        **SMALL,
    ).to(precision.weights)  # fmt: skip
    for module in encoder.modules():
        if watched and is_conv(module):
            # With a hook it is called as a whole, in plain autograd.
            module.register_forward_hook(lambda *_: None)
    for parameter_name, parameter in encoder.named_parameters():
        if frozen and parameter_name.startswith(frozen):
            parameter.requires_grad_(False)
    torch.manual_seed(1)
    feats = torch.randn(3, 43, 80, dtype=precision.weights)
    with precision.autocast():
        y = (Recompute(encoder) if wrap else encoder)(feats, lengths)
    weights = torch.linspace(-1, 1, y.numel(), dtype=precision.weights).view_as(y)
    precision.scaler().scale((y.to(precision.weights) * weights).sum()).backward()
    encoder.check_streams()
    grads = {f"grad of {n}": p.grad for n, p in encoder.named_parameters()}
    return grads | dict(encoder.named_buffers()) | {"y": y.detach()}


#: Between them with both kinds of transitions, and every kind of hidden convolution.
IN_HALF = ("revnet140", "df_revnet89")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, FLOAT32) for name in REVERSIBLE),
        *(
            pytest.param(
                name, half, marks=[] if name in IN_HALF and half is BF16 else [SLOW]
            )
            for half in (BF16, FP16)
            for name in REVERSIBLE
        ),
    ],
    ids=str,
)
def test_every_mode_has_the_bits_of_storing(name, precision):
    lengths = torch.tensor([1.0, 0.5, 0.7])
    expected = trained(name, "store", CHUNK, precision, lengths=lengths)
    for mode in ("reconstruct", "recompute"):
        found = trained(name, mode, CHUNK, precision, lengths=lengths)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (mode, key)


@pytest.mark.parametrize("name", REVERSIBLE)
def test_gradients_are_those_of_the_whole(name):
    whole = trained(name, "store", None, FLOAT64, "float", watched=True)
    assert (
        distance(trained(name, "reconstruct", CHUNK, FLOAT64, "float"), whole) < 1e-12
    )


@pytest.mark.parametrize("kind", [BasicResidual, DFBottleneckResidual])
def test_pieces_add_up_to_the_whole_and_update_its_statistics(kind):
    torch.manual_seed(0)
    whole = kind(8).double()
    parts = kind(8).double()
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(2, 8, 6, 10, dtype=torch.float64)
    pieces = parts.pieces(3)
    assert [p.norm.channels for p in pieces][-1] == whole.norm.channels % 3 or 3
    total = sum(piece(x) for piece in pieces)
    assert distance({"y": total}, {"y": whole(x)}) < EXACT
    assert distance(dict(parts.named_buffers()), dict(whole.named_buffers())) < EXACT


class Derived(BasicResidual):
    """Computes something else than the class that it comes from."""

    def forward(self, x, mask=None):
        return super().forward(x, mask).tanh()


def with_hook(f):
    f.conv1.register_forward_hook(lambda *_: None)
    return f


def with_other_layer(f):
    f.conv2 = nn.Sequential(f.conv2)
    return f


def with_weight_norm(f):
    nn.utils.parametrizations.weight_norm(f.conv1)
    return f


def with_bias(f):
    f.conv1 = nn.Conv2d(8, 8, 3, padding=1)
    return f


def with_own_forward(f):
    f.forward = f.forward
    return f


def compiled(f):
    f.compile(backend="eager")
    return f


def with_circular_padding(f):
    f.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False, padding_mode="circular")
    return f


@pytest.mark.parametrize(
    "change",
    [
        with_hook,
        with_other_layer,
        with_weight_norm,
        with_bias,
        with_circular_padding,
        with_own_forward,
        compiled,
    ],
)
def test_what_is_not_as_it_was_built_is_run_whole(change):
    f = change(BasicResidual(8))
    assert list(f.pieces(3)) == [f]


def test_memory_falls_with_the_chunk():
    def peak(chunk):
        with torch.device("meta"):
            encoder = build_encoder("df_revnet89", chunk=chunk, blocks=(1, 1, 1, 1))
            feats = torch.randn(16, 200, 80)
        for p in encoder.parameters():
            p.grad = torch.zeros_like(p)
        return live_bytes_peak(lambda: encoder(feats).square().sum().backward())

    peaks = [peak(chunk) for chunk in (None, 2 * AUTO, AUTO, AUTO // 2)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] < 0.4 * peaks[0]


def grown(name, frames=200, streams="exact", **options):
    """Bytes that an utterance adds to a training step, counted without computing."""
    with torch.device("meta"):
        encoder = build_encoder(name, streams=streams, **options)
    for p in encoder.parameters():
        p.grad = torch.zeros_like(p)

    def step(batch):
        feats = torch.randn(batch, frames, 80, device="meta")
        encoder(feats).square().sum().backward()

    few, many = (live_bytes_peak(lambda batch=n: step(batch)) for n in (32, 64))
    return (many - few) / 32


#: GB per utterance of 2 s, with float streams and with exact ones.
FIGURES = {
    "revnet57": (0.0125, 0.0140), "df_revnet89": (0.0125, 0.0140),
    "revnet46": (0.020, 0.022), "df_revnet66": (0.020, 0.022),
    "revnet155": (0.032, 0.036), "revnet140": (0.050, 0.055),
}  # fmt: skip
#: Two kinds of transitions and of residual functions, those of bottlenecks among them.
QUICK = ("revnet57", "df_revnet66")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [SLOW]) for name in FIGURES],
)
def test_an_utterance_takes_no_more_than_promised(name):
    for streams, most in zip(("float", "exact"), FIGURES[name], strict=True):
        assert grown(name, streams=streams, blocks=(1, 1, 1, 1)) <= most * 1e9


@pytest.mark.parametrize("mode", [pytest.param("store", marks=SLOW), "recompute"])
def test_small_pieces_hand_down_their_gradients_one_by_one(mode):
    few, many = (
        grown("revnet57", mode=mode, chunk=n, blocks=(1, 1, 1, 1))
        for n in ("auto", 200_000)
    )
    assert many <= 1.01 * few


@SLOW
@pytest.mark.parametrize("name", REVERSIBLE)
def test_memory_does_not_grow_with_depth(name):
    shallow, deep = (grown(name, blocks=(n, 1, 1, n)) for n in (2, 8))
    assert deep <= shallow


@SLOW
@pytest.mark.parametrize("name", REVERSIBLE)
def test_three_times_the_frames_take_three_times_the_memory(name):
    short, long = (grown(name, frames, blocks=(1, 1, 1, 1)) for frames in (200, 600))
    assert long <= 3.01 * short


@pytest.mark.parametrize("n_mels", [24, 40, 80])
def test_channels_do_not_depend_on_the_utterance(n_mels):
    channels = channels_by_level("auto", architecture("revnet57").geometry(n_mels))
    for level, number in enumerate(channels):
        size = 4 * -(-n_mels // 2**level) * -(-200 // 2**level)
        assert number * size <= AUTO < (number + 1) * size


@pytest.mark.parametrize("streams", ["exact", pytest.param("float", marks=SLOW)])
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *((name, "") for name in REVERSIBLE),
        ("revnet57", "stem"),
        ("df_revnet66", "stem"),
    ],
)
def test_an_encoder_within_recompute_has_the_same_gradients(name, frozen, streams):
    plain, within = (
        trained(name, None, CHUNK, FLOAT64, streams, wrap=wrap, frozen=frozen)
        for wrap in (False, True)
    )
    assert plain.keys() == within.keys()
    for key, value in plain.items():
        assert value is None or torch.equal(within[key], value), key


@pytest.mark.parametrize("name", ["revnet57", "df_revnet66"])
def test_an_encoder_without_gradients_in_a_recomputed_module_gives_the_same(name):
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = build_encoder(name, chunk=CHUNK, **SMALL)
            self.student = nn.Linear(80, 256)

        def forward(self, feats):
            with torch.no_grad():
                embedding = self.teacher(feats).squeeze(1)
            return (self.student(feats).mean(dim=1) - embedding).square()

    torch.manual_seed(0)
    plain, feats = Taught(), torch.randn(2, 40, 80)
    within = copy.deepcopy(plain)
    for module in (plain, Recompute(within)):
        torch.mean(module(feats)).backward()
    # Beside the rounding of exact streams, which a pass without gradients has not.
    found, expected = (
        {n: p.grad for n, p in m.student.named_parameters()} for m in (within, plain)
    )
    assert distance(found, expected) < 1e-3


@SLOW
@pytest.mark.parametrize("name", REVERSIBLE)
def test_stored_pieces_can_be_differentiated_twice(name):
    torch.manual_seed(0)
    encoder = build_encoder(name, mode="store", streams="float", chunk=CHUNK, **SMALL)
    encoder.double()
    feats = torch.randn(2, 24, 80, dtype=torch.float64)
    weights = [m.weight for m in encoder.stages[1].entry.modules() if is_conv(m)]
    directions = [torch.randn_like(x) for x in (feats, *weights)]

    def slope(x):
        """Along some directions, those of weights among them."""
        inputs = [x, *weights]
        found = torch.autograd.grad(encoder(x).sum(), inputs, create_graph=True)
        pairs = zip(found, directions, strict=True)
        return sum((grad * direction).sum() for grad, direction in pairs)

    x = feats.clone().requires_grad_()
    (found,) = torch.autograd.grad(slope(x), x)
    step = 1e-8  # so small that no ReLU switches
    low, high = (
        float(slope((feats + sign * step * directions[0]).requires_grad_()).detach())
        for sign in (-1, 1)
    )
    expected = (high - low) / (2 * step)
    assert float((found * directions[0]).sum()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["df_revnet89", "revnet140"])
def test_a_backward_pass_under_autocast_has_the_same_bits(name):
    found = {}
    for mode in ("store", "reconstruct"):
        torch.manual_seed(0)
        encoder = build_encoder(name, mode=mode, chunk=CHUNK, verify=None, **SMALL)
        torch.manual_seed(1)
        y = encoder(torch.randn(3, 40, 80))
        with torch.autocast("cpu", torch.bfloat16):
            y.square().sum().backward()
        found[mode] = [p.grad for p in encoder.parameters()]
    assert all(map(torch.equal, *found.values()))


@pytest.mark.parametrize("mode", ["store", "reconstruct"])
@pytest.mark.parametrize("name", ["revnet46", "revnet57"])
def test_all_convolutions_run_under_pinned_flags(name, mode, monkeypatch):
    monkeypatch.setattr(replay, "_decided_by_flags", lambda _: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen, convolve = [], nn.functional.conv2d

    def watched(*arguments, **options):
        seen.append(torch.backends.cudnn.benchmark)
        return convolve(*arguments, **options)

    monkeypatch.setattr(nn.functional, "conv2d", watched)
    trained(name, mode, CHUNK)
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("mode", ["reconstruct", "recompute"])
def test_layouts_of_one_channel_are_the_same_in_all_modes(mode):
    found = []
    for each in ("store", mode):
        torch.manual_seed(0)
        encoder = build_encoder("df_revnet66", chunk=CHUNK, mode=each, **SMALL)
        encoder.to(memory_format=torch.channels_last)
        torch.manual_seed(1)
        encoder(torch.randn(3, 32, 80)).sum().backward()
        buffers = [b.clone() for b in encoder.buffers()]
        found.append([p.grad for p in encoder.parameters()] + buffers)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["revnet57", pytest.param("df_revnet66", marks=SLOW)])
def test_a_compiled_encoder_stores_in_pieces(name):
    encoder = build_encoder(name, mode="store", chunk=CHUNK, **SMALL)
    compiled, x = torch.compile(encoder, backend="eager"), torch.randn(2, 24, 80)
    torch.testing.assert_close(compiled(x), encoder(x))


def test_a_unit_that_others_recompute_is_left_to_them():
    encoder = build_encoder("df_revnet66", mode="store", chunk=CHUNK, **SMALL)
    assert can_be_split(encoder.stem)
    recompute_blocks(encoder, "stem")
    assert not can_be_split(encoder.stem)


@pytest.mark.filterwarnings("ignore:.*fire in both of its runs")
@pytest.mark.parametrize("training", [False, True])
def test_hooks_of_a_shortcut_fire(training):
    encoder = build_encoder("revnet46", chunk=CHUNK, **SMALL).train(training)
    seen = []
    encoder.stages[1].entry.shortcut.register_forward_hook(lambda *_: seen.append(1))
    encoder(torch.randn(2, 24, 80))
    assert seen == [1]


def test_geometry_may_be_numbers():
    encoder = build_encoder("revnet57", chunk=CHUNK, **SMALL)
    x = torch.randn(2, 24, 80)
    expected = encoder(x)
    encoder.stages[1].entry.conv.padding = 1
    encoder.stages[1].entry.conv.stride = 1
    assert torch.equal(encoder(x), expected)


def test_vanilla_encoders_refuse_a_size():
    with pytest.raises(ValueError, match="works on all channels at once"):
        build_encoder("resnet34", chunk=800_000)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "large", True])
def test_other_sizes_are_refused(chunk):
    with pytest.raises(ValueError, match="takes 'auto', a number of bytes, or null"):
        build_encoder("revnet57", chunk=chunk)
