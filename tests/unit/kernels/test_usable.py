"""What kernels have in common: their references, and what happens without Triton."""

import inspect
import sys
from unittest import mock

import pytest
import torch

from speechbrain_rev.compression import codec
from speechbrain_rev.compression import reference as compression_reference
from speechbrain_rev.kernels import compression, fixed_point, norm, optimizer
from speechbrain_rev.optim import reference as optimizer_reference
from speechbrain_rev.reversible import fixed_point as fixed_point_reference
from speechbrain_rev.reversible import norm as norm_reference
from speechbrain_rev.reversible import streams

PAIRS = {
    compression: (compression_reference, codec._module),
    fixed_point: (fixed_point_reference, streams._arithmetic),
    norm: (
        norm_reference,
        lambda x: norm if norm_reference._has_kernels(x) else norm_reference,
    ),
    optimizer: (
        optimizer_reference,
        lambda x: (
            optimizer if optimizer.usable(x.device, x.dtype) else optimizer_reference
        ),
    ),
}
each_module = pytest.mark.parametrize(
    "kernels", PAIRS, ids=lambda module: module.__name__.rpartition(".")[2]
)


@each_module
def test_kernels_and_references_are_called_alike(kernels):
    reference, _ = PAIRS[kernels]
    public = {
        n for n, f in vars(reference).items() if inspect.isfunction(f) and n[0] != "_"
    }
    names = [name for name in public if hasattr(kernels, name)]
    assert len(names) >= 2
    for name in names:
        mine, other = (getattr(module, name) for module in (kernels, reference))
        assert inspect.signature(mine) == inspect.signature(other)


@pytest.fixture
def fresh():
    caches = [cached for m in PAIRS for cached in (m.usable, m._compiled)]
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def failing(error):
    return mock.Mock(side_effect=error)


@each_module
@pytest.mark.parametrize("error", [ModuleNotFoundError(), RuntimeError("no compiler")])
@pytest.mark.usefixtures("fresh")
def test_where_kernels_do_not_run_one_warning_names_the_reason(
    kernels, error, monkeypatch, recwarn
):
    if isinstance(error, ImportError):
        monkeypatch.setitem(sys.modules, "triton", None)
    else:
        monkeypatch.setattr(kernels, "_launch", failing(error))
    x = mock.Mock(is_cuda=True, device=torch.device("cpu"), dtype=torch.float32)
    reference, computing = PAIRS[kernels]
    assert computing(x) is computing(x) is reference
    (warning,) = recwarn
    assert f"on cpu in torch.float32 ({type(error).__name__}: " in str(warning.message)
    assert "plain torch" in str(warning.message)


@each_module
@pytest.mark.usefixtures("fresh")
def test_memory_that_runs_out_at_the_first_call_is_no_reason(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_launch", failing(torch.cuda.OutOfMemoryError))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        kernels.usable(torch.device("cpu"), torch.float32)


@each_module
def test_where_triton_runs_it_is_taken(kernels, interpreter):
    assert interpreter(kernels.usable, torch.device("cpu"), torch.float32)[0]
