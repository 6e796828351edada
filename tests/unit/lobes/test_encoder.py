"""Every encoder of the table: size, shapes, modes, errors."""

import copy
import functools
import inspect
import pickle

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from torch import nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder, inference_form
from speechbrain_rev.planner import Plan
from speechbrain_rev.planner.memory import live_bytes_peak
from tests.unit.lobes.encoders import KINDS, feats, tiny

NAMES = list(ARCHITECTURES)
REVERSIBLE = [n for n, row in ARCHITECTURES.items() if row.reversible]


@functools.cache
def whole(name):
    """The encoder as the table has it, without contents."""
    with torch.device("meta"):
        return build_encoder(name).eval()


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count_is_the_tables(name):
    assert sum(p.numel() for p in whole(name).parameters()) == (
        ARCHITECTURES[name].parameters
    )


@pytest.mark.parametrize("name", NAMES)
def test_layer_count_is_the_names(name):
    # The count leaves out shortcuts, and in DF-ResNets' names the downsampling.
    modules = whole(name).named_modules()
    convolutions = [
        n
        for n, m in modules
        if isinstance(m, nn.Conv2d)
        and "shortcut" not in n
        and not (name.startswith("df_resnet") and "entry" in n)
    ]
    assert len(convolutions) + 1 == ARCHITECTURES[name].layers


@pytest.mark.parametrize("name", NAMES)
def test_output_is_one_embedding_per_utterance(name):
    x = feats(2, 21, torch.float32).to("meta")
    with torch.no_grad():
        assert whole(name)(x).shape == (2, 1, 256)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("time", [9, 16, 43])
def test_any_number_of_frames_works_in_training(name, time):
    encoder = tiny(name)
    y = encoder(feats(3, time, torch.float32))
    assert y.shape == (3, 1, 32)
    y.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters()
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("time", [40, 43])
def test_gradients_and_buffers_of_all_modes_are_equal(name, time):
    modes = ["store", "recompute"]
    modes += ["reconstruct"] if ARCHITECTURES[name].reversible else []
    results = {}
    for mode in modes:
        encoder = tiny(name, mode=mode).double()
        y = encoder(feats(time=time))
        (y * torch.linspace(-1, 1, 32)).sum().backward()
        grads = [p.grad for p in encoder.parameters()]
        results[mode] = y, grads, dict(encoder.named_buffers())
    y, grads, buffers = results["store"]
    for found_y, found, found_buffers in results.values():
        assert torch.equal(found_y, y)
        torch.testing.assert_close(found, grads)
        for key, buffer in buffers.items():
            assert torch.equal(found_buffers[key], buffer), key


@pytest.mark.parametrize("name", KINDS)
def test_state_dict_keys_are_the_same_in_every_mode(name):
    encoder = tiny(name)
    keys = list(encoder.state_dict())
    for mode in ("store", "recompute"):
        encoder.set_mode(mode)
        assert list(encoder.state_dict()) == keys


def test_modes_are_set_by_name_and_the_rest_stays():
    encoder = tiny("revnet57")
    encoder.set_mode({"stem": "store", "stages.1.chain.1": "recompute"})
    modes = encoder.block_modes()
    assert modes["stem"] == "store"
    assert modes["stages.1.chain.0"] == "reconstruct"
    assert modes["stages.1.chain.1"] == "recompute"
    assert modes["stages.1.entry"] == "recompute"
    assert encoder.stages[1].chain.modes == ["reconstruct", "recompute"]


def test_the_default_mode_follows_the_family():
    assert set(tiny("resnet34").block_modes().values()) == {"store"}
    modes = tiny("df_revnet89").block_modes()
    assert all(modes[n] == "reconstruct" for n in modes if "chain" in n)


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


@pytest.mark.parametrize("switch", ["zero_init_residual", "sync_batchnorm"])
@pytest.mark.parametrize("value", ["false", "maybe", 0, None])
def test_a_switch_takes_true_or_false(switch, value):
    with pytest.raises(
        ValueError, match=rf"^{switch} is {value!r}, but takes True or Fa"
    ):
        tiny("revnet57", **{switch: value})


@pytest.mark.parametrize("sizes", ["widths", "blocks"])
@pytest.mark.parametrize("value", [8, "8888", {"a": 8}])
def test_sizes_of_stages_are_lists(sizes, value):
    with pytest.raises(
        ValueError, match=rf"^{sizes} is .*, but takes a list of 4 whole"
    ):
        tiny("revnet57", **{sizes: value})


def test_reconstruction_saves_memory_over_storing_and_over_the_vanilla_encoder():
    x = feats(2, 200, torch.float32).to("meta")

    def peak(name, mode):
        encoder = tiny(name, mode=mode, widths=(24, 48, 96, 152), blocks=(2, 3, 5, 3))
        encoder.requires_grad_(False)
        encoder.stem.requires_grad_(True)
        encoder.to("meta")
        return live_bytes_peak(lambda: encoder(x).square().sum().backward())

    assert peak("revnet57", "reconstruct") < 0.45 * peak("revnet57", "store")
    assert peak("revnet57", "reconstruct") < 0.45 * peak("resnet34", "store")
    assert peak("resnet34", "recompute") < 0.6 * peak("resnet34", "store")


@pytest.mark.parametrize("training", [False, True])
def test_inference_mode_works(training):
    encoder = tiny("revnet57").train(training)
    x = feats(dtype=torch.float32)
    with torch.no_grad():
        expected = copy.deepcopy(encoder)(x)
    with torch.inference_mode():
        assert torch.equal(encoder(x.clone()), expected)


def test_copies_and_pickles_embed_alike():
    encoder = tiny("revnet57").eval()
    x = feats(dtype=torch.float32)
    for twin in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert torch.equal(twin(x), encoder(x))
        assert twin.block_modes() == encoder.block_modes()


@pytest.mark.parametrize("tag", ["!new:{}.SpeakerEncoder", "!apply:{}.build_encoder"])
@pytest.mark.parametrize("name", KINDS)
def test_a_yaml_makes_what_the_function_makes_to_the_bit(name, tag):
    text = f"""
encoder: {tag.format("speechbrain_rev.lobes")}
    name: {name}
    embedding_dim: 32
    widths: [8, 8, 16, 16]
    blocks: [1, 2, 1, 1]
"""
    torch.manual_seed(0)
    encoder = load_hyperpyyaml(text)["encoder"]
    assert type(encoder) is SpeakerEncoder
    copies = copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))
    expected = tiny(name)
    state = expected.state_dict()
    x = feats(dtype=torch.float32)
    y = expected(x)
    y.square().sum().backward()
    for each in (encoder, *copies):
        assert list(each.state_dict()) == list(state)
        found = each(x)
        found.square().sum().backward()
        assert torch.equal(found, y)
        assert all(map(torch.equal, each.state_dict().values(), state.values()))
        pairs = zip(each.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


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


@pytest.mark.parametrize("correction", [0, 1])
def test_pooling_takes_the_variance_asked_for(correction):
    kind = ["population", "unbiased"][correction]
    encoder = tiny("resnet34", pooling_variance=kind).eval()
    maps = torch.randn(2, 16, 10, 6)
    pooled = []
    encoder.fc.register_forward_hook(lambda m, i, o: pooled.append(i[0]))
    encoder.stages[-1].blocks[-1].register_forward_hook(lambda m, i, o: maps)
    encoder(feats(2, 43, torch.float32))
    rows = maps.flatten(1, 2)
    std = (rows.var(2, correction=correction) + 1e-7).sqrt()
    torch.testing.assert_close(pooled[0], torch.cat([rows.mean(2), std], 1))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 80, 43), r"takes filterbanks \[batch, time, 80\], but got \[2, 80, 43\]"),
        ((2, 43), "takes filterbanks"),
        ((2, 1, 43, 80), "takes filterbanks"),
        ((2, 8, 80), "at least 9 frames"),
    ],
)
def test_input_of_a_wrong_shape_is_refused(shape, words):
    with pytest.raises(ValueError, match=words):
        tiny("revnet57")(torch.randn(shape))


@pytest.mark.parametrize("kind", ["int64", "int16", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("form", [lambda encoder: encoder, inference_form])
def test_features_that_are_no_floats_are_refused(kind, form):
    encoder = form(tiny("revnet57").eval())
    whole = torch.ones(2, 43, 80, dtype=getattr(torch, kind))
    with pytest.raises(
        ValueError, match=rf"as a tensor of floats, but got torch\.{kind}"
    ):
        encoder(whole)
    with pytest.raises(ValueError, match="as a tensor of floats, but got float32"):
        encoder(
            whole.float().numpy() if kind != "complex64" else np.ones(2, np.float32)
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"widths": (8, 8, 8)}, "each of the 4 stages"),
        ({"widths": (8, 10, 8, 8)}, "multiples of 4, but 10"),
        ({"n_mels": 81}, "multiple of 8, but is 81"),
        ({"embedding_dim": 0}, "at least 1"),
        ({"pooling_variance": "sample"}, "population, unbiased"),
        ({"blocks": (1, -1, 1, 1)}, "1 in all"),
        ({"streams": "half"}, "formats are 'float'"),
        ({"compression": 0.1}, "compression is 0.1; give an ActivationCompression"),
        ({"mode": "forget"}, "the modes are"),
    ],
)
def test_impossible_sizes_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        tiny("revnet57", **settings)
    with pytest.raises(ValueError, match=words):
        SpeakerEncoder("revnet57", **settings)


@pytest.mark.parametrize("name", ["revnet46", "df_revnet66", "resnet34"])
def test_other_numbers_of_mel_bands_work(name):
    encoder = tiny(name, n_mels=43)
    assert encoder(torch.randn(2, 20, 43)).shape == (2, 1, 32)


def test_a_saved_plan_is_a_mode_in_a_yaml_of_ones_own(tmp_path):
    with torch.device("meta"):
        like = build_encoder("revnet57")
    modes = dict.fromkeys(like.named_blocks(), "store")
    modes["stem"] = "recompute"
    path = tmp_path / "plan.json"
    Plan(modes, [1, 6, 25, 100], 1, 1, 1, 1.0, {}).save(path)
    text = f"""
mode: !apply:speechbrain_rev.planner.Plan.load [{path}]
encoder: !apply:speechbrain_rev.lobes.build_encoder
    name: revnet57
    mode: !ref <mode>
"""
    encoder = load_hyperpyyaml(text)["encoder"]
    assert {k: m.value for k, m in encoder.block_modes().items()} == modes
    assert encoder.channels == [1, 6, 25, 100]
