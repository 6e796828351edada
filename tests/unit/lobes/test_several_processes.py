"""Encoders on 2 and 4 processes, wrapped as the recipe's Brain wraps them.

What one process finds on the joined batch is the measure. float64: another order of sums
moves no value to another step of the exact streams, and shows below 1e-10 only.
"""

import os

import pytest
import speechbrain as sb
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.reversible.processes import run_in_processes

# float64 rounding through a few blocks, with a wide margin: wrong statistics, or a rank's
# share that is missing, show at 1e-3 or more.
EXACT = 1e-10
UTTERANCES = 8
PLANS = ["store", "reconstruct", "mixed"]

pytestmark = pytest.mark.slow


def encoder_of(plan, *, frozen=True, **settings):
    """A small encoder; frozen, the running statistics normalise and stay as they are."""
    torch.manual_seed(0)
    sizes = {"widths": (8, 8, 16, 16), "blocks": (2, 1, 1, 1), "n_mels": 24}
    encoder = build_encoder("df_revnet89", embedding_dim=64, **sizes, **settings)
    if plan == "mixed":
        modes = [Mode.STORE, Mode.RECOMPUTE, Mode.RECONSTRUCT]
        names = sorted(encoder.reversible_blocks())
        encoder.set_mode({name: modes[i % 3] for i, name in enumerate(names)})
        assert set(modes) <= set(encoder.block_modes().values())
    else:
        encoder.set_mode({name: Mode(plan) for name in encoder.reversible_blocks()})
    encoder.double().train()
    for module in encoder.modules():
        if frozen and isinstance(module, BatchNorm):
            module.eval()
            module.running_mean.uniform_(-0.1, 0.1)
    return encoder


def loss_of(encoder, first, last, step=0):
    """The mean over some utterances of a batch; each pulls in its own direction."""
    torch.manual_seed(1 + step)
    feats = torch.randn(UTTERANCES, 43, 24, dtype=torch.float64)
    directions = torch.randn(UTTERANCES, 64, dtype=torch.float64)
    embeddings = encoder(feats[first:last]).squeeze(1)
    return (embeddings * directions[first:last]).sum(1).mean()


def gradients(encoder):
    module = getattr(encoder, "module", encoder)
    return {n: p.grad.clone() for n, p in module.named_parameters()}


class Recorded(TorchDispatchMode):
    """What a process sends and receives: operations and sizes, in their order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            tensors = (a for a in tree_leaves(args) if isinstance(a, torch.Tensor))
            name = function.name().removeprefix("c10d::")
            self.calls.append((name, [list(tensor.shape) for tensor in tensors]))
        return function(*args, **(kwargs or {}))


class OneProcess:
    """A process among others that run encoders and leave what they found in a file."""

    def __init__(self, rank, processes):
        share = UTTERANCES // processes
        self.utterances = rank * share, (rank + 1) * share

    def brain(self, encoder):
        """Wrap an encoder as a training does."""
        options = {"device": "cpu", "distributed_backend": "gloo"}
        brain = sb.Brain(modules={"encoder": encoder}, run_opts=options)
        brain._wrap_distributed()
        return brain

    def one_step(self, **settings):
        """Gradients, buffers and communication of a step."""
        encoder = self.brain(encoder_of(**settings)).modules.encoder
        with Recorded() as forward:
            loss = loss_of(encoder, *self.utterances)
        with Recorded() as backward:
            loss.backward()
        return {
            "gradients": gradients(encoder),
            "buffers": dict(encoder.module.named_buffers()),
            "forward": forward.calls,
            "backward": backward.calls,
        }

    def accumulated(self):
        """Two batches whose gradients are added up."""
        brain = self.brain(encoder_of("mixed"))
        encoder = brain.modules.encoder
        with brain.no_sync():
            loss = loss_of(encoder, *self.utterances, step=0)
            with Recorded() as first:
                loss.backward()
        with Recorded() as second:
            loss_of(encoder, *self.utterances, step=1).backward()
        return {
            "gradients": gradients(encoder),
            "first": first.calls,
            "second": second.calls,
        }

    def trained(self, name):
        """Steps of an 8-bit optimizer, with batch statistics."""
        encoder = encoder_of("mixed", frozen=False).float()
        brain = self.brain(encoder)
        optimizer = build_optimizer(
            brain.modules.parameters(), name=name, lr=0.01, bits=8
        )
        for step in range(3):
            first, last = self.utterances
            torch.manual_seed(step)
            feats = torch.randn(UTTERANCES, 43, 24)[first:last]
            brain.modules.encoder(feats).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = optimizer.state_dict()["state"]
        return {"weights": dict(encoder.named_parameters()), "states": states}


def run(rank, folder, processes):
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    process = OneProcess(rank, processes)
    found = {plan: process.one_step(plan=plan) for plan in PLANS}
    for plan in PLANS:
        # Unchunked: a chunk's statistics are gathered on their own.
        settings = {"frozen": False, "sync_batchnorm": True, "chunk": None}
        found["sync", plan] = process.one_step(plan=plan, **settings)
    found["accumulated"] = process.accumulated()
    found |= {("8 bit", name): process.trained(name) for name in ("sgd", "adamw")}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def ranks(request, tmp_path_factory):
    """What each of the processes found."""
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(run, (str(folder), request.param), request.param)
    paths = [folder / f"{rank}.pt" for rank in range(request.param)]
    return [torch.load(path, weights_only=True) for path in paths]


def joined(*steps, **settings):
    """Gradients and buffers of one process with the batches of all."""
    encoder = encoder_of(**settings)
    for step in steps:
        loss_of(encoder, 0, UTTERANCES, step).backward()
    return gradients(encoder), dict(encoder.named_buffers())


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).norm()
        assert difference <= EXACT * value.double().norm(), name


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_one_process_with_the_joined_batch(ranks, plan):
    expected, _ = joined(0, plan="store")
    assert all(grad.norm() > 0 for grad in expected.values())
    for found in ranks:
        assert_close(found[plan]["gradients"], expected)


def test_a_share_of_the_batch_alone_has_other_gradients(ranks):
    encoder = encoder_of("store")
    loss_of(encoder, 0, UTTERANCES // len(ranks)).backward()
    found = ranks[0]["store"]["gradients"]
    with pytest.raises(AssertionError):
        assert_close(found, gradients(encoder))


@pytest.mark.parametrize("plan", ["reconstruct", "mixed"])
def test_modes_give_each_process_the_same_bits(ranks, plan):
    for found in ranks:
        stored = found["store"]["gradients"]
        for name, grad in found[plan]["gradients"].items():
            assert torch.equal(grad, stored[name]), name


@pytest.mark.parametrize("key", [*PLANS, *(("sync", plan) for plan in PLANS)], ids=str)
def test_processes_communicate_alike_and_modes_too(ranks, key):
    stored = ("sync", "store") if "sync" in key else "store"
    for way in ("forward", "backward"):
        expected = ranks[0][stored][way]
        assert expected
        assert all(found[key][way] == expected for found in ranks)


def test_without_sync_gradients_are_added_up_and_none_is_sent(ranks):
    expected, _ = joined(0, 1, plan="store")
    for found in ranks:
        assert found["accumulated"]["first"] == []
        assert found["accumulated"]["second"] == ranks[0]["accumulated"]["second"]
        assert [name for name, _ in found["accumulated"]["second"]].count("allreduce_")
        assert_close(found["accumulated"]["gradients"], expected)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_8_bit_optimizers_leave_the_same_bits_on_all_processes(ranks, name):
    first = ranks[0]["8 bit", name]
    start = dict(encoder_of("mixed", frozen=False).float().named_parameters())
    for found in ranks:
        for key, value in found["8 bit", name]["weights"].items():
            assert torch.equal(value, first["weights"][key]), key
            assert not torch.equal(value, start[key]), key
        assert_same_states(found["8 bit", name]["states"], first["states"])


def assert_same_states(found, expected):
    quantized = 0
    for index, state in expected.items():
        pairs = [(state, found[index])]
        inner = "__bnb_optimizer_quant_state__"
        if inner in state:
            pairs.append((state[inner], found[index][inner]))
        for mine, other in pairs:
            for name, value in mine.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, other[name]), name
                    quantized += value.dtype == torch.uint8 and name.startswith("state")
    assert quantized


@pytest.mark.parametrize("plan", PLANS)
def test_shared_statistics_are_those_of_the_joined_batch(ranks, plan):
    settings = {"frozen": False, "chunk": None}
    expected, buffers = joined(0, plan="store", **settings)
    for found in ranks:
        assert_close(found["sync", plan]["gradients"], expected)
        assert_close(found["sync", plan]["buffers"], buffers)


@pytest.mark.parametrize("plan", PLANS)
def test_shared_statistics_are_gathered_once_and_not_for_the_second_run(ranks, plan):
    norms = [m for m in encoder_of(plan).modules() if isinstance(m, BatchNorm)]
    plain = [name for name, _ in ranks[0][plan]["backward"]]
    for found in ranks:
        forward = [name for name, _ in found["sync", plan]["forward"]]
        backward = [name for name, _ in found["sync", plan]["backward"]]
        assert forward.count("allgather_") == len(norms)
        assert "allreduce_" not in forward
        assert "allgather_" not in backward
        # Beside the gradients of weights, one sum for each normalisation's input.
        assert backward.count("allreduce_") == plain.count("allreduce_") + len(norms)


def test_statistics_are_those_of_a_process_by_default():
    encoder = encoder_of("reconstruct", frozen=False)
    assert not any(m.sync for m in encoder.modules() if isinstance(m, BatchNorm))
