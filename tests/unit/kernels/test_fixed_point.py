"""The kernels of the exact streams: interpreted on the CPU, compiled for CUDA devices."""

from importlib.metadata import version

import pytest
import torch

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import fixed_point as reference
from speechbrain_rev.reversible import streams
from tests.unit.kernels.process import compiled
from tests.unit.kernels.same_as_reference import FLOATS, STEPS, SameAsReference
from tests.unit.reversible import chains


class TestInterpreted(SameAsReference):
    @pytest.fixture(autouse=True)
    def _process(self, interpreter):
        self.run = interpreter


def train(mode, precision, arithmetic):
    """Take a step of a chain on the CPU; count how many kernels it launches."""
    launches = []
    launch, plain = kernels._launch, streams.reference
    kernels._launch = lambda *a, **s: (launches.append(1), launch(*a, **s))[1]
    streams.reference = arithmetic or kernels
    try:
        chain = chains.chain_of("basic", 3, mode=mode, dtype=torch.float32)
        tensors = chains.train_once(chain, precision, inputs=chains.streams)
        chain.check_streams()
    finally:
        kernels._launch, streams.reference = launch, plain
    tensors = {name: x.detach() for name, x in tensors.items()}
    return tensors | {"largest": torch.tensor(chain.largest_stream())}, len(launches)


@pytest.mark.parametrize("precision", [chains.FLOAT32, chains.BF16], ids=str)
@pytest.mark.parametrize("mode", ["store", "reconstruct"])
def test_training_gives_the_same_bits(interpreter, mode, precision):
    expected, none = train(mode, precision, reference)
    (tensors, launches), _ = interpreter(train, mode, precision, None)
    assert none == 0
    # Each stream is made once and each residual is added, and subtracted again.
    assert launches == 2 + 3 * 2 * (1 if mode == "store" else 2)
    chains.assert_same_bits(tensors, expected)


def launch():
    """Launch the kernel for all kinds of arguments."""
    sizes = {torch.float32: (5, 1, 2**31 + 5)}
    for dtype in FLOATS:
        for size in sizes.get(dtype, (5,)):
            f = torch.empty(size, dtype=dtype, device="meta")
            largest = torch.zeros(2)
            value = kernels.encode(f, STEPS, largest)
            if size == 5:
                kernels.encode(f, STEPS, None)
                kernels.subtract(value, f, STEPS, None)
            kernels.add(value, [f], STEPS, largest, None)
        several = [torch.empty(5, dtype=dtype, device="meta")] * kernels.AT_ONCE
        value = kernels.encode(several[0], STEPS, None)
        floats = torch.empty(5, device="meta")
        kernels.add(value, several, STEPS, largest, value, floats)
        halves = torch.empty(4, 6, 5, 7, dtype=dtype, device="meta").chunk(2, dim=1)
        kernels.encode(halves[1], STEPS, largest)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_device(compiler, capability):
    """For other numbers of elements and other alignments too than tests have."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("older releases of Triton take a kernel's arguments otherwise")
    code, _ = compiler(compiled, kernels.__name__, launch, capability)
    assert len(code) == 3 * 6 + 2 * 2
    for ptx in code:
        # As torch converts: what is beyond an int32 becomes the nearest, NaN zero.
        assert "cvt.rzi.s32.f32" in ptx
        assert ".ftz" not in ptx
