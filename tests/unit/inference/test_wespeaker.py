"""WeSpeaker's ResNets there and back, bit by bit, or refused by name."""

import os

import numpy as np
import pytest
import torch
import yaml

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.wespeaker import (
    convert_from_wespeaker,
    convert_to_wespeaker,
    from_wespeaker,
    to_wespeaker,
)
from speechbrain_rev.lobes import build_encoder
from tests.run_folders import speech_like, write_audio
from tests.unit.inference.conftest import Attack, close
from tests.wespeaker import BASIC, ResNet, embed, with_statistics, write_model

SLOW = pytest.mark.slow
BOTTLENECK = {**BASIC, "bottleneck": True}
YAML, WEIGHTS = "hyperparams.yaml", "embedding_model.ckpt"


def model_of(**sizes):
    torch.manual_seed(0)
    model = with_statistics(ResNet(**sizes))
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


@pytest.fixture(scope="module")
def converted(basic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wespeaker")
    convert_from_wespeaker(write_model(folder, basic), folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("sizes", "arch"),
    [
        (BASIC, "resnet34"),
        (BOTTLENECK, "resnet101"),
        ({**BASIC, "feat_dim": 40}, "resnet34"),
        pytest.param({**BOTTLENECK, "blocks": (3, 4, 23, 3)}, "resnet101", marks=SLOW),
    ],
)
def test_an_embedding_is_that_of_wespeaker_from_the_waveform(sizes, arch, tmp_path):
    model = model_of(**sizes)
    settings = convert_from_wespeaker(write_model(tmp_path, model), tmp_path / "model")
    assert settings["arch"] == arch
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
    ("blocks", "bottleneck", "arch"),
    [
        ((3, 4, 6, 3), False, "resnet34"),
        ((3, 8, 36, 3), True, "resnet152"),
        ((2, 2, 2, 2), False, "resnet34"),
        ((2, 2, 2, 2), True, "resnet101"),
    ],
)
def test_every_weight_has_its_counterpart_at_any_depth(blocks, bottleneck, arch):
    with torch.device("meta"):
        whole = ResNet(blocks, bottleneck=bottleneck)
        theirs = ResNet(blocks, bottleneck=bottleneck, channels=4).state_dict()
    if ARCHITECTURES[arch].blocks == blocks:
        count = sum(p.numel() for p in whole.parameters())
        assert count == ARCHITECTURES[arch].parameters
    zeros = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in theirs.items()}
    settings, weights = from_wespeaker(zeros)
    assert (settings.pop("arch"), settings["blocks"]) == (arch, list(blocks))
    with torch.device("meta"):
        expected = build_encoder(arch, **settings).state_dict()
    shapes = [{n: t.shape for n, t in some.items()} for some in (weights, expected)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("sizes", [BASIC, BOTTLENECK], ids=["basic", "bottleneck"])
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
    for file in (YAML, WEIGHTS):
        once, again = (tmp_path / f / file for f in ("model", "again"))
        assert once.read_bytes() == again.read_bytes()


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
    settings = convert_from_wespeaker(tmp_path / "a.pt", tmp_path / "run")
    assert settings.items() >= expected.items()
    written = torch.load(tmp_path / "run" / WEIGHTS, weights_only=True)
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
        (without("layer2.1.bn2.running_var"), "lacks layer2.1.bn2.running_var"),
        (without(".shortcut"), r"lacks layer2.0.shortcut.0.weight.* and 14 more"),
        (without(""), "no weights layer1.0.conv1.weight"),
        ({"layer1.0.conv1.weight": torch.tensor(1.0)}, "no weights layer1.0.con"),
        ({"extra.weight": ONE}, "holds extra.weight, which the network"),
        ({"layer1.0.conv2.weight": torch.ones(4, 4, 1, 1)}, r"shape \[4, 4, 1, "),
        ({"seg_1.weight": torch.ones(16, 636)}, "636 statistics.*one than TSTP"),
        ({"seg_1.weight": torch.ones(16, 0)}, "seg_1.weight is empty"),
        ({"seg_2.weight": ROWS}, "seg_2.weight.*two_emb_layer: true"),
        ({"pool.linear1.weight": ONE}, "pooling with weights of its own"),
        (within, "holds front.conv1.weight: .*a ResNet within a larger one.*SimAM"),
        ({"seg_1.bias": ROWS.half()}, "torch.float16.*weight.float"),
        ({"bn1.num_batches_tracked": torch.tensor(True)}, "torch.bool"),
        ({"seg_1.bias": ROWS / 0}, "seg_1.bias holds NaN or inf"),
        (lambda s: {"net": s, "epoch": 7}, "no state dict .*: it holds net, epoch"),
        ({"conv1.weight": Attack(os.mkdir, "executed")}, "names 'posix.mkdir'"),
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
    with pytest.raises(ValueError, match="Taken are the averaged or last weights"):
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
        ("feat_dim: 80", "<<: {feat_dim: 40}", "feat_dim: 40"),
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"front_end": "speechbrain"}, "front_end is speechbrain, not kaldi"),
        ({"n_mels": 76}, "n_mels is 76; WeSpeaker's ResNets take multiples of 8"),
        ({"embedding_dim": 32}, r"has the shape \[16, 640\], but \[32, 640\]"),
        ({"blocks": [1, 1, 1, 1]}, "which the network of its other weights has not"),
        ({"arch": "revnet57"}, "revnet57 is of the family revnet; WeSpeaker's ResNets"),
        ({"arch": "resnet35"}, "There is no encoder 'resnet35'. Did you mean"),
    ],
)
def test_back_goes_what_wespeaker_would_compute_alike(
    converted, tmp_path, changed, message
):
    settings = yaml.safe_load((converted / YAML).read_text()) | changed
    (tmp_path / YAML).write_text(yaml.safe_dump(settings))
    (tmp_path / WEIGHTS).write_bytes((converted / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match=message):
        convert_to_wespeaker(tmp_path, tmp_path / "back.pt")
    assert not (tmp_path / "back.pt").exists()
    with pytest.raises(ValueError, match="revnet57 is of the family revnet"):
        to_wespeaker({"arch": "revnet57"}, {})
