"""Every encoder of the table: size, shapes, modes, transforms, errors."""

import copy
import itertools
import pickle
import re
from inspect import signature

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
from speechbrain_rev.lobes.pooling import POOLINGS
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.memory import LiveBytes, live_bytes_peak
from speechbrain_rev.planner.step import cpu_fakes
from speechbrain_rev.reversible import (
    AdditiveCoupling,
    Recompute,
    ReversibleChain,
    StreamWarning,
)
from speechbrain_rev.reversible import flags as backend_flags
from speechbrain_rev.reversible.comparison import RecomputeWarning
from speechbrain_rev.reversible.norm import BatchNorm
from tests.unit.lobes.encoders import (
    CHUNKED,
    FEW,
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
    on_meta,
    tiny,
    trained,
)
from tests.unit.reversible.chains import BF16, FP16, Differs, distance

SLOW = pytest.mark.slow
FAMILIES = [*FEW, "revnet57", "df_revnet66"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes_are_the_tables(name):
    encoder, row = on_meta(name, blocks=None).eval(), ARCHITECTURES[name]
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
def test_any_number_of_frames_works_in_training(name):
    for frames in (9, 16, 43):
        values = trained(tiny(name), feats(3, frames, torch.float32))
        assert values["y"].shape == (3, 1, 32)
        assert all(value.isfinite().all() for value in values.values())


LAST = {"memory_format": "channels_last"}
CPU = torch.device("cpu")
#: Ways to train: sizes of the encoder, and options of the step.
WAYS = {
    "two steps": ({"n_mels": 24}, {"steps": 2}),
    "fp16": ({"n_mels": 24}, {"precision": FP16}),
    "chunked": (CHUNKED, {}),
    "chunked bf16": (CHUNKED, {"precision": BF16}),
    "chunked fp16": (CHUNKED, {"precision": FP16}),
    "backward under bf16": (CHUNKED, {"backward": BF16.autocast()}),
    "channels last": (CHUNKED | LAST, {}),
    "channels last bf16": (CHUNKED | LAST, {"precision": BF16}),
    "channels last whole": (LAST | {"n_mels": 24, "chunk": None}, {"steps": 2}),
}


#: Quick are both kinds of transitions and every kind of convolution.
TRAININGS = [
    *itertools.product(KINDS, ["two steps"]),
    *itertools.product(REVERSIBLE, ["chunked", "chunked bf16", "chunked fp16"]),
    ("resnet34", "fp16"),
    ("revnet140", "backward under bf16"),
    ("df_revnet89", "backward under bf16"),
    ("df_revnet66", "channels last"),
    ("revnet57", "channels last bf16"),
    ("revnet140", "channels last"),
    ("df_revnet89", "channels last bf16"),
    ("df_resnet56", "channels last whole"),
    ("revnet46", "channels last whole"),
]
QUICK = [
    *(t for t in TRAININGS if not re.search("chunked |last ", t[1])),
    ("revnet140", "chunked bf16"),
    ("df_revnet89", "chunked bf16"),
    ("revnet57", "chunked fp16"),
    ("df_revnet89", "channels last bf16"),
    ("df_resnet56", "channels last whole"),
]


@pytest.mark.parametrize(
    ("name", "way"),
    but_slow(TRAININGS, *QUICK),
)
def test_every_mode_trains_to_the_bits_of_storing(name, way):
    sizes, options = WAYS[way]

    def train(mode, **options):
        encoder = tiny(name, mode=mode, verify="raise", verify_every=1, **sizes)
        return trained(encoder, narrow(3, 43), LENGTHS, **options)

    expected = train("store", **options)
    for mode in [*modes_of(name)[1:], *runs_of(name)]:
        assert_same_bits(train(mode, **options), expected)
    if "precision" in options:
        halves, floats = (
            {key: value for key, value in step.items() if key.startswith("grad of")}
            for step in (expected, train("store"))
        )
        assert {grad.dtype for grad in halves.values()} == {torch.float32}
        assert 0 < distance(floats, halves) < 0.5


class Layouts(TorchDispatchMode):
    """Collect the maps of three utterances that a step makes, and those in another layout."""

    def __init__(self):
        super().__init__()
        self.made, self.others = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for y in outputs if isinstance(outputs, tuple) else (outputs,):
            is_map = isinstance(y, torch.Tensor) and y.dim() == 4 and len(y) == 3
            # Of one channel both layouts are the same; pooling's have 3 frequencies there.
            if is_map and min(y.shape) > 1 and y.shape[1] != 3 and not func.is_view:
                self.made += 1
                if y.stride(1) != 1:
                    self.others.add((str(func), y.shape))
        return outputs


@pytest.mark.parametrize("chunk", [None, 96_000])
@pytest.mark.parametrize("name", ["df_resnet56", "revnet46", "df_revnet89"])
def test_in_channels_last_no_map_or_gradient_is_in_another_layout(name, chunk):
    for mode in modes_of(name):
        sizes = {"widths": (16, 16, 32, 32), "n_mels": 24, **LAST}
        reversible = ARCHITECTURES[name].reversible
        encoder = tiny(name, mode=mode, chunk=chunk if reversible else None, **sizes)
        with Layouts() as seen:
            encoder(narrow(3, 43), LENGTHS).sum().backward()
        assert seen.made > 50
        assert not seen.others
    assert encoder.eval()(narrow(3)).shape == (3, 1, 32)


@pytest.mark.parametrize("name", ["df_resnet56", "revnet57"])
def test_both_memory_formats_hold_the_same_bytes_with_data_and_without(name):
    def peak(memory_format, where):
        sizes = {"widths": (16, 32, 32, 32), "n_mels": 24}
        if ARCHITECTURES[name].reversible:
            sizes["chunk"] = 100_000
        with where:
            # Fake tensors are not compared.
            encoder = tiny(name, memory_format=memory_format, verify=None, **sizes)
            for p in encoder.parameters():
                p.grad = torch.zeros_like(p)
            x = torch.randn(2, 100, 24)
            return live_bytes_peak(lambda: encoder(x).square().sum().backward())

    contiguous = peak("contiguous", CPU)
    for where in (CPU, cpu_fakes()):
        difference = peak("channels_last", where) - contiguous
        # The input is laid out anew.
        assert 0 <= difference <= 2 * 100 * 24 * 4


@pytest.mark.parametrize(
    "formats", [["contiguous", "channels_last"], ["channels_last", "contiguous"]]
)
def test_weights_of_either_memory_format_are_loaded_and_keep_their_own(formats):
    one, other = (tiny("df_revnet89", memory_format=f, n_mels=24) for f in formats)
    strides = [p.stride() for p in other.parameters()]
    assert strides != [p.stride() for p in one.parameters()]
    with torch.no_grad():
        for p in one.parameters():
            p.add_(1)
    other.load_state_dict(one.state_dict())
    assert [p.stride() for p in other.parameters()] == strides
    assert_same_bits(other.state_dict(), one.state_dict())
    # The 8-bit optimizer leaves them so.
    optimizer = build_optimizer(other.parameters(), name="adamw", bits=8, lr=0.1)
    other(narrow(3)).sum().backward()
    optimizer.step()
    assert [p.stride() for p in other.parameters()] == strides


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("revnet140", ("store", "recompute", "reconstruct")),
        ("resnet34", ("store", "recompute")),
    ],
)
def test_flags_of_cudnn_are_those_of_the_encoder_in_both_passes(
    name, modes, monkeypatch
):
    monkeypatch.setattr(backend_flags, "_decided_by_flags", lambda device: True)
    seen = set()

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "convolution" in str(func):
                cudnn = torch.backends.cudnn
                seen.add((cudnn.benchmark, cudnn.deterministic))
            return func(*args, **(kwargs or {}))

    user = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    row = CHUNKED if name == "revnet140" else {"n_mels": 24}
    for mode, deterministic in itertools.product(modes, [False, True]):
        encoder = tiny(name, mode=mode, deterministic=deterministic, **row)
        seen.clear()
        with Noted():
            encoder(narrow(3)).sum().backward()
        assert seen == {(not deterministic, deterministic)}
        assert user == (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        )


def runs_of(name):
    """Modes of an encoder that is not reversible, in which blocks run again in runs."""
    if ARCHITECTURES[name].reversible:
        return []
    names = tiny(name).block_modes()
    return [{n: "join" if i % 3 else "recompute" for i, n in enumerate(names)}]


def test_a_block_joins_one_that_recomputes_and_modes_that_are_refused_change_nothing():
    encoder = tiny("resnet34")
    encoder.set_mode({"stem": "recompute", "stages.0.blocks.0": "join"})
    modes = encoder.block_modes()
    for refused in ({"stem": "store"}, {"stages.2.blocks.0": "join"}):
        with pytest.raises(ValueError, match="follows one with mode 'store'"):
            encoder.set_mode(refused)
        assert encoder.block_modes() == modes


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
    ("name", "settings", "words"),
    [
        ("resnet34", {"mode": "reconstruct"}, "no reversible blocks.*revnet46, rev"),
        ("resnet34", {"mode": {"stages.0.blocks.0": "reconstruct"}}, "not reversible"),
        ("revnet57", {"mode": {"stages.0.entry": "store"}}, "no block 'stages.0.entry"),
        ("revnet57", {"mode": {"stem": "reconstruct"}}, "is not reversible"),
        ("revnet57", {"mode": "forget"}, "the modes are"),
        ("resnet34", {"mode": "join"}, "'stem' of resnet34 .* it follows none"),
        (
            "revnet57",
            {"mode": {"stem": "recompute", "stages.1.entry": "join"}},
            "that are not reversible a block can join",
        ),
        ("revnet57", {"widths": (8, 8, 8)}, "each of the 4 stages"),
        ("revnet57", {"widths": (8, 10, 8, 8)}, "multiples of 4, but 10"),
        ("revnet57", {"n_mels": 81}, "multiple of 8, but is 81"),
        ("revnet57", {"embedding_dim": 0}, "at least 1"),
        ("revnet57", {"widths": (8.0, 8, 8, 8)}, "takes whole numbers"),
        ("revnet57", {"pooling_variance": "sample"}, "population, unbiased"),
        ("revnet57", {"blocks": (1, -1, 1, 1)}, "1 in all"),
        ("revnet57", {"streams": "half"}, "formats are 'exact'"),
        ("revnet57", {"compression": 0.1}, "compression is 0.1; give an ActivationC"),
        ("revnet57", {"pooling": "mean"}, f"one of {', '.join(POOLINGS)}, but is 'me"),
        ("resnet34", {"chunk": 800_000}, "works on all channels at once"),
        *(
            ("revnet57", {name: value}, words.format(name))
            for name, values, words in (
                ("chunk", (0, -1, 1.5, "large", True), "'auto', a number of bytes, or"),
                ("zero_init_residual", ("false", 0, None), "^{} is .*takes True or"),
                ("sync_batchnorm", ("false", 0, None), "^{} is .*takes True or"),
                ("deterministic", ("false", 0, None), "^{} is .*takes True or"),
                ("memory_format", ("nhwc", None), "contiguous, channels_last, but is"),
                ("widths", (8, "8888", {"a": 8}), "^{} is .*takes a list of 4 whole"),
                ("blocks", (8, "8888", {"a": 8}), "^{} is .*takes a list of 4 whole"),
            )
            for value in values
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


@pytest.mark.parametrize("tag", ["!new:{}SpeakerEncoder", "!apply:{}build_encoder"])
def test_a_yaml_and_its_copies_make_what_the_function_makes_to_the_bit(tag):
    text = f"""
encoder: {tag.format("speechbrain_rev.lobes.")}
    name: df_revnet89
    embedding_dim: 32
    widths: [8, 8, 16, 16]
    blocks: [1, 2, 1, 1]
"""
    torch.manual_seed(0)
    encoder = load_hyperpyyaml(text)["encoder"]
    assert type(encoder) is SpeakerEncoder
    assert signature(build_encoder).parameters == signature(SpeakerEncoder).parameters
    copies = copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))
    x = feats(dtype=torch.float32)
    expected = trained(tiny("df_revnet89"), x)
    for each in (encoder, *copies):
        assert_same_bits(trained(each, x), expected)


def test_a_saved_plan_is_a_mode(tmp_path):
    modes = dict.fromkeys(tiny("revnet57", blocks=None).named_blocks(), "store")
    modes["stem"] = "recompute"
    path = tmp_path / "plan.json"
    Plan(modes, [1, 6, 25, 100], 1, 1, 1, 1.0, {}).save(path)
    encoder = build_encoder("revnet57", mode=Plan.load(path))
    assert {k: m.value for k, m in encoder.block_modes().items()} == modes
    assert encoder.channels == [1, 6, 25, 100]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.randn(2, 80, 43), r"\[batch, time, 80\], but got \[2, 80, 43\]"),
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
    encoder = tiny(
        "revnet57", pooling_variance="unbiased", streams="float", n_mels=24,
        deterministic=False, **LAST,
    )  # fmt: skip
    settings = settings_of(encoder)
    again = build_encoder("revnet57", blocks=(1, 2, 1, 1), **settings)
    assert settings_of(again) == settings
    shapes = [
        [(p.shape, p.stride()) for p in each.parameters()] for each in (again, encoder)
    ]
    assert shapes[0] == shapes[1]
    for part in ("pooling", "fc"):
        setattr(encoder, part, nn.Identity())
        message = rf"{part} of revnet57 is a Identity.*planner\.plan"
        with pytest.raises(ValueError, match=message):
            settings_of(encoder)


class TestStreams:
    """What exact streams report, and how far they are from floats."""

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

    def test_the_largest_magnitude_of_each_stage_is_given(self):
        encoder = tiny("df_revnet66")
        encoder(torch.randn(2, 43, 80)).sum().backward()
        largest = encoder.largest_streams()
        assert list(largest) == [f"stages.{i}.chain" for i in range(4)]
        assert all(0 < value < 2**14 for value in largest.values())
        # Asked again, it has seen nothing since.
        assert not any(encoder.largest_streams().values())
        assert tiny("resnet34").largest_streams() == {}

    @pytest.mark.parametrize(
        "name", but_slow(["revnet57", "revnet245", "df_revnet377"], "revnet57")
    )
    def test_rounding_moves_an_embedding_by_less_than_evaluation_may(self, name):
        blocks = (1, 1, 2, 1) if name == "revnet57" else None
        sizes = {"widths": (16, 16, 32, 32), "n_mels": 40, "blocks": blocks}
        x = feats(8, 48, torch.float32, n_mels=40)
        exact, floats = (
            tiny(name, mode="store", streams=streams, **sizes)(x)
            for streams in ("exact", "float")
        )
        assert 0 < float((exact - floats).abs().max()) < 1e-4


class Looks(TorchDispatchMode):
    """Counts where the host asks for a number on the device, and waits for it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_asks_the_device_for_nothing():
    encoder = tiny("df_revnet89", verify="raise", verify_every=1)
    # The first step reads what was compared, before it ends.
    encoder(torch.randn(2, 43, 80)).sum().backward()
    with Looks() as looks:
        for _ in range(2):  # each step reads the notes of the one before
            encoder(torch.randn(2, 43, 80)).sum().backward()
        assert looks.count == 0
        bool(torch.ones(()) > 0)
        assert looks.count == 1


@pytest.mark.parametrize(
    ("settings", "of_units", "of_chains"),
    [
        ({}, True, True),
        ({"mode": "recompute"}, True, True),
        ({"verify": None}, None, None),
        ({"streams": "float"}, True, None),
        ({"streams": "float", "mode": "recompute"}, True, True),
    ],
)
def test_blocks_that_run_twice_have_equal_bits_or_are_not_compared(
    settings, of_units, of_chains
):
    encoder = tiny("revnet57", **NARROW, **settings)
    equal = {
        name: of_chains if ".chain." in name else of_units
        for name in encoder.block_modes()
    }
    assert encoder.equal_bits() == dict.fromkeys(equal)
    encoder(narrow()).sum().backward()
    assert encoder.equal_bits() == equal
    encoder.set_mode("store")
    assert encoder.equal_bits() == {}


@pytest.mark.parametrize("mode", ["reconstruct", "recompute"])
def test_a_block_whose_second_run_differs_has_no_equal_bits(mode):
    encoder = tiny("revnet57", mode=mode, verify="warn", **NARROW)
    block = encoder.stages[0].chain.blocks[0]
    block.f = Differs(block.f)
    with pytest.warns((StreamWarning, RecomputeWarning), match="In block|second run"):
        encoder(narrow()).sum().backward()
    differing = {name for name, equal in encoder.equal_bits().items() if not equal}
    assert differing == {"stages.0.chain.0"}


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
    _, held, fine = compressed(name, "compress")
    assert 0 < distance(fine, exact) < 0.02
    coarse = compressed(name, "compress", 1e-2)[-1]
    assert distance(coarse, exact) > 2 * distance(fine, exact)
    # Streams of reversible encoders are integers, which stay as they are.
    assert held < stored_bytes / (2.5 if "rev" not in name else 1.3)
    # Blocks can have any mode beside.
    modes = ["compress", "store", "recompute"]
    modes = {n: modes[i % 3] for i, n in enumerate(encoder.block_modes())}
    encoder, _, mixed = compressed(name, modes)
    assert 0 < distance(mixed, exact) < 0.02
    blocks = [n for n, mode in modes.items() if mode == "compress"]
    prefixes = tuple(n.replace(".chain.", ".chain.blocks.") for n in blocks)
    assert encoder.compression.records
    assert all(layer.startswith(prefixes) for layer in encoder.compression.records)


#: The peak of a step with selective blocks, as a share of the stored one.
SELECTIVE_SHARES = {
    "resnet34": 0.80, "resnet101": 0.84, "df_resnet56": 0.60, "revnet46": 0.69,
    "revnet57": 0.68, "revnet140": 0.79, "revnet155": 0.78, "df_revnet66": 0.69,
    "df_revnet89": 0.70,
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_selective_blocks_hold_no_output_of_a_normalisation(name):
    peaks = []
    for mode in ("store", "selective"):
        encoder = on_meta(name, mode=mode, blocks=(2, 2, 2, 2))
        x = torch.randn(16, 200, 80, device="meta")
        peaks.append(live_bytes_peak(lambda n=encoder, x=x: n(x).sum().backward()))
    share = SELECTIVE_SHARES[name]
    assert share - 0.01 < peaks[1] / peaks[0] < share + 0.005


@pytest.mark.parametrize("chunk", [20_000, None])
@pytest.mark.parametrize("weight", ["stem.convs.0", "stages.1.entry.conv"])
def test_what_is_recomputed_in_pieces_is_compared_too(weight, chunk):
    encoder = build_encoder(
        "revnet57", widths=(16, 16, 16, 16), blocks=(1, 1, 0, 0), n_mels=24,
        mode="recompute", chunk=chunk,
    )  # fmt: skip
    loss = encoder(torch.randn(2, 40, 24)).square().sum()
    dict(encoder.named_parameters())[f"{weight}.weight"].data.mul_(-1.5)
    with pytest.raises(RuntimeError, match=weight.rpartition(".conv")[0]):
        loss.backward()


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
            grads = torch.autograd.grad(y, [x, *weights], create_graph=True)
            pairs = zip(grads, directions, strict=True)
            return sum((grad * direction).sum() for grad, direction in pairs)

        (second,) = torch.autograd.grad(slope(x), x)
        step = 1e-8  # so small that no ReLU switches
        low, high = (
            float(slope((x + sign * step * directions[0]).detach().requires_grad_()))
            for sign in (-1, 1)
        )
        expected = (high - low) / (2 * step)
        along = float((second * directions[0]).sum())
        assert along == pytest.approx(expected, rel=1e-3)

    def test_an_export_with_lengths_names_the_command(self):
        given = narrow(), LENGTHS[:2]
        with pytest.raises(
            RuntimeError, match=r"takes no lengths.*speechbrain-rev exp"
        ):
            torch.export.export(tiny("resnet34", **NARROW).eval(), given)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_those_of_torch_func_work_in_evaluation(self, name):
        encoder = tiny(name, **NARROW).eval()
        given = narrow(), LENGTHS[:2]
        parameters = {n: p.detach() for n, p in encoder.named_parameters()}
        slopes = grad(lambda p: functional_call(encoder, p, given).square().sum())
        encoder(*given).square().sum().backward()
        torch.testing.assert_close(slopes(parameters), grads_of(encoder))

    @pytest.mark.parametrize(
        "run",
        [
            tiny("resnet34", mode="recompute", **NARROW),
            tiny("revnet57", mode="store", **NARROW),
            tiny("revnet57", mode="reconstruct", **NARROW),
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
    @pytest.mark.parametrize("name", ["resnet101", "revnet46", "df_revnet89"])
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
