"""What is compiled makes the bits of all modes, once, and no more than it may."""

import copy
import pickle
import shutil

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    ReversibleChain,
    compile_pieces,
    compiled,
    fixed_point,
)
from speechbrain_rev.reversible.norm import BatchNorm

from .chains import (
    BF16,
    FLOAT32,
    FLOAT64,
    FORMAT,
    chain_of,
    distance,
    make_chain,
    step,
    streams,
)
from .test_chain import MODES


@pytest.fixture(autouse=True, params=["exact"])
def stream_format(request):
    token = FORMAT.set(request.param)
    yield
    FORMAT.reset(token)


each_format = pytest.mark.parametrize(
    "stream_format",
    ["exact", pytest.param("float", marks=pytest.mark.slow)],
    indirect=True,
)

#: float64 rounding, through a few blocks.
ROUNDING = 1e-12
STEPS = 2.0**16

each_backend = pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    shutil.which("g++") is None,
                    reason="inductor needs a C++ compiler, and there is no g++",
                ),
            ],
        ),
    ],
)


def steps_of_all_modes(backend, precision, **settings):
    """The steps of a compiled chain of split residual functions, by mode."""
    results = {}
    for mode in MODES:
        chain = chain_of("basic", 2, mode=mode, dtype=precision.weights, **settings)
        compile_pieces(chain, backend)
        results[mode] = step(chain, streams(precision.weights), precision)
        chain.check_streams()
    return results


@each_backend
@pytest.mark.parametrize(
    "precision", [pytest.param(FLOAT64, marks=pytest.mark.slow), FLOAT32, BF16], ids=str
)
def test_compiled_pieces_make_equal_bits_in_all_modes(backend, precision):
    # Eight channels at five a time: five and three.
    results = steps_of_all_modes(backend, precision, chunk=5)
    expected = results["store"]
    for mode in MODES:
        for found, stored in zip(results[mode][1:], expected[1:], strict=True):
            for name, x in stored.items():
                assert torch.equal(found[name], x), (mode, name)


@each_format
@each_backend
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_chain_that_is_not_compiled(backend, mode):
    chain = chain_of("df_bottleneck", 2, mode=mode, chunk=12)
    mask = torch.ones(2, 1, 1, 12, dtype=torch.float64)
    mask[1, ..., 7:] = 0
    _, expected, buffers = step(copy.deepcopy(chain), streams(), mask=mask)
    compile_pieces(chain, backend)
    _, grads, found = step(chain, streams(), mask=mask)
    assert distance(grads, expected) < ROUNDING
    assert distance(found, buffers) < ROUNDING


@each_format
@each_backend
def test_no_size_and_no_step_compiles_again(backend):
    torch._dynamo.reset()
    compiled._COMPILED.clear()
    counters.clear()

    def train(chunk, batch, time, mode):
        chain = chain_of("basic", 1, mode=mode, chunk=chunk, dtype=torch.float32)
        compile_pieces(chain, backend)
        for inputs in (streams(torch.float32, batch=batch, time=time),) * 2:
            step(chain, inputs, FLOAT32)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for mode in MODES:
            # Batch and channels, then channels and time, happen to be equal.
            train(4, 4, 12, mode)
            train(5, 2, 5, mode)
            train(None, 3, 17, mode)
            train(3, 8, 8, mode)
        # Outside of a chain and of autocast, and within the latter.
        norm = compile_pieces(BatchNorm(6, relu=True), backend)
        for precision in (FLOAT32, BF16):
            with precision.autocast():
                norm(torch.randn(2, 6, 5, 7))
    pieces = len(compiled._COMPILED)
    # Normalising; adding in place and not, subtracting in place.
    assert pieces == (1 if FORMAT.get() == "float" else 4)
    assert counters["stats"]["unique_graphs"] == pieces


@each_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_sums_are_the_references(backend, dtype):
    arithmetic = compiled.FixedPoint(backend)
    torch.manual_seed(0)
    value = torch.randint(-(2**30), 2**30, (3, 4, 5, 7), dtype=torch.int32)
    f = torch.randn(value.shape).mul_(100).to(dtype)
    f.view(-1)[:4] = torch.tensor([0.5, 1.5, -0.5, -2.5], dtype=dtype) / STEPS
    f[-1], value[-1] = -1000, -(2**30)  # the largest magnitudes are negative
    for layout in (torch.contiguous_format, torch.channels_last):
        value, f = (x.contiguous(memory_format=layout) for x in (value, f))
        for given in (f, f.transpose(2, 3).contiguous().transpose(2, 3)):
            notes, expected_notes = torch.zeros(2), torch.zeros(2)
            expected = fixed_point.add(value, given, STEPS, expected_notes, None)
            assert torch.equal(
                arithmetic.add(value, given, STEPS, notes, None), expected
            )
            assert torch.equal(notes, expected_notes)
            total, version = value.clone(), value.clone()._version
            kept = given.clone()
            assert arithmetic.add(total, given, STEPS, notes, total) is total
            assert torch.equal(total, expected)
            assert total._version > version
            assert torch.equal(
                arithmetic.subtract(total, given, STEPS, None, spend=False), value
            )
            arithmetic.subtract(total, given, STEPS, total, spend=True)
            assert torch.equal(total, value)
            assert torch.equal(given, kept) or given.stride() != value.stride()
    assert arithmetic.add(value, f, STEPS, None, None).stride() == value.stride()


@each_backend
def test_what_is_not_a_number_is_noted(backend):
    arithmetic = compiled.FixedPoint(backend)
    value = torch.zeros(40, dtype=torch.int32)
    for bad in (torch.nan, torch.inf):
        notes = torch.tensor([1.0, 7.0])
        arithmetic.add(value, torch.full((40,), bad), STEPS, notes, None)
        assert not notes[0] < 2**14
    notes = torch.tensor([torch.nan, 0.0])
    arithmetic.add(value, torch.ones(40), STEPS, notes, None)
    assert notes[0].isnan()
    assert notes[1] == 1


@each_backend
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("relu", [False, True])
def test_compiled_normalisation_in_both_layouts(backend, relu, layout, monkeypatch):
    calls = []
    real = compiled.run
    monkeypatch.setattr(
        compiled, "run", lambda *a, **k: (calls.append(a), real(*a, **k))[1]
    )
    x = torch.randn(3, 6, 5, 7).double().contiguous(memory_format=layout)
    for channels in (6, 1):
        part = x[:, :channels].contiguous(memory_format=layout)
        plain = BatchNorm(channels, relu=relu).double()
        norm = compile_pieces(copy.deepcopy(plain), backend)
        y, expected = norm(part), plain(part)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected, rtol=ROUNDING, atol=ROUNDING)
        assert torch.equal(norm.running_var, plain.running_var)
    assert len(calls) == 2
    # Every other frame: neither layout.
    torch.testing.assert_close(norm(part[..., ::2]), plain(part[..., ::2]))
    assert len(calls) == 2


@each_format
@pytest.mark.parametrize("kind", ["meta", "fake", "counted"])
def test_whatever_is_to_be_seen_is_not_compiled(kind, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(compiled, "run", fail)
    settings = {"widths": (8,) * 4, "blocks": (1,) * 4, "mode": "reconstruct"}

    def build():
        encoder = build_encoder("revnet57", **settings, chunk=20_000)
        return compile_pieces(encoder, "aot_eager")

    def train(encoder, x):
        encoder(x).square().sum().backward()
        assert encoder.fc.weight.grad is not None

    x = torch.randn(2, 24, 80)
    if kind == "meta":
        train(build().to("meta"), x.to("meta"))
    elif kind == "fake":
        with FakeTensorMode():
            encoder = build()
            # Fakes have no random state to compare before and after a first run.
            encoder.set_mode("store")
            train(encoder, torch.randn(2, 24, 80))
    else:
        encoder, plain = build(), build_encoder("revnet57", **settings, chunk=20_000)
        peak = live_bytes_peak(lambda: train(encoder, x))
        assert peak == live_bytes_peak(lambda: train(plain, x))
        with pytest.raises(AssertionError, match="compiled"):
            train(encoder, x)


@each_format
def test_the_choice_travels_with_the_network_and_not_with_its_state():
    chain = chain_of("basic", 1)
    keys = set(chain.state_dict())
    assert compile_pieces(chain, "aot_eager") is chain
    assert set(chain.state_dict()) == keys
    for copied in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert copied.compiled_with == "aot_eager"
        assert copied.blocks[0].f.norm.compiled_with == "aot_eager"
    compile_pieces(chain, None)
    assert chain.compiled_with is chain.blocks[0].f.norm.compiled_with is None


def test_a_choice_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="'inductor', 'aot_eager', or None"):
        compile_pieces(chain_of("basic", 1), "cudagraphs")
    with pytest.raises(ValueError, match=r"Use torch\.compile for it"):
        compile_pieces(nn.Linear(2, 2))


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
@pytest.mark.parametrize("mode", ["reconstruct", "recompute"])
def test_compiled_residual_functions_are_refused_where_bits_must_be_equal(
    compiles, mode
):
    chain = chain_of("torch", 2, mode=mode, streams="exact", dtype=torch.float32)
    name = compiles(chain)
    with pytest.raises(ValueError, match=f"{name}.*compile_pieces.*mode='store'"):
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
    grads = step(chain, streams())[1]
    grads = {name.replace("_orig_mod.", ""): grad for name, grad in grads.items()}
    assert distance(grads, expected) < ROUNDING


@each_format
def test_a_residual_function_kept_from_the_compiler_is_not_taken_for_compiled():
    class Eager(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return x.tanh()

    chain = make_chain([AdditiveCoupling(Eager(), Eager())], streams="exact")
    assert isinstance(chain, ReversibleChain)
    step(chain, streams())


@each_format
def test_pieces_are_compiled_inside_a_compiled_network(monkeypatch):
    calls = []
    real = compiled.run
    monkeypatch.setattr(
        compiled, "run", lambda *a, **k: (calls.append(a), real(*a, **k))[1]
    )
    chain = compile_pieces(chain_of("basic", 1), "aot_eager")
    network = torch.compile(copy.deepcopy(chain), backend="aot_eager")
    expected = step(chain, streams())[1]
    of_eager = len(calls)
    grads = step(network, streams())[1]
    # Both runs of F and G normalise; one adds to the streams, one subtracts.
    assert of_eager == (4 if chain.format_name == "float" else 8)
    assert len(calls) == 2 * of_eager
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name.removeprefix("_orig_mod.")])
