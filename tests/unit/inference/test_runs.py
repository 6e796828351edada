"""Runs: what is recorded, who may write there, and runs of SpeechBrain's own script."""

import shutil
from dataclasses import replace

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.encoder import CategoricalEncoder

from speechbrain_rev import cli
from speechbrain_rev.files import LOCK, locked
from speechbrain_rev.inference import SpeakerEmbedder, export_run, read_cohort, runs
from speechbrain_rev.inference.runs import (
    RECORD,
    EarlierEpochs,
    FinalWeights,
    TrainingRecord,
    read_record,
)
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.lobes.checkpointer import WholeCheckpointer
from speechbrain_rev.training import run_folder
from tests.recipes.stock import write_experiment
from tests.run_folders import (
    HAPPENED,
    SETTINGS,
    SPEAKERS,
    change_record,
    speech_like,
    tiny_encoder,
    write_run,
)
from tests.unit.inference.conftest import close

YAML, WEIGHTS, SUMS = "hyperparams.yaml", "embedding_model.ckpt", "SHA256SUMS"


def load(run):
    return SpeakerEmbedder.from_run(run, device="cpu")


def standing(run):
    return read_weights(run).standing


# ------------------------------------------------------------ the record


def record_of_nothing(**changed):
    where = {"output_folder": "run", "save_folder": "run/save"}
    settings = {**SETTINGS, **where, "number_of_epochs": 3, **changed}
    nothing = {"epochs": 0, "seconds": 0.0, "lr": None, "margin": None, "weights": None}
    return TrainingRecord("a run", settings, **{**HAPPENED, **nothing})


def test_a_record_is_read_as_it_was_written_and_completed_by_epochs(tmp_path):
    begun = record_of_nothing()
    assert begun.after([]) == begun
    rows = [
        {"epoch": 1, "minutes": 1.5, "lr": 0.1, "margin": 0.0},
        {"epoch": 2, "minutes": 0.5, "lr": 0.01, "margin": 0.15},
    ]
    done = begun.after(rows)
    assert (done.epochs, done.seconds, done.lr, done.margin) == (2, 120, 0.01, 0.15)
    weights = [FinalWeights((1, last), "f00d", 0.01, None, 90.0) for last in (2, 3)]
    for record in (begun, done, replace(done, weights=weights[0])):
        record.write(tmp_path)
        assert read_record(tmp_path) == record
        assert not record.is_finished(3)
    assert replace(done, weights=weights[1]).is_finished(3)
    with pytest.raises(FileNotFoundError, match=r"has no run\.json: give the output_f"):
        runs.record_of(tmp_path / "save")


def test_what_earlier_epochs_had_otherwise_is_kept(tmp_path):
    weights = FinalWeights((1, 2), "f00d", 0.01, None, 90.0)
    before = replace(record_of_nothing(), weights=weights)
    same = record_of_nothing().following(before, 1.5)
    assert same == before
    noisy = replace(before.augmentation, noise=True)
    now = replace(record_of_nothing(batch_size=8), augmentation=noisy)
    after = now.following(before, 1.5)
    assert after.weights == weights
    assert after.earlier == (EarlierEpochs(1.5, {"batch_size": 4, "noise": False}),)
    after.write(tmp_path)
    assert read_record(tmp_path) == after
    # Before the first step there was nothing else.
    assert not now.following(before, 0).earlier
    later = replace(now, device="a GPU").following(after, 2)
    assert later.earlier[0] == after.earlier[0]
    assert later.earlier[1].values == {"device": before.device}


def test_where_weights_stand_is_told_of_runs_that_have_not_ended(run, tmp_path):
    assert standing(run) == ""
    change_record(run, {"number_of_epochs": 5})
    words = (
        "being extended to 5 epochs, 2 are done, and its weights are those of an earlier "
        "end, the mean of epochs up to 2."
    )
    assert standing(run).endswith(words)
    change_record(run, weights=None)
    assert "2 of 5 epochs are done, and its weights are of an earlier" in standing(run)
    (run / WEIGHTS).unlink()
    (checkpoint,) = (run / "save").glob("CKPT*")
    (checkpoint / SUMS).unlink()
    for name, text in (("counter", "4"), ("brain", "step: 30")):
        (checkpoint / f"{name}.ckpt").write_text(text)
    words = "its weights are of epoch 4 at step 30 of 5, of the newest checkpoint."
    for ended, where in ((False, words), (True, words.replace(" at step 30", ""))):
        meta = f"unixtime: 1\nend-of-epoch: {str(ended).lower()}\n"
        (checkpoint / "CKPT.yaml").write_text(meta)
        # A checkpoint that is given is no less of this run.
        for source in (run, checkpoint, checkpoint / WEIGHTS):
            assert standing(source).endswith(where)
    (run / RECORD).unlink()
    assert standing(run) == ""


def test_a_finished_run_that_lost_its_weights_is_told_to_write_them_again(run):
    (run / WEIGHTS).unlink()
    words = f"lacks {WEIGHTS}, which the same command of training writes again: these"
    assert words in standing(run)


def test_weights_of_another_run_are_refused(run, tmp_path):
    other = tmp_path / "other"
    write_run(other, seed=1)
    shutil.copy(other / WEIGHTS, run / WEIGHTS)
    (run / SUMS).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"other weights than the run in .* wrote"):
        load(run)
    with pytest.raises(ValueError, match=r"other weights than the run in .* wrote"):
        run_folder.finished(run_settings(run))


def test_checkpoints_of_another_run_are_refused(run):
    (checkpoint,) = (run / "save").glob("CKPT*")
    (checkpoint / SUMS).unlink(missing_ok=True)
    for name in ("the run", "another"):
        (checkpoint / "brain.ckpt").write_text(f"step: 30\nrun: {name}\n")
        if name == "the run":
            run_folder.refuse_other_checkpoints(run_settings(run))
            assert read_weights(checkpoint).fingerprint
        else:
            with pytest.raises(ValueError, match="a checkpoint of another run than"):
                run_folder.refuse_other_checkpoints(run_settings(run))
            with pytest.raises(ValueError, match="a checkpoint of another run than"):
                read_weights(checkpoint)


def run_settings(run, **changed):
    return {
        **read_record(run).settings,
        "output_folder": str(run),
        "save_folder": str(run / "save"),
        **changed,
    }


def test_a_run_is_finished_with_its_epochs_averaged_and_its_weights_as_written(run):
    assert run_folder.finished(run_settings(run))
    assert run_folder.finished(run_settings(run, number_of_epochs=1))
    assert not run_folder.finished(run_settings(run, number_of_epochs=3))
    assert not run_folder.finished(run_settings(run, average_checkpoints=2))
    (run / SUMS).write_text(f"{'0' * 64}  {WEIGHTS}\n")
    with pytest.raises(ValueError, match=f"{WEIGHTS} is not as it was written"):
        run_folder.finished(run_settings(run))
    change_record(run, weights=None)
    (run / SUMS).unlink()
    assert not run_folder.finished(run_settings(run))


def test_the_end_of_a_run_is_the_mean_of_its_last_epochs_with_a_checksum(tmp_path):
    run = tmp_path / "run"
    encoder = write_run(run)
    checkpointer = WholeCheckpointer(run / "save", {"embedding_model": encoder})
    for epoch in (1, 2, 3):
        torch.nn.init.constant_(encoder.fc.bias, epoch)
        checkpointer.save_checkpoint(meta={"epoch": epoch})
    given = run_settings(run, average_checkpoints=2, keep_checkpoints=2)
    record = change_record(run, epochs=3, weights=None)
    said = run_folder.finish({**given, "checkpointer": checkpointer}, record)
    assert "the mean of the last 2 epochs" in said
    weights = read_weights(run)
    final = FinalWeights((2, 3), weights.fingerprint, 0.01, 0.2, 90.0)
    assert read_record(run).weights == final
    assert weights.path == run / WEIGHTS
    assert torch.all(weights.state_dict["fc.bias"] == 2.5)
    assert weights.description == encoder.description
    (run / WEIGHTS).write_bytes(b"x")
    with pytest.raises(ValueError, match="is not as it was written"):
        read_weights(run)


PUBLISHED = {"widths": [48, 96, 192, 300], "blocks": None}


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ({"widths": None, "blocks": None}, PUBLISHED, None),
        ({"widths": [8, 8, 8, 16]}, PUBLISHED, r"widths: was \[8, 8, 8, 16\], is \[48"),
        # A model of others has no record.
        (None, {"speeds": [1.0]}, None),
        ({"pooling": "another"}, {"pooling": "another"}, None),
        (
            {"pooling": "another"},
            {"pooling": "statistics"},
            "was another, is statistics",
        ),
    ],
)
def test_another_network_than_the_record_s_is_refused(tmp_path, then, now, words):
    if then is not None:
        record_of_nothing(arch="revnet57", **then).write(tmp_path)
    (tmp_path / WEIGHTS).touch()
    settings = {"output_folder": str(tmp_path), "save_folder": str(tmp_path / "save")}
    settings = {**SETTINGS, "arch": "revnet57", **settings, **now}
    if words is None:
        run_folder.refuse_other_network(settings)
        return
    with pytest.raises(ValueError, match=words):
        run_folder.refuse_other_network(settings)


def test_two_runs_do_not_share_a_save_folder(tmp_path):
    first, second, save = (tmp_path / name for name in ("first", "second", "save"))
    first.mkdir()
    second.mkdir()
    with (
        run_folder.owned(first, save),
        pytest.raises(ValueError, match=r"into .*save\. Wait .* another save_folder"),
        run_folder.owned(second, save),
    ):
        pass
    assert not any(path.name == LOCK for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("is_main", [True, False])
def test_of_several_processes_one_locks_the_folder(tmp_path, monkeypatch, is_main):
    monkeypatch.setattr(run_folder, "if_main_process", lambda: is_main)
    with locked(tmp_path / LOCK, "the run", "writing into"):
        if is_main:
            with pytest.raises(ValueError, match="another output_folder"):
                run_folder.owned(tmp_path).__enter__()
        else:
            with run_folder.owned(tmp_path), run_folder.owned(tmp_path):
                pass


# ------------------------------------------------------------ weights


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
    with pytest.raises(
        FileNotFoundError, match=rf"no .* or {WEIGHTS}, and no checkpoint\. Gi"
    ):
        load(run)
    weights = tiny_encoder(front_end=None).state_dict()
    torch.save(weights, run / WEIGHTS)
    with pytest.raises(ValueError, match=r"how the features .* Give encoder=.*kind"):
        load(run)
    given = {"front_end": {"kind": "speechbrain", "sample_rate": 8000}}
    assert SpeakerEmbedder.from_run(run, encoder=given).sample_rate == 8000


def test_the_newest_checkpoint_serves_until_training_has_ended(tmp_path):
    final = write_run(tmp_path).state_dict()
    older, newer = ({**final, "fc.bias": final["fc.bias"] + i} for i in (1, 2))
    checkpoint(tmp_path, "CKPT+b", 200.5, newer)
    checkpoint(tmp_path, "CKPT+c", 100.0, older)
    assert read_weights(tmp_path).path == tmp_path / WEIGHTS
    (tmp_path / WEIGHTS).unlink()
    weights = read_weights(tmp_path)
    assert weights.path.parent.name == "CKPT+b"
    assert all(torch.equal(weights.state_dict[k], newer[k]) for k in newer)
    # A checkpoint that is given, a file in it, and one without a run's record.
    for source in (weights.path.parent, weights.path):
        assert read_weights(source).fingerprint == weights.fingerprint
    (tmp_path / RECORD).unlink()
    assert read_weights(tmp_path).path == weights.path


def test_weights_of_a_wrapper_are_those_of_what_it_wraps(run, embedder):
    state = torch.load(run / WEIGHTS, weights_only=True)
    wrapped = {f"module.encoder.{n}": t for n, t in state.items()}
    torch.save({"model": {"state_dict": wrapped}}, run / WEIGHTS)
    assert load(run).fingerprint == embedder.fingerprint


# ------------------------------------------------------------ runs of SpeechBrain's script

HEAD = "!new:speechbrain.lobes.models.ECAPA_TDNN.Classifier"
FRONT_END = """\
    front_end:
        kind: speechbrain
        sample_rate: !ref <rate>
"""
#: With names of its own choosing, where this package's files have others.
STOCK = f"""\
output_folder: !PLACEHOLDER
save_folder: !ref <output_folder>/save
mels: 24
dim: 16
speakers: 3
rate: 16000
fbank: !new:speechbrain.lobes.features.Fbank
    n_mels: !ref <mels>
    sample_rate: !ref <rate>
normaliser: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
    std_norm: false
model: !apply:speechbrain_rev.lobes.build_encoder
    name: revnet57
    n_mels: !ref <mels>
    embedding_dim: !ref <dim>
    widths: [8, 16, 16, 16]
    blocks: [1, 1, 1, 1]
    mode: recompute
{FRONT_END}head: {HEAD}
    input_size: !ref <dim>
    out_neurons: !ref <speakers>
epochs: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: 2
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save_folder>
    recoverables:
        network: !ref <model>
        classifier: !ref <head>
        counter: !ref <epochs>
"""


def write_stock(folder, text=STOCK):
    """Write what SpeechBrain leaves of a run by a YAML; what the YAML builds."""
    folder.mkdir()
    source = folder.parent / "source.yaml"
    run = {"output_folder": str(folder)}
    source.write_text(text)
    write_experiment(folder, source, run)
    torch.manual_seed(0)
    made = load_hyperpyyaml(text, run)
    for name, buffer in made["model"].named_buffers():
        if name.endswith("running_mean"):
            buffer.uniform_(-0.1, 0.1)
    for _ in range(2):
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


def test_a_run_of_names_of_its_own_embeds_as_its_objects_do(moved, stock, wave):
    # Whatever its file says since.
    (moved / YAML).write_text("model: !new:os.system [touch executed]\n")
    # On a CPU normalisations are folded into convolutions, whose sums round otherwise.
    assert close(load(moved).embed(wave, 16000), embedded(stock[1], wave))
    assert read_weights(moved).path.name == "network.ckpt"
    (moved / "save").rename(moved / "states")
    assert read_weights(moved).path.parents[1] == moved / "states"
    for path in moved.glob("states/*/network.ckpt"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"has no {WEIGHTS}, nor another file"):
        load(moved)


def test_what_is_exported_of_such_a_run_names_what_can_be_done(
    stock, tmp_path, wave, capsys
):
    (folder, made), model = stock, tmp_path / "model"
    cohort, thresholds = export_run(folder, model)
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    assert close(embedder.embed(wave, 16000), embedded(made, wave))
    card = (model / "README.md").read_text()
    assert "3 speakers; the run has no record of its training" in card
    # No script is advised that cannot read the run.
    of = "of runs of recipes/VoxCeleb/train.py"
    assert all(of in words for words in (cohort, thresholds))
    assert of in load(folder).thresholds.missing
    with pytest.raises(FileNotFoundError, match="else score without a cohort"):
        read_cohort(folder)
    for option in ("--speeds=2", "--labels=x"):
        assert cli.main(["export", str(folder), f"{model}.onnx", option]) == 2
        message = "--labels and --speeds are of the classifier"
        assert message in capsys.readouterr().err


def test_what_its_encoder_is_not_said_to_take_is_no_model_for_speechbrain(tmp_path):
    write_stock(tmp_path / "run", STOCK.replace(FRONT_END, ""))
    with pytest.raises(ValueError, match="does not say how the features of its"):
        export_run(tmp_path / "run", tmp_path / "model")


@pytest.mark.parametrize(
    ("speeds", "refused"),
    [
        (None, "6 classes, which is not 3 speakers. Give --speeds N"),
        (4, "not 3 speakers times 4 speed"),
        (0, "not 3 speakers times 0 speed"),
        (2, None),
    ],
)
def test_classes_of_a_speaker_are_asked_for(six, tmp_path, speeds, refused, capsys):
    run, model = shutil.copytree(six[0], tmp_path / "run"), tmp_path / "model"
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
    return folder, write_stock(folder, STOCK.replace("speakers: 3", "speakers: 6"))


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
    text = text.replace("out_neurons:", "out_features:")
    write_stock(tmp_path / "run", text)
    with pytest.raises(
        ValueError, match=r"bias \[3\], .*a classifier of cosines of embed"
    ):
        export_run(tmp_path / "run", tmp_path / "model")
