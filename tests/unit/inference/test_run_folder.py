"""Runs of our recipe and of SpeechBrain's script: read as data, whatever they name."""

import os
import re
import shutil

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain_rev.inference.model_folder import run_settings
from speechbrain_rev.inference.run_folder import (
    ENCODERS,
    read_classifier,
    read_settings,
    read_weights,
)

from speechbrain_rev import cli
from speechbrain_rev.inference import SpeakerEmbedder, export_run, read_cohort
from tests.recipes.stock import write_experiment
from tests.run_folders import SPEAKERS, TINY, speech_like, write_run
from tests.unit.inference.conftest import Attack, close

YAML, WEIGHTS = "hyperparams.yaml", "embedding_model.ckpt"


def load(run):
    return SpeakerEmbedder.from_run(run, device="cpu")


def plain(folder, text):
    (folder / YAML).write_text(text)
    return read_settings(folder, ["arch"])["arch"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1, *x]", [1, [1]]),
        ("{<<: *y, a: 2}", {"a": 2}),
        ("{<<: [{a: 3}, *y]}", {"a": 3}),
        ("[&b [1, 1], [*b, *b]]", [[1, 1], [[1, 1], [1, 1]]]),
    ],
)
def test_aliases_and_merges_are_what_they_stand_for(tmp_path, value, expected):
    text = f"x: &x [1]\ny: &y {{a: 1}}\nz: [*x, *x]\nw: {{<<: *y}}\narch: {value}\n"
    assert plain(tmp_path, text) == expected
    assert plain(tmp_path, f"x: &x {{arch: {expected}, b: 1}}\n<<: *x\n") == expected


def doubled(own):
    """Lines of which each has the one before twice, or more."""
    lines = [own.format(i, i - 1) for i in range(1, 61)]
    return "a0: &a0 {x: 1}\n" + "\n".join(lines) + "\narch: 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "b: &b [!name:x ]\narch: *b\n",
            "line 1 has the tag !name:x.*without tags and",
        ),
        ("arch: !new:os.system [ls]", "has the tag !new:os.system"),
        ("arch: &a [*a]\n", r"line 1: \*a is a part of itself"),
        ("arch: *x\n", "line 1: found undefined alias 'x'"),
        ("arch: {<<: [1]}\n", "line 1: expected a mapping for merging"),
        ("arch: 1\nx: {b: 1, b: 2}\n", "line 2: b stands there twice"),
        (f"x: {'[' * 51}{']' * 51}\n", "line 1: it is nested deeper than 50"),
        (doubled("a{0}: &a{0} [*a{1}, *a{1}]"), r"aliases expanded .* 1,000,000 char"),
        (doubled("a{0}: &a{0} {{<<: [*a{1}, *a{1}]}}"), "with aliases expanded"),
        (doubled("? &a{0} [*a{1}, *a{1}]\n: 1"), "with aliases expanded"),
        (f"x: &x {'y' * 999}\narch: [{'*x, ' * 1002}]\n", "line 2: with aliases exp"),
        ("arch: \u0007\n", "special characters are not allowed"),
        (f"arch: {'1:' * 1000}1.5\n", r"line 1 has '.*'\.\.\., which has no end"),
        ("- arch\n", "no YAML mapping"),
        ("other: 1\n", "lacks arch"),
        ("a: " + "x" * 1_000_001, "another file"),
    ],
)
def test_other_files_than_plain_values_are_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        plain(tmp_path, text)
    assert "\n" not in str(error.value)
    assert YAML in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": "revnet58"}, "revnet57"),
        ({"n_mels": "eighty"}, "n_mels: 'eighty'"),
        ({"sample_rate": 48000}, "48000 .it takes an integer from 4000 to 16000"),
        ({"widths": list(range(2000))}, r"widths: \[0, 1, 2, "),
        ({"front_end": "htk"}, r"front_end: 'htk' \(it takes speechbrain or kaldi\)"),
    ],
)
def test_values_training_never_writes_are_named(tmp_path, changed, message):
    write_run(tmp_path, **changed)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    assert len(str(error.value)) < 1000


# ------------------------------------------------------------ weights and links


def checkpoint(run, name, unixtime, weights):
    folder = run / "save" / name
    folder.mkdir(parents=True)
    (folder / "CKPT.yaml").write_text(f"end-of-epoch: true\nunixtime: {unixtime}\n")
    torch.save(weights, folder / WEIGHTS)


def test_missing_pieces_are_named_with_what_to_give(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match=r"no folder .*output_folder"):
        load(run)
    run.mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no hyperparams\.yaml"):
        load(run)
    weights = write_run(run).state_dict()
    (run / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="has this run been trained"):
        load(run)
    for time in ("null", "[]", "yesterday"):
        checkpoint(run, "CKPT+a", time, weights)
        with pytest.raises(ValueError, match=r"a does not say its epoch and step"):
            read_weights(run)
        shutil.rmtree(run / "save")


def test_the_newest_checkpoint_serves_until_training_has_ended(tmp_path):
    final = write_run(tmp_path).state_dict()
    older, newer = ({k: v + i for k, v in final.items()} for i in (1, 2))
    checkpoint(tmp_path, "CKPT+b", 200.5, newer)
    checkpoint(tmp_path, "CKPT+c", 100.0, older)
    assert read_weights(tmp_path).path == tmp_path / WEIGHTS
    (tmp_path / WEIGHTS).unlink()
    weights = read_weights(tmp_path)
    assert weights.path.parent.name == "CKPT+b"
    assert all(torch.equal(weights.state_dict[k], newer[k]) for k in newer)
    # Of a run whose settings are lost, too.
    (tmp_path / YAML).unlink()
    assert read_weights(tmp_path).path == weights.path


NAMES = {"model": {f"{n}": torch.ones(1) for n in "abcdefg"}}
MKDIR = Attack(os.mkdir, "executed")


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda s: {"stem": MKDIR}, "ckpt is not loaded"),
        (
            lambda s: NAMES,
            r"stem\S+ is missing.* more\. It holds a, b, c, d and 3 more",
        ),
        (lambda s: s | {"fc.bias": torch.ones(3)}, "does not fit"),
        (lambda s: s | {"fc.bias": s["fc.bias"] / 0}, "diverged"),
    ],
)
def test_other_weights_than_the_encoder_s_are_refused(
    run, saved, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    torch.save(saved(torch.load(run / WEIGHTS, weights_only=True)), run / WEIGHTS)
    with pytest.raises(ValueError, match=message) as error:
        load(run)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_weights_of_a_wrapper_are_those_of_what_it_wraps(run, embedder):
    state = torch.load(run / WEIGHTS, weights_only=True)
    wrapped = {f"module.encoder.{n}": t for n, t in state.items()}
    torch.save({"model": {"state_dict": wrapped}}, run / WEIGHTS)
    expected = embedder.embed(speech_like(), 16000)
    assert np.array_equal(load(run).embed(speech_like(), 16000), expected)


def test_only_files_of_the_folder_are_read(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    assert load(tmp_path / "latest").sample_rate == TINY["sample_rate"]
    for name in (YAML, WEIGHTS, "save"):
        (run / name).rename(tmp_path / f"elsewhere {name}")
        (run / name).symlink_to(tmp_path / f"elsewhere {name}")
        with pytest.raises(ValueError, match="link out of its folder"):
            load(run)
        (run / name).unlink()
        if name == YAML:
            (tmp_path / f"elsewhere {name}").rename(run / name)


# ------------------------------------------------------------ objects that a YAML describes

ENCODER = "!apply:speechbrain_rev.lobes.build_encoder"
FBANK = "!new:speechbrain.lobes.features.Fbank"
NORM = "!new:speechbrain.processing.features.InputNormalization"
HEAD = "!new:speechbrain.lobes.models.ECAPA_TDNN.Classifier"
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
epochs: !new:speechbrain.utils.epoch_loop.EpochCounter
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
    """Write what SpeechBrain leaves of a run by a YAML; what the YAML builds.

    The file of the run is ``written`` instead where that is given.
    """
    folder.mkdir(exist_ok=True)
    source = folder.parent / "source.yaml"
    run = {"output_folder": str(folder)}
    source.write_text(written or text)
    if resolved:
        write_experiment(folder, source, run)
    else:
        filled = source.read_text().replace("!PLACEHOLDER", str(folder))
        (folder / YAML).write_text(filled)
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


@pytest.fixture(scope="module")
def wave():
    return torch.from_numpy(speech_like())


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock") / "run"
    return folder, write_stock(folder)


@pytest.fixture
def moved(stock, tmp_path):
    """Such a run of the test's own."""
    return shutil.copytree(stock[0], tmp_path / "stock")


@pytest.mark.parametrize(
    ("tag", "resolved"), [*((tag, True) for tag in ENCODERS), (ENCODER, False)]
)
def test_a_run_of_names_of_its_own_embeds_as_its_objects_do(
    tmp_path, wave, tag, resolved
):
    run = tmp_path / "run"
    made = write_stock(run, written=STOCK.replace(ENCODER, tag), resolved=resolved)
    assert ("*id00" in (run / YAML).read_text()) == resolved
    # On a CPU normalisations are folded into convolutions, whose sums round otherwise.
    assert close(load(run).embed(wave, 16000), embedded(made, wave))
    assert read_weights(run).path.name == "network.ckpt"
    assert read_classifier(run).path.name == "top.ckpt"


def changed(*lines, without=()):
    """The file with lines in place of those that begin alike, and without others."""
    text = STOCK
    for old in without:
        text = re.sub(rf"(?m)^{old}.*\n", "", text)
    for new in lines:
        key = new.lstrip().partition(":")[0]
        (old,) = [x for x in text.splitlines() if x.lstrip().startswith(f"{key}:")]
        text = text.replace(f"{old}\n", f"{new}\n")
    return text


def settings_of(tmp_path, text):
    (tmp_path / YAML).write_text(text.replace("!PLACEHOLDER", str(tmp_path)))
    return run_settings(tmp_path)


def with_model(line):
    """The file with the encoder in one line."""
    start, end = STOCK.index("model:"), STOCK.index("head:")
    return f"{STOCK[:start]}model: {line}\n{STOCK[end:]}"


def at_rate(rate, *, fbank=""):
    """The file with a rate of the speech under its usual name."""
    text = STOCK.replace("rate: 16000\n", f"sample_rate: {rate}\n", 1)
    text = text.replace("    sample_rate: !ref <rate>\n", fbank)
    return text.replace("    f_max: 8000\n", "").replace("<rate>", "<sample_rate>")


FORTY = f"other: {FBANK} {{n_mels: 40}}\n"
NAMED = STOCK.replace("fbank:", "compute_features:")
NAMED = NAMED.replace("<fbank>", "<compute_features>")
DEFAULTS = changed(without=["    n_mels: !ref", "    embedding_dim:"])
DEFAULTS = DEFAULTS.replace("    sample_rate:", "    n_mels: 80\n    sample_rate:")
SIZES = "sizes: &sizes {widths: [8, 8, 8, 8], embedding_dim: 3}\nmodel:"
MERGED = changed("    widths: 0\n    <<: *sizes", without=["    embedding_dim:"])
MERGED = MERGED.replace("    widths: 0\n", "").replace("model:", SIZES)


OWN_RATE = "    sample_rate: !ref <sample_rate>\n"
N_MELS = {"n_mels": 24}
SIZED = {"widths": [8, 8, 8, 8], "embedding_dim": 3}
TABLE = with_model(f"{ENCODER} [df_revnet89]").replace("mels: 24", "mels: 80", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What changes no feature, and what is none of ours.
        (changed("    deltas: false\n    param_rand_factor: 0.1"), N_MELS),
        (changed("    std_norm: false\n    update_until_epoch: 4"), N_MELS),
        (changed(f"fbank: &f {FBANK}"), N_MELS),
        (changed("lr: 1\nevil: !apply:os.mkdir [executed]"), N_MELS),
        # Defaults, arguments by their order, and merged ones.
        (DEFAULTS, {"n_mels": 80, "embedding_dim": 256}),
        (TABLE, {"arch": "df_revnet89", "widths": None}),
        (MERGED, SIZED),
        (at_rate(8000, fbank=OWN_RATE), {"sample_rate": 8000}),
        (at_rate(16000), {"sample_rate": 16000}),
        # Of several, SpeechBrain's name counts; the same twice is no other.
        (NAMED + FORTY, N_MELS),
        (STOCK + FORTY.replace("40", "24"), N_MELS),
    ],
)
def test_settings_are_read_of_objects_that_are_not_built(
    tmp_path, text, expected, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert settings_of(tmp_path, text).items() >= expected.items()
    assert [path.name for path in tmp_path.iterdir()] == [YAML]


NO_ENCODER = "lacks arch, .*no encoder of this.*!name: and !include: are not read"
WIDER = "    deltas: false\n    win_length: 32"
LOW = "    sample_rate: 8000\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Features that are made otherwise.
        (changed("    deltas: true"), r"line \d+: .*deltas: True.*deltas: False only"),
        (changed(WIDER), "32, .*win_length: 25 only"),
        (changed("    f_max: 7600"), "f_max: 7600.*f_max: null only"),
        (changed("    norm_type: global"), "global.*norm_type: sentence only"),
        (changed(without=["    std_norm:"]), r"std_norm: True \(SpeechBrain's default"),
        (changed(without=["    n_mels: !ref <mels>\n    sam"]), "the Fbank makes 40"),
        (STOCK + FORTY, r"other sizes than on line.*compute_features"),
        # Filters of another rate than the speech's.
        (at_rate(8000), r"16000 \(SpeechBrain's default\), but the file's .* is 8000"),
        (at_rate(16000, fbank=LOW), "8000, but the file's sample_r"),
        # Encoders that are not understood.
        (f"{STOCK}teacher: {ENCODER} [revnet57]\n", "2 encoders .* on lines 17, 43"),
        (STOCK.replace(ENCODER, "!new:my.Encoder"), NO_ENCODER),
        (changed(without=["    name: revnet57"]), "line 17: .* has no name"),
        (changed("    mode: x\n    depth: 3"), "line 17: .*argument 'depth'"),
        (
            changed("    widths: !ref <dim> * 2"),
            "line 21 has !ref <dim> . 2: widths of",
        ),
        (changed("    widths: [!ref <dim>, !ref <model>]"), "has the tag !apply"),
        (
            changed("    mode: x\n    <<: 1"),
            "line 24: expected a mapping .* for merging",
        ),
        (changed("dim: !ref <mels>", "mels: !ref <dim>"), "line 19 has !ref <mels>"),
        (changed("rate: 48000", "    f_max: null"), "sample_rate: 48000"),
        (STOCK.replace(FBANK, "!new:my.Fbank"), f"line 17: .* no {FBANK}.*features"),
        (STOCK.replace(NORM, "!new:my.Norm"), f"line 17: .* no {NORM}.*normalisation"),
    ],
)
def test_what_is_not_as_ours_or_not_understood_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        settings_of(tmp_path, text)
    assert YAML in str(error.value)
    assert "\n" not in str(error.value)


def test_a_size_that_is_left_out_is_named_where_weights_have_another(moved):
    path = moved / YAML
    path.write_text(re.sub(r"(?m)^ +embedding_dim: .*\n", "", path.read_text()))
    with pytest.raises(ValueError, match="does not give embedding_dim: 256, which are"):
        load(moved)


@pytest.mark.parametrize("name", ["../network", "/tmp/x", ".."])
def test_a_name_that_leads_out_of_a_checkpoint_is_refused(tmp_path, name):
    settings_of(tmp_path, STOCK.replace("network: !ref", f'"{name}": !ref'))
    with pytest.raises(ValueError, match=r"line \d+: .* is no name of a file"):
        read_weights(tmp_path)


def test_of_several_encoders_plain_settings_name_the_trained_one(tmp_path):
    lines = (f"{name}: {value}\n" for name, value in TINY.items())
    text = f"{STOCK}teacher: {ENCODER} [resnet34]\n{''.join(lines)}"
    assert settings_of(tmp_path, text)["arch"] == "revnet57"
    # Of its two encoders one is saved, or both; names of files are all that is read.
    saved = (tmp_path / "save/CKPT+one", ("network", "embedding_model"))
    checkpoint(tmp_path, "CKPT+one", 1, {"x": torch.ones(1)})
    shutil.copy(saved[0] / WEIGHTS, saved[0] / "network.ckpt")
    assert read_weights(tmp_path).path.name == "network.ckpt"
    both = "        network: !ref <model>\n        other: !ref <teacher>\n"
    text = text.replace("        network: !ref <model>\n", both)
    settings_of(tmp_path, text)
    with pytest.raises(
        ValueError, match=r"network, other, .*Call that one embedding_m"
    ):
        read_weights(tmp_path)
    settings_of(tmp_path, text.replace("    network:", "    embedding_model:"))
    assert read_weights(tmp_path).path.name == WEIGHTS


def test_encoders_and_checkpoints_are_read_wherever_the_file_puts_them(tmp_path, wave):
    start, end = STOCK.index("model:"), STOCK.index("head:")
    _, *arguments = STOCK[start:end].splitlines()
    arguments = ", ".join(line.strip() for line in arguments)
    # As SpeechBrain's command line writes it.
    text = with_model(f"!apply:typing.cast [any, {ENCODER} {{{arguments}}}]")
    saved = "    checkpoints_dir: !ref <output_folder>/states/here"
    text = text.replace("    checkpoints_dir: !ref <save_folder>", saved)
    made = write_stock(tmp_path / "run", text)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert close(load(tmp_path / "moved").embed(wave, 16000), embedded(made, wave))
    weights = read_weights(tmp_path / "moved").path
    assert weights.parents[1] == tmp_path / "moved/states/here"
    assert weights.name == "network.ckpt"


def test_an_encoder_that_no_checkpointer_names_has_the_name_of_its_key(tmp_path):
    made = write_stock(tmp_path, STOCK.replace("        network: !ref <model>\n", ""))
    with pytest.raises(FileNotFoundError, match=r"neither model\.ckpt nor a check"):
        read_weights(tmp_path)
    (checkpoint,) = (tmp_path / "save").glob("CKPT*")
    torch.save(made["model"].state_dict(), checkpoint / "model.ckpt")
    assert read_weights(tmp_path).path == checkpoint / "model.ckpt"


def test_the_end_of_such_a_run_is_its_last_epoch(tmp_path):
    ended = "the end of its training"
    write_stock(tmp_path / "one", epochs=1)
    assert export_run(tmp_path / "one", tmp_path / "first")[0].startswith(ended)
    # As ``speechbrain-rev resolve`` writes the YAML.
    ours = "!new:speechbrain_rev.lobes.checkpointer.WholeCheckpointer"
    text = STOCK.replace("!new:speechbrain.utils.checkpoints.Checkpointer", ours)
    write_stock(tmp_path / "two", text)
    missing = export_run(tmp_path / "two", tmp_path / "second")
    assert not [words for words in missing if "training" in words]
    # Our recipe averages checkpoints after the last of them.
    (tmp_path / "two/save/prepared.json").write_text("null")
    assert export_run(tmp_path / "two", tmp_path / "third")[0].startswith(ended)


def test_what_is_exported_of_such_a_run_names_what_can_be_done(
    stock, tmp_path, wave, capsys
):
    (folder, made), model = stock, tmp_path / "model"
    cohort, rates = export_run(folder, model)
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    assert close(embedder.embed(wave, 16000), embedded(made, wave))
    # What is no plain value, or has another name, is no setting that a card shows.
    card = (model / "README.md").read_text()
    assert "| lr | 16.0 |" in card
    assert "| seed |" not in card
    # No script is advised that cannot read the run.
    alone = "of runs of recipes/VoxCeleb/train.py alone"
    assert alone in cohort
    assert alone in rates
    assert "verification.yaml" in rates
    assert alone in load(folder).thresholds.missing
    with pytest.raises(FileNotFoundError, match=f"{alone}: score without a cohort"):
        read_cohort(folder)
    for option in ("--speeds=2", "--labels=x"):
        assert cli.main(["export", str(folder), f"{model}.onnx", option]) == 2
        message = "--labels and --speeds are of the classifier"
        assert message in capsys.readouterr().err


AUGMENT = "augment: !new:speechbrain_rev.data.SpeakerAugment"


@pytest.mark.parametrize(
    ("line", "speeds", "refused"),
    [
        ("", None, "6 classes for 3 speakers. Give --speeds N"),
        ("", 4, "not 3 speakers times 4 speed"),
        ("", 0, "speeds is 0"),
        ("", 2, None),
        (f"{AUGMENT} {{out_n_neurons: 6, speeds: [1.0, 0.9]}}", None, None),
        (f"s: [1, 2]\n{AUGMENT} {{out_n_neurons: 6, speeds: !ref <s>}}", None, None),
        ("speeds: [1.0, 0.9]", None, None),
    ],
)
def test_classes_of_a_speaker_are_as_augmentation_says_or_asked_for(
    six, tmp_path, line, speeds, refused, capsys
):
    run, model = shutil.copytree(six[0], tmp_path / "run"), tmp_path / "model"
    with (run / YAML).open("a") as file:
        file.write(f"{line}\n")
    options = [] if speeds is None else [f"--speeds={speeds}"]
    assert cli.main(["export", str(run), str(model), *options]) == (2 if refused else 0)
    if refused:
        assert refused in capsys.readouterr().err
    else:
        weight = torch.load(model / "classifier.ckpt", weights_only=True)["weight"]
        assert torch.equal(weight, six[1]["head"].weight[:3])


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A run whose classifier has two classes of each speaker."""
    folder = tmp_path_factory.mktemp("six") / "run"
    return folder, write_stock(folder, changed("speakers: 6"))


def test_labels_may_lie_elsewhere_and_are_asked_for(moved, tmp_path):
    labels = (moved / "save/label_encoder.txt").rename(tmp_path / "mine.txt")
    with pytest.raises(FileNotFoundError, match=r"label_encoder\.txt.*--labels FI"):
        export_run(moved, tmp_path / "model")
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing.*Categorical"):
        export_run(moved, tmp_path / "model", labels=tmp_path / "nothing")
    labels.write_text(labels.read_text().replace("id00002", "y"))
    export_run(moved, tmp_path / "model", labels=labels)
    assert "'y' => 1" in (tmp_path / "model/label_encoder.txt").read_text()


def test_a_classifier_without_cosines_is_refused_by_name(tmp_path):
    text = STOCK.replace(HEAD, "!new:torch.nn.Linear")
    text = text.replace("input_size: !ref <dim>", "in_features: !ref <dim>")
    text = text.replace("out_neurons:", "bias: false\n    out_features:")
    write_stock(tmp_path / "run", text)
    with pytest.raises(ValueError, match=f"no classifier of cosines .*{HEAD}"):
        export_run(tmp_path / "run", tmp_path / "model")
