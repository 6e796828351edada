"""What is compiled makes the bits of all modes, once, and no more than it may."""

import copy
import pickle
import shutil
from contextlib import nullcontext

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
    compile_pieces,
    compiled,
    fixed_point,
)
from speechbrain_rev.reversible.compiled import CompileWarning
from speechbrain_rev.reversible.norm import BatchNorm

from .chains import (
    BF16,
    FLOAT32,
    FLOAT64,
    FORMAT,
    MODES,
    WITHOUT_STORAGE,
    assert_same_bits,
    chain_of,
    distance,
    make_chain,
    step,
    streams,
)

pytestmark = pytest.mark.slow

#: float64 rounding, through a few blocks.
ROUNDING = 1e-12
STEPS = 2.0**16

each_format = pytest.mark.usefixtures("stream_format")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler, here no g++"
)
each_backend = pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=[pytest.mark.slow, needs_a_compiler]),
    ],
)


@each_format
@each_backend
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param("basic", FLOAT32, marks=pytest.mark.slow),
        ("basic", BF16),
        ("df_bottleneck", FLOAT64),
    ],
    ids=str,
)
def test_compiled_pieces_make_equal_bits_in_all_modes_and_the_chains_gradients(
    backend, kind, precision
):
    mask, results = torch.ones(2, 1, 1, 12, dtype=precision.weights), []
    mask[1, ..., 7:] = 0
    for mode in MODES:
        # Eight channels at five a time: five and three.
        chain = chain_of(kind, 2, mode=mode, dtype=precision.weights, chunk=5)
        runs = compile_pieces(copy.deepcopy(chain), backend), chain
        compiled_step, plain_step = (
            step(run, streams(precision.weights), precision, mask=mask)[1:]
            for run in runs
        )
        runs[0].check_streams()
        results.append(compiled_step[0] | compiled_step[1])
        if precision is FLOAT64:
            assert all(map(near, compiled_step, plain_step))
        if chain.format_name == "exact":
            assert_same_bits(results[-1], results[0])


def near(tensors, expected):
    return distance(tensors, expected) < ROUNDING


@each_format
@each_backend
def test_no_size_and_no_step_compiles_again(backend):
    torch._dynamo.reset()
    compiled._COMPILED.clear()
    counters.clear()

    def train(chunk, batch, time, mode):
        chain = chain_of("basic", 1, mode=mode, chunk=chunk, dtype=torch.float32)
        compile_pieces(chain, backend)
        for _ in range(2):
            step(chain, streams(torch.float32, batch=batch, time=time), FLOAT32)

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
            notes, expected_notes, kept = torch.zeros(2), torch.zeros(2), given.clone()
            expected = fixed_point.add(value, [given], STEPS, expected_notes, None)
            total = arithmetic.add(value, [given], STEPS, notes, None)
            assert torch.equal(total, expected)
            assert total.stride() == value.stride()
            assert torch.equal(notes, expected_notes)
            total, version = value.clone(), value.clone()._version
            assert arithmetic.add(total, [given], STEPS, notes, total) is total
            assert torch.equal(total, expected)
            assert total._version > version
            assert torch.equal(arithmetic.subtract(total, given, STEPS, None), value)
            arithmetic.subtract(total, given, STEPS, total, True)
            assert torch.equal(total, value)
            assert torch.equal(given, kept) or given.stride() != value.stride()


@each_backend
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_noted(backend, bad):
    value, notes = torch.zeros(40, dtype=torch.int32), torch.tensor([1.0, 7.0])
    for f in (bad, 1.0):
        f = torch.full((40,), f)
        compiled.FixedPoint(backend).add(value, [f], STEPS, notes, None)
    assert not notes[0] < 2**14


def test_compiling_is_counted_once_for_each_piece_and_its_failure_is_explained(
    monkeypatch,
):
    compiled._COMPILED.clear()
    compiled._SECONDS.clear()
    x, norm = torch.randn(2, 3, 4, 5), compile_pieces(BatchNorm(3), "aot_eager")
    assert compiled.compiling() == (0, 0)
    norm(x)
    pieces, seconds = compiled.compiling()
    assert pieces == 1
    assert seconds > 0
    norm(x)
    assert compiled.compiling() == (pieces, seconds)

    def fails(*arguments, **options):
        raise OSError("g++: not found")

    monkeypatch.setattr(torch, "compile", lambda function, **options: fails)
    message = (
        r"(?s)aot_eager could not compile .* for cpu: OSError: g\+\+: not found.*C\+\+"
    )
    with pytest.raises(RuntimeError, match=message):
        norm.double()(x.double())
    assert compiled.compiling() == (pieces, seconds)


@pytest.fixture
def calls(monkeypatch):
    """What was called compiled."""
    calls, real = [], compiled.run
    monkeypatch.setattr(
        compiled, "run", lambda *a, **k: (calls.append(a), real(*a, **k))[1]
    )
    return calls


@each_backend
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("relu", [False, True])
def test_compiled_normalisation_in_both_layouts(backend, relu, layout, calls):
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


def tiny_encoder(backend="aot_eager"):
    settings = {"widths": (8,) * 4, "blocks": (1,) * 4, "mode": "reconstruct"}
    encoder = build_encoder("revnet57", **settings, chunk=20_000)
    return compile_pieces(encoder, backend)


def train_encoder(encoder, x):
    encoder(x).square().sum().backward()
    assert encoder.fc.weight.grad is not None


def test_what_is_measured_or_has_no_values_is_not_compiled(calls):
    x = torch.randn(2, 24, 80)
    train_encoder(tiny_encoder().to("meta"), x.to("meta"))
    with FakeTensorMode():
        # Fakes have no random state to compare before and after a first run.
        encoder = tiny_encoder()
        encoder.set_mode("store")
        train_encoder(encoder, torch.randn(2, 24, 80))
    encoders = tiny_encoder(), tiny_encoder(None)
    peaks = [live_bytes_peak(lambda e=e: train_encoder(e, x)) for e in encoders]
    assert peaks[0] == peaks[1]
    assert not calls


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_the_choice_travels_with_the_network_and_not_with_its_state(clone):
    chain = chain_of("basic", 1)
    keys = set(chain.state_dict())
    assert compile_pieces(chain, "aot_eager") is chain
    assert set(chain.state_dict()) == keys
    copied = clone(chain)
    assert copied.compiled_with == copied.blocks[0].f.norm.compiled_with == "aot_eager"
    compile_pieces(copied, None)
    assert copied.compiled_with is copied.blocks[0].f.norm.compiled_with is None


@pytest.mark.parametrize(
    ("module", "backend", "message"),
    [
        (BatchNorm(2), "cudagraphs", "'inductor', 'aot_eager', or None"),
        (nn.Linear(2, 2), "inductor", r"Use torch\.compile for it"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(module, backend, message):
    with pytest.raises(ValueError, match=message):
        compile_pieces(module, backend)


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
    assert near(without_prefix(step(chain, streams())[1]), expected)


def without_prefix(grads):
    return {name.replace("_orig_mod.", ""): grad for name, grad in grads.items()}


def test_a_residual_function_kept_from_the_compiler_is_not_taken_for_compiled():
    class Eager(nn.Module):
        @torch.compiler.disable
        def forward(self, x):
            return x.tanh()

    step(make_chain([AdditiveCoupling(Eager(), Eager())], streams="exact"), streams())


@each_format
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_pieces_are_compiled_inside_a_compiled_network_and_nothing_else(backend, calls):
    chain = compile_pieces(chain_of("basic", 1), backend)
    network = torch.compile(copy.deepcopy(chain), backend="aot_eager")
    expected = step(chain, streams())[1]
    # Both runs of F and G normalise; one adds to the streams, one subtracts.
    once = 0 if backend is None else 4 if chain.format_name == "float" else 8
    assert len(calls) == once
    uncompiled = pytest.warns(CompileWarning, match=r"compile_pieces\(network\)")
    with nullcontext() if backend else uncompiled:
        grads = step(network, streams())[1]
    assert len(calls) == 2 * once
    assert_same_bits(without_prefix(grads), expected)
