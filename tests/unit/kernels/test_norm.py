"""The kernels of batch normalisation: interpreted on the CPU, compiled for CUDA devices."""

import contextlib
import gc
from importlib import import_module
from importlib.metadata import version
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from speechbrain_rev.compression import ActivationCompression
from speechbrain_rev.compression.bounds import DeviationBound
from speechbrain_rev.kernels import norm as kernels
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.reversible import norm as reference
from tests.unit.kernels.process import compiled
from tests.unit.kernels.same_norm import FLOATS, LAYOUTS, SameNorm, given
from tests.unit.reversible import chains


@contextlib.contextmanager
def rounding_as_a_device():
    """Let Triton's interpreter round once in tl.fma, and not cut bits off in bf16."""
    interpreter = import_module("triton.runtime.interpreter")
    tl = import_module("triton.language")
    convert = interpreter._convert_float

    def fma(self, x, y, z):
        wide = (each.data.astype(np.float64) for each in (x, y))
        total = np.multiply(*wide) + z.data
        return interpreter.TensorHandle(total.astype(np.float32), z.dtype.scalar)

    def converted(data, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            half = torch.from_numpy(np.array(data, np.float32)).bfloat16()
            return half.view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.view(np.uint16).astype(np.uint32) << 16
        return convert(data, source, target, mode)

    builder = interpreter.InterpreterBuilder
    # Of what is not a number numpy warns, as no device does.
    with (
        mock.patch.object(builder, "create_fma", fma),
        mock.patch.object(interpreter, "_convert_float", converted),
        np.errstate(all="ignore"),
    ):
        yield


def in_small_tiles(function, *arguments):
    sizes = {"TILE": 64, "LANES": 8, "SAMPLES": 2, "TILES": 2, "SPLITS": 3}
    with rounding_as_a_device(), mock.patch.multiple(kernels, **sizes):
        return function(*arguments)


class TestInterpreted(SameNorm):
    @pytest.fixture(autouse=True)
    def _process(self, interpreter):
        self.run = lambda *call: interpreter(in_small_tiles, *call)[0]


@contextlib.contextmanager
def fused():
    """Take the kernels on the CPU; count their launches."""
    launches, launch = [], kernels._launch

    def counted(kernel, *arguments, **constants):
        launches.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    with (
        rounding_as_a_device(),
        mock.patch.object(kernels, "_launch", counted),
        mock.patch.object(
            reference, "_has_kernels", lambda x: x.dtype in kernels.DTYPES
        ),
    ):
        yield launches


def train(mode, precision, chunk):
    with fused() as launches:
        return launches, plain_train(mode, precision, chunk)


def plain_train(mode, precision, chunk):
    chain = chains.chain_of(
        "bottleneck", 2, mode=mode, dtype=torch.float32, chunk=chunk
    )
    tensors = chains.train_once(chain, precision, inputs=chains.streams)
    chain.check_streams()
    return {name: x.detach() for name, x in tensors.items()}


@pytest.mark.parametrize(
    ("precision", "chunk"),
    [(chains.FLOAT32, None), (chains.FLOAT32, 3), (chains.BF16, 3)],
    ids=str,
)
def test_training_gives_the_same_bits_in_all_modes(interpreter, precision, chunk):
    results = [interpreter(train, mode, precision, chunk)[0] for mode in chains.MODES]
    (launches, expected), *others = results
    for more, tensors in others:
        assert len(more) > len(launches) > 0
        chains.assert_same_bits(tensors, expected)
    if precision is chains.FLOAT32:
        plain = plain_train("store", precision, chunk)
        assert chains.distance(expected, plain) < chains.FLOAT32_ROUNDING


def train_encoder(mode):
    torch.manual_seed(0)
    encoder = build_encoder(
        "revnet57", widths=(16, 16, 16, 16), blocks=(1, 1, 1, 1), n_mels=16, chunk=40_000,
        mode=mode, memory_format="channels_last",
    )  # fmt: skip
    feats = torch.randn(2, 16, 16)
    with fused() as launches:
        encoder(feats).square().sum().backward()
    encoder.check_streams()
    return launches, {name: p.grad for name, p in encoder.named_parameters()}


def test_pieces_of_one_channel_whose_strides_tell_no_layout_are_one_kernels(
    interpreter,
):
    (stored, expected), (launches, grads) = (
        interpreter(train_encoder, mode)[0] for mode in ("store", "reconstruct")
    )
    assert launches.count("_sums_kernel") == stored.count("_sums_kernel") > 0
    chains.assert_same_bits(grads, expected)


def step(x, grad, relu=True):
    """Gradients of a normalisation, of which the second derivative too."""
    torch.manual_seed(0)
    norm = reference.BatchNorm(x.shape[1], relu=relu)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    sources = [x.requires_grad_(), norm.weight, norm.bias]
    y = norm(x)
    first = torch.autograd.grad(y, sources, grad, retain_graph=True)
    again = torch.autograd.grad(y, sources, grad, create_graph=True)
    second = torch.autograd.grad([g.square().sum() for g in again], sources[:2])
    return [y, *first], [*again], [*second]


def fused_step(*settings):
    with fused() as launches:
        return launches, *step(*settings)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_normalisation_is_three_launches_and_can_be_differentiated_twice(
    interpreter, layout, relu
):
    x, grad, _ = given((4, 6, 5, 7), layout=layout)
    launches, *found = interpreter(fused_step, x, grad, relu)[0]
    assert launches == ["_normalise_kernel", "_sums_kernel", "_gradient_kernel"]
    # The default tolerance: float32's.
    torch.testing.assert_close(found, [*step(x, grad, relu)])


def not_fused():
    """Inputs and layers that no kernel takes, and whether one was launched."""
    x = torch.randn(4, 6, 5, 8)
    double, half_weights = reference.BatchNorm(6).double(), reference.BatchNorm(6)
    half_weights.weight.data = half_weights.weight.data.bfloat16()
    norm = reference.BatchNorm(6, relu=True)
    with fused() as launches:
        double(x.double())
        half_weights(x)
        norm(x, torch.ones(4, 1, 1, 8))
        norm(x[..., ::2])
        norm(x[:1].expand(4, -1, -1, -1))
        norm(x.transpose(2, 3))
        norm.eval()(x)
    return launches


def test_what_kernels_do_not_take_is_computed_by_torch(interpreter):
    assert interpreter(not_fused)[0] == []


def outputs_held():
    """Whether ReLU's output is held by what made it, without compression and with it."""
    held, norm = [], reference.BatchNorm(3, relu=True)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for wanted in (False, True):
        with fused(), ActivationCompression().during(norm, wanted=wanted):
            y = norm(x)
        storage, loss = StorageWeakRef(y.untyped_storage()), y.sum()
        del y
        gc.collect()  # Triton's interpreter holds itself in cycles.
        held.append(not storage.expired())
        loss.backward()
    return held


def test_no_more_than_the_input_is_saved(interpreter):
    assert interpreter(outputs_held)[0] == [False, True]


def compressed_step():
    rule = DeviationBound(0.9)
    norm = reference.BatchNorm(3, relu=True)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    compression = ActivationCompression(normalisations=rule)
    with fused() as launches:
        with compression.during(norm):
            y = norm(x)
        y.sum().backward()
    assert "_sums_kernel" in launches
    (record,) = compression.records.values()
    return y, norm.bias.grad, record.ratio


def test_zeros_of_relu_are_those_of_the_output_though_inputs_are_rounded(interpreter):
    (y, grad, ratio), _ = interpreter(compressed_step)
    assert ratio > 4
    assert torch.equal(grad, (y > 0).sum((0, 2, 3)).float())


def launch():
    """Launch the kernels for all kinds of arguments."""
    for dtype in FLOATS:
        for layout in LAYOUTS:
            for shape in ((4, 33, 5, 9), (64, 64, 8, 16), (2**21, 2, 32, 33)):
                x = torch.empty(shape, dtype=dtype, device="meta")
                x = x.contiguous(memory_format=layout)
                vectors = [torch.ones(shape[1], device="meta")] * 4
                for relu, y in ((False, None), (True, None), (True, x)):
                    kernels.normalise(x, x, *vectors, relu=relu)
                    kernels.normalise_backward(x, x, y, *vectors, relu=relu)


@pytest.mark.slow(drawn=False)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_device(compiler, capability):
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("older releases of Triton take a kernel's arguments otherwise")
    code, _ = compiler(compiled, kernels.__name__, launch, capability)
    assert code
    for ptx in code:
        assert "fma.rn.f32" in ptx
        assert ".ftz" not in ptx
        # Products are rounded, as the reference's are.
        assert "mul.f32" not in ptx
        # Sums are the same in each run.
        assert "atom." not in ptx
        assert "red.global" not in ptx
