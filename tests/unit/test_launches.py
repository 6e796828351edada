"""What training steps ask of a GPU: how it is counted, and that it never grows."""

import pkgutil
from collections import Counter
from importlib import import_module

import pytest
import torch
from torch import nn

from speechbrain_rev import kernels
from speechbrain_rev.devices import Speed
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner.step import cpu_fakes
from speechbrain_rev.reversible.streams import as_format
from tests.benchmarks.launches import (
    PLAIN,
    TINY_ELEMENTS,
    StepCount,
    count_step,
    counted,
)

TINY = {"widths": (8, 16, 16, 16), "blocks": (1, 1, 1, 1), "batch": 2, "frames": 40}

#: Kernels, and bytes moved beside convolutions, of a step at batch 128 and 200 frames.
CEILINGS = {
    # encoder, mode, precision, chunk: (kernels, bytes)
    ("df_revnet377", "reconstruct", "float32", "auto"): (4_754, 454_820_935_290),
    ("df_revnet377", "store", "float32", "auto"): (4_048, 385_440_417_534),
    ("revnet57", "reconstruct", "float32", "auto"): (932, 74_202_498_818),
    ("revnet57", "reconstruct", "float32", None): (717, 63_670_469_570),
    ("revnet57", "reconstruct", "bf16", "auto"): (1_301, 70_132_485_314),
    ("revnet57", "store", "float32", "auto"): (797, 62_764_717_834),
    ("resnet34", "store", "float32", "auto"): (454, 53_654_956_226),
    ("resnet34", "recompute", "float32", "auto"): (558, 70_858_224_322),
    ("df_resnet56", "store", "float32", "auto"): (682, 159_340_479_906),
}


@pytest.mark.parametrize("case", CEILINGS, ids=lambda case: "-".join(map(str, case)))
def test_a_step_asks_no_more_of_a_gpu_than_before(case):
    name, mode, precision, chunk = case
    step = count_step(name, mode=mode, precision=precision, chunk=chunk)
    now, ceiling = (step.launches, step.other_bytes), CEILINGS[case]
    grown = any(new > old for new, old in zip(now, ceiling, strict=True))
    assert not grown, (
        f"{case} launches {now[0]:,} kernels and moves {now[1]:,} bytes beside "
        f"convolutions, but did so with {ceiling}: see count_step(...).operations."
    )
    assert now == ceiling, (
        f"{case} asks less than before. Lower its ceiling in CEILINGS to "
        f"({now[0]:_}, {now[1]:_})."
    )


@pytest.mark.parametrize(("name", "launches"), [("sgd", 5), ("adam", 7), ("adamw", 7)])
@pytest.mark.parametrize("pack", [False, True])
def test_an_optimizer_steps_in_few_kernels_however_many_tensors_there_are(
    name, launches, pack
):
    """Where gradients lie elsewhere than before, their addresses are one copy more."""
    sizes = {"device": "meta"}
    weights = [
        nn.Parameter(torch.empty(shape, **sizes))
        for shape in [(64, 64), (9,), (64, 16, 3, 3), (300,)] * 50
    ]
    optimizer = build_optimizer(
        weights, name=name, bits=8, lr=0.1, weight_decay=0.1, pack_small=pack
    )
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        step = counted(optimizer.step)
    assert step.launches == launches < 10


def on_meta(*shape):
    return torch.empty(shape, device="meta")


def in_place_on_lists(x):
    torch._foreach_add_([x[0]] * 70, [x[1]] * 70)


def forward_and_backward(x):
    weight = nn.Parameter(on_meta(8, 8))
    (x @ weight).backward(torch.empty_like(x))


def convolved(x):
    maps, weight = x.view(1, 4, 4, 2).requires_grad_(), on_meta(4, 4, 1, 1)
    y = torch.conv2d(maps, weight.requires_grad_())
    y.backward(torch.empty_like(y))


def beside_the_host(x):
    # As random states are compared, on the host.
    return torch.zeros(4).equal(torch.ones(4)), x + x


#: Of x, [4, 8] in float32: operations, and kernels and bytes of all of them.
RULES = {
    "views and allocations": (lambda x: torch.empty_like(x.t()[1:].detach()), 0, 0),
    "an operation": (lambda x: x + x, 1, 3 * 128),
    "in place": (lambda x: x.mul_(2), 1, 2 * 128),
    "overwritten": (lambda x: x.copy_(x[:1]), 1, 128 + 32),
    "filled": (lambda x: x.zero_(), 1, 128),
    "given where to": (lambda x: torch.add(x[0], x[0], out=x[0]), 1, 3 * 32),
    "expanded": (lambda x: x[:1].expand(4, 8) + 1, 1, 32 + 128),
    "on lists": (in_place_on_lists, 2, 3 * 70 * 32),
    # Nobody has the weight's gradient, so that autograd copies nothing.
    "with a gradient": (forward_and_backward, 2, (128 + 256 + 128) * 2),
    "a convolution": (convolved, 3, (128 + 64 + 128) + (128 + 128 + 64 + 128 + 64)),
    "on the host": (beside_the_host, 1, 3 * 128),
}


@pytest.mark.parametrize("rule", RULES)
def test_operations_are_counted_by_their_kernels_and_bytes(rule):
    run, launches, moved = RULES[rule]
    step = counted(lambda: run(on_meta(4, 8)))
    assert step.launches == launches
    assert step.convolution_bytes + step.other_bytes == moved
    assert sum(each * count for (_, each), count in step.work.items()) == moved
    assert step.tiny == launches


def test_flops_are_those_of_convolutions_and_products():
    assert counted(lambda: convolved(on_meta(4, 8))).flops == 3 * 2 * 4 * 4 * 8
    assert counted(lambda: on_meta(4, 8) * 2).flops == 0
    large = counted(lambda: on_meta(TINY_ELEMENTS) * 2)
    assert (large.launches, large.tiny) == (1, 0)


@pytest.mark.parametrize("fakes", [False, True])
def test_a_kernel_of_ours_is_one_that_moves_what_it_is_given(fakes):
    format, dtype = as_format("exact"), torch.bfloat16 if fakes else torch.float32
    with cpu_fakes() if fakes else torch.device("meta"):
        value, f = torch.empty(4, 8, dtype=torch.int32), torch.empty(4, 8, dtype=dtype)
        turned, largest = torch.empty(8, 4, dtype=dtype).t(), torch.empty(2)
        step = counted(lambda: format.add(value, [f], largest, out=value))
        apart = counted(lambda: format.add(value, [turned], None))
        assert not value.is_cuda
    assert step.operations == {"triton::_add_kernel": 1}
    assert step.other_bytes == 2 * 128 + f.nbytes + 8
    # What lies otherwise is copied first.
    assert set(apart.operations) == {"copy_", "triton::_add_kernel"}


def test_kernels_are_launched_where_the_counter_looks():
    for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        module = import_module(found.name)
        assert callable(module._compiled), found.name
        assert callable(module.usable), found.name


@pytest.mark.parametrize("name", ["resnet34", "revnet57", "df_revnet66"])
def test_plain_layers_compute_as_much_as_storing_and_less_than_running_twice(name):
    again, stored, plain = (
        count_step(name, mode=mode, chunk=None, **TINY)
        for mode in ("recompute", "store", PLAIN)
    )
    assert again.flops > stored.flops == plain.flops > 0
    assert again.convolutions > stored.convolutions == plain.convolutions


def test_the_slower_of_host_and_device_decides_a_modelled_time():
    # An operation of FLOPs, and two of bytes.
    work = Counter({(1000, 10): 1, (0, 100): 2})
    step = StepCount(Counter(mm=1, add=2), work=work)
    device = Speed("a GPU", 100.0, 10.0, 1e9)
    assert step.modelled_seconds(device) == 10 + 2 * 10
    host = Speed("a GPU", 1e9, 1e9, 0.1)
    assert step.modelled_seconds(host) == pytest.approx(30)
