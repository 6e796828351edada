"""Encoders on 2 and 4 processes, wrapped as the recipe's Brain wraps them.

What one process computes on the joined batch is the measure. float64: another order of
sums moves no value to another step of the exact streams, and shows below 1e-10 only.
"""

import os

import pytest
import speechbrain as sb
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speechbrain_rev.reversible import Mode
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.lobes.encoders import assert_same_bits, grads_of, tiny
from tests.unit.reversible.processes import run_in_processes

# float64 rounding through a few blocks, with a wide margin: wrong statistics, or a rank's
# share that is missing, show at 1e-3 or more.
EXACT = 1e-10
UTTERANCES = 8
PLANS = ["store", "selective", "reconstruct", "mixed"]
#: Unchunked: a chunk's statistics are gathered on their own.
SYNC = {"frozen": False, "chunk": None}

pytestmark = pytest.mark.slow


def encoder_of(plan, *, frozen=True, **settings):
    """A small encoder; frozen, the running statistics normalise and stay as they are."""
    encoder = tiny("df_revnet89", n_mels=24, embedding_dim=64, **settings)
    names = sorted(encoder.reversible_blocks())
    modes = (
        [Mode.STORE, Mode.RECOMPUTE, Mode.RECONSTRUCT] if plan == "mixed" else [plan]
    )
    encoder.set_mode({name: modes[i % len(modes)] for i, name in enumerate(names)})
    encoder.double().train()
    for module in encoder.modules():
        if frozen and isinstance(module, BatchNorm):
            module.eval()
            module.running_mean.uniform_(-0.1, 0.1)
    return encoder


def loss_of(encoder, some=slice(None)):
    """The mean over some utterances of a batch; each pulls in its own direction."""
    torch.manual_seed(1)
    x = torch.randn(UTTERANCES, 43, 24, dtype=torch.float64)
    directions = torch.randn(UTTERANCES, 64, dtype=torch.float64)
    return (encoder(x[some]).squeeze(1) * directions[some]).sum(1).mean()


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


def one_step(some, **settings):
    """Gradients, buffers and communication of a step."""
    options = {"device": "cpu", "distributed_backend": "gloo"}
    brain = sb.Brain(modules={"encoder": encoder_of(**settings)}, run_opts=options)
    brain._wrap_distributed()
    encoder = brain.modules.encoder
    with Recorded() as forward:
        loss = loss_of(encoder, some)
    with Recorded() as backward:
        loss.backward()
    return {
        "gradients": grads_of(encoder.module),
        "buffers": dict(encoder.module.named_buffers()),
        "forward": forward.calls,
        "backward": backward.calls,
    }


def run(rank, folder, processes):
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    share = UTTERANCES // processes
    some = slice(rank * share, (rank + 1) * share)
    steps = {plan: one_step(some, plan=plan) for plan in PLANS}
    for plan in PLANS:
        steps["sync", plan] = one_step(some, plan=plan, sync_batchnorm=True, **SYNC)
    torch.save(steps, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def ranks(request, tmp_path_factory):
    """The steps of each process."""
    folder = tmp_path_factory.mktemp("processes")
    run_in_processes(run, (str(folder), request.param), request.param)
    paths = [folder / f"{rank}.pt" for rank in range(request.param)]
    return [torch.load(path, weights_only=True) for path in paths]


def joined(**settings):
    """Gradients and buffers of one process with the batches of all."""
    encoder = encoder_of("store", **settings)
    loss_of(encoder).backward()
    return grads_of(encoder), dict(encoder.named_buffers())


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = (actual[name].double() - value.double()).norm()
        assert difference <= EXACT * value.double().norm(), name


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_one_process_with_the_joined_batch(ranks, plan):
    expected, _ = joined()
    assert all(grad.norm() > 0 for grad in expected.values())
    for steps in ranks:
        assert_close(steps[plan]["gradients"], expected)
        assert_same_bits(steps[plan]["gradients"], steps["store"]["gradients"])


@pytest.mark.parametrize("key", [*PLANS, *(("sync", plan) for plan in PLANS)], ids=str)
def test_processes_communicate_alike_and_modes_too(ranks, key):
    stored = ("sync", "store") if "sync" in key else "store"
    for way in ("forward", "backward"):
        expected = ranks[0][stored][way]
        assert expected
        assert all(steps[key][way] == expected for steps in ranks)


@pytest.mark.parametrize("plan", PLANS)
def test_shared_statistics_are_those_of_the_joined_batch_and_gathered_once(ranks, plan):
    expected, buffers = joined(**SYNC)
    encoder = encoder_of(plan, frozen=False)
    norms = [m for m in encoder.modules() if isinstance(m, BatchNorm)]
    assert not any(norm.sync for norm in norms)
    plain = [name for name, _ in ranks[0][plan]["backward"]]
    for steps in ranks:
        step = steps["sync", plan]
        assert_close(step["gradients"], expected)
        assert_close(step["buffers"], buffers)
        forward, backward = ([n for n, _ in step[w]] for w in ("forward", "backward"))
        assert forward.count("allgather_") == len(norms)
        assert "allreduce_" not in forward
        # Not for the second run.
        assert "allgather_" not in backward
        # Beside the gradients of weights, one sum for each normalisation's input.
        assert backward.count("allreduce_") == plain.count("allreduce_") + len(norms)
