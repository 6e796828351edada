"""Every encoder of the table: size, shapes, modes, transforms, errors."""

import copy
import functools
import inspect
import itertools
import pickle
import re

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad
from torch.utils._python_dispatch import TorchDispatchMode

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    RangeBound,
)
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder, inference_form
from speechbrain_rev.lobes.encoder import settings_of
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.memory import LiveBytes
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Recompute,
    ReversibleChain,
    StreamWarning,
)
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.lobes.encoders import (
    CHUNKED,
    FEW,
    IN_MODES,
    KINDS,
    LENGTHS,
    NARROW,
    REVERSIBLE,
    assert_same_bits,
    but_slow,
    feats,
    grads_of,
    modes_of,
    narrow,
    tiny,
    trained,
)
from tests.unit.reversible.chains import BF16, FP16, distance

NAMES = list(ARCHITECTURES)
SLOW = pytest.mark.slow
FAMILIES = [*FEW, "revnet57", "df_revnet66"]


@functools.cache
def whole(name):
    """The encoder as the table has it, without contents."""
    with torch.device("meta"):
        return build_encoder(name).eval()


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_the_tables(name):
    encoder, row = whole(name), ARCHITECTURES[name]
    assert sum(p.numel() for p in encoder.parameters()) == row.parameters
    # The count leaves out shortcuts, and in DF-ResNets' names the downsampling.
    left_out = ("shortcut", "entry") if name.startswith("df_resnet") else ("shortcut",)
    convolutions = [
        n
        for n, m in encoder.named_modules()
        if isinstance(m, nn.Conv2d) and not any(words in n for words in left_out)
    ]
    assert len(convolutions) + 1 == row.layers
    with torch.no_grad():
        assert encoder(feats(2, 21).float().to("meta")).shape == (2, 1, 256)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("time", [9, 16, 43])
def test_any_number_of_frames_works_in_training(name, time):
    found = trained(tiny(name), feats(3, time, torch.float32))
    assert found["y"].shape == (3, 1, 32)
    assert all(value.isfinite().all() for value in found.values())


#: Ways to train: sizes of the encoder, and options of the step.
WAYS = {
    "two steps": ({"n_mels": 24}, {"steps": 2}),
    "fp16": ({"n_mels": 24}, {"precision": FP16}),
    "chunked": (CHUNKED, {}),
    "chunked bf16": (CHUNKED, {"precision": BF16}),
    "chunked fp16": (CHUNKED, {"precision": FP16}),
    "backward under bf16": (CHUNKED, {"backward": BF16.autocast()}),
    "channels last": (CHUNKED, {}),
}


#: Between those in halves both kinds of transitions, and every kind of convolution.
QUICK = [
    *((name, "two steps") for name in KINDS),
    *((name, "chunked") for name in REVERSIBLE),
    ("resnet34", "fp16"),
    ("revnet140", "chunked bf16"),
    ("df_revnet89", "chunked bf16"),
    ("revnet57", "chunked fp16"),
    ("revnet140", "backward under bf16"),
    ("df_revnet89", "backward under bf16"),
    ("df_revnet66", "channels last"),
]
IN_HALF = itertools.product(REVERSIBLE, ("chunked bf16", "chunked fp16"))


@pytest.mark.parametrize(
    ("name", "way"),
    [*QUICK, *(pytest.param(*c, marks=SLOW) for c in IN_HALF if c not in QUICK)],
)
def test_every_mode_trains_to_the_bits_of_storing(name, way):
    sizes, options = WAYS[way]

    def found(mode, **options):
        encoder = tiny(name, mode=mode, verify="raise", verify_every=1, **sizes)
        if way == "channels last":
            encoder.to(memory_format=torch.channels_last)
        return trained(encoder, narrow(3, 43), LENGTHS, **options)

    expected = found("store", **options)
    for mode in modes_of(name)[1:]:
        assert_same_bits(found(mode, **options), expected)
    if "precision" in options:
        assert all(
            value.dtype is torch.float32 for value in grads_in(expected).values()
        )
        assert 0 < distance(grads_in(expected), grads_in(found("store"))) < 0.5


def grads_in(found):
    return {key: value for key, value in found.items() if key.startswith("grad of")}


def test_modes_are_set_by_name_and_the_rest_stays():
    encoder = tiny("revnet57")
    keys = list(encoder.state_dict())
    assert encoder.block_modes()["stages.1.chain.0"] == "reconstruct"
    encoder.set_mode({"stem": "store", "stages.1.chain.1": "recompute"})
    modes = encoder.block_modes()
    assert [modes[n] for n in ("stem", "stages.1.entry")] == ["store", "recompute"]
    assert encoder.stages[1].chain.modes == ["reconstruct", "recompute"]
    for mode in ("store", "compress"):
        encoder.set_mode(mode)
        assert list(encoder.state_dict()) == keys
    assert set(tiny("resnet34").block_modes().values()) == {"store"}


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("resnet34", "reconstruct", "no reversible blocks.*revnet46, revnet57"),
        ("resnet34", {"stages.0.blocks.0": "reconstruct"}, "is not reversible"),
        ("revnet57", {"stages.0.entry": "store"}, "no block 'stages.0.entry'"),
        ("revnet57", {"stem": "reconstruct"}, "is not reversible"),
        ("revnet57", "forget", "the modes are"),
    ],
)
def test_impossible_modes_are_refused(name, mode, words):
    with pytest.raises(ValueError, match=words):
        tiny(name, mode=mode)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("revnet57", {"widths": (8, 8, 8)}, "each of the 4 stages"),
        ("revnet57", {"widths": (8, 10, 8, 8)}, "multiples of 4, but 10"),
        ("revnet57", {"n_mels": 81}, "multiple of 8, but is 81"),
        ("revnet57", {"embedding_dim": 0}, "at least 1"),
        ("revnet57", {"widths": (8.0, 8, 8, 8)}, "takes whole numbers"),
        ("revnet57", {"pooling_variance": "sample"}, "population, unbiased"),
        ("revnet57", {"blocks": (1, -1, 1, 1)}, "1 in all"),
        ("revnet57", {"streams": "half"}, "formats are 'float'"),
        ("revnet57", {"compression": 0.1}, "compression is 0.1; give an ActivationC"),
        ("resnet34", {"chunk": 800_000}, "works on all channels at once"),
        *(
            ("revnet57", {"chunk": value}, "takes 'auto', a number of bytes, or null")
            for value in (0, -1, 1.5, "large", True)
        ),
        *(
            ("revnet57", {switch: value}, rf"^{switch} is {value!r}, but takes True or")
            for switch in ("zero_init_residual", "sync_batchnorm")
            for value in ("false", 0, None)
        ),
        *(
            (
                "revnet57",
                {sizes: value},
                rf"^{sizes} is .*, but takes a list of 4 whole",
            )
            for sizes in ("widths", "blocks")
            for value in (8, "8888", {"a": 8})
        ),
    ],
)
def test_impossible_settings_are_refused(name, settings, words):
    for make in (tiny, SpeakerEncoder):
        with pytest.raises(ValueError, match=words):
            make(name, **settings)


@pytest.mark.parametrize("training", [False, True])
def test_inference_mode_works(training):
    encoder = tiny("revnet57").train(training)
    x = feats(dtype=torch.float32)
    with torch.no_grad():
        expected = copy.deepcopy(encoder)(x)
    with torch.inference_mode():
        assert torch.equal(encoder(x.clone()), expected)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        (name, f"{tag}:speechbrain_rev.lobes.{made}")
        for made, tag in (("SpeakerEncoder", "!new"), ("build_encoder", "!apply"))
        for name in FEW
    ],
)
def test_a_yaml_and_its_copies_make_what_the_function_makes_to_the_bit(name, tag):
    text = f"""
encoder: {tag}
    name: {name}
    embedding_dim: 32
    widths: [8, 8, 16, 16]
    blocks: [1, 2, 1, 1]
"""
    torch.manual_seed(0)
    encoder = load_hyperpyyaml(text)["encoder"]
    assert type(encoder) is SpeakerEncoder
    copies = copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))
    x = feats(dtype=torch.float32)
    expected = trained(tiny(name), x)
    for each in (encoder, *copies):
        assert_same_bits(trained(each, x), expected)


def test_the_function_hands_all_that_the_class_takes_to_the_class(monkeypatch):
    taken = inspect.signature(SpeakerEncoder).parameters
    assert inspect.signature(build_encoder).parameters == taken
    given = {name: object() for name in taken}
    monkeypatch.setitem(
        build_encoder.__globals__,
        "SpeakerEncoder",
        lambda name, **o: {"name": name} | o,
    )
    assert build_encoder(**given) == given


def test_a_saved_plan_is_a_mode(tmp_path):
    modes = dict.fromkeys(whole("revnet57").named_blocks(), "store")
    modes["stem"] = "recompute"
    path = tmp_path / "plan.json"
    Plan(modes, [1, 6, 25, 100], 1, 1, 1, 1.0, {}).save(path)
    encoder = build_encoder("revnet57", mode=Plan.load(path))
    assert {k: m.value for k, m in encoder.block_modes().items()} == modes
    assert encoder.channels == [1, 6, 25, 100]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            torch.randn(2, 80, 43),
            r"filterbanks \[batch, time, 80\], but got \[2, 80, 43\]",
        ),
        (torch.randn(2, 43), "takes filterbanks"),
        (torch.randn(2, 1, 43, 80), "takes filterbanks"),
        (torch.randn(2, 8, 80), "at least 9 frames"),
        (torch.randn(0, 43, 80), "at least one utterance"),
        *(
            (torch.ones(2, 43, 80).to(dtype), f"a tensor of floats, but got {dtype}")
            for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64)
        ),
        (np.ones((2, 43, 80), np.float32), "a tensor of floats, but got float32"),
    ],
)
@pytest.mark.parametrize("form", [lambda encoder: encoder, inference_form])
def test_what_is_no_batch_of_filterbanks_is_refused(given, words, form):
    with pytest.raises(ValueError, match=words):
        form(tiny("revnet57"))(given)


def test_settings_make_another_encoder_of_the_kind_or_are_refused():
    encoder = tiny("revnet57", pooling_variance="unbiased", streams="float", n_mels=24)
    settings = settings_of(encoder)
    again = build_encoder("revnet57", blocks=(1, 2, 1, 1), **settings)
    assert settings_of(again) == settings
    assert [p.shape for p in again.parameters()] == [
        p.shape for p in encoder.parameters()
    ]
    for part in ("fc", "pooling"):
        changed = copy.deepcopy(encoder)
        setattr(changed, part, nn.Identity())
        message = rf"{part} of revnet57 is a Identity.*planner\.plan"
        with pytest.raises(ValueError, match=message):
            settings_of(changed)


class TestStreams:
    """What exact streams tell, and how far they are from floats."""

    def test_those_out_of_range_are_named_by_stage(self):
        encoder = tiny("revnet57")
        with torch.no_grad():
            encoder.stages[2].chain.blocks[0].g.conv2.weight.fill_(1e6)
        assert encoder(torch.randn(2, 43, 80)).isnan().all()
        with pytest.warns(StreamWarning) as warned:
            encoder.check_streams()
        # The stages after it, which get nothing but NaN, report nothing.
        assert len(warned) == 1
        assert re.search(r"stages\.2\.chain .* at G of block 0", str(warned[0].message))

    @pytest.mark.parametrize("name", ["df_revnet66", "resnet34"])
    def test_the_largest_magnitude_of_each_stage_is_given(self, name):
        encoder = tiny(name)
        encoder(torch.randn(2, 43, 80)).sum().backward()
        largest = encoder.largest_streams()
        stages = range(4 * ARCHITECTURES[name].reversible)
        assert list(largest) == [f"stages.{i}.chain" for i in stages]
        assert all(0 < value < 2**14 for value in largest.values())
        # Asked again, it has seen nothing since.
        assert not any(encoder.largest_streams().values())

    @pytest.mark.parametrize(
        ("name", "blocks"),
        [
            ("revnet57", (1, 1, 2, 1)),
            ("df_revnet66", (1, 1, 2, 1)),
            pytest.param("revnet245", None, marks=SLOW),
            pytest.param("df_revnet377", None, marks=SLOW),
        ],
    )
    def test_rounding_moves_an_embedding_by_less_than_evaluation_may(
        self, name, blocks
    ):
        sizes = {"widths": (16, 16, 32, 32), "n_mels": 40, "blocks": blocks}
        exact, floats = (
            tiny(name, mode="store", streams=streams, **sizes)(
                feats(8, 48, torch.float32, n_mels=40)
            )
            for streams in ("exact", "float")
        )
        assert 0 < float((exact - floats).abs().max()) < 1e-4

    @pytest.mark.parametrize("name", ["revnet46", "df_revnet89"])
    def test_a_step_asks_the_device_for_nothing(self, name):
        class Looks(TorchDispatchMode):
            """Counts where the host asks for a number on the device, and waits for it."""

            count = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.count += func is torch.ops.aten._local_scalar_dense.default
                return func(*args, **(kwargs or {}))

        encoder = tiny(name, verify="raise", verify_every=1)
        with Looks() as looks:
            for _ in range(2):  # the second step reads the notes of the first
                encoder(torch.randn(2, 43, 80)).sum().backward()
            assert looks.count == 0
            bool(torch.ones(()) > 0)
            assert looks.count == 1


def compressed(name, mode, fraction=1e-3):
    """An encoder after a step, the bytes that it held, and its gradients."""
    encoder = tiny(name, widths=(16, 16, 32, 32))
    encoder.compression = ActivationCompression(
        convolutions=RangeBound(fraction), normalisations=DeviationBound(fraction)
    )
    encoder.set_mode(mode)
    encoder = copy.deepcopy(encoder)
    with LiveBytes() as meter:
        loss = encoder(feats(3, 40, torch.float32), LENGTHS).square().mean()
        held = meter.live
        loss.backward()
    return encoder, held, grads_of(encoder)


@pytest.mark.parametrize("name", but_slow(KINDS, "resnet34", "revnet57"))
def test_compressing_is_storing_within_the_bounds_in_less_memory(name):
    encoder, stored_bytes, exact = compressed(name, "store")
    _, held, found = compressed(name, "compress")
    assert 0 < distance(found, exact) < 0.02
    coarse = compressed(name, "compress", 1e-2)[-1]
    assert distance(coarse, exact) > 2 * distance(found, exact)
    # Streams of reversible encoders are integers, which stay as they are.
    assert held < stored_bytes / (2.5 if "rev" not in name else 1.3)
    # Blocks can have any mode beside.
    modes = ["compress", "store", "recompute"]
    modes = {n: modes[i % 3] for i, n in enumerate(encoder.block_modes())}
    encoder, _, found = compressed(name, modes)
    assert 0 < distance(found, exact) < 0.02
    blocks = [n for n, mode in modes.items() if mode == "compress"]
    prefixes = tuple(n.replace(".chain.", ".chain.blocks.") for n in blocks)
    assert encoder.compression.records
    assert all(layer.startswith(prefixes) for layer in encoder.compression.records)


class TestTransforms:
    """Second derivatives, torch.func, tracing and scripting."""

    @pytest.mark.parametrize(
        ("name", "way"),
        [
            *((name, way) for name in FAMILIES for way in ("whole", "lengths")),
            *(pytest.param(name, "chunked", marks=SLOW) for name in REVERSIBLE),
        ],
    )
    def test_the_second_derivative_is_that_of_finite_differences(self, name, way):
        lengths = LENGTHS[:2] if way == "lengths" else None
        sizes = NARROW | (CHUNKED if way == "chunked" else {})
        encoder = tiny(name, mode="store", streams="float", **sizes).double()
        x = narrow(2, 48 if way == "whole" else 44).double().requires_grad_()
        convs = [m for m in encoder.stages[1].modules() if isinstance(m, nn.Conv2d)]
        weights = [conv.weight for conv in convs]
        directions = [torch.randn_like(value) for value in (x, *weights)]

        def slope(x):
            """Along some directions, those of weights among them."""
            y = encoder(x, lengths).square().sum()
            found = torch.autograd.grad(y, [x, *weights], create_graph=True)
            pairs = zip(found, directions, strict=True)
            return sum((grad * direction).sum() for grad, direction in pairs)

        (found,) = torch.autograd.grad(slope(x), x)
        step = 1e-8  # so small that no ReLU switches
        low, high = (
            float(slope((x + sign * step * directions[0]).detach().requires_grad_()))
            for sign in (-1, 1)
        )
        expected = (high - low) / (2 * step)
        assert float((found * directions[0]).sum()) == pytest.approx(expected, rel=1e-3)

    @pytest.mark.parametrize("lengths", [None, LENGTHS[:2]], ids=["whole", "lengths"])
    @pytest.mark.parametrize("name", FAMILIES)
    def test_those_of_torch_func_work_in_evaluation(self, name, lengths):
        encoder = tiny(name, **NARROW).eval()
        x = narrow()
        parameters = {n: p.detach() for n, p in encoder.named_parameters()}
        found = grad(lambda p: functional_call(encoder, p, (x, lengths)).square().sum())
        encoder(x, lengths).square().sum().backward()
        torch.testing.assert_close(found(parameters), grads_of(encoder))

    @pytest.mark.parametrize(
        "run",
        [
            *(
                tiny(n, mode=m, **NARROW)
                for n, m in IN_MODES
                if n in ("resnet34", "revnet57")
            ),
            Recompute(nn.Tanh()),
            lambda x: BatchNorm(24)(x[..., None].transpose(1, 2)),
            lambda x: ReversibleChain([AdditiveCoupling(nn.Tanh(), nn.Tanh())])(x, x)[
                0
            ],
        ],
    )
    def test_those_of_torch_func_and_forward_mode_are_refused_in_training(self, run):
        x = torch.randn(2, 48, 24, requires_grad=True)
        with pytest.raises(RuntimeError, match="evaluation only"):
            grad(lambda x: run(x).sum())(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(RuntimeError, match="evaluation only"):
                run(dual)

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    @pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
    @pytest.mark.parametrize("lengths", [None, LENGTHS[:2]], ids=["whole", "lengths"])
    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("name", KINDS)
    def test_a_trace_is_right_at_any_length_or_refused(self, name, training, lengths):
        encoder = tiny(name, mode="store", **NARROW).train(training)
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
        ("part", "message"),
        [
            (lambda encoder: encoder, "speechbrain-rev export writes ONNX"),
            (nn.Sequential, "export writes ONNX"),
            (lambda encoder: encoder.stages[0].chain, "Use torch.export"),
            (Recompute, "Script the module within it"),
        ],
    )
    def test_scripting_is_refused(self, part, message):
        with pytest.raises(RuntimeError, match=message):
            torch.jit.script(part(tiny("revnet57", **NARROW)))
