"""WeSpeaker's networks there and back, bit by bit, or refused by name."""

import dataclasses
import functools
import os

import numpy as np
import pytest
import safetensors.torch
import torch

from speechbrain_rev.architectures import WESPEAKER_ARCHITECTURES, architecture
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.wespeaker import (
    convert_from_wespeaker,
    convert_to_wespeaker,
    from_wespeaker,
    to_wespeaker,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.description import weights_in
from tests.run_folders import speech_like, write_audio
from tests.unit.inference.conftest import Attack, close
from tests.wespeaker import (
    BASIC,
    GeminiDFResNet,
    ResNet,
    embed,
    with_statistics,
    write_model,
)

SLOW = pytest.mark.slow
BOTTLENECK = {**BASIC, "bottleneck": True}
GEMINI = {**BASIC, "network": GeminiDFResNet}
LISTS = ("widths", "blocks")
DEEP = functools.partial(ResNet, bottleneck=True)
#: Plain networks of the further encoders, by family.
NETWORKS = {"resnet": DEEP, "df_resnet": GeminiDFResNet}
OTHERS = WESPEAKER_ARCHITECTURES.items()
SMALL = {"widths": (4, 8, 8, 8), "blocks": (1, 1, 2, 1), "embedding_dim": 16}
WEIGHTS = "embedding_model.safetensors"


def model_of(network=ResNet, **sizes):
    torch.manual_seed(0)
    model = with_statistics(network(**sizes))
    # No normalisation is as it was made, which would hide one that is left out.
    for norm in [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]:
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert not torch.any((tensor == 0) | (tensor == 1))
    return model


@pytest.fixture(scope="module")
def basic():
    return model_of(**BASIC)


@pytest.fixture
def theirs(basic, tmp_path):
    """The file of a WeSpeaker model."""
    return write_model(tmp_path, basic)


@pytest.mark.parametrize(
    ("sizes", "arch"),
    [
        (BASIC, "resnet34"),
        (BOTTLENECK, "resnet101"),
        (GEMINI, "gemini_df_resnet60"),
        ({**BASIC, "feat_dim": 40}, "resnet34"),
        ({**GEMINI, "feat_dim": 48}, "gemini_df_resnet60"),
        pytest.param({**BOTTLENECK, "blocks": (3, 4, 23, 3)}, "resnet101", marks=SLOW),
    ],
)
def test_an_embedding_is_that_of_wespeaker_from_the_waveform(sizes, arch, tmp_path):
    model = model_of(**sizes)
    encoder = convert_from_wespeaker(write_model(tmp_path, model), tmp_path / "model")
    assert (encoder.name, encoder.front_end.kind) == (arch, "kaldi")
    embedder = SpeakerEmbedder.from_run(tmp_path / "model", device="cpu")
    n_mels = sizes.get("feat_dim", 80)
    wave = torch.from_numpy(speech_like(0.73))
    assert close(embedder.embed(wave, 16000), embed(model, wave, n_mels=n_mels))
    # Audio of 16 bits comes back as the integers that Kaldi reads.
    path = write_audio(tmp_path / "a.flac", speech_like())
    rounded = np.round(speech_like().astype(np.float64) * 32768) / 32768
    wave = torch.from_numpy(rounded.astype(np.float32))
    assert close(embedder.embed(path), embed(model, wave, n_mels=n_mels))


@pytest.mark.parametrize(
    ("blocks", "network", "arch"),
    [
        ((3, 4, 6, 3), ResNet, "resnet34"),
        ((3, 8, 36, 3), DEEP, "resnet152"),
        ((2, 2, 2, 2), ResNet, "resnet34"),
        ((2, 2, 2, 2), DEEP, "resnet101"),
        ((3, 8, 63, 3), GeminiDFResNet, "gemini_df_resnet60"),
        *((row.blocks, NETWORKS[row.family], name) for name, row in OTHERS),
    ],
)
def test_every_weight_has_its_counterpart_at_any_depth(blocks, network, arch):
    with torch.device("meta"):
        whole = network(blocks)
        theirs = network(blocks, channels=4).state_dict()
    if architecture(arch).blocks == blocks:
        count = sum(p.numel() for p in whole.parameters())
        assert count == architecture(arch).parameters
    zeros = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in theirs.items()}
    settings, weights = from_wespeaker(zeros)
    assert (settings["name"], settings["blocks"]) == (arch, list(blocks))
    with torch.device("meta"):
        expected = weights_in(build_encoder(**settings).state_dict())
    shapes = [{n: t.shape for n, t in some.items()} for some in (weights, expected)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", WESPEAKER_ARCHITECTURES)
def test_embeddings_and_gradients_are_those_of_the_plain_network(name):
    row = architecture(name)
    plain = model_of(NETWORKS[row.family], blocks=row.blocks, channels=4, embed_dim=16)
    settings, weights = from_wespeaker(plain.state_dict())
    assert settings["name"] == name
    encoder = build_encoder(**settings, mode="store", pooling_variance="unbiased")
    encoder.load_state_dict(weights)
    feats = torch.randn(2, 43, 80, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(feats)
        distance = (encoder.eval()(feats)[:, 0] - expected).norm(dim=1)
    assert (distance < 1e-5 * expected.norm(dim=1)).all()
    # Batch statistics, in float64: a hundred layers amplify what float32 rounds.
    for network in (encoder.double(), plain.double()):
        y = network.train()(feats.double()).view(2, 16)
        (y * torch.linspace(-1, 1, 32, dtype=y.dtype).view(2, 16)).sum().backward()
    # Gradients have the names of weights, and go the way of these.
    tensors = encoder.state_dict() | {n: p.grad for n, p in encoder.named_parameters()}
    gradients = {
        n: t.float() if t.is_floating_point() else t for n, t in tensors.items()
    }
    theirs = to_wespeaker(settings, gradients)
    for key, parameter in plain.named_parameters():
        off = (theirs[key] - parameter.grad).norm()
        assert off <= 1e-6 * parameter.grad.norm(), key


@pytest.mark.parametrize(
    "sizes", [BASIC, BOTTLENECK, GEMINI], ids=["basic", "bottleneck", "gemini"]
)
def test_there_and_back_is_the_same_to_the_bit(sizes, tmp_path):
    model = model_of(**sizes)
    convert_from_wespeaker(write_model(tmp_path, model), tmp_path / "model")
    convert_to_wespeaker(tmp_path / "model", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    convert_from_wespeaker(tmp_path / "back.pt", tmp_path / "again")
    for once in (tmp_path / "model").iterdir():
        assert once.read_bytes() == (tmp_path / "again" / once.name).read_bytes()


@pytest.mark.parametrize(
    ("key", "prefix"),
    [(None, "module.front."), ("model", ""), ("state_dict", "model.front.")],
)
def test_what_wrappers_checkpoints_and_averages_add_is_taken_off(
    basic, tmp_path, key, prefix
):
    expected, weights = from_wespeaker(basic.state_dict())
    state = {f"{prefix}{name}": t for name, t in basic.state_dict().items()}
    outer = "module." if prefix.startswith("module.") else ""
    state[f"{outer}projection.weight"] = torch.full((5, 16), torch.nan)
    # Averaging makes fractions of counts of batches.
    state[f"{prefix}bn1.num_batches_tracked"] = torch.tensor(7.5)
    weights["stem.norms.0.num_batches_tracked"] = torch.tensor(7)
    torch.save({key: state, "epoch": 7} if key else state, tmp_path / "a.pt")
    encoder = convert_from_wespeaker(tmp_path / "a.pt", tmp_path / "model")
    said = dataclasses.asdict(encoder) | {n: list(getattr(encoder, n)) for n in LISTS}
    assert said.items() >= expected.items()
    written = weights_in(safetensors.torch.load_file(tmp_path / "model" / WEIGHTS))
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor)
        assert written[name].dtype == tensor.dtype


def without(part):
    return lambda state: {n: t for n, t in state.items() if part not in n}


def within(state):
    """A ResNet within another network."""
    larger = {"module.pooling.linear1.weight": ONE, "module.b": ONE}
    return {f"module.front.{n}": t for n, t in state.items()} | larger


ONE, ROWS = torch.ones(1), torch.ones(16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layer2.1.bn2.running_var"), "layer2.1.bn2.running_var is missing"),
        (without(".shortcut"), r"layer2.0.shortcut.0.weight is missing.* and 15 more"),
        (without(""), "no weights layer1.0.conv1.weight"),
        ({"layer1.0.conv1.weight": torch.tensor(1.0)}, "no weights layer1.0.con"),
        ({"extra.weight": ONE}, "'extra.weight' is surplus"),
        (
            {"layer1.0.conv2.weight": torch.ones(4, 4, 1, 1)},
            r"conv2.weight is \[4, 4, 1, 1\] instead of \[4, 4, 3, 3\]",
        ),
        ({"seg_1.weight": torch.ones(16, 636)}, "636 statistics.*one than TSTP"),
        ({"seg_1.weight": torch.ones(16, 0)}, "seg_1.weight is empty"),
        ({"seg_2.weight": ROWS}, "'seg_2.weight' is surplus"),
        ({"pool.linear1.weight": ONE}, "'pool.linear1.weight' is surplus"),
        (within, "it holds front.conv1.weight, "),
        (
            {"seg_1.bias": ROWS.half()},
            "seg_1.bias is of torch.float16, not torch.float32",
        ),
        ({"bn1.num_batches_tracked": torch.tensor(True)}, "torch.bool"),
        ({"seg_1.bias": ROWS / 0}, "holds NaN or infinity in seg_1.bias"),
    ],
)
def test_what_is_not_the_network_is_refused_by_name(
    basic, tmp_path, change, message, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path, state = tmp_path / "a.pt", dict(basic.state_dict())
    torch.save(change(state) if callable(change) else state | change, path)
    with pytest.raises(ValueError, match=message) as error:
        convert_from_wespeaker(path, tmp_path / "model")
    assert str(path) in str(error.value)
    assert "Taken are the averaged or last weights" in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"net": {}, "epoch": 7}, "holds net, epoch"),
        ({"conv1.weight": Attack(os.mkdir, "executed")}, "is not loaded"),
    ],
)
def test_what_is_no_state_dict_is_refused(tmp_path, saved, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=rf"a\.pt {message}.*plain tensors"):
        convert_from_wespeaker(tmp_path / "a.pt", tmp_path / "model")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.pt"]


def test_other_files_are_named_and_nothing_is_written_over(theirs, tmp_path):
    out, words = tmp_path / "model", "there already.* nothing is "
    with pytest.raises(FileNotFoundError, match=r"no file .*none.pt. Give the avg_mo"):
        convert_from_wespeaker(tmp_path / "none.pt", out)
    out.mkdir()
    convert_from_wespeaker(theirs, out)
    for there in (out, theirs):
        with pytest.raises(ValueError, match=words):
            convert_from_wespeaker(theirs, there)
    with pytest.raises(ValueError, match=words):
        convert_to_wespeaker(out, theirs)
    theirs.write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not loaded: it is damaged"):
        convert_from_wespeaker(theirs, tmp_path / "other")


CONFIG = """\
model_args: {feat_dim: 80, embed_dim: 16, pooling_func: TSTP, two_emb_layer: false}
dataset_args:
  resample_rate: 16000
  frontend: fbank
  cmvn: true
  fbank_args: {num_mel_bins: 80, frame_shift: 10, dither: 1.0}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pooling_func: TSTP", "pooling_func: TSDP", "model_args.pooling_func: 'TSDP'"),
        ("layer: false", "layer: true", "model_args.two_emb_layer: True"),
        ("shift: 10", "shift: 8", "dataset_args.fbank_args.frame_shift: 8"),
        ("feat_dim: 80", "feat_dim: 40", "feat_dim: 40"),
        ("feat_dim: 80", "<<: {feat_dim: 40}", "cannot be read as plain YAML.*merge"),
        ("feat_dim: 80", "feat_dim: !!python/name:os.mkdir", "cannot be read as pl"),
        ("feat_dim: 80", "[" * 9999, "cannot be read as plain YAML"),
        ("TSTP", f"[{'x, ' * 2000}x]", r"pooling_func: \['x', 'x', "),
    ],
)
def test_a_configuration_beside_the_weights_says_the_same(
    theirs, tmp_path, old, new, message
):
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    convert_from_wespeaker(theirs, tmp_path / "model")
    assert old in CONFIG
    config.write_text(CONFIG.replace(old, new))
    with pytest.raises(ValueError, match=message) as error:
        convert_from_wespeaker(theirs, tmp_path / "other")
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "other").exists()


def test_a_configuration_of_another_folder_is_not_opened(
    theirs, tmp_path, tmp_path_factory
):
    other = tmp_path_factory.mktemp("other") / "config.yaml"
    other.write_text(CONFIG)
    theirs.with_name("config.yaml").symlink_to(other)
    with pytest.raises(ValueError, match=r"config.yaml is .*link out of its folder"):
        convert_from_wespeaker(theirs, tmp_path / "run")


KALDI = {"kind": "kaldi", "sample_rate": 16000}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"front_end": KALDI | {"kind": "speechbrain"}},
            "is {'kind': 'speechbrain'.*, no",
        ),
        ({"front_end": KALDI | {"sample_rate": 8000}}, "'sample_rate': 8000, .*, not"),
        ({"front_end": None}, "front_end is None, not"),
        ({"pooling_variance": "population"}, "pooling_variance is population, not unb"),
        ({"n_mels": 76}, "n_mels is 76; WeSpeaker's ResNets take multiples of 8"),
        (
            {"n_mels": 72, "name": "gemini_df_resnet60"},
            "n_mels is 72; WeSpeaker's Gemini-DF-ResNets take multiples of 16",
        ),
        (
            {"name": "revnet57"},
            "revnet57 is no network of WeSpeaker's; these are: resn",
        ),
        (
            {"name": "df_resnet56"},
            "df_resnet56 is no network of WeSpeaker's; these are",
        ),
    ],
)
def test_back_goes_what_wespeaker_would_compute_alike(tmp_path, changed, message):
    given = {"name": "resnet34", "pooling_variance": "unbiased", "front_end": KALDI}
    encoder = build_encoder(**given | SMALL | changed)
    torch.save(encoder.state_dict(), tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        convert_to_wespeaker(tmp_path / "a.ckpt", tmp_path / "back.pt")
    assert not (tmp_path / "back.pt").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_dim": 32}, r"fc.weight is \[16, 160\] instead of \[32, 160\]"),
        ({"blocks": (1, 1, 3, 1)}, "stages.2.blocks.2.conv1.weight is missing"),
        ({"blocks": (1, 1, 1, 1)}, "'stages.2.blocks.1.conv1.weight' is surplus"),
        ({"name": "resnet35"}, "There is no encoder 'resnet35'. Did you mean"),
    ],
)
def test_weights_of_other_settings_do_not_go_back(settings, message):
    weights = build_encoder("resnet34", **SMALL).state_dict()
    with pytest.raises(ValueError, match=message):
        to_wespeaker({"name": "resnet34", **SMALL, **settings}, weights)
