"""Runs that start from a pretrained model: head, frozen epochs, refusals."""

import re
import shutil

import pytest
import torch

from speechbrain_rev.data import read_manifest
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.inference import SpeakerEmbedder, export_run
from speechbrain_rev.inference.wespeaker import convert_from_wespeaker, to_wespeaker
from speechbrain_rev.lobes import build_encoder
from tests.corpus import write_corpus
from tests.recipes.runs import (
    HPARAMS,
    SHORT,
    TINY,
    arguments,
    assert_same_weights,
    log,
    run,
    weights,
)

SPEAKERS, SPEEDS = 6, 3
#: Settings that follow from the source: no command line gives them.
MODEL = ("arch", "widths", "blocks", "n_mels", "embedding_dim")
REST = {name: value for name, value in (TINY | SHORT).items() if name not in MODEL}
ADAPT = {**REST, "number_of_epochs": 3, "steps_per_epoch": 2, "chunk": "null"}
ADAPT["ckpt_interval_steps"] = 1


@pytest.fixture(autouse=True)
def logged(caplog):
    """As SpeechBrain sets it up for an experiment."""
    caplog.set_level("INFO", logger="train")


@pytest.fixture(scope="module")
def source(train, data, tmp_path_factory):
    """A finished run of all six speakers at three speeds."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train.main(arguments(data, folder, **SHORT, steps_per_epoch=2, chunk="null"))
    return folder


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export_run(source, folder)
    return folder


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Speech of five other speakers."""
    folder = tmp_path_factory.mktemp("others")
    write_corpus(folder / "corpus", speakers=5, seed=7)
    for speaker in sorted((folder / "corpus/wav").iterdir()):
        speaker.rename(speaker.with_name(speaker.name.replace("id", "new")))
    return folder / "corpus"


def adapt(data, output, source, file="train.yaml", **changed):
    """A command line that gives nothing of the model."""
    settings = {
        **ADAPT, "data_folder": data, "output_folder": output, "pretrained": source,
        **changed,
    }  # fmt: skip
    options = [f"--{key}={value}" for key, value in settings.items()]
    return [str(HPARAMS / file), *options, "--device=cpu"]


def start_of(train, monkeypatch, argv):
    """The weights with which a run begins."""
    start = {}

    def remember(self, *arguments, **keywords):
        start.update({n: v.clone() for n, v in self.modules.state_dict().items()})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.SpeakerBrain, "fit", remember)
        with pytest.raises(KeyboardInterrupt):
            train.main(argv)
    return start


def head_of_run(folder):
    (newest, *_) = sorted(folder.glob("save/CKPT*/classifier.ckpt"), reverse=True)
    return torch.load(newest, weights_only=True)["weight"]


def test_the_head_of_the_same_speakers_is_kept(
    train, data, source, exported, tmp_path, monkeypatch, caplog
):
    directions = head_of_run(source)
    for given, speeds, kept in (
        (source, [1.0, 0.9, 1.1], directions),
        (source, [1.0], directions[:SPEAKERS]),
        (exported, [1.0], directions[:SPEAKERS]),
    ):
        argv = adapt(data, tmp_path / "run", given, speeds=speeds, head="keep")
        start = start_of(train, monkeypatch, argv)
        assert torch.equal(start["classifier.weight"], kept)
        assert "Head: kept" in caplog.text
        caplog.clear()
        for name, value in weights(source).items():
            if name in start:
                assert torch.equal(start[f"embedding_model.{name}"], value), name
        settings = plain_settings((tmp_path / "run/hyperparams.yaml").read_text())
        assert {n: str(settings[n]) for n in MODEL} == {n: TINY[n] for n in MODEL}
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"head": "new"}, "head is new"),
        (
            {"speeds": [1.0, 0.8]},
            r"its head has the speeds .*, this run \[1\.0, 0\.8\]",
        ),
        ({"loss": "subcenter_aam_softmax"}, "its head is cosine, .* takes subcenter"),
        ({"valid_speakers": 2}, "it has other speakers"),
        ({"pretrained": "file"}, "a file of weights has no head"),
    ],
)
def test_a_head_that_does_not_fit_is_new_and_is_not_kept(
    train, data, source, tmp_path, monkeypatch, caplog, changed, why
):
    if changed.get("pretrained") == "file":
        changed = {"pretrained": source / "embedding_model.ckpt"}
    given = {"pretrained": source, **changed}
    argv = adapt(data, tmp_path / "run", **{"source": given.pop("pretrained"), **given})
    start_of(train, monkeypatch, argv)
    words = f"Head: new, since {why}; each direction is a mean"
    assert re.search(words, caplog.text)
    if "head" not in changed:
        with pytest.raises(ValueError, match=f"does not fit: {why}.* Give head: new"):
            train.main([*argv, "--head=keep"])


def test_a_new_head_begins_as_the_means_of_its_speakers(
    train, others, source, tmp_path, monkeypatch
):
    """Each class has the direction of its speaker's embeddings, at its speed."""
    given = {"valid_speakers": 0, "sentence_len": 0.32, "speeds": [1.0]}
    argv = adapt(others, tmp_path / "run", source, **given)
    start = start_of(train, monkeypatch, argv)
    directions = torch.nn.functional.normalize(start["classifier.weight"], dim=-1)
    embedder = SpeakerEmbedder.from_run(source, device="cpu")
    numbers = read_labels(tmp_path / "run/save/label_encoder.txt")
    rows = list(read_manifest(tmp_path / "run/save/train.csv"))
    embedded = embedder.embed([row.wav for row in rows])
    embedded = torch.nn.functional.normalize(torch.as_tensor(embedded), dim=-1)
    whose = torch.tensor([numbers[row.spk_id] for row in rows])
    means = torch.stack([embedded[whose == n].mean(0) for n in range(len(numbers))])
    means = torch.nn.functional.normalize(means, dim=-1)
    # Segments of a third of a second are not whole utterances.
    assert (directions * means).sum(-1).min() > 0.8
    # As long as a head of random directions.
    random = start_of(
        train, monkeypatch, adapt(others, tmp_path / "r", source, head_init="random")
    )["classifier.weight"]
    ratio = start["classifier.weight"].norm() / random[: len(directions)].norm()
    assert ratio == pytest.approx(1, rel=0.2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(random[: len(directions)], directions)


def test_sub_centers_begin_as_means_of_parts_of_the_utterances(
    train, others, source, tmp_path, monkeypatch
):
    given = {"loss": "subcenter_aam_softmax", "speeds": [1.0]}
    start = start_of(
        train, monkeypatch, adapt(others, tmp_path / "run", source, **given)
    )
    weight = start["classifier.weight"]
    assert weight.shape == (5, 3, 16)
    assert weight.isfinite().all()
    assert not torch.equal(weight[:, 0], weight[:, 1])


@pytest.fixture(scope="module")
def adapted(train, others, source, tmp_path_factory):
    """An adaptation whose first epoch trains the head alone."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    given = {"freeze_epochs": 1, "encoder_lr": 0.01, "average_checkpoints": 3}
    argv = adapt(others, folder, source, **given)
    done = run(argv)
    assert not done.returncode, done.stderr
    return folder, argv


def test_frozen_epochs_train_the_head_alone(adapted, source, capsys):
    folder, _ = adapted
    before, frozen, after = (
        torch.load(path, weights_only=True)
        for path in (
            source / "embedding_model.ckpt",
            *sorted(folder.glob("save/CKPT*/embedding_model.ckpt"))[::2],
        )
    )
    # Parameters, and statistics of batches.
    assert all(torch.equal(frozen[name], value) for name, value in before.items())
    assert not torch.equal(after["fc.weight"], before["fc.weight"])
    assert not any(
        torch.equal(after[n], before[n]) for n in before if n.endswith("running_mean")
    )
    # The mean takes no epoch in which the encoder stood still.
    record = (folder / "run.json").read_text()
    assert '"epochs": [\n   2,\n   3\n  ]' in record


@pytest.mark.parametrize("step", [2, 4])
def test_an_adaptation_that_was_killed_resumes_to_the_same_weights(
    adapted, source, tmp_path, step
):
    """On both sides of the end of the frozen epochs, without its source."""
    folder, argv = adapted
    moved = shutil.copytree(source, tmp_path / "source")
    again = [a.replace(str(folder), str(tmp_path / "run")) for a in argv]
    again = [a.replace(str(source), str(moved)) for a in again]
    assert run(again, killed_at_step=step).returncode == 9
    shutil.rmtree(moved)
    done = run(again)
    assert not done.returncode, done.stderr
    assert_same_weights(tmp_path / "run", folder)
    assert log(tmp_path / "run") == log(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": "resnet34"}, r"arch is resnet34, and pretrained .* has revnet"),
        (
            {"embedding_dim": 64},
            "embedding_dim is 64, and pretrained .* has 16. Leave it",
        ),
        ({"n_mels": 80}, "n_mels is 80, and pretrained .* has 24"),
        ({"sample_rate": 8000}, "sample_rate is 8000, and pretrained .* has 16000"),
        ({"blocks": [1, 1, 1, 1]}, r"blocks is \[1, 1, 1, 1\], and pretrained .* has"),
        (
            {"freeze_epochs": 3},
            "the encoder would stay as it is",
        ),
        ({"pretrained": "nowhere"}, "pretrained: There is no folder nowhere"),
        ({"pretrained": "empty"}, "pretrained: .*empty has no .* and no checkpoint"),
        (
            {"pretrained": "plain.pt"},
            r"plain\.pt has no description\. .* convert wespeaker",
        ),
        (
            {"pretrained": "null", "freeze_epochs": 1},
            "freeze_epochs is 1, and pretrained",
        ),
        (
            {"pretrained": "null", "head": "keep"},
            "head is keep, and pretrained is null",
        ),
        ({"output_folder": "own"}, "Give another output_folder"),
        ({"model_init": "x"}, "unknown key 'model_init'. Did you mean pretrained"),
    ],
)
def test_a_start_that_cannot_work_is_refused_in_one_line(
    train, data, source, tmp_path, monkeypatch, changed, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    torch.save({"fc.weight": torch.zeros(2, 2)}, "plain.pt")
    given = {"pretrained": source, "output_folder": tmp_path / "run", **changed}
    if given["output_folder"] == "own":
        given["output_folder"] = source / "below"
    output, start = given.pop("output_folder"), given.pop("pretrained")
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        train.main(adapt(data, output, start, **given))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--pretrained=other", "was started with pretrained: .*run, and pretrained is"),
        (
            "--freeze_epochs=2",
            "was started with freeze_epochs: 1, and freeze_epochs is 2",
        ),
        (
            "--head=keep",
            "was started with head: None, and head is keep: give it as it was",
        ),
    ],
)
def test_a_run_is_not_resumed_with_another_start(train, adapted, option, message):
    _, argv = adapted
    name = option.partition("=")[0]
    others = [a for a in argv if not a.startswith(f"{name}=")]
    with pytest.raises(ValueError, match=message):
        train.main([*others, option])


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    adapted, source, tmp_path
):
    folder, argv = adapted
    again = [a.replace(str(folder), str(tmp_path / "run")) for a in argv]
    again = [a.replace("ckpt_interval_steps=1", "ckpt_interval_steps=0") for a in again]
    assert run(again, killed_at_step=1).returncode == 9
    done = run(again)
    assert not done.returncode, done.stderr
    assert_same_weights(tmp_path / "run", folder)


def test_a_run_is_not_trained_in_the_folder_of_a_model(train, data, exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    with pytest.raises(ValueError, match="would leave two models in it"):
        train.main(arguments(data, folder))
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        p.name for p in exported.iterdir()
    )


def test_a_dry_run_counts_the_head_and_both_phases(
    train, others, source, tmp_path, capsys
):
    argv = adapt(others, tmp_path / "run", source, freeze_epochs=1)
    train.main([*argv, "--dry_run"])
    printed = capsys.readouterr().out
    assert "s per step up to epoch 1 and" in printed
    assert "of them before the first step" in printed
    assert not list(tmp_path.glob("run/save/CKPT*"))


def test_an_adapted_model_is_exported_and_verifies(adapted, tmp_path, others):
    folder, _ = adapted
    export_run(folder, tmp_path / "model")
    embedder = SpeakerEmbedder.from_hparams(tmp_path / "model", device="cpu")
    one, other, *_ = sorted(others.rglob("*.wav"))
    score = embedder.verify(one, other, threshold=0.0).score
    embedded = SpeakerEmbedder.from_run(folder, device="cpu").verify(one, other)
    assert score == pytest.approx(embedded.score, abs=1e-6)


@pytest.mark.parametrize("name", ["resnet34", "gemini_df_resnet60"])
def test_converted_weights_are_adapted_and_exported(
    train, others, tmp_path, monkeypatch, name
):
    settings = {"name": name, "widths": (4, 8, 8, 8), "blocks": (1, 1, 1, 1)}
    encoder = build_encoder(**settings)
    torch.save(to_wespeaker(settings, encoder.state_dict()), tmp_path / "avg_model.pt")
    convert_from_wespeaker(tmp_path / "avg_model.pt", tmp_path / "model")
    argv = adapt(others, tmp_path / "run", tmp_path / "model")
    start = start_of(train, monkeypatch, argv)
    for tensor, value in encoder.named_parameters():
        assert torch.equal(start[f"embedding_model.{tensor}"], value), tensor
    settings = plain_settings((tmp_path / "run/hyperparams.yaml").read_text())
    assert (settings["features"], settings["pooling_variance"]) == ("kaldi", "unbiased")
    train.main(argv)
    export_run(tmp_path / "run", tmp_path / "exported")
    path = next(others.rglob("*.wav"))
    embedded = [
        SpeakerEmbedder.from_hparams(tmp_path / folder, device="cpu").embed([path])
        for folder in ("run", "exported", "model")
    ]
    torch.testing.assert_close(embedded[0], embedded[1])
    assert (embedded[0] != embedded[2]).any()


@pytest.mark.parametrize(
    ("file", "held_out"), [("fine_tune.yaml", 2), ("large_margin.yaml", 0)]
)
def test_the_files_of_an_adaptation_need_the_source_alone(
    train, data, source, tmp_path, monkeypatch, caplog, file, held_out
):
    monkeypatch.chdir(tmp_path)
    options = [f"--data_folder={data}", f"--pretrained={source}", "--batch_size=4"]
    options += [
        "--num_workers=0",
        f"--valid_speakers={held_out}",
        "--chunk_samples=4640",
    ]
    options += ["--memory_budget=null", "--device=cpu"]
    start_of(train, monkeypatch, [str(HPARAMS / file), *options])
    # With speakers held out others than those of the source are trained on.
    head = "kept" if file == "large_margin.yaml" else "new"
    assert f"Head: {head}" in caplog.text
    (settings,) = tmp_path.glob("results/*/1986/hyperparams.yaml")
    assert plain_settings(settings.read_text())["arch"] == "revnet57"
