"""The kernel of a step with 8-bit states: interpreted on the CPU, and compiled."""

import math
from unittest import mock

import pytest
import torch

from speechbrain_rev.kernels import optimizer as kernels
from speechbrain_rev.optim import build_optimizer, optimizer, reference
from speechbrain_rev.optimizers import OPTIMIZERS
from tests.unit.kernels.process import compiled
from tests.unit.optim.steps import CUDA, assert_identical

#: A short last block, whole ones, one too small, one value, and parts of shared blocks.
SHAPES = [(70, 67), (64, 16, 2, 2), (4096,), (9,), (1,), (33, 1, 7), (300,)]
OPTIONS = {
    **{name: {"name": name} for name in OPTIMIZERS},
    "nesterov": {"name": "sgd", "nesterov": True, "weight_decay": 0.1},
    "decoupled": {"name": "sgd", "decoupled_decay": True, "weight_decay": 0.1},
    "adam, decay": {"name": "adam", "weight_decay": 0.1},
    "adamw, decay": {"name": "adamw", "weight_decay": 0.1, "eps": 1e-3},
    "lion, decay": {"name": "lion", "weight_decay": 0.1, "betas": (0.8, 0.95)},
}
FORMS = {"256": {}, "2048, packed": {"block": 2048, "pack_small": True}}


def steps_by(module, options, device="cpu", absent=(), bad=None):
    """Take three steps of gradients of all magnitudes by one way of computing."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draw) for shape in SHAPES]
    weights[1] = weights[1].to(memory_format=torch.channels_last)
    weights[2] = torch.stack([weights[2], weights[2]], dim=1)[:, 0]
    # A view among other values, which nothing may write to.
    around = [torch.full((w.numel() + 64,), 7.0, device=device) for w in weights]
    params = []
    for weight, slack in zip(weights, around, strict=True):
        if weight.is_contiguous():
            own = slack[32:-32].view(weight.shape)
        else:
            own = torch.empty_strided(weight.shape, weight.stride(), device=device)
        params.append(torch.nn.Parameter(own.copy_(weight)))
    built = build_optimizer(params, bits=8, lr=0.01, **options)
    with mock.patch.object(optimizer, "_backend", return_value=module):
        for number in range(3):
            for i, param in enumerate(params):
                scale = 10 ** (-6 * torch.rand(param.shape, generator=draw))
                gradient = scale * torch.randn(param.shape, generator=draw)
                gradient.view(-1)[::17] = 0
                if number == 1 and i in absent:
                    param.grad = None
                else:
                    param.grad = gradient.to(device)
            if number == 2 and bad is not None:
                index, value = bad
                params[index].grad.view(-1)[-1] = value
            built.step()
    edges = [torch.cat([s[:32], s[-32:]]) for s in around]
    assert all((edge == 7).all() for edge in edges)
    left = {p: built.state[p] for p in params}
    return [
        [p.detach().cpu().contiguous() for p in params],
        [
            {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in s.items()}
            for s in left.values()
        ],
        built.skipped_steps,
    ]


def by_kernels(*given):
    return steps_by(kernels, *given)


def assert_kernels_are_the_reference(run, options, **case):
    expected = steps_by(reference, options, **case)
    device = {"device": "cuda"} if run is None else {}
    arguments = (
        options,
        *{"device": "cpu", "absent": (), "bad": None, **case, **device}.values(),
    )
    result = by_kernels(*arguments) if run is None else run(by_kernels, *arguments)[0]
    assert_identical(result, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_steps_have_the_bits_of_the_reference(interpreter, kind, form):
    assert_kernels_are_the_reference(interpreter, OPTIONS[kind] | FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case",
    # The square of 2e19 is not finite.
    [{"absent": (0, 4, 5)}, {"bad": (0, math.nan)}, {"bad": (4, 2e19)}],
)
def test_what_has_no_gradient_and_what_is_not_finite_is_left_alone(
    interpreter, case, form
):
    assert_kernels_are_the_reference(
        interpreter, OPTIONS["adamw"] | FORMS[form], **case
    )


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("case", [{}, {"absent": (0, 4, 5)}, {"bad": (4, 2e19)}])
def test_on_a_gpu_too(device, kind, form, case):
    assert_kernels_are_the_reference(None, OPTIONS[kind] | FORMS[form], **case)


def few_steps():
    """Take steps of every kind."""
    for options in OPTIONS.values():
        for form in FORMS.values():
            steps_by(kernels, options | form)


@pytest.mark.slow(drawn=False)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus(compiler, capability):
    codes, _ = compiler(compiled, kernels.__name__, few_steps, capability)
    assert len(codes) > len(OPTIONS)
    for code in codes:
        assert f".target sm_{capability}" in code
        # Products and sums are rounded one by one, quotients and roots to the nearest.
        assert "fma.rn.f32" not in code.replace("div.full", "")
        assert "div.full.f32" not in code
        assert "sqrt.approx" not in code


def test_weights_of_too_many_axes_are_refused():
    weight = torch.zeros(3, 3, 3, 3, 3, 3).permute(5, 3, 1, 4, 2, 0)
    given = tuple(weight.shape), weight.stride(), weight.stride()
    with pytest.raises(ValueError, match="Make the weight contiguous"):
        kernels._layout(*given)
