"""Chains and residual functions that were given to torch.compile."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

from speechbrain_rev.reversible import AdditiveCoupling
from speechbrain_rev.reversible.chain import CompileWarning

from .chains import (
    FLOAT32,
    WITHOUT_STORAGE,
    assert_same_bits,
    chain_of,
    distance,
    make_chain,
    step,
    streams,
)

pytestmark = pytest.mark.slow


def compile_wrapped(chain):
    chain.blocks[1].f = torch.compile(chain.blocks[1].f, backend="aot_eager")
    return r"blocks\.1\.f "


def compile_in_place(chain):
    chain.blocks[1].g[0].compile(backend="aot_eager")
    return r"blocks\.1\.g\.0 "


def compile_forward(chain):
    layer = chain.blocks[1].g[3]
    layer.forward = torch.compile(layer.forward, backend="aot_eager")
    return r"blocks\.1\.g\.3 "


each_way = pytest.mark.parametrize(
    "compiles", [compile_wrapped, compile_in_place, compile_forward]
)


@each_way
@pytest.mark.parametrize("mode", WITHOUT_STORAGE)
def test_compiled_residual_functions_are_refused_where_bits_must_be_equal(
    compiles, mode
):
    chain = chain_of("torch", 2, mode=mode, streams="exact", dtype=torch.float32)
    name = compiles(chain)
    with pytest.raises(ValueError, match=f"{name}.*float.*mode='store'"):
        chain(*streams(torch.float32))
    # Nothing of a stored block, and nothing in evaluation, runs twice.
    chain.set_mode([mode, "store"])
    step(chain, streams(torch.float32), FLOAT32)
    chain.set_mode(mode)
    chain.eval()(*streams(torch.float32))


@each_way
def test_compiled_residual_functions_of_float_streams_have_right_gradients(compiles):
    torch._dynamo.reset()
    chain = chain_of("torch", 2, streams="float")
    expected = step(copy.deepcopy(chain), streams())[1]
    compiles(chain)
    grads = without_prefix(step(chain, streams())[1])
    # float64 rounding, through a few blocks.
    assert distance(grads, expected) < 1e-12


def without_prefix(grads):
    return {name.replace("_orig_mod.", ""): grad for name, grad in grads.items()}


def test_a_residual_function_kept_from_the_compiler_is_not_taken_for_compiled():
    class Eager(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return x.tanh()

    step(make_chain([AdditiveCoupling(Eager(), Eager())], streams="exact"), streams())


@pytest.mark.usefixtures("stream_format")
def test_a_chain_in_a_compiled_network_trains_as_without_it_and_warns():
    chain = chain_of("basic", 1)
    network = torch.compile(copy.deepcopy(chain), backend="aot_eager")
    expected = step(chain, streams())[1]
    with pytest.warns(CompileWarning, match="is no faster"):
        grads = step(network, streams())[1]
    assert_same_bits(without_prefix(grads), expected)
