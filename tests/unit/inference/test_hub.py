"""Models on the Hub: what is fetched, of which commit, and what is refused before."""

import hashlib
import logging
import os
import shutil
import socket
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

from speechbrain_rev import cli
from speechbrain_rev.inference import (
    Cohort,
    SpeakerEmbedder,
    Threshold,
    export_run,
    read_cohort,
)
from speechbrain_rev.inference.run_folder import read_weights
from speechbrain_rev.inference.thresholds import as_json
from speechbrain_rev.inference.trained import model_folder
from speechbrain_rev.inference.untrusted import open_own
from tests.hub_server import Repository, ask, serving
from tests.run_folders import speech_like, write_audio, write_finished_run

ID = "owner/model"
YAML, SUMS, TENSORS = "hyperparams.yaml", "SHA256SUMS", "embedding_model.safetensors"
THRESHOLDS, COHORT = "thresholds.json", "cohort.safetensors"
READ = {YAML, SUMS, TENSORS, THRESHOLDS}
#: A commit that no repository has.
OTHER = "0123456789abcdef0123456789abcdef01234567"


def summed(files):
    """The files with checksums of all."""
    files = {name: data for name, data in files.items() if name != SUMS}
    lines = [f"{hashlib.sha256(d).hexdigest()}  {n}\n" for n, d in files.items()]
    return {**files, SUMS: "".join(lines).encode()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The files of an exported model with thresholds and a cohort."""
    folder = tmp_path_factory.mktemp("exported")
    write_finished_run(folder / "run")
    export_run(folder / "run", folder / "out")
    fingerprint = read_weights(folder / "run").fingerprint
    means = np.random.default_rng(0).standard_normal((4, 16))
    Cohort(means, 3, fingerprint).write(folder / "out" / COHORT)
    known = Threshold("vox1_o", "EER", "cosine", 0.31, 5, 5, 0.1)
    (folder / "out" / THRESHOLDS).write_text(as_json([known]))
    return summed({path.name: path.read_bytes() for path in (folder / "out").iterdir()})


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on the loopback, and an empty cache; the folder at hand is empty too."""
    with serving() as served:
        (tmp_path / "cwd").mkdir()
        monkeypatch.chdir(tmp_path / "cwd")
        ask(served.endpoint, tmp_path / "cache", monkeypatch)
        yield served


@pytest.fixture
def repository(hub, exported):
    """The repository of ``ID`` with the exported model on main."""
    hub.repositories[ID] = Repository()
    hub.repositories[ID].commit(exported)
    return hub.repositories[ID]


@pytest.fixture
def no_connection(tmp_path, monkeypatch):
    """Call to be cut off from the Hub."""

    def cut_off():
        with socket.socket() as unheard:
            unheard.bind(("127.0.0.1", 0))
            port = unheard.getsockname()[1]
        ask(f"http://127.0.0.1:{port}", tmp_path / "cache", monkeypatch)

    return cut_off


def load(revision=None, source=ID):
    return SpeakerEmbedder.from_hparams(source, revision=revision, device="cpu")


def refused(kind, *words, revision=None, source=ID):
    """The one line with which a model is refused; the words must be in it."""
    with pytest.raises(kind) as error:
        load(revision, source)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    return message


def remove(files, *names):
    return {name: data for name, data in files.items() if name not in names}


# ------------------------------------------------------------ what is fetched


def test_a_model_on_the_hub_is_the_one_that_was_exported(
    hub, repository, exported, tmp_path
):
    local = tmp_path / "local"
    local.mkdir()
    for name, data in exported.items():
        (local / name).write_bytes(data)
    speech = speech_like(0.5)
    ours, theirs = load(), load(source=local)
    np.testing.assert_array_equal(
        ours.embed(speech, 16000), theirs.embed(speech, 16000)
    )
    assert ours.fingerprint == theirs.fingerprint
    assert ours.thresholds == theirs.thresholds
    assert ours.thresholds.known


def test_only_what_is_read_is_fetched_and_once(hub, repository, exported):
    load()
    assert hub.fetched() == READ < set(exported)
    hub.requests.clear()
    load()
    assert [asked.split()[0] for asked in hub.requests] == ["GET"]
    assert not hub.fetched()


def test_a_commit_in_the_cache_is_loaded_without_a_request(
    hub, repository, monkeypatch
):
    load()
    hub.requests.clear()
    load(revision=repository.refs["main"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load(revision=repository.refs["main"])
    assert not hub.requests


def test_the_cache_has_one_copy_under_the_name_of_the_commit(hub, repository):
    folder = model_folder(ID)
    assert folder.name == repository.refs["main"]
    assert folder.is_relative_to(constants.HF_HUB_CACHE)
    assert {path.name for path in folder.iterdir()} == READ
    assert all(path.is_symlink() for path in folder.iterdir())
    # As downloaded by whichever program: the cache's own folder is read, too.
    assert load(source=folder).fingerprint == load().fingerprint


def test_the_cohort_is_fetched_when_it_is_asked_for(hub, repository):
    load()
    cohort = read_cohort(ID, revision=repository.refs["main"])
    assert cohort.fingerprint == load().fingerprint
    assert hub.fetched() == READ | {COHORT}
    hub.requests.clear()
    read_cohort(ID, revision=repository.refs["main"])
    assert not hub.requests


def test_a_model_without_a_cohort_says_so(hub, repository, exported):
    repository.commit(summed(remove(exported, COHORT)))
    with pytest.raises(
        FileNotFoundError, match=f"has no {COHORT}. It was exported without"
    ):
        read_cohort(ID)
    assert load().sample_rate == 16000


@pytest.mark.parametrize("listed", [True, False])
def test_a_model_without_thresholds_is_known_to_have_none(
    hub, repository, exported, listed, no_connection
):
    files = remove(exported, THRESHOLDS)
    commit = repository.commit(files if listed else summed(files))
    assert not load().thresholds.known
    no_connection()
    assert not load(revision=commit).thresholds.known


# ------------------------------------------------------------ revisions


def test_branches_tags_and_commits_are_revisions(hub, repository, exported):
    first = repository.refs["main"]
    repository.refs["v1"] = first
    second = repository.commit({**exported, "README.md": b"2"}, "main", "refs/pr/1")
    given = [None, "main", "v1", "refs/pr/1", first, second]
    folders = [model_folder(ID, revision).name for revision in given]
    assert folders == [second, second, first, second, first, second]


def test_a_branch_that_moves_meanwhile_is_one_commit(
    hub, repository, exported, monkeypatch
):
    first, genuine = repository.refs["main"], huggingface_hub.HfApi.model_info
    later = dict.fromkeys(exported, b"another")

    def moved(*arguments, **options):
        listed = genuine(*arguments, **options)
        repository.commit(later)
        return listed

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", moved)
    load()
    files = [asked for asked in hub.requests if "/resolve/" in asked]
    assert files
    assert all(f"/resolve/{first}/" in asked for asked in files)


def test_the_commit_is_logged_unless_it_was_given(hub, repository, caplog):
    commit = repository.refs["main"]
    with caplog.at_level(logging.INFO, logger="speechbrain_rev"):
        load()
        assert caplog.messages == [
            f"{ID}: main is commit {commit}. Load the same again by revision={commit!r}."
        ]
        caplog.clear()
        load(revision=commit)
        assert not caplog.messages


def test_a_revision_that_is_not_there_is_named(hub, repository):
    for revision in ("v9", OTHER, "../main"):
        refused(FileNotFoundError, f"no revision {revision!r}", revision=revision)


@pytest.mark.parametrize("revision", ["", 3, b"main"])
def test_a_revision_is_a_text(hub, repository, revision):
    refused(ValueError, "takes a branch, a tag or a commit", revision=revision)


# ------------------------------------------------------------ paths and ids


def test_a_folder_that_is_there_is_a_folder(hub, repository, exported):
    Path(ID).mkdir(parents=True)
    refused(FileNotFoundError, f"{ID} has no ")
    for name, data in exported.items():
        Path(ID, name).write_bytes(data)
    assert load().sample_rate == 16000
    refused(ValueError, f"{ID} is a local path", revision="main")
    shutil.rmtree(ID)
    Path(ID).symlink_to("nowhere")
    refused(FileNotFoundError, f"There is no folder {ID}")
    assert not hub.requests


@pytest.mark.parametrize(
    "source",
    [
        "./owner/model", "/owner/model", "../model", "owner/..", "owner/../model", ".", "..",
        "a/b/c", "owner/model/", "owner//model", "~/model", "model", "", "owner/mo del",
        "owner/model.git", "own--er/model", "-/-", "owner/model\n", Path(ID),
        "https://huggingface.co/owner/model", "owner/" + "m" * 97,
    ],
)  # fmt: skip
def test_what_is_no_id_is_a_path(hub, repository, source):
    with pytest.raises(FileNotFoundError, match=r"or the id of a model on the Hugging"):
        load(source=source)
    with pytest.raises(ValueError, match="goes with the id of a model on the Hub"):
        load("main", source=source)
    assert not hub.requests


def test_runs_are_local(hub, repository):
    with pytest.raises(FileNotFoundError, match=f"There is no folder {ID}"):
        SpeakerEmbedder.from_run(ID)
    assert not hub.requests


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", ["custom.py", "a b.py", "\x1b[2J.py"])
def test_code_is_refused_before_anything_is_fetched(hub, repository, exported, name):
    repository.commit({**exported, name: b"raise SystemExit"})
    message = refused(ValueError, "brings code, ", ID)
    assert message.isprintable()
    assert not hub.fetched()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (TENSORS, None),
        (YAML, 100_001), (SUMS, 100_001), (THRESHOLDS, 1_000_001), (YAML, None),
        (THRESHOLDS, None),
    ],
)  # fmt: skip
def test_a_file_that_is_too_large_is_not_fetched(hub, repository, name, size):
    repository.sizes[name] = size
    refused(ValueError, ID, f"{name} has ", "not fetched")
    assert not hub.fetched()


@pytest.mark.parametrize("size", [0, 100, 10**6, 10**12])
def test_weights_of_another_size_than_the_settings_mean_are_not_fetched(
    hub, repository, size
):
    repository.sizes[TENSORS] = size
    refused(ValueError, f"{TENSORS} has ", ID)
    assert hub.fetched() == {YAML, SUMS}


def test_a_cohort_that_is_too_large_is_not_fetched(hub, repository):
    repository.sizes[COHORT] = 10**9 + 1
    with pytest.raises(ValueError, match=f"{COHORT} has 1,000,000,001 bytes"):
        read_cohort(ID)
    assert not hub.fetched()


def test_settings_that_are_none_of_export_cost_no_weights(hub, repository, exported):
    settings = exported[YAML] + b"more: !apply:os.mkdir [executed]\n"
    repository.commit(summed({**exported, YAML: settings}))
    refused(ValueError, "!apply:os.mkdir")
    assert hub.fetched() == {YAML, SUMS}
    assert not Path("executed").exists()


def test_a_file_of_another_size_than_listed_is_refused(hub, repository):
    repository.sizes[YAML] = 99
    refused(ValueError, f"{YAML} has ", "but 99 are listed", ID)


def test_what_an_exported_model_lacks_is_named(hub, repository, exported):
    repository.commit(remove(exported, SUMS, YAML))
    refused(FileNotFoundError, f"has no {YAML}, {SUMS}. Give a model that")
    repository.commit(remove(exported, TENSORS))
    message = refused(
        FileNotFoundError, f"has no {TENSORS}. It has embedding_model.ckpt"
    )
    assert "speechbrain-rev convert" in message
    assert not hub.fetched()


# ------------------------------------------------------------ the Hub says no, or nothing


def test_a_model_that_is_not_there_may_have_been_meant_as_a_folder(hub):
    refused(
        FileNotFoundError, f"There is no folder {ID} here", "HF_TOKEN", hub.endpoint
    )


def test_a_gated_model_is_asked_for_first(hub, repository):
    hub.gated.add(ID)
    refused(PermissionError, f"{ID} is gated", f"{hub.endpoint}/{ID}", "HF_TOKEN")


@pytest.mark.parametrize(
    "answer",
    [
        (500, b""), (503, b"later"), (200, b"<html>"), (200, b"[]"), (200, b"{}"),
        (200, b'{"id": "owner/model", "sha": "../..", "siblings": []}'),
        (200, b'{"id": "owner/model", "sha": null, "siblings": []}'),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_no_model(hub, repository, answer, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.answer = answer
    refused(
        ConnectionError,
        f"There is no folder {ID} here, and as the id of a model on the Hub",
        f"{ID} at revision 'main' cannot be looked up",
        "no commit",
    )


def test_without_a_connection_the_cache_is_named_and_what_it_has(
    hub, repository, exported, no_connection
):
    first = load() and repository.refs["main"]
    second = repository.commit({**exported, "README.md": b"2"})
    older, newer = model_folder(ID, first), model_folder(ID)
    os.utime(older, (1, 1))
    # As other programs note which commit a branch was.
    (newer.parents[1] / "refs").mkdir()
    (newer.parents[1] / "refs/main").write_text(second)
    no_connection()
    told = f"has commit {second} (main), {first}: give revision={second!r}"
    refused(ConnectionError, constants.HF_HUB_CACHE, told)
    refused(ConnectionError, told, revision=OTHER)
    assert load(revision=second).sample_rate == 16000
    # A commit of which a file is missing is none that helps.
    (newer / THRESHOLDS).unlink()
    refused(ConnectionError, f"has commit {first}: give", revision=second)
    (older / TENSORS).unlink()
    refused(ConnectionError, "has no commit of it that is complete")


def test_a_commit_whose_cohort_is_not_cached_is_named_as_that(
    hub, repository, exported, no_connection, tmp_path, monkeypatch
):
    commit = load() and repository.refs["main"]
    other = repository.commit({**exported, "README.md": b"2"})
    no_connection()
    with pytest.raises(ConnectionError, match=f"has this commit without {COHORT}") as e:
        read_cohort(ID, revision=commit)
    assert "give revision" not in str(e.value)
    with pytest.raises(ConnectionError, match=f"is complete and has {COHORT}"):
        read_cohort(ID)
    ask(hub.endpoint, tmp_path / "cache", monkeypatch)
    read_cohort(ID)
    no_connection()
    with pytest.raises(ConnectionError, match=f"commit {other}: give revision"):
        read_cohort(ID)


def test_where_the_hub_may_not_be_asked_it_is_not(hub, repository, monkeypatch):
    commit = load() and repository.refs["main"]
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(ConnectionError, "HF_HUB_OFFLINE is set", f"give revision={commit!r}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "empty")
    refused(ConnectionError, "HF_HUB_OFFLINE is set", "or give a local folder")
    assert not hub.requests


def test_a_download_that_was_cut_short_is_named_and_goes_on(
    hub, repository, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.stop_after = 50
    refused(ConnectionError, ID, "was not fetched to its end", "Try again")
    hub.stop_after = None
    assert load().sample_rate == 16000


def test_a_disk_that_is_full_is_no_matter_of_the_hub(hub, repository, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(OSError, match="No space left") as error:
        load()
    assert error.value.errno == 28


def test_a_damaged_file_in_the_cache_is_fetched_anew_as_the_error_says(hub, repository):
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
    assert load(revision=commit).sample_rate == 16000


# ------------------------------------------------------------ links of the cache


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot as huggingface_hub lays it out, and a file elsewhere."""
    folder = tmp_path / "cache/models--owner--model/snapshots" / OTHER
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"secret")
    return folder


def place(blob):
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"content")
    return blob


@pytest.mark.parametrize(
    "blob",
    [
        "../../blobs/" + "a" * 40,
        "../../blobs/" + "b" * 64,
        "../../../blobs/cc/" + "c" * 64,
    ],
)
def test_links_to_content_of_the_cache_are_followed(snapshot, blob):
    place(snapshot / blob)
    (snapshot / "file").symlink_to(blob)
    with open_own(snapshot, "file") as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    "blob",
    [
        "../../../../secret", "../../blobs/name", "../../blobs/deeper/" + "a" * 40,
        "../../../models--owner--other/blobs/" + "a" * 40, "../../../blobs/" + "a" * 64,
        "../../../blobs/bb/" + "a" * 64, "../../" + "a" * 40, "../../../../blobs/" + "a" * 40,
    ],
)  # fmt: skip
def test_other_links_out_of_a_snapshot_are_not(snapshot, blob):
    place(snapshot / blob)
    (snapshot / "file").symlink_to(blob)
    with pytest.raises(ValueError, match="file is a link out of its folder"):
        open_own(snapshot, "file")


def test_content_that_is_a_link_elsewhere_is_not(snapshot, tmp_path):
    blobs, name = snapshot.parents[1] / "blobs", "a" * 40
    blobs.mkdir()
    (blobs / name).symlink_to(tmp_path / "secret")
    (snapshot / "file").symlink_to(blobs / name)
    with pytest.raises(ValueError, match="file is a link out of its folder"):
        open_own(snapshot, "file")
    (blobs / name).unlink()
    blobs.rmdir()
    place(tmp_path / "elsewhere" / name)
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="file is a link out of its folder"):
        open_own(snapshot, "file")


@pytest.mark.parametrize(
    "folder",
    [
        "models--a--b/snapshots/main",
        "a--b/snapshots/" + OTHER,
        "models--a--b/x/" + OTHER,
    ],
)
def test_a_folder_that_is_no_snapshot_has_no_such_links(tmp_path, folder):
    folder = tmp_path / folder
    folder.mkdir(parents=True)
    blob = place(folder.parents[1] / "blobs" / ("a" * 40))
    (folder / "file").symlink_to(blob)
    with pytest.raises(ValueError, match="file is a link out of its folder"):
        open_own(folder, "file")


# ------------------------------------------------------------ commands


@pytest.fixture
def audio(tmp_path):
    names = ["a.wav", "b.wav"]
    return [str(write_audio(tmp_path / n, speech_like(0.5))) for n in names]


def test_embed_prints_the_commit_and_takes_it(hub, repository, audio, tmp_path, capsys):
    commit, out = repository.refs["main"], str(tmp_path / "rows.npz")
    arguments = ["embed", ID, *audio, "--device=cpu", f"--out={out}"]
    assert cli.main(arguments) == 0
    # A bar of huggingface_hub may stand before it.
    said = capsys.readouterr().err
    line = f"{ID}: main is commit {commit}. Use the same again by --revision={commit}\n"
    assert said.count(commit) == 2
    assert line in said
    hub.requests.clear()
    assert cli.main([*arguments, f"--revision={commit}"]) == 0
    assert capsys.readouterr().err == ""
    assert not hub.requests
    with np.load(out) as written:
        assert str(written["fingerprint"]) == load().fingerprint


def test_verify_takes_thresholds_and_cohort_of_one_commit(
    hub, repository, audio, capsys
):
    assert cli.main(["verify", ID, *audio, "--device=cpu"]) == 0
    assert "by the threshold 0.3100: EER of the list vox1_o" in capsys.readouterr().out
    arguments = ["verify", ID, *audio, "--as-norm", "--device=cpu", "--revision=main"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "AS-Norm, in deviations" in out
    assert sum("/revision/main" in asked for asked in hub.requests) == 2
    assert f"--revision={repository.refs['main']}" in err


@pytest.mark.parametrize("command", ["embed", "verify"])
def test_mistakes_are_one_line(hub, exported, audio, tmp_path, command, capsys):
    Path("model").mkdir()
    for name, data in exported.items():
        Path("model", name).write_bytes(data)
    for arguments, words in [
        ([ID], f"There is no folder {ID} here, and on the Hub"),
        (["./model/nowhere"], "There is no folder "),
        (["model", "--revision=main"], "(--revision) goes with the id of a model"),
        (["a/b/c", "--revision=main"], "a/b/c is no such id"),
        (["./a/b"], "no folder ./a/b. Give the output_folder of a training run"),
        (["a/b/c"], "export or convert wrote, or the id of a model on the Hugging"),
        (["model/SHA256SUMS"], "model/SHA256SUMS is a file, and no folder"),
        (["hf://owner/model"], "id of a model on the Hugging Face Hub: 'owner/model'"),
        ([f"https://huggingface.co/{ID}/tree/main"], f"Face Hub: '{ID}'."),
    ]:
        assert cli.main([command, *arguments, *audio, "--device=cpu"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert words in err
