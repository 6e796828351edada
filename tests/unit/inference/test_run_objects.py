"""Runs of YAMLs in SpeechBrain's manner, whose objects say what was trained."""

import re
import shutil

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.inference.classifiers import EncoderClassifier

from speechbrain_rev import cli
from speechbrain_rev.inference import SpeakerEmbedder, export_run, read_cohort
from speechbrain_rev.inference.model_folder import run_settings
from speechbrain_rev.inference.run_folder import ENCODERS, read_classifier, read_weights
from tests.recipes.stock import write_experiment
from tests.run_folders import SPEAKERS, speech_like, write_audio

ENCODER = "!apply:speechbrain_rev.lobes.build_encoder"
FBANK = "!new:speechbrain.lobes.features.Fbank"
NORM = "!new:speechbrain.processing.features.InputNormalization"
HEAD = "!new:speechbrain.lobes.models.ECAPA_TDNN.Classifier"
COUNTER = "!new:speechbrain.utils.epoch_loop.EpochCounter"
#: With names of its own choosing, where this package's files have others.
STOCK = f"""\
output_folder: !PLACEHOLDER
save_folder: !ref <output_folder>/save
mels: 24
dim: 16
speakers: 3
rate: 16000
stages: [1, 1, 1, 1]
fbank: {FBANK}
    n_mels: !ref <mels>
    sample_rate: !ref <rate>
    deltas: false
    left_frames: 0
    f_max: 8000
normaliser: {NORM}
    norm_type: sentence
    std_norm: false
model: {ENCODER}
    name: revnet57
    n_mels: !ref <mels>
    embedding_dim: !ref <dim>
    widths: [8, 16, 16, 16]
    blocks: !ref <stages>
    mode: recompute
head: {HEAD}
    input_size: !ref <dim>
    out_neurons: !ref <speakers>
epochs: {COUNTER}
    limit: 2
modules:
    a: !ref <fbank>
    b: !ref <normaliser>
    c: !ref <model>
    d: !ref <head>
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save_folder>
    recoverables:
        network: !ref <model>
        top: !ref <head>
        counter: !ref <epochs>
lr: !ref <rate> / 1000
seed: !apply:random.randint [1, 9]
batch_size: 4
"""


def write_stock(folder, text=STOCK, *, written=None, epochs=2, resolved=True):
    """Write what SpeechBrain leaves of a training by a YAML; what the YAML builds.

    The file of the run is ``written`` instead where that is given.
    """
    folder.mkdir(exist_ok=True)
    source = folder.parent / "source.yaml"
    run = {"output_folder": str(folder)}
    source.write_text(written or text)
    if resolved:
        write_experiment(folder, source, run)
    else:
        text_of_run = source.read_text().replace("!PLACEHOLDER", str(folder))
        (folder / "hyperparams.yaml").write_text(text_of_run)
    torch.manual_seed(0)
    made = load_hyperpyyaml(text, run)
    for name, buffer in made["model"].named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-0.1, 0.1)
    for _ in range(epochs):
        next(made["epochs"])
        made["checkpointer"].save_and_keep_only(meta={"ErrorRate": 0.5})
    labels = CategoricalEncoder()
    labels.update_from_iterable(SPEAKERS)
    (folder / "save").mkdir(exist_ok=True)
    labels.save(folder / "save/label_encoder.txt")
    return made


def embedded(made, wave):
    """What the objects of a file make of a waveform, as SpeechBrain's script runs them."""
    model = made["model"].eval()
    with torch.no_grad():
        features = made["fbank"](wave[None])
        return model(made["normaliser"](features, torch.ones(1))).flatten().numpy()


def assert_near(found, expected):
    # On a CPU normalisations are folded into convolutions, whose sums round otherwise.
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def wave():
    return torch.from_numpy(speech_like())


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock") / "run"
    return folder, write_stock(folder)


@pytest.mark.parametrize("resolved", [True, False])
@pytest.mark.parametrize("tag", ENCODERS)
def test_a_run_of_names_of_its_own_embeds_as_its_objects_do(
    tmp_path, wave, tag, resolved
):
    written = STOCK.replace(ENCODER, tag)
    run = tmp_path / "run"
    made = write_stock(run, written=written, resolved=resolved)
    assert ("*id00" in (run / "hyperparams.yaml").read_text()) == resolved
    embedder = SpeakerEmbedder.from_run(run, device="cpu")
    assert_near(embedder.embed(wave, 16000), embedded(made, wave))
    assert read_weights(run).path.name == "network.ckpt"
    assert read_classifier(run).path.name == "top.ckpt"


def test_commands_take_such_a_run(stock, tmp_path, wave, capsys):
    run, made = str(stock[0]), stock[1]
    audio = str(write_audio(tmp_path / "a.wav", wave.numpy()))
    out = str(tmp_path / "embeddings.npz")
    assert cli.main(["embed", run, audio, "--out", out, "--device", "cpu"]) == 0
    assert_near(np.load(out)["embeddings"][0], embedded(made, wave))
    assert cli.main(["verify", run, audio, audio, "--device", "cpu"]) == 0
    assert cli.main(["export", run, str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    assert "cohort.safetensors" in said
    assert "the end of its training" not in said


def test_what_is_exported_of_it_loads_in_speechbrain(stock, tmp_path, wave):
    folder, made = stock
    export_run(folder, tmp_path / "model")
    expected = embedded(made, wave)
    embedder = SpeakerEmbedder.from_hparams(tmp_path / "model", device="cpu")
    assert_near(embedder.embed(wave, 16000), expected)
    ran = SpeakerEmbedder.from_run(folder, device="cpu")
    assert embedder.fingerprint == ran.fingerprint
    classifier = EncoderClassifier.from_hparams(str(tmp_path / "model"))
    cosines, *_, (label,) = classifier.classify_batch(wave[None])
    with torch.no_grad():
        theirs = made["head"](torch.from_numpy(expected)[None, None]).flatten()
    assert torch.allclose(cosines[0], theirs, atol=1e-5)
    assert label == SPEAKERS[int(theirs.argmax())]
    card = (tmp_path / "model/README.md").read_text()
    # What is no plain value, or has another name, is no setting that a card shows.
    assert "| lr | 16.0 |" in card
    assert "| batch_size | 4 |" in card
    assert "| seed |" not in card


def test_nothing_that_the_file_names_is_built(stock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = (stock[0] / "hyperparams.yaml").read_text()
    lines = "evil: !apply:os.mkdir [executed]\nx: !!python/object/apply:os.mkdir [y]\n"
    run = tmp_path / "run"
    run.mkdir()
    (run / "hyperparams.yaml").write_text(content + lines)
    assert run_settings(run)["arch"] == "revnet57"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def changed(line, *others):
    """The file with lines in place of those that begin alike."""
    text = STOCK
    for new in (line, *others):
        key = new.lstrip().partition(":")[0]
        (old,) = [x for x in text.splitlines() if x.lstrip().startswith(f"{key}:")]
        text = text.replace(f"{old}\n", f"{new}\n")
    return text


def settings_of(tmp_path, text):
    path = tmp_path / "hyperparams.yaml"
    path.write_text(text.replace("!PLACEHOLDER", str(tmp_path)))
    return run_settings(tmp_path)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("    deltas: true", "deltas: True.*deltas: False only"),
        ("    deltas: false\n    context: true", "context: True.*context: False only"),
        ("    deltas: false\n    requires_grad: true", "requires_grad: True"),
        (
            "    deltas: false\n    win_length: 32",
            "win_length: 32.*win_length: 25 only",
        ),
        ("    deltas: false\n    hop_length: 12.5", "hop_length: 12.5"),
        ("    deltas: false\n    f_min: 20", "f_min: 20.*f_min: 0 only"),
        ("    deltas: false\n    n_fft: 512", "n_fft: 512"),
        ("    deltas: false\n    filter_shape: gaussian", "filter_shape: gaussian"),
        ("    f_max: 7600", "f_max: 7600.*f_max: null only"),
        ("    norm_type: global", "norm_type: global.*norm_type: sentence only"),
        ("    norm_type: batch", "norm_type: batch"),
        ("    std_norm: true", "std_norm: True.*std_norm: False only"),
        ("    std_norm: false\n    mean_norm: false", "mean_norm: False"),
    ],
)
def test_features_that_are_made_otherwise_are_refused_by_name(tmp_path, line, shown):
    with pytest.raises(ValueError, match=rf"hyperparams\.yaml, line \d+: .*{shown}"):
        settings_of(tmp_path, changed(line))


@pytest.mark.parametrize(
    "line",
    [
        "    f_max: null",
        "    deltas: false\n    param_rand_factor: 0.1\n    right_frames: 3",
        "    deltas: false\n    win_length: 25.0\n    requires_grad: false",
        "    std_norm: false\n    update_until_epoch: 4\n    avoid_padding_norm: true",
        f"fbank: &f {FBANK}",
    ],
)
def test_what_changes_no_feature_is_taken(tmp_path, line):
    found = settings_of(tmp_path, changed(line))
    assert (found["n_mels"], found["sample_rate"]) == (24, 16000)


def test_what_an_object_is_not_given_is_its_default(tmp_path):
    text = STOCK.replace("    std_norm: false\n", "")
    with pytest.raises(ValueError, match=r"std_norm: True \(SpeechBrain's default\)"):
        settings_of(tmp_path, text)
    with pytest.raises(ValueError, match="std_norm: True, but"):
        settings_of(tmp_path, changed("    std_norm: true"))
    with pytest.raises(ValueError, match=r"takes n_mels 24, but the Fbank makes 40"):
        settings_of(tmp_path, STOCK.replace(f"{FBANK}\n    n_mels: !ref <mels>", FBANK))
    text = STOCK.replace("    n_mels: !ref <mels>\n", "    n_mels: 80\n", 1)
    text = text.replace("    n_mels: !ref <mels>\n", "")
    text = text.replace("    embedding_dim: !ref <dim>\n", "")
    found = settings_of(tmp_path, text)
    assert (found["n_mels"], found["embedding_dim"]) == (80, 256)


@pytest.mark.parametrize(
    ("top", "line", "shown"),
    [
        (
            8000,
            "",
            r"16000 \(SpeechBrain's default\), but the file's sample_rate is 8000",
        ),
        (8000, "    sample_rate: 16000\n", "16000, but the file's sample_rate is 8000"),
        (16000, "    sample_rate: 8000\n", "8000, but the file's sample_rate is 16000"),
        (8000, "    sample_rate: !ref <sample_rate>\n", None),
        (16000, "", None),
    ],
)
def test_filters_of_another_rate_than_the_speech_s_are_refused(
    tmp_path, top, line, shown
):
    text = STOCK.replace("rate: 16000\n", f"sample_rate: {top}\n", 1)
    text = text.replace("    sample_rate: !ref <rate>\n", line)
    text = text.replace("    f_max: 8000\n", "").replace("<rate>", "<sample_rate>")
    if shown is None:
        assert settings_of(tmp_path, text)["sample_rate"] == top
        return
    with pytest.raises(ValueError, match=rf"line \d+: .*sample_rate: {shown}"):
        settings_of(tmp_path, text)


def test_a_size_that_is_left_out_is_named_where_weights_have_another(stock, tmp_path):
    shutil.copytree(stock[0], tmp_path / "run")
    path = tmp_path / "run/hyperparams.yaml"
    text = re.sub(r"(?m)^ +embedding_dim: .*\n", "", path.read_text())
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"does not give embedding_dim: 256, which are"
    ):
        SpeakerEmbedder.from_run(tmp_path / "run", device="cpu")


def test_arguments_may_be_given_by_their_order(tmp_path):
    lines = STOCK.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("model:"))
    lines[start : start + 7] = [f"model: {ENCODER} [df_revnet89]\n"]
    found = settings_of(tmp_path, "".join(lines).replace("mels: 24", "mels: 80", 1))
    assert (found["arch"], found["widths"]) == ("df_revnet89", None)


def test_sizes_of_several_fbanks_go_by_speechbrain_s_name(tmp_path):
    other = f"other: {FBANK} {{n_mels: 40}}\n"
    with pytest.raises(ValueError, match=r"other sizes than on line.*compute_features"):
        settings_of(tmp_path, STOCK + other)
    named = STOCK.replace("fbank:", "compute_features:").replace(
        "<fbank>", "<compute_features>"
    )
    assert settings_of(tmp_path, named + other)["n_mels"] == 24
    # The same twice, as !copy writes it, is no other.
    assert settings_of(tmp_path, STOCK + other.replace("40", "24"))["n_mels"] == 24


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{STOCK}teacher: {ENCODER} [revnet57]\n", "2 encoders .* on lines 17, 43"),
        (
            STOCK.replace(ENCODER, "!new:my.Encoder"),
            r"lacks arch, .*no encoder of this.*!name: and !include: are not read",
        ),
        (changed("    name: !ref <stages>"), r"arch: \[1, 1, 1, 1\]"),
        (STOCK.replace("    name: revnet57\n", ""), "line 17: .* has no name"),
        (changed("    mode: x\n    depth: 3"), "line 17: .*argument 'depth'"),
        (
            changed("    widths: !ref <dim> * 2"),
            "line 21 has !ref <dim> . 2: widths of .*plain",
        ),
        (changed("    widths: !ref <head.weight>"), "line 21 has !ref <head.weight>"),
        (changed("    widths: !ref <nothing>"), "line 21 has !ref <nothing>"),
        (changed("    widths: [!ref <dim>, !ref <model>, 8, 8]"), "has the tag !apply"),
        (changed("    widths: !tuple (8, 8, 8, 8)"), "line 21 has the tag !tuple"),
        (changed("    widths: *x"), "undefined alias"),
        (
            changed("    mode: x\n    <<: 1"),
            "line 24: expected a mapping .* for merging",
        ),
        (changed("dim: !ref <mels>", "mels: !ref <dim>"), "line 19 has !ref <mels>"),
        (changed("    embedding_dim: 0"), "embedding_dim: 0 .it takes"),
        (changed("rate: 48000", "    f_max: null"), "sample_rate: 48000"),
        (STOCK.replace(FBANK, "!new:my.Fbank"), f"line 17: .* no {FBANK}.*features"),
        (STOCK.replace(NORM, "!new:my.Norm"), f"line 17: .* no {NORM}.*normalisation"),
    ],
)
def test_what_is_not_understood_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        settings_of(tmp_path, text)
    assert "hyperparams.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_of_several_encoders_plain_settings_name_the_trained_one(tmp_path):
    plain = (
        "arch: revnet57\nwidths: [8, 16, 16, 16]\nblocks: [1, 1, 1, 1]\nn_mels: 24\n"
    )
    plain += "embedding_dim: 16\nsample_rate: 16000\n"
    text = f"{STOCK}teacher: {ENCODER} [resnet34]\n{plain}"
    assert settings_of(tmp_path, text)["arch"] == "revnet57"
    # One of the two is saved.
    write_stock(tmp_path / "run", text)
    found = read_weights(tmp_path / "run")
    assert found.path.name == "network.ckpt"
    both = "        network: !ref <model>\n        other: !ref <teacher>\n"
    text = text.replace("        network: !ref <model>\n", both)
    write_stock(tmp_path / "both", text)
    with pytest.raises(
        ValueError, match=r"network, other, .*Call that one embedding_m"
    ):
        read_weights(tmp_path / "both")
    text = text.replace("        network:", "        embedding_model:")
    write_stock(tmp_path / "named", text)
    assert read_weights(tmp_path / "named").path.name == "embedding_model.ckpt"


def test_an_encoder_of_speechbrain_s_command_line_is_found(tmp_path, wave):
    lines = STOCK.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if line.startswith("model:"))
    arguments = "".join(line.strip() + ", " for line in lines[start + 1 : start + 7])
    cast = f"model: !apply:typing.cast [any, {ENCODER} {{{arguments.rstrip(', ')}}}]\n"
    lines[start : start + 7] = [cast]
    made = write_stock(tmp_path / "run", "".join(lines))
    embedder = SpeakerEmbedder.from_run(tmp_path / "run", device="cpu")
    assert_near(embedder.embed(wave, 16000), embedded(made, wave))
    assert read_weights(tmp_path / "run").path.name == "network.ckpt"


def test_an_encoder_that_no_checkpointer_names_has_the_name_of_its_key(tmp_path):
    text = STOCK.replace("        network: !ref <model>\n", "")
    run = tmp_path / "run"
    made = write_stock(run, text)
    with pytest.raises(
        FileNotFoundError, match=r"neither model\.ckpt nor a checkpoint"
    ):
        read_weights(run)
    (checkpoint,) = (run / "save").glob("CKPT*")
    torch.save(made["model"].state_dict(), checkpoint / "model.ckpt")
    assert read_weights(run).path == checkpoint / "model.ckpt"


@pytest.mark.parametrize("name", ["../network", "/tmp/x", "..", "a/b"])
def test_a_name_that_leads_out_of_a_checkpoint_is_refused(tmp_path, name):
    text = STOCK.replace("network: !ref", f'"{name}": !ref')
    settings_of(tmp_path, text)
    with pytest.raises(ValueError, match=r"line \d+: .* is no name of a file"):
        read_weights(tmp_path)


def test_checkpoints_lie_where_the_checkpointer_writes_them(tmp_path, wave):
    text = changed("    checkpoints_dir: !ref <output_folder>/states/here")
    made = write_stock(tmp_path / "run", text)
    (tmp_path / "run").rename(tmp_path / "moved")
    embedder = SpeakerEmbedder.from_run(tmp_path / "moved", device="cpu")
    assert_near(embedder.embed(wave, 16000), embedded(made, wave))
    found = read_weights(tmp_path / "moved").path
    assert found.parents[1] == tmp_path / "moved/states/here"


def test_a_training_that_stopped_says_so(tmp_path):
    write_stock(tmp_path / "run", epochs=1)
    missing = export_run(tmp_path / "run", tmp_path / "model")
    assert missing[0].startswith("the end of its training")


def test_a_run_of_the_script_with_our_checkpointer_has_ended(tmp_path):
    """As ``speechbrain-rev resolve`` writes the YAML."""
    ours = "!new:speechbrain_rev.lobes.checkpointer.WholeCheckpointer"
    text = STOCK.replace("!new:speechbrain.utils.checkpoints.Checkpointer", ours)
    write_stock(tmp_path / "run", text)
    missing = export_run(tmp_path / "run", tmp_path / "model")
    assert not [words for words in missing if "training" in words]
    # Our recipe averages checkpoints after the last of them.
    (tmp_path / "run/save/prepared.json").write_text("null")
    missing = export_run(tmp_path / "run", tmp_path / "other")
    assert missing[0].startswith("the end of its training")


def test_no_script_is_advised_that_cannot_read_the_run(stock, tmp_path):
    folder, _ = stock
    alone = "of runs of recipes/VoxCeleb/train.py alone"
    cohort, rates = export_run(folder, tmp_path / "model")
    assert alone in cohort
    assert alone in rates
    assert "verification.yaml" in rates
    assert alone in SpeakerEmbedder.from_run(folder, device="cpu").thresholds.missing
    with pytest.raises(FileNotFoundError, match=f"{alone}: score without a cohort"):
        read_cohort(folder)


AUGMENT = "!new:speechbrain_rev.data.SpeakerAugment"


class TestClasses:
    """How many classes of the classifier are one speaker."""

    @pytest.fixture
    def run(self, tmp_path):
        text = changed("speakers: 6")
        return tmp_path / "run", write_stock(tmp_path / "run", text)

    def exported(self, run, out, **given):
        export_run(run, out, **given)
        return torch.load(out / "classifier.ckpt", weights_only=True)["weight"]

    def test_they_are_asked_for_where_nothing_says_it(self, run, tmp_path, capsys):
        folder, made = run
        with pytest.raises(
            ValueError, match=r"6 classes for 3 speakers\. Give --speeds N"
        ):
            export_run(folder, tmp_path / "model")
        arguments = ["export", str(folder), str(tmp_path / "model"), "--speeds"]
        assert cli.main([*arguments, "4"]) == 2
        assert "not 3 speakers times 4 speed" in capsys.readouterr().err
        assert cli.main([*arguments, "0"]) == 2
        assert cli.main([*arguments, "2"]) == 0
        weight = torch.load(tmp_path / "model/classifier.ckpt", weights_only=True)
        assert torch.equal(weight["weight"], made["head"].weight[:3])

    @pytest.mark.parametrize(
        "line",
        [
            f"augment: {AUGMENT} {{out_n_neurons: 6, speeds: [1.0, 0.9]}}",
            f"s: [1.0, 0.9]\naugment: {AUGMENT} {{out_n_neurons: 6, speeds: !ref <s>}}",
            "speeds: [1.0, 0.9]",
        ],
    )
    def test_augmentation_says_it(self, run, tmp_path, line):
        folder, made = run
        path = folder / "hyperparams.yaml"
        path.write_text(f"{path.read_text()}{line}\n")
        weight = self.exported(folder, tmp_path / "model")
        assert torch.equal(weight, made["head"].weight[:3])

    def test_labels_may_lie_elsewhere(self, stock, tmp_path):
        labels = CategoricalEncoder()
        labels.update_from_iterable(["x", "y", "z"])
        labels.save(tmp_path / "mine.txt")
        export_run(stock[0], tmp_path / "model", labels=tmp_path / "mine.txt")
        assert "'y' => 1" in (tmp_path / "model/label_encoder.txt").read_text()
        with pytest.raises(
            FileNotFoundError, match=r"no file .*nothing.*CategoricalEnc"
        ):
            export_run(stock[0], tmp_path / "other", labels=tmp_path / "nothing")

    def test_labels_that_are_missing_are_asked_for(self, run, tmp_path):
        (run[0] / "save/label_encoder.txt").unlink()
        with pytest.raises(
            FileNotFoundError, match=r"label_encoder\.txt.*--labels FILE"
        ):
            export_run(run[0], tmp_path / "model")

    def test_a_classifier_without_cosines_is_refused_by_name(self, tmp_path):
        text = STOCK.replace(HEAD, "!new:torch.nn.Linear").replace(
            "input_size: !ref <dim>\n    out_neurons:",
            "in_features: !ref <dim>\n    bias: false\n    out_features:",
        )
        write_stock(tmp_path / "run", text)
        with pytest.raises(ValueError, match=f"no classifier of cosines .*{HEAD}"):
            export_run(tmp_path / "run", tmp_path / "model")


def test_merged_arguments_are_the_object_s(tmp_path):
    text = STOCK.replace(
        "model:", "sizes: &sizes {widths: [8, 8, 8, 8], embedding_dim: 3}\nmodel:"
    ).replace("    widths: [8, 16, 16, 16]\n", "    <<: *sizes\n")
    found = settings_of(tmp_path, text)
    assert (found["widths"], found["embedding_dim"]) == ([8, 8, 8, 8], 16)


@pytest.mark.parametrize("option", [["--speeds", "2"], ["--labels", "x"]])
def test_options_of_the_classifier_are_not_of_graphs(stock, tmp_path, capsys, option):
    out = str(tmp_path / "model.onnx")
    assert cli.main(["export", str(stock[0]), out, *option]) == 2
    assert "--labels and --speeds are of the classifier" in capsys.readouterr().err
