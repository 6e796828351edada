import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
import yaml

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.inference import SpeakerEmbedder, WaveformEncoder, wespeaker
from speechbrain_rev.inference.front_ends import KaldiFbank
from speechbrain_rev.inference.wespeaker import from_wespeaker, to_wespeaker
from speechbrain_rev.lobes import build_encoder
from tests.run_folders import speech_like, write_audio, write_run
from tests.wespeaker import ResNet, embed, with_statistics

# Sums of other grouping; one part in 100,000 of the embedding's length.
TOLERANCE = 1e-5
BASIC = {"blocks": (1, 2, 1, 1), "channels": 4, "embed_dim": 16}
BOTTLENECK = {**BASIC, "bottleneck": True}


def close(a, b):
    return np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b)


def model_of(seed=0, **sizes):
    torch.manual_seed(seed)
    return with_statistics(ResNet(**sizes), seed)


def saved(folder, state_dict):
    path = folder / "avg_model.pt"
    torch.save(state_dict, path)
    return path


def zeros(model):
    return {
        n: torch.zeros(t.shape, dtype=t.dtype) for n, t in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def basic():
    return model_of(**BASIC)


@pytest.fixture(scope="module")
def converted(basic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wespeaker")
    wespeaker.convert_from_wespeaker(
        saved(folder, basic.state_dict()), folder / "model"
    )
    return folder / "model"


@pytest.mark.parametrize(
    ("sizes", "arch"),
    [
        (BASIC, "resnet34"),
        (BOTTLENECK, "resnet101"),
        ({**BASIC, "feat_dim": 40}, "resnet34"),
        ({"blocks": (3, 4, 6, 3)}, "resnet34"),
        pytest.param(
            {"blocks": (3, 4, 23, 3), "bottleneck": True},
            "resnet101",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["basic", "bottleneck", "40 bands", "ResNet34", "ResNet101"],
)
def test_an_embedding_is_that_of_wespeaker_from_the_waveform(sizes, arch, tmp_path):
    model = model_of(**sizes)
    path = saved(tmp_path, model.state_dict())
    settings = wespeaker.convert_from_wespeaker(path, tmp_path / "model")
    assert settings["arch"] == arch
    embedder = SpeakerEmbedder.from_run(tmp_path / "model", device="cpu")
    for seconds, seed in ((1.0, 0), (0.73, 1)):
        wave = torch.from_numpy(speech_like(seconds, seed=seed))
        expected = embed(model, wave, n_mels=sizes.get("feat_dim", 80))
        assert close(embedder.embed(wave, 16000), expected)


def test_audio_of_16_bits_comes_back_as_the_integers_that_kaldi_reads(
    basic, converted, tmp_path
):
    path = write_audio(tmp_path / "a.flac", speech_like())
    embedder = SpeakerEmbedder.from_run(converted, device="cpu")
    rounded = np.round(speech_like().astype(np.float64) * 32768) / 32768
    expected = embed(basic, torch.from_numpy(rounded.astype(np.float32)))
    assert close(embedder.embed([path])[0], expected)


def test_an_embedding_does_not_depend_on_its_companions(converted, tmp_path):
    # A window of 400 samples, hops of 160: also one sample more or less.
    lengths = [16000, 15999, 15920, 15919, 15600, 12960, 15760]
    paths = [
        write_audio(tmp_path / f"{i}.flac", speech_like(seed=i)[:n])
        for i, n in enumerate(lengths)
    ]
    embedder = SpeakerEmbedder.from_run(converted, device="cpu")
    rows = embedder.embed(paths)
    for path, row in zip(paths, rows, strict=True):
        assert close(row, embedder.embed([path])[0])


def test_frames_lie_within_the_utterance_and_have_no_mean():
    waves = torch.zeros(3, 1000)
    counts = torch.tensor([1000, 400, 719])
    for wave, count in zip(waves, counts, strict=True):
        wave[:count] = torch.randn(int(count))
    features, lengths = KaldiFbank()(waves, counts)
    frames = [1 + (int(n) - 400) // 160 for n in counts]
    assert features.shape == (3, max(frames), 80)
    assert (lengths * max(frames)).round().tolist() == frames == [4, 1, 2]
    torch.testing.assert_close(features.sum(1), torch.zeros(3, 80), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"399 samples, but a window .* has 400"):
        KaldiFbank()(waves, torch.tensor([1000, 399, 1000]))


def test_a_front_end_that_is_none_is_refused():
    with pytest.raises(
        ValueError, match="must be one of speechbrain, kaldi, but is 'h"
    ):
        WaveformEncoder(torch.nn.Identity(), front_end="htk")


@pytest.mark.parametrize("arch", ["resnet34", "resnet101", "resnet152"])
def test_every_weight_has_its_counterpart(arch):
    row = ARCHITECTURES[arch]
    with torch.device("meta"):
        model = ResNet(row.blocks, bottleneck=row.block == "bottleneck")
    assert sum(p.numel() for p in model.parameters()) == row.parameters
    settings, weights = from_wespeaker(zeros(model))
    assert settings["arch"] == arch
    with torch.device("meta"):
        settings.pop("arch")
        expected = build_encoder(arch, **settings).state_dict()
    assert {n: t.shape for n, t in weights.items()} == {
        n: t.shape for n, t in expected.items()
    }


@pytest.mark.parametrize(
    ("blocks", "bottleneck", "arch"),
    [
        ((2, 2, 2, 2), False, "resnet34"),
        ((10, 20, 64, 3), True, "resnet101"),
    ],
)
def test_other_depths_are_said_by_their_blocks(blocks, bottleneck, arch):
    with torch.device("meta"):
        model = ResNet(blocks, bottleneck=bottleneck, channels=4)
    theirs = zeros(model)
    settings, weights = from_wespeaker(theirs)
    assert (settings["arch"], settings["blocks"]) == (arch, list(blocks))
    assert len(weights) == len(theirs)


@pytest.mark.parametrize("sizes", [BASIC, BOTTLENECK], ids=["basic", "bottleneck"])
def test_there_and_back_is_the_same_to_the_bit(sizes, tmp_path):
    model = model_of(**sizes)
    wespeaker.convert_from_wespeaker(
        saved(tmp_path, model.state_dict()), tmp_path / "model"
    )
    wespeaker.convert_to_wespeaker(tmp_path / "model", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    model.load_state_dict(back, strict=True)
    wespeaker.convert_from_wespeaker(tmp_path / "back.pt", tmp_path / "again")
    for file in ("hyperparams.yaml", "embedding_model.ckpt"):
        once, again = (tmp_path / f / file for f in ("model", "again"))
        assert once.read_bytes() == again.read_bytes()


def test_a_classifier_is_left_out_and_fractions_of_batches_are_cut(basic, tmp_path):
    # As averaging leaves them.
    averaged = {n: torch.true_divide(t * 3, 2) for n, t in basic.state_dict().items()}
    averaged["projection.weight"] = torch.full((5, 16), torch.nan)
    averaged["bn1.num_batches_tracked"] = torch.tensor(7.5)
    _, weights = from_wespeaker(averaged)
    assert not [name for name in weights if "projection" in name]
    assert weights["stem.norms.0.num_batches_tracked"].tolist() == 7
    assert weights["stem.norms.0.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize(
    "prefix",
    ["module.", "front.", "module.front.", "model.", "module._orig_mod.", "encoder."],
)
def test_what_wrappers_put_before_all_names_is_taken_off(basic, prefix):
    expected_settings, expected = from_wespeaker(basic.state_dict())
    theirs = {f"{prefix}{name}": t for name, t in basic.state_dict().items()}
    outer = "module." if prefix.startswith("module.") else ""
    theirs[f"{outer}projection.weight"] = torch.ones(5, 16)
    settings, weights = from_wespeaker(theirs)
    assert settings == expected_settings
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def changed(**tensors):
    def change(state):
        for name, tensor in tensors.items():
            state[name.replace("__", ".")] = tensor
        return state

    return change


def without(name):
    return lambda state: {n: t for n, t in state.items() if n != name}


REFUSED = [
    (without("layer2.1.bn2.running_var"), "lacks layer2.1.bn2.running_var"),
    (without("layer2.0.bn2.num_batches_tracked"), "lacks layer2.0.bn2.num_batches"),
    (without("seg_1.weight"), "no weights seg_1.weight"),
    (
        lambda s: {n: t for n, t in s.items() if ".shortcut" not in n},
        r"lacks layer2.0.shortcut.0.weight.* and 14 more",
    ),
    (changed(extra__weight=torch.ones(1)), "holds extra.weight, which the network"),
    (
        changed(layer2__2__conv1__weight=torch.ones(8, 8, 3, 3)),
        "lacks layer2.2.bn1.weight.* and 7",
    ),
    (changed(layer5__0__conv1__weight=torch.ones(1)), "holds layer5.0.conv1.weight"),
    (changed(layer1__0__conv2__weight=torch.ones(4, 4, 1, 1)), r"shape \[4, 4, 1, 1\]"),
    (changed(layer1__0__conv1__weight=torch.tensor(1.0)), "no weights layer1.0.conv1"),
    (
        changed(conv1__weight=torch.ones(5, 1, 3, 3)),
        r"\[5, 1, 3, 3\], but \[4, 1, 3, 3",
    ),
    (changed(seg_1__weight=torch.ones(16, 636)), "636 statistics.*other one than TSTP"),
    (changed(seg_1__weight=torch.ones(16, 0)), "seg_1.weight is empty"),
    (changed(seg_2__weight=torch.ones(16, 16)), "seg_2.weight.*two_emb_layer: true"),
    (changed(seg_bn_1__running_mean=torch.ones(16)), "seg_bn_1.*two_emb_layer: true"),
    (changed(pool__linear1__weight=torch.ones(1)), "pooling with weights of its own"),
    (changed(frontend__x=torch.ones(1)), "front-end with weights of its own"),
    (
        lambda s: {f"net.{n}": t for n, t in s.items()},
        r"no weights layer1.0.conv1.weight.*holds net.conv1.weight.* and \d+ more names",
    ),
    (
        lambda s: (
            {f"module.front.{n}": t for n, t in s.items() if "seg" not in n}
            | {
                "module.pooling.linear1.weight": torch.ones(1),
                "module.bottleneck.bias": torch.ones(1),
            }
        ),
        "holds front.conv1.weight: .*a ResNet within a larger one, such as .*SimAM",
    ),
    (
        lambda s: {
            "blocks.0.conv.conv.weight": torch.ones(2),
            "mfa.weight": s["bn1.bias"],
        },
        r"no weights layer1.*it holds blocks.0.conv.conv.weight, mfa.weight\.",
    ),
    (changed(seg_1__bias=torch.ones(16).half()), "torch.float16.*weight.float"),
    (changed(seg_1__bias=torch.ones(16).double()), "torch.float64.*weight.float"),
    (changed(bn1__num_batches_tracked=torch.tensor(True)), "torch.bool"),
    (
        changed(conv1__weight=torch.ones(4, 1, 3, 3).to_sparse()),
        "it names 'torch._utils._rebuild_sparse_tensor'",
    ),
    (changed(bn1__num_batches_tracked=torch.tensor(torch.nan)), "NaN or infinity"),
    (changed(bn1__weight=torch.full((4,), torch.nan)), "bn1.weight holds NaN"),
    (changed(seg_1__bias=torch.full((16,), torch.inf)), "seg_1.bias holds NaN or inf"),
    (lambda s: {}, "no weights layer1.0.conv1.weight"),
    (lambda s: {"net": s, "epoch": 7}, "no state dict .*: it holds net, epoch"),
    (lambda s: list(s.values()), "no state dict .*: it holds a list"),
    (lambda s: {**s, 3: s["bn1.bias"]}, "no state dict"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_not_the_network_is_refused_by_name(basic, tmp_path, change, message):
    path = saved(tmp_path, change(dict(basic.state_dict())))
    with pytest.raises(ValueError, match=message) as refused:
        wespeaker.convert_from_wespeaker(path, tmp_path / "model")
    assert str(path) in str(refused.value)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": s, "epoch": 7},
        lambda s: {"state_dict": {f"model.front.{n}": t for n, t in s.items()}},
    ],
)
def test_a_state_dict_in_a_checkpoint_of_training_is_found(basic, tmp_path, wrap):
    expected, _ = from_wespeaker(basic.state_dict())
    path = saved(tmp_path, wrap(basic.state_dict()))
    settings = wespeaker.convert_from_wespeaker(path, tmp_path / "model")
    assert settings.items() >= expected.items()


class _Executed:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def compress(path):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save({"conv1.weight": _Executed()}, path),
        lambda path: path.write_bytes(pickle.dumps(_Executed())),
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        lambda path: path.write_bytes(b"<!DOCTYPE html>"),
        lambda path: path.write_bytes(b""),
        # Pickles that take what is not there.
        lambda path: path.write_bytes(b"\x80\x02."),
        lambda path: path.write_bytes(b"\x80\x02h\x05."),
        lambda path: path.write_bytes(path.read_bytes()[:-1000]),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        compress,
    ],
)
def test_a_file_of_anything_else_is_named_and_never_executed(
    basic, tmp_path, write, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, basic.state_dict())
    write(path)
    with pytest.raises(
        ValueError, match="Taken are the averaged or last weights"
    ) as no:
        wespeaker.convert_from_wespeaker(path, tmp_path / "model")
    assert str(path) in str(no.value)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "model").exists()


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no file .*none.pt. Give the avg_model"
    ):
        wespeaker.convert_from_wespeaker(tmp_path / "none.pt", tmp_path / "model")
    large = tmp_path / "large.pt"
    with large.open("wb") as file:
        file.truncate(2**32 + 1)
    with pytest.raises(ValueError, match="4,294,967,297 bytes, more than"):
        wespeaker.convert_from_wespeaker(large, tmp_path / "model")


def test_nothing_is_written_over(basic, tmp_path):
    path = saved(tmp_path, basic.state_dict())
    (tmp_path / "empty").mkdir()
    wespeaker.convert_from_wespeaker(path, tmp_path / "empty")
    for there in (tmp_path / "empty", path):
        with pytest.raises(
            ValueError, match="there already, and nothing is written ove"
        ):
            wespeaker.convert_from_wespeaker(path, there)
    with pytest.raises(ValueError, match="there already, and nothing is written over"):
        wespeaker.convert_to_wespeaker(tmp_path / "empty", path)


CONFIG = {
    "model": "ResNet34",
    "model_args": {
        "feat_dim": 80,
        "embed_dim": 16,
        "pooling_func": "TSTP",
        "two_emb_layer": False,
    },
    "dataset_args": {
        "resample_rate": 16000,
        "fbank_args": {"num_mel_bins": 80, "frame_shift": 10, "dither": 1.0},
    },
}


def test_no_normalisation_of_the_comparison_is_as_it_was_made(basic):
    norms = [m for m in basic.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) > 9
    for norm in norms:
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert not torch.any((tensor == 0) | (tensor == 1))


@pytest.mark.parametrize(
    "name", ["conv1.weight", "layer4.0.conv1.weight", "seg_1.weight"]
)
def test_weights_of_no_size_are_refused_by_name(basic, name):
    state = dict(basic.state_dict())
    state[name] = state[name][:0]
    with pytest.raises(ValueError, match=name):
        from_wespeaker(state)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_configuration_that_is_no_file_of_its_own_is_not_opened(
    basic, tmp_path, kind
):
    torch.save(basic.state_dict(), tmp_path / "avg_model.pt")
    path = tmp_path / "config.yaml"
    if kind == "link":
        path.symlink_to("/dev/zero")
    else:
        (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    words = "link out of its folder" if kind == "link" else "no regular file"
    with pytest.raises(ValueError, match=f"config.yaml is .*{words}|{words}"):
        wespeaker.convert_from_wespeaker(tmp_path / "avg_model.pt", tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_args: &a {pooling_func: [*a]}\n", r"\*a is a part of itself"),
        ("x: &a [1]\nmodel_args: {pooling_func: *a}\n", r"pooling_func: \[1\]"),
        ("x: &a {pooling_func: TSDP}\nmodel_args: *a\n", "pooling_func: 'TSDP'"),
        ("model_args: {<<: {pooling_func: TSDP}}\n", "pooling_func: 'TSDP'"),
    ],
)
def test_what_a_configuration_refers_to_is_compared(basic, tmp_path, text, message):
    torch.save(basic.state_dict(), tmp_path / "avg_model.pt")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        wespeaker.convert_from_wespeaker(tmp_path / "avg_model.pt", tmp_path / "run")


def test_what_a_configuration_says_at_length_is_not_repeated(basic, tmp_path):
    torch.save(basic.state_dict(), tmp_path / "avg_model.pt")
    long = f"model_args: {{pooling_func: [{'x, ' * 2000}x]}}\n"
    (tmp_path / "config.yaml").write_text(long)
    with pytest.raises(ValueError, match=r"pooling_func: \['x', 'x', ") as error:
        wespeaker.convert_from_wespeaker(tmp_path / "avg_model.pt", tmp_path / "run")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (("model_args",), "pooling_func", "TSDP"),
        (("model_args",), "feat_dim", 40),
        (("model_args",), "embed_dim", 256),
        (("model_args",), "two_emb_layer", True),
        (("dataset_args",), "resample_rate", 8000),
        (("dataset_args",), "frontend", "s3prl"),
        (("dataset_args",), "cmvn", False),
        (("dataset_args", "fbank_args"), "num_mel_bins", 40),
        (("dataset_args", "fbank_args"), "frame_shift", 8),
    ],
)
def test_a_configuration_beside_the_weights_says_the_same(
    basic, tmp_path, section, key, value
):
    path = saved(tmp_path, basic.state_dict())
    config = yaml.safe_load(yaml.safe_dump(CONFIG))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    wespeaker.convert_from_wespeaker(path, tmp_path / "model")
    inner = config
    for name in section:
        inner = inner[name]
    inner[key] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    message = (
        f"config.yaml says {'.'.join((*section, key))}: {value!r}, but the weights"
    )
    with pytest.raises(ValueError, match=message):
        wespeaker.convert_from_wespeaker(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("front_end: htk", r"front_end: 'htk' \(it takes speechbrain or kaldi\)"),
        ("front_end: [kaldi]", "front_end"),
        ("pooling_variance: sample", "takes population or unbiased"),
        ("pooling_variance: null", "pooling_variance: None"),
    ],
)
def test_a_run_of_another_front_end_or_pooling_is_refused(tmp_path, line, message):
    write_run(tmp_path)
    with (tmp_path / "hyperparams.yaml").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        SpeakerEmbedder.from_run(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"front_end": "speechbrain"}, "front_end is speechbrain, not kaldi"),
        ({"pooling_variance": "population"}, "pooling_variance is population, not unb"),
        ({"sample_rate": 8000}, "sample_rate is 8000, not 16000"),
        ({"n_mels": 76}, "n_mels is 76; WeSpeaker's ResNets take multiples of 8"),
        (
            {"embedding_dim": 32},
            r"fc.weight has the shape \[16, 640\], but \[32, 640\]",
        ),
        ({"blocks": [1, 1, 1, 1]}, "which the network of its other weights has not"),
        ({"arch": "revnet57"}, "revnet57 is of the family revnet; WeSpeaker's ResNets"),
        ({"arch": "resnet35"}, "There is no encoder 'resnet35'. Did you mean"),
    ],
)
def test_back_goes_what_wespeaker_would_compute_alike(
    converted, tmp_path, changed, message
):
    settings = yaml.safe_load((converted / "hyperparams.yaml").read_text()) | changed
    (tmp_path / "hyperparams.yaml").write_text(yaml.safe_dump(settings))
    weights = converted / "embedding_model.ckpt"
    (tmp_path / "embedding_model.ckpt").write_bytes(weights.read_bytes())
    with pytest.raises(ValueError, match=message):
        wespeaker.convert_to_wespeaker(tmp_path, tmp_path / "back.pt")
    assert not (tmp_path / "back.pt").exists()


def test_weights_of_a_reversible_encoder_have_no_names_there():
    with pytest.raises(ValueError, match="revnet57 is of the family revnet"):
        to_wespeaker({"arch": "revnet57"}, {})
