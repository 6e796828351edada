"""The kernels of the exact streams: interpreted on the CPU, compiled for CUDA devices."""

import inspect
import sys
from importlib.metadata import version

import pytest
import torch

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import fixed_point as reference
from tests.unit.kernels.code import compiled
from tests.unit.kernels.same_as_reference import SameAsReference
from tests.unit.kernels.training import train
from tests.unit.reversible import chains


class TestInterpreted(SameAsReference):
    @pytest.fixture(autouse=True)
    def _process(self, interpreter):
        self.run = interpreter


@pytest.mark.parametrize("name", ["encode", "decode", "add", "subtract"])
def test_kernels_and_references_are_called_alike(name):
    found, expected = (
        inspect.signature(getattr(m, name)) for m in (kernels, reference)
    )
    assert found == expected


@pytest.mark.parametrize("precision", [chains.FLOAT32, chains.BF16], ids=str)
@pytest.mark.parametrize("mode", ["store", "reconstruct"])
def test_training_gives_the_same_bits(interpreter, mode, precision):
    expected, none = train(mode, precision, reference)
    (found, launches), _ = interpreter(train, mode, precision, None)
    assert none == 0
    # Each stream is made once and each residual is added, and subtracted again.
    assert launches == 2 + 3 * 2 * (1 if mode == "store" else 2)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_device(compiler, capability):
    """For other numbers of elements and other alignments too than tests have."""
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 3):
        pytest.skip("older releases of Triton are told a kernel's arguments otherwise")
    code, _ = compiler(compiled, capability)
    assert len(code) == 3 * 2 * 2 + 2
    for ptx in code:
        # As torch converts: what is beyond an int32 becomes the nearest, NaN zero.
        assert "cvt.rzi.s32.f32" in ptx
        assert ".ftz" not in ptx


class TestWithoutTriton:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        caches = kernels.usable, kernels._compiled
        for cached in caches:
            cached.cache_clear()
        yield
        for cached in caches:
            cached.cache_clear()

    def usable(self):
        return kernels.usable(torch.device("cpu"), torch.float32)

    def test_where_it_cannot_be_imported_a_warning_says_so_once(
        self, monkeypatch, recwarn
    ):
        monkeypatch.setitem(sys.modules, "triton", None)
        assert not self.usable()
        assert not self.usable()
        (warning,) = recwarn
        assert "on cpu in torch.float32 (ModuleNotFoundError" in str(warning.message)
        assert "plain torch" in str(warning.message)

    def test_where_it_cannot_compile_a_warning_says_so_once(self, monkeypatch, recwarn):
        def fail(*_, **__):
            raise RuntimeError("Failed to find C compiler")

        monkeypatch.setattr(kernels, "_launch", fail)
        assert not self.usable()
        assert not self.usable()
        (warning,) = recwarn
        assert "(RuntimeError: Failed to find C compiler)" in str(warning.message)

    def test_memory_that_runs_out_at_the_first_call_is_no_reason(self, monkeypatch):
        def fail(*_, **__):
            raise torch.cuda.OutOfMemoryError

        monkeypatch.setattr(kernels, "_launch", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            self.usable()
