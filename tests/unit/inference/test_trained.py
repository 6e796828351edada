"""Models on the Hub: what is fetched, of which commit, and what is refused before."""

import hashlib
import logging
import shutil
import socket
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from speechbrain_rev import cli
from speechbrain_rev.inference import Cohort, SpeakerEmbedder, Threshold, read_cohort
from speechbrain_rev.inference.thresholds import as_json
from speechbrain_rev.inference.trained import model_folder
from tests.hub_server import Repository, ask, serving
from tests.run_folders import speech_like, write_audio

ID = "owner/model"
FOUND_NOWHERE = (
    f"There is no folder {ID} here, and as the id of a model on the Hub it can"
)
SUMS, TENSORS = "SHA256SUMS", "embedding_model.safetensors"
THRESHOLDS, COHORT = "thresholds.json", "cohort.safetensors"
READ = {SUMS, TENSORS, THRESHOLDS}
#: A commit that no repository has.
OTHER = "0123456789abcdef0123456789abcdef01234567"


def summed(files, *left_out):
    """The files with checksums of all, but for some."""
    files = {n: data for n, data in files.items() if n not in (SUMS, *left_out)}
    lines = [f"{hashlib.sha256(d).hexdigest()}  {n}\n" for n, d in files.items()]
    return {**files, SUMS: "".join(lines).encode()}


@pytest.fixture(scope="module")
def files(exported, embedder, tmp_path_factory):
    """The files of an exported model with thresholds and a cohort."""
    means = np.random.default_rng(0).standard_normal((4, 16))
    path = tmp_path_factory.mktemp("cohort") / COHORT
    Cohort(means, 3, embedder.fingerprint).write(path)
    known = as_json(
        [Threshold("vox1_o", "EER", "cosine", 0.31, 5, 5, 0.1, (1, 1), None)]
    )
    more = {COHORT: path.read_bytes(), THRESHOLDS: known.encode()}
    return summed({**exported, **more})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on the loopback, and an empty cache; the folder at hand is empty too."""
    with serving() as served:
        (tmp_path / "cwd").mkdir()
        monkeypatch.chdir(tmp_path / "cwd")
        ask(served.endpoint, tmp_path / "cache", monkeypatch)
        yield served


@pytest.fixture
def repository(hub, files):
    """The repository of ``ID`` with the exported model on main."""
    hub.repositories[ID] = Repository()
    hub.repositories[ID].commit(files)
    return hub.repositories[ID]


@pytest.fixture
def no_connection(tmp_path, monkeypatch):
    """Call to be cut off from the Hub."""

    def cut_off():
        with socket.socket() as unheard:
            unheard.bind(("127.0.0.1", 0))
            port = unheard.getsockname()[1]
        ask(f"http://127.0.0.1:{port}", tmp_path / "cache", monkeypatch)
        # The Hub's library waits between its attempts.
        monkeypatch.setattr(time, "sleep", lambda _: None)

    return cut_off


def load(revision=None, source=ID):
    return SpeakerEmbedder.from_hparams(source, revision=revision, device="cpu")


def refused(kind, *words, call=load, **given):
    """The one line with which a model is refused; the words must be in it."""
    with pytest.raises(kind) as error:
        call(**given)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    return message


def cohort(revision=None):
    return read_cohort(ID, revision=revision)


# ------------------------------------------------------------ what is fetched


def test_what_is_read_is_fetched_once_into_the_cache_of_all_programs(
    hub, repository, embedder, monkeypatch
):
    commit = load() and repository.refs["main"]
    assert hub.fetched() == READ
    folder = model_folder(ID)
    assert folder.name == commit
    assert folder.is_relative_to(constants.HF_HUB_CACHE)
    assert {path.name for path in folder.iterdir()} == READ
    assert all(path.is_symlink() for path in folder.iterdir())
    # The cache's own folder is read, too.
    here, speech = load(source=folder), speech_like(0.5)
    assert here.fingerprint == embedder.fingerprint
    assert here.thresholds.known
    assert np.array_equal(here.embed(speech, 16000), embedder.embed(speech, 16000))
    hub.requests.clear()
    load()
    assert [asked.split()[0] for asked in hub.requests] == ["GET"]
    assert not hub.fetched()
    # A commit that is there is loaded without a request.
    hub.requests.clear()
    load(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load(commit)
    assert not hub.requests


def test_the_cohort_is_fetched_when_it_is_asked_for(hub, repository, files):
    load()
    commit = repository.refs["main"]
    assert cohort(commit).fingerprint == load().fingerprint
    assert hub.fetched() == READ | {COHORT}
    hub.requests.clear()
    cohort(commit)
    assert not hub.requests
    repository.commit(summed(files, COHORT))
    words = f"has neither {COHORT} nor"
    refused(FileNotFoundError, words, call=cohort)
    assert load().sample_rate == 16000


def test_a_model_without_thresholds_is_known_to_have_none(
    repository, files, no_connection
):
    without = summed(files, THRESHOLDS)
    # The checksums list the file, or do not.
    commits = [
        repository.commit({**without, **more}) for more in ({}, {SUMS: files[SUMS]})
    ]
    for commit in commits:
        assert not load(commit).thresholds.known
    no_connection()
    for commit in commits:
        assert not load(commit).thresholds.known


# ------------------------------------------------------------ revisions and ids


def test_branches_tags_and_commits_are_revisions(repository, files, caplog):
    first = repository.refs["main"]
    repository.refs["v1"] = first
    second = repository.commit({**files, "README.md": b"2"}, "main", "refs/pr/1")
    given = [None, "main", "v1", "refs/pr/1", first, second]
    folders = [model_folder(ID, revision).name for revision in given]
    assert folders == [second, second, first, second, first, second]
    for revision in ("v9", OTHER, "../main", "", 3):
        refused(OSError, FOUND_NOWHERE, revision=revision)
    with caplog.at_level(logging.INFO, logger="speechbrain_rev"):
        load()
        load(second)
    assert caplog.messages == [
        f"{ID}: main is commit {second}. Load the same again by revision={second!r}."
    ]


def test_a_branch_that_moves_meanwhile_is_one_commit(
    hub, repository, files, monkeypatch
):
    first, genuine = repository.refs["main"], huggingface_hub.HfApi.model_info

    def moved(*arguments, **options):
        listed = genuine(*arguments, **options)
        repository.commit(dict.fromkeys(files, b"another"))
        return listed

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", moved)
    load()
    fetched = [asked for asked in hub.requests if "/resolve/" in asked]
    assert fetched
    assert all(f"/resolve/{first}/" in asked for asked in fetched)


def test_a_folder_that_is_there_is_a_folder(hub, repository, files):
    Path(ID).mkdir(parents=True)
    refused(FileNotFoundError, f"{ID} has no ")
    for name, data in files.items():
        Path(ID, name).write_bytes(data)
    assert load().sample_rate == 16000
    refused(
        ValueError, f"of a model on the Hub, owner/model, but {ID}", revision="main"
    )
    shutil.rmtree(ID)
    Path(ID).symlink_to("nowhere")
    refused(FileNotFoundError, f"There is no folder {ID}")
    # Runs are local.
    with pytest.raises(FileNotFoundError, match=f"There is no folder {ID}"):
        SpeakerEmbedder.from_run(ID)
    assert not hub.requests


@pytest.mark.parametrize(
    "source",
    [
        "./owner/model", "/owner/model", "owner/..", ".", "a/b/c", "owner/model/",
        "owner//model", "~/model", "model", "", "owner/mo del", "owner/model.git",
        "own--er/model", "-/-", "owner/model\n", Path(ID), "owner/" + "m" * 97,
        "https://huggingface.co/owner/model", "hf://owner/model",
    ],
)  # fmt: skip
def test_what_is_no_id_is_a_path(hub, repository, source):
    words = "or the id of a model on the Hugging"
    with pytest.raises(FileNotFoundError, match=words):
        load(source=source)
    with pytest.raises(ValueError, match="goes with the id of a model on the Hub"):
        load("main", source=source)
    assert not hub.requests


# ------------------------------------------------------------ what is refused


def test_code_and_whatever_else_there_is_are_not_fetched(hub, repository, files):
    others = ("custom.py", "hyperparams.yaml", "a/SHA256SUMS", "../../x.safetensors")
    repository.commit({**files, **dict.fromkeys(others, b"raise SystemExit")})
    assert load().sample_rate == 16000
    assert hub.fetched() == READ


def test_what_a_model_lacks_is_named(hub, repository, files):
    repository.commit({n: data for n, data in files.items() if n != TENSORS})
    refused(FileNotFoundError, f"has no {TENSORS} (of a model on the Hub nothing else")
    assert TENSORS not in hub.fetched()
    repository.commit(summed({**files, TENSORS: b"x"}))
    refused(ValueError, f"{TENSORS} is not loaded", f"is {ID} of the Hub at commit")


# ------------------------------------------------------------ the Hub says no, or nothing


def test_a_model_that_is_not_there_or_gated_is_reported_by_the_hub(hub, files):
    refused(OSError, FOUND_NOWHERE, "Not Found", hub.endpoint)
    hub.repositories[ID] = Repository()
    hub.repositories[ID].commit(files)
    hub.gated.add(ID)
    refused(OSError, FOUND_NOWHERE, hub.endpoint)


@pytest.mark.parametrize(
    "answer",
    [(500, b""), (200, b"<html>"), (200, b'{"id": "owner/model", "sha": "../.."}')],
)
def test_an_answer_that_is_none_is_no_model(hub, repository, answer, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.answer = answer
    refused(OSError, FOUND_NOWHERE)


def test_without_a_connection_what_is_in_the_cache_is_loaded(
    repository, files, no_connection
):
    first = load() and repository.refs["main"]
    second = repository.commit({**files, "README.md": b"2"})
    no_connection()
    assert load(first).sample_rate == 16000
    assert model_folder(ID).name == first
    for revision in (second, "v1"):
        refused(OSError, FOUND_NOWHERE, revision=revision)
    refused(OSError, FOUND_NOWHERE, call=cohort)


def test_where_the_hub_may_not_be_asked_it_is_not(hub, repository, monkeypatch):
    load()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load().sample_rate == 16000
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "empty")
    refused(OSError, FOUND_NOWHERE, "HF_HUB_OFFLINE")
    assert not hub.requests


def test_a_download_that_was_cut_short_is_reported_and_resumed(
    hub, repository, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.stop_after = 50
    refused(OSError, FOUND_NOWHERE)
    hub.stop_after = None
    assert load().sample_rate == 16000


def test_a_damaged_file_in_the_cache_is_fetched_anew_as_the_error_says(repository):
    commit = load() and repository.refs["main"]
    weights = (model_folder(ID) / TENSORS).resolve()
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    message = refused(ValueError, "is not as it was written", revision=commit)
    folder = message.split("remove ")[-1].removesuffix(" first.")
    assert folder == str(model_folder(ID).parents[1])
    shutil.rmtree(folder)
    assert load(commit).sample_rate == 16000


def test_commands_print_the_commit_and_take_it(hub, repository, tmp_path, capsys):
    commit = repository.refs["main"]
    audio = [write_audio(tmp_path / n, speech_like(0.5)) for n in ("a.wav", "b.wav")]
    verify = ["verify", ID, *map(str, audio), "--as-norm", "--device=cpu"]
    assert cli.main([*verify, "--revision=main"]) == 0
    out, err = capsys.readouterr()
    assert "AS-Norm, in deviations" in out
    # A bar of huggingface_hub may stand before it.
    line = f"{ID}: main is commit {commit}. Use the same again by --revision={commit}\n"
    assert line in err
    # The cohort is of the same commit.
    assert sum("/revision/main" in asked for asked in hub.requests) == 1
    hub.requests.clear()
    assert cli.main([*verify, f"--revision={commit}"]) == 0
    assert ID not in capsys.readouterr().err
    assert not hub.requests
