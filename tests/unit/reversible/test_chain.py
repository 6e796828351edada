"""The engine against plain autograd: gradients, buffers, random state, memory."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Mode,
    Recompute,
)

from .chains import (
    CHANNELS,
    EXACT,
    FLOAT32,
    FP16,
    HALVES,
    RESIDUALS,
    Plain,
    as_global,
    chain_of,
    distance,
    equal_to_plain,
    every_precision,
    in_backward,
    loss_of,
    make_chain,
    step,
    streams,
    train_once,
)

MODES = ["store", "reconstruct", "recompute"]


@pytest.mark.parametrize("kind", RESIDUALS)
def test_inverse_of_a_coupling_undoes_it(kind):
    # In evaluation, where a residual function is one and the same function twice.
    block = chain_of(kind).blocks[0].eval()
    x1, x2 = streams(requires_grad=False)
    r1, r2 = block.inverse(*block(x1, x2))
    assert distance({"1": r1, "2": r2}, {"1": x1, "2": x2}) < EXACT


@every_precision
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RESIDUALS)
def test_gradients_of_every_mode_equal_plain_autograds(kind, mode, precision):
    chain = chain_of(kind, mode=mode, dtype=precision.weights)
    equal_to_plain(chain, precision)


@every_precision
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RESIDUALS)
def test_outputs_of_every_mode_are_plain_autograds_to_the_bit(kind, mode, precision):
    chain = chain_of(kind, mode=mode, dtype=precision.weights)
    plain = Plain(chain)
    y, _, _ = step(chain, streams(precision.weights), precision)
    expected, _, _ = step(plain, streams(precision.weights), precision)
    for a, b in zip(y, expected, strict=True):
        assert torch.equal(a, b)


@every_precision
@pytest.mark.parametrize(
    "modes", [m for m in itertools.product(MODES, repeat=3) if len(set(m)) > 1]
)
def test_each_block_may_have_its_own_mode(modes, precision):
    chain = chain_of("basic", mode=modes, dtype=precision.weights)
    equal_to_plain(chain, precision)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_masked_chains_equal_plain_autograd(mode, precision):
    chain = chain_of("basic", mode=mode, dtype=precision.weights)
    frames = torch.tensor([[12], [7]])
    mask = (torch.arange(12) < frames).to(precision.weights)[:, None, None, :]
    equal_to_plain(chain, precision, partial(train_once, mask=mask))


class Counted(nn.Module):
    """A residual function that notes each run and whether it is in a backward pass."""

    def __init__(self, runs):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.variables = as_global(note=runs.append)

    def forward(self, x):
        self.variables.note(in_backward())
        return self.conv(x)


@pytest.mark.parametrize("precision", [FLOAT32, *HALVES], ids=str)
@pytest.mark.parametrize("mode", ["reconstruct", "recompute"])
def test_each_residual_function_runs_once_in_each_pass(mode, precision):
    runs = [[] for _ in range(6)]
    chain = make_chain(
        (AdditiveCoupling(Counted(runs[i]), Counted(runs[i + 1])) for i in (0, 2, 4)),
        mode=mode,
    )
    step(chain, streams(torch.float32), precision)
    assert runs == [[False, True]] * 6


@pytest.mark.parametrize("precision", [FLOAT32, *HALVES], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["basic", "torch"])
def test_running_statistics_are_updated_once_and_to_the_same_bits(
    kind, mode, precision
):
    chain = chain_of(kind, mode=mode, dtype=torch.float32)
    stored = chain_of(kind, mode="store", dtype=torch.float32)
    _, _, buffers = step(chain, streams(torch.float32), precision)
    _, _, expected = step(stored, streams(torch.float32), precision)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name
        if name.endswith("num_batches_tracked"):
            assert buffer == 1


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_the_output_depends_on_is_as_it_was_in_the_first_run(
    mode, precision
):
    def make():
        # Spectral normalisation improves a buffer at each run in training.
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        return nn.utils.parametrizations.spectral_norm(conv)

    torch.manual_seed(0)
    blocks = (AdditiveCoupling(make(), make()) for _ in range(2))
    chain = make_chain(blocks, mode=mode).to(precision.weights)
    equal_to_plain(chain, precision)


def activations_peak(depth, mode, kind="basic", precision=FLOAT32):
    """Live peak of a step without the parameters' gradients, which grow with depth."""
    chain = chain_of(kind, depth, mode=mode, dtype=torch.float32).requires_grad_(False)
    x = streams(torch.float32, batch=8, time=100)

    def train():
        with precision.autocast():
            loss = loss_of(chain(*x))
        loss.backward()

    return live_bytes_peak(train)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *(
            (kind, FLOAT32)
            for kind in ("basic", "bottleneck", "df_bottleneck", "torch")
        ),
        ("basic", FP16),
    ],
    ids=str,
)
def test_peak_memory_of_reconstruction_does_not_grow_with_depth(kind, precision):
    shallow = activations_peak(2, "reconstruct", kind, precision)
    deep = activations_peak(8, "reconstruct", kind, precision)
    # What is looked at of the streams are some numbers a block.
    assert deep <= 1.0015 * shallow
    assert activations_peak(8, "store", kind, precision) > 1.5 * deep


def test_recomputation_keeps_two_streams_of_each_block():
    stream = 8 * CHANNELS * 6 * 100 * 4
    grown = activations_peak(6, "recompute") - activations_peak(2, "recompute")
    assert grown == pytest.approx(4 * 2 * stream, rel=0.05)


def test_a_mode_can_be_switched_and_keeps_the_state_dict():
    chain = chain_of("basic", mode="store")
    keys = list(chain.state_dict())
    _, expected, _ = step(copy.deepcopy(chain), streams())
    chain.set_mode(["reconstruct", "store", Mode.RECOMPUTE])
    assert list(chain.state_dict()) == keys
    _, grads, _ = step(chain, streams())
    assert distance(grads, expected) < EXACT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "keep"}, "'keep'; the modes are 'store', 'reconstruct', 'recompute'"),
        ({"mode": ["store"]}, "1 modes were given for 2 blocks"),
        ({"streams": "double"}, "'double'; the formats are 'float'"),
    ],
)
def test_impossible_settings_are_refused(arguments, words):
    blocks = [AdditiveCoupling(nn.Identity(), nn.Identity()) for _ in range(2)]
    with pytest.raises(ValueError, match=words):
        make_chain(blocks, **arguments)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_residual_function_is_refused(mode):
    x = streams(torch.float32)
    in_place = AdditiveCoupling(nn.ReLU(inplace=True), nn.Identity())
    with pytest.raises(RuntimeError, match="inplace=False"):
        make_chain([in_place], mode=mode)(*x)
    widening = AdditiveCoupling(nn.Conv2d(CHANNELS, 4, 1), nn.Identity())
    with pytest.raises(ValueError, match="must keep the shape"):
        make_chain([widening], mode=mode)(*x)
    with pytest.raises(ValueError, match="one shape, dtype and device"):
        chain_of("basic", mode=mode)(x[0], x[1][..., :5])


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_identities_and_empty_chains_work(mode, precision):
    for blocks in ([], [AdditiveCoupling(nn.Identity(), nn.Identity())]):
        chain = make_chain(blocks, mode=mode)
        equal_to_plain(chain, precision, to_the_bit=True)


@every_precision
def test_recompute_equals_the_module_and_updates_statistics_once(precision):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(CHANNELS, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)
    ).to(precision.weights)
    again = Recompute(copy.deepcopy(module))
    results = []
    for m in (module, again):
        (x, _) = streams(precision.weights)
        torch.manual_seed(3)
        with precision.autocast():
            loss = m(x).square().sum(dtype=precision.weights)
        precision.scaler().scale(loss).backward()
        grads = [p.grad for p in m.parameters()]
        results.append((x.grad, *grads, *m.buffers()))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


class Mix(nn.Module):
    """Takes and returns tensors in every structure, and things that are no tensors."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a, factor, pair, *, offset):
        x, (y,) = pair
        return {
            "product": a * x * self.scale,
            "others": [(y * factor).sin(), a.argmax(), None, "name"],
            "alone": (offset["value"] + self.scale,),
        }


def test_recompute_takes_and_returns_any_structure():
    mix = Mix()
    results = []
    for module in (mix, Recompute(mix)):
        torch.manual_seed(0)
        a, x, y, value = (torch.randn(3, requires_grad=True) for _ in range(4))
        found = module(a, 2.0, (x, [y]), offset={"value": value})
        assert found["others"][1:] == [a.argmax(), None, "name"]
        assert isinstance(found["alone"], tuple)
        loss = found["product"].sum() + found["others"][0].sum()
        mix.scale.grad = None
        (loss + found["alone"][0].square().sum()).backward()
        results.append([t.grad for t in (a, x, y, value, mix.scale)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@every_precision
@pytest.mark.parametrize("mode", MODES)
def test_a_recomputed_module_inside_a_residual_function_is_exact(mode, precision):
    torch.manual_seed(0)
    halves = [RESIDUALS["basic"](CHANNELS) for _ in range(4)]
    blocks = [
        AdditiveCoupling(Recompute(halves[0]), halves[1]),
        AdditiveCoupling(halves[2], Recompute(halves[3])),
    ]
    chain = make_chain(blocks, mode=mode).to(precision.weights)
    equal_to_plain(chain, precision)
