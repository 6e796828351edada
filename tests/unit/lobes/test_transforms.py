"""What transforms an encoder: second derivatives, torch.func, tracing and scripting."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.reversible import AdditiveCoupling, Recompute, ReversibleChain
from speechbrain_rev.reversible.norm import BatchNorm

TINY = {
    "n_mels": 24,
    "embedding_dim": 8,
    "widths": (8, 8, 16, 16),
    "blocks": (1, 1, 1, 1),
}
FAMILIES = [
    "resnet34",
    "revnet46",
    "revnet57",
    "revnet140",
    "df_revnet66",
    "df_revnet89",
]
LENGTHS = [None, torch.tensor([1.0, 0.6])]


def encoder_of(name, **settings):
    torch.manual_seed(0)
    return build_encoder(name, mode="store", **{**TINY, **settings})


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole", "lengths"])
@pytest.mark.parametrize("frames", [48, 44])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_second_derivative_is_that_of_finite_differences(name, frames, lengths):
    encoder = encoder_of(
        name, **({"streams": "float"} if "rev" in name else {})
    ).double()
    x = torch.randn(2, frames, 24, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)

    def slope(x):
        each = copy.deepcopy(encoder)
        (g,) = torch.autograd.grad(
            each(x, lengths).square().sum(), x, create_graph=True
        )
        return g

    (found,) = torch.autograd.grad((slope(x) * direction).sum(), x)
    step = 1e-7  # ReLU has kinks, which a longer one straddles
    ahead, behind = (x.detach() + s * step * direction for s in (1, -1))
    expected = (slope(ahead.requires_grad_()) - slope(behind.requires_grad_())).detach()
    expected = expected / (2 * step)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole", "lengths"])
@pytest.mark.parametrize("frames", [48, 44])
@pytest.mark.parametrize("name", FAMILIES)
def test_transforms_of_torch_func_work_in_evaluation(name, frames, lengths):
    encoder = encoder_of(name).eval()
    x = torch.randn(2, frames, 24)
    parameters = {n: p.detach() for n, p in encoder.named_parameters()}
    found = grad(
        lambda p: functional_call(encoder, p, (x, lengths)).square().sum()
    )(parameters)  # fmt: skip
    encoder(x, lengths).square().sum().backward()
    for key, p in encoder.named_parameters():
        torch.testing.assert_close(found[key], p.grad)


@pytest.mark.parametrize("name", ["resnet34", "revnet57"])
@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_transforms_of_torch_func_are_refused_in_training(name, mode):
    encoder = encoder_of(name)
    encoder.set_mode(mode)
    with pytest.raises(RuntimeError, match=r"evaluation only: call eval\(\)"):
        grad(lambda x: encoder(x).sum())(torch.randn(2, 44, 24))


@pytest.mark.parametrize(
    "module", [Recompute(torch.nn.Tanh()), BatchNorm(3), torch.nn.Tanh()]
)
def test_each_part_refuses_transforms_by_itself(module):
    x = torch.randn(2, 3, 4, 5)
    if isinstance(module, torch.nn.Tanh):
        chain = ReversibleChain([AdditiveCoupling(module, module)])
        run = lambda x: sum(y.sum() for y in chain(x, x))  # noqa: E731
    else:
        run = lambda x: module(x).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="evaluation only"):
        grad(run)(x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole", "lengths"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, "resnet101", "df_resnet56", "revnet155"])
def test_a_trace_is_right_at_any_length_or_refused(name, training, lengths):
    encoder = encoder_of(name).train(training)
    given = [torch.randn(2, 120, 24)] + ([] if lengths is None else [lengths])
    two = encoder.architecture.type == "II"
    if training or two or lengths is not None:
        with pytest.raises(RuntimeError, match=r"fix the number of frames.*ONNX"):
            torch.jit.trace(encoder, given)
        return
    traced = torch.jit.trace(encoder, given)
    for batch, frames in ((2, 77), (3, 200), (1, 9)):
        x = torch.randn(batch, frames, 24)
        torch.testing.assert_close(traced(x), encoder(x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: encoder_of("resnet34"), "speechbrain-rev export writes ONNX"),
        (lambda: encoder_of("revnet57"), "speechbrain-rev export writes ONNX"),
        (lambda: torch.nn.Sequential(encoder_of("revnet57")), "export writes ONNX"),
        (lambda: encoder_of("revnet57").stages[0].chain, "Use torch.export"),
        (lambda: Recompute(torch.nn.Tanh()), "Script the module within it"),
    ],
)
def test_scripting_is_refused(module, message):
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(module())


@pytest.mark.parametrize("mode", ["store", "reconstruct", "recompute"])
def test_forward_mode_derivatives_are_refused_in_training(mode):
    block = Recompute(torch.nn.Tanh()).train()
    encoder = encoder_of("revnet46")
    encoder.set_mode(mode)
    x = torch.randn(2, 48, 24, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for module in (encoder, block):
            with pytest.raises(
                RuntimeError, match="forward_ad work in evaluation only"
            ):
                module(dual)
