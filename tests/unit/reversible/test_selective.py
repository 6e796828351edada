"""Blocks that make outputs of normalisations again: bits, bytes, and what they hold."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from speechbrain_rev.compression.activations import (
    ActivationCompression,
    compress_blocks,
)
from speechbrain_rev.modes import Mode
from speechbrain_rev.planner.memory import LiveBytes, live_bytes_peak
from speechbrain_rev.reversible.selective import selecting
from speechbrain_rev.reversible.wrapping import give_mode, mode_of
from speechbrain_rev.torch_private import saved_tensor_hooks

from .chains import (
    BF16,
    FLOAT32,
    FLOAT64,
    FP16,
    Counting,
    assert_same_bits,
    module_with,
)

WIDTH = 16
Row = nn.Sequential


def conv(**options):
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False, **options)


def norm():
    return nn.BatchNorm2d(WIDTH)


@module_with(layers=lambda: Row(norm(), nn.ReLU(), conv(), norm(), nn.ReLU(), conv()))
def pre_activation(self, x):
    return x + self.layers(x)


@module_with(norm=norm, first=conv, other=norm, second=conv)
def concatenated(self, x):
    """Of what the last convolution reads, one part is made of the other."""
    part = self.norm(self.first(x)).relu()
    both = torch.cat([part, self.other(part)], dim=1)
    return F.conv2d(both, self.second.weight.repeat(1, 2, 1, 1))


@module_with(first=conv, norm=norm, weight=lambda: nn.Parameter(torch.eye(WIDTH)))
def read_as_views(self, x):
    y = F.relu(self.norm(self.first(x)))
    z = self.weight.expand(len(x), -1, -1) @ y.flatten(2)
    return z.view_as(y)[1:] + F.conv2d(y[1:, 3:7], self.first.weight[:, 3:7], padding=1)


@module_with(first=conv, norm=norm, second=conv)
def written_to(self, x):
    y = self.norm(self.first(x))
    y += x
    return self.second(y.relu_())


@module_with(first=conv, norm=norm, second=conv)
def written_in_part(self, x):
    y = self.norm(self.first(x))
    y[1:].relu_()
    return self.second(y)


@module_with(first=conv, norm=norm, second=conv)
def normalised_for_statistics(self, x):
    x = self.first(x)
    self.norm(x)
    return self.second(x.relu_())


@module_with(first=conv, norm=norm, second=conv)
def convolved_in_float32(self, x):
    """Under autocast, padding by reflection returns float32."""
    y = F.pad(self.norm(self.first(x)).relu(), [1] * 4, "reflect")
    with torch.autocast("cpu", enabled=False):
        return F.conv2d(y, self.second.weight)


@module_with(first=conv, norm=norm, second=conv)
def seen_before_it_is_freed(self, x):
    """Maps that nothing saves come and go, and others have their places in memory."""
    for _ in range(8):
        self.norm(x).mean()
        x = self.second(self.first(x) * 1.5)
    return x


def linear():
    layers = [nn.LayerNorm(12), nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 12)]
    return Row(*layers)


def one_dimension():
    layers = [nn.Conv1d(WIDTH, WIDTH, 3), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return Row(nn.Flatten(2), *layers, nn.Conv1d(WIDTH, WIDTH, 3))


#: Blocks, and how many maps fewer than stored ones they hold.
BLOCKS = {
    "convolution, normalisation, ReLU": (
        lambda: Row(conv(), norm(), nn.ReLU(), conv(), norm(), nn.ReLU(), conv()), 2
    ),
    "in place": (lambda: Row(conv(), norm(), nn.ReLU(inplace=True), conv()), 1),
    "ReLU before": (
        lambda: Row(conv(), nn.ReLU(), norm(), conv(), nn.ReLU(True), norm(), conv()), 2
    ),
    "pre-activation": (pre_activation, 2),
    # With its margins the map that is convolved is 14 x 14.
    "padded": (
        lambda: Row(conv(), norm(), nn.ReLU(), conv(padding_mode="reflect")),
        1 + (14 / 12) ** 2,
    ),
    "one dimension": (one_dimension, 142 / 144),
    # The inner features are four times as many.
    "linear": (linear, 1 + 4),
    "concatenated": (concatenated, 3),
    "views": (read_as_views, 1),
    "in float32": (convolved_in_float32, 1 + (14 / 12) ** 2),
    "ReLU alone": (lambda: Row(conv(), nn.ReLU(), conv(), nn.ReLU(True), conv()), 0),
    "written to": (written_to, 0),
    "written in part": (written_in_part, 0),
    "for statistics": (normalised_for_statistics, 0),
    "freed": (seen_before_it_is_freed, 0),
}  # fmt: skip
MAP_BYTES = 4 * WIDTH * 12 * 12 * 4
USUAL = "convolution, normalisation, ReLU"


def network_of(*names, mode="selective", evaluated=False):
    """A convolution, and blocks in a mode."""
    torch.manual_seed(0)
    network = Row(conv(), *(BLOCKS[name][0]() for name in names))
    for layer in network.modules():
        if isinstance(layer, (nn.BatchNorm2d, nn.BatchNorm1d)):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
            layer.train(not evaluated)
    give_mode(network, Mode(mode), *map(str, range(1, len(network))))
    return network


def batch(requires_grad=False):
    torch.manual_seed(1)
    return torch.randn(4, WIDTH, 12, 12).requires_grad_(requires_grad)


def trained(network, precision=FLOAT32, *, steps=1, backward=torch.Tensor.backward):
    """All that steps make, by name."""
    x = batch(True).to(precision.weights).detach().requires_grad_()
    network = network.to(precision.weights)
    for _ in range(steps):
        with precision.autocast():
            y = network(x)
        backward((y.float() * (precision.scale or 1)).square().mean())
    named = network.named_parameters()
    grads = {f"grad of {name}": p.grad for name, p in named if p.grad is not None}
    return {**network.state_dict(), **grads, "x": x.grad, "y": y.detach()}


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("precision", [FLOAT32, FLOAT64, BF16, FP16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_are_those_of_storing(name, precision, evaluated):
    expected, actual = (
        trained(network_of(name, mode=mode, evaluated=evaluated), precision, steps=2)
        for mode in ("store", "selective")
    )
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_hold_what_they_store_but_maps_that_what_is_kept_makes(name):
    held = []
    for mode in ("store", "selective"):
        network = network_of(name, mode=mode)
        with LiveBytes() as meter:
            y = network(batch(True))
            held.append(meter.live)
            y.sum().backward()
    assert held[0] - held[1] == pytest.approx(BLOCKS[name][1] * MAP_BYTES)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_map_is_made_again_once_in_each_backward_pass(steps):
    """ReLU and the convolution that reads its output share it."""
    network, kept = network_of(USUAL), {"retain_graph": steps > 1}
    with Counting() as forward:
        loss = network(batch()).sum()
    with Counting() as backward:
        for _ in range(steps):
            loss.backward(**kept)
    for seen, times in ((forward, 1), (backward, steps)):
        assert seen.counts["native_batch_norm"] == 2 * times
        assert seen.counts["relu"] == 2 * times


def test_relu_of_what_is_not_kept_is_not_made_again():
    with Counting() as seen:
        trained(network_of("ReLU alone"))
    assert (seen.counts["relu"], seen.counts["relu_"]) == (1, 1)


def test_in_place_what_is_made_again_is_written_once():
    with Counting() as seen:
        trained(network_of("in place"))
    assert (seen.counts["native_batch_norm"], seen.counts["relu_"]) == (2, 2)


BACKWARD = {
    "twice": lambda loss: (loss.backward(retain_graph=True), loss.backward()),
    "under autocast": lambda loss: BF16.autocast()(torch.Tensor.backward)(loss),
    "with the graph of the gradient": lambda loss: loss.backward(create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", BACKWARD)
@pytest.mark.parametrize("precision", [FLOAT32, BF16], ids=str)
def test_any_backward_pass_has_the_bits_of_storing(way, precision):
    options = {"backward": BACKWARD[way], "steps": 2}
    expected, actual = (
        trained(network_of(USUAL, "linear", mode=mode), precision, **options)
        for mode in ("store", "selective")
    )
    assert_same_bits(actual, expected)


def test_gradients_of_one_layer_and_then_of_all_are_those_of_storing():
    grads = []
    for mode in ("store", "selective"):
        network = network_of(USUAL, mode=mode)
        loss = network(batch()).square().sum()
        weights = [*network.parameters()]
        for some in (weights[-1:], weights[:1], weights):
            grads += torch.autograd.grad(loss, some, retain_graph=True)
    half = len(grads) // 2
    assert all(map(torch.equal, grads[:half], grads[half:]))


def test_the_second_derivative_is_that_of_storing():
    x, grads = batch(True), []
    for mode in ("store", "selective"):
        loss = network_of(USUAL, mode=mode)(x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        grads += torch.autograd.grad(slope.square().sum(), x)
    assert torch.equal(*grads)


@pytest.mark.parametrize("ends", ["backward", "forward", "part", "kept"])
def test_nothing_holds_a_map_after_its_graph(ends):
    network = network_of(USUAL, "in place", "linear", "concatenated")
    maps = []
    network[1][1].register_forward_hook(lambda *given: maps.append(given[-1]))
    with LiveBytes() as meter:
        loss = network(batch()).sum()
        maps.clear()
        if ends == "backward":
            loss.backward()
        elif ends == "kept":
            loss.backward(retain_graph=True)
        elif ends == "part":
            torch.autograd.grad(loss, network[-1].second.weight)
        network.zero_grad()
        if ends != "backward":
            # After a backward pass the loss alone keeps no map.
            del loss
        assert meter.live <= 4


def test_what_is_read_last_of_a_kept_graph_is_not_held():
    network = network_of(USUAL)
    with LiveBytes() as meter:
        loss = network(batch()).sum()
        held = meter.live
        loss.backward(retain_graph=True)
        network.zero_grad()
        assert meter.live == held


def test_a_kept_tensor_that_was_written_to_is_refused_as_where_it_is_stored():
    @module_with(first=conv, norm=norm)
    def writing(self, x):
        y = self.first(x)
        z = self.norm(y).relu()
        y += 1
        return z

    for mode in ("store", "selective"):
        network = Row(conv(), writing())
        give_mode(network, Mode(mode), "1")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            network(batch()).sum().backward()


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_and_pickles_have_the_mode_and_the_bits(how):
    network = network_of(USUAL)
    trained(network)
    network.zero_grad()
    other = how(network)
    assert mode_of(other[1]) is Mode.SELECTIVE
    assert_same_bits(trained(other), trained(network))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_noted(grad):
    outputs, peaks = [], []
    for mode in ("store", "selective"):
        network = network_of(USUAL, mode=mode).eval()
        with grad(), LiveBytes() as meter:
            outputs.append(network(batch()))
            peaks.append(meter.peak)
    assert torch.equal(*outputs)
    assert peaks[0] == peaks[1]
    with grad(), selecting():
        assert saved_tensor_hooks() is None


def test_within_a_recomputed_block_nothing_more_is_held():
    peaks, steps = [], []
    for inner in ("store", "selective"):
        network = Row(conv(), Row(*(BLOCKS[USUAL][0]() for _ in range(2))))
        network.load_state_dict(
            {k: torch.full_like(v, 0.1) for k, v in network.state_dict().items()}
        )
        give_mode(network, Mode(inner), "1.*")
        give_mode(network, Mode.RECOMPUTE, "1")
        peaks.append(live_bytes_peak(lambda n=network: steps.append(trained(n))))
    assert_same_bits(*steps)
    assert peaks[1] == peaks[0]


def compressing(network, *, other):
    """Let blocks compress and have another mode in turn."""
    compress_blocks(network, ActivationCompression())
    for i in range(1, len(network)):
        give_mode(network, Mode.COMPRESS if i % 2 else Mode(other), str(i))
    return network


def test_beside_blocks_that_compress_bits_are_those_of_storing_in_less_memory():
    steps, held = [], []
    for mode in ("store", "selective"):
        network = compressing(network_of(*[USUAL] * 4, mode="store"), other=mode)
        with LiveBytes() as meter:
            network(batch())
        with LiveBytes() as meter:
            y = network(batch())
            held.append(meter.live)
        del y
        steps.append(trained(network))
    assert_same_bits(*steps)
    # Two blocks, of two maps each.
    assert held[0] - held[1] >= 3 * MAP_BYTES


def test_hooks_around_a_block_hold_what_it_keeps():
    """They may give back a copy in another layout."""
    layout, steps = torch.channels_last, []
    for mode in ("store", "selective"):
        network = network_of(USUAL, "views", mode=mode).to(memory_format=layout)
        with saved_tensors_hooks(lambda x: x.detach().contiguous(), lambda x: x):
            steps.append(trained(network, FLOAT64))
    torch.testing.assert_close(*steps)
    packed = []

    def pack(x):
        packed.append(x)
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        network_of("in place")(batch())
    stored = [x for x in packed if x.numel() * x.element_size() == MAP_BYTES]
    # Inputs of the convolution before, of the block and of its normalisation, and ReLU's
    # output, which becomes known when it is there.
    assert len(stored) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_within_torch_s_checkpoint_bits_are_those_of_storing(reentrant):
    """Its hooks give each tensor once."""
    steps = []
    for mode in ("store", "selective"):
        network, x = network_of(USUAL, "in place", mode=mode), batch(True)
        y = checkpoint(network, x, use_reentrant=reentrant)
        y.square().mean().backward()
        steps.append({"x": x.grad} | {n: p.grad for n, p in network.named_parameters()})
    assert_same_bits(*steps)


def test_compiled_blocks_keep_what_their_compiler_chooses():
    network = network_of(USUAL)
    expected = trained(copy.deepcopy(network))
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    loss = compiled(batch(True)).float().square().mean()
    loss.backward()
    for name, p in network.named_parameters():
        torch.testing.assert_close(p.grad, expected[f"grad of {name}"])
