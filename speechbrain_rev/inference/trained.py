"""Trained encoders as their folders describe them: a run's, an exported one, one on the Hub.

A repository's files are listed with their sizes before any of them is fetched. Of one
commit, the files that are read of an exported model are fetched, and no others; none is
fetched that is larger than it may be. They stay in the cache that all programs share, and
are read as those of a local folder: ``untrusted`` knows which links are the cache's own.
huggingface_hub is imported here only, when a model on the Hub is asked for.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.files import SUMS
from speechbrain_rev.inference.front_ends import WaveformEncoder
from speechbrain_rev.inference.model_folder import (
    ASSUMED,
    MAX_TEXT_BYTES,
    SAFETENSORS,
    encoder_of,
    expected_weights,
    is_exported,
    model_settings,
    read_model,
    read_sums,
    refuse_code,
    run_settings,
)
from speechbrain_rev.inference.run_folder import (
    HYPERPARAMS,
    WEIGHTS,
    read_objects,
    read_weights,
)
from speechbrain_rev.inference.thresholds import (
    MAX_THRESHOLDS_BYTES,
    THRESHOLDS,
    Thresholds,
    read_thresholds,
    run_thresholds,
)
from speechbrain_rev.inference.untrusted import check_tensors
from speechbrain_rev.lobes import SpeakerEncoder, inference_form
from speechbrain_rev.lobes.pretrained import unwrapped

logger = logging.getLogger(__name__)

_COMMIT = re.compile("[0-9a-f]{40}")
_URL = re.compile(
    r"(?:hf:/{1,2}|https?:/{1,2}(?:huggingface\.co|hf\.co)/)(?:models/)?"
    r"([\w.-]+/[\w.-]+)"
)
_MAX_REASON = 200


def is_hub_id(source: object) -> bool:
    """Return whether a source is the id of a model on the Hub, and no path.

    Parameters
    ----------
    source : object
        What a user gave.

    Returns
    -------
    bool
        True of a str of the form ``owner/model``, unless there is a file or folder of
        that name: a path that is there is always a path.

    Example
    -------
    >>> [is_hub_id(s) for s in ("owner/model", "./model", "a/b/c", "/model", "..", "model")]
    [True, False, False, False, False, False]
    """
    if not isinstance(source, str) or os.path.lexists(source):
        return False
    if source.count("/") != 1 or not source.isprintable():
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return True


def check_no_url(source: str | PathLike[str]) -> None:
    """Refuse the address of a model on the Hub, in whose place its id is to be given.

    Parameters
    ----------
    source : str or path-like
        What a user gave.

    Raises
    ------
    FileNotFoundError
        If it is an address, and nothing of that name is here.

    Example
    -------
    >>> check_no_url("owner/model")
    >>> check_no_url("https://huggingface.co/owner/model")
    Traceback (most recent call last):
    FileNotFoundError: https://... or the id of a model on the Hugging Face Hub: 'owner/model'.
    """
    address = _URL.match(os.fspath(source))
    if address is not None and not os.path.lexists(source):
        raise FileNotFoundError(
            f"{source} is an address, and not opened. Give the path of a folder, or the id "
            f"of a model on the Hugging Face Hub: {address[1]!r}."
        )


def model_folder(
    source: str | PathLike[str],
    revision: str | None = None,
    *,
    also: Mapping[str, int] | None = None,
) -> Path:
    """Give the folder of a model, to which one of the Hub is fetched first.

    Nothing is fetched, and the Hub is not asked, where ``revision`` is a whole commit
    hash and the cache has the model at this commit.

    Parameters
    ----------
    source : str or path-like
        A local folder, or the id of a model on the Hub.
    revision : str, optional
        Of a model on the Hub: a branch, a tag or a commit; the branch main by default.
        It is resolved once, and all files are of that commit.
    also : mapping of str to int, optional
        Files that are needed beside settings, weights, checksums and thresholds, and how
        many bytes each may have.

    Returns
    -------
    pathlib.Path
        The local folder as it was given, or one in the cache that is called by the
        commit.

    Raises
    ------
    FileNotFoundError
        If the Hub has no such model or revision, or the model lacks a file.
    PermissionError
        If the model is gated and the user has no access.
    ConnectionError
        If the Hub cannot be reached or may not be asked (``HF_HUB_OFFLINE=1``), or a
        download ends early. The message lists what the cache has.
    ValueError
        If a file is too large, the model brings code, or ``revision`` is given with a
        local folder.
    """
    if revision is not None and not (isinstance(revision, str) and revision):
        raise ValueError(
            f"revision takes a branch, a tag or a commit, not {revision!r}."
        )
    if not is_hub_id(source):
        if revision is not None:
            what = "a local path" if os.path.lexists(source) else "no such id"
            raise ValueError(
                f"revision={revision!r} (--revision) goes with the id of a model on the "
                f"Hub, owner/model, but {source} is {what}. Leave the revision out."
            )
        check_no_url(source)
        return Path(source)
    source, also = str(source), also or {}
    pinned = revision is not None and _COMMIT.fullmatch(revision) is not None
    if revision is not None and pinned:
        cached = _cached(source, revision, also)
        if cached is not None:
            return cached
    commit, sizes = _listed(source, revision or "main", also)
    folder = _fetched(source, commit, sizes, also)
    if not pinned:
        logger.info(
            "%s: %s is commit %s. Load the same again by revision=%r.",
            source,
            revision or "main",
            commit,
            commit,
        )
    return folder


@contextmanager
def reading(
    source: str | PathLike[str],
    revision: str | None = None,
    *,
    also: Mapping[str, int] | None = None,
) -> Iterator[Path]:
    """Give the folder of a model while it is read.

    Parameters
    ----------
    source, revision, also
        As of ``model_folder``.

    Yields
    ------
    pathlib.Path
        As ``model_folder`` gives it. Of a model on the Hub, a ValueError in the block is
        completed by how to fetch it anew.

    Raises
    ------
    FileNotFoundError, PermissionError, ConnectionError, ValueError
        As of ``model_folder``.
    """
    on_hub = is_hub_id(source)
    folder = model_folder(source, revision, also=also)
    with _of_hub(str(source), folder) if on_hub else nullcontext():
        yield folder


@contextmanager
def _of_hub(repo_id: str, folder: Path) -> Iterator[None]:
    """Complete what is wrong in a snapshot by whose it is, and how to fetch it anew."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{error} This is {repo_id} of the Hub at commit {folder.name}; to download it "
            f"again, remove {folder.parents[1]} first."
        ) from error


def _listed(
    repo_id: str, revision: str, also: Mapping[str, int]
) -> tuple[str, dict[str, int | None]]:
    """Ask the Hub for the commit of a revision, and the sizes of its files."""
    from huggingface_hub import HfApi, constants

    def failed(reason: str) -> str:
        return (
            f"There is no folder {repo_id} here, and as the id of a model on the Hub "
            f"{repo_id} at revision {revision!r} cannot be looked up ({reason}). "
            f"{_held(repo_id, revision, also)}"
        )

    if constants.HF_HUB_OFFLINE:
        raise ConnectionError(failed("HF_HUB_OFFLINE is set"))
    with _one_line(repo_id, revision, failed):
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            repo_id,
            revision=revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        commit = info.sha or ""
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"it gives {commit!r} as the commit")
        return commit, {one.rfilename: one.size for one in info.siblings or ()}


def _fetched(
    repo_id: str, commit: str, listed: Mapping[str, int | None], also: Mapping[str, int]
) -> Path:
    """Fetch what is read of a model, if its files are those of an exported one."""
    place = f"{repo_id} on the Hub at commit {commit}"
    refuse_code(place, listed)
    sizes = _checked_sizes(place, listed, also)
    _fetch(repo_id, commit, SUMS, sizes[SUMS])
    folder = _fetch(repo_id, commit, HYPERPARAMS, sizes[HYPERPARAMS]).parent
    with _of_hub(repo_id, folder):
        # The settings say how large the weights are.
        settings = model_settings(folder)
        expected_weights(settings, folder, SAFETENSORS, sizes[SAFETENSORS])
    for name in sizes:
        if name not in (SUMS, HYPERPARAMS):
            _fetch(repo_id, commit, name, sizes[name])
    if THRESHOLDS not in sizes and THRESHOLDS in read_sums(folder):
        from huggingface_hub.utils import EntryNotFoundError

        # It was not listed: the cache keeps it that there is none.
        with suppress(EntryNotFoundError):
            _download(repo_id, commit, THRESHOLDS)
    return folder


def _checked_sizes(
    place: str, listed: Mapping[str, int | None], also: Mapping[str, int]
) -> dict[str, int]:
    """Give the bytes of what is to be fetched; refuse what lacks a file or is too large."""
    needed = (HYPERPARAMS, SUMS, SAFETENSORS, *also)
    if missing := [name for name in needed if name not in listed]:
        remedy = "Give a model that speechbrain-rev export wrote."
        if set(missing) <= set(also):
            remedy = "It was exported without: do without, or ask whoever made it."
        if SAFETENSORS in missing and WEIGHTS in listed:
            remedy = (
                f"It has {WEIGHTS}, which is not loaded from the Hub: if you trust it, "
                "download the repository, and make a loadable folder of that by "
                "speechbrain-rev convert speechbrain DOWNLOADED NEW."
            )
        raise FileNotFoundError(f"{place} has no {', '.join(missing)}. {remedy}")
    texts = {HYPERPARAMS: MAX_TEXT_BYTES, SUMS: MAX_TEXT_BYTES}
    largest = {**texts, THRESHOLDS: MAX_THRESHOLDS_BYTES, **also}
    sizes = {}
    for name in (*needed, THRESHOLDS):
        if name not in listed:
            continue
        size, most = listed[name], largest.get(name)
        if size is None:
            raise ValueError(
                f"{place}: {name} has no size in the Hub's listing, and is not fetched. "
                "Download the repository, and give its folder."
            )
        if most is not None and size > most:
            raise ValueError(
                f"{place}: {name} has {size:,} bytes, and an exported model's has at most "
                f"{most:,}. It is not fetched. Is it another file?"
            )
        sizes[name] = size
    return sizes


def _fetch(repo_id: str, commit: str, name: str, size: int) -> Path:
    """Bring one file into the cache, unless it is there, and compare its size."""

    def failed(reason: str) -> str:
        return (
            f"{name} of {repo_id} at commit {commit} was not fetched to its end "
            f"({reason}). Try again; what is in the cache is not fetched twice."
        )

    with _one_line(repo_id, commit, failed):
        path = _download(repo_id, commit, name)
    there = path.stat().st_size
    if there != size:
        with _of_hub(repo_id, path.parent):
            raise ValueError(f"{path} has {there:,} bytes, but {size:,} are listed.")
    return path


def _download(repo_id: str, commit: str, name: str) -> Path:
    from huggingface_hub import constants, hf_hub_download

    path = hf_hub_download(
        repo_id,
        name,
        revision=commit,
        cache_dir=constants.HF_HUB_CACHE,
        endpoint=constants.ENDPOINT,
    )
    return Path(path)


def _cached(repo_id: str, commit: str, also: Mapping[str, int]) -> Path | None:
    """Find a commit in the cache, if all that is read of the model is there."""
    from huggingface_hub import _CACHED_NO_EXIST, constants, try_to_load_from_cache

    def cached(name: str) -> object:
        return try_to_load_from_cache(
            repo_id, name, cache_dir=constants.HF_HUB_CACHE, revision=commit
        )

    paths = [cached(name) for name in (HYPERPARAMS, SUMS, SAFETENSORS, *also)]
    if not isinstance(paths[0], str) or not all(isinstance(p, str) for p in paths):
        return None
    folder = Path(paths[0]).parent
    thresholds = cached(THRESHOLDS)
    if isinstance(thresholds, str) or thresholds is _CACHED_NO_EXIST:
        return folder
    return None if THRESHOLDS in read_sums(folder) else folder


def _held(repo_id: str, revision: str, also: Mapping[str, int]) -> str:
    """Say which commits of a model the cache has, the newest first, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    repository = cache / repo_folder_name(repo_id=repo_id, repo_type="model")
    commits = []
    for snapshot in repository.glob("snapshots/*"):
        with suppress(ValueError, OSError):
            name = snapshot.name
            if _COMMIT.fullmatch(name) and _cached(repo_id, name, also):
                commits.append((snapshot.stat().st_mtime, name))
    more = ", ".join(also)
    if more and _COMMIT.fullmatch(revision) and _cached(repo_id, revision, {}):
        return (
            f"The cache {cache} has this commit without {more}. Try again with a "
            f"connection, which fetches it, or do without {more}."
        )
    if not commits:
        lacking = f" and has {more}" if more else ""
        return (
            f"The cache {cache} has no commit of it that is complete{lacking}. Try again "
            "with a connection, or give a local folder."
        )
    names: dict[str, str] = {}
    for ref in repository.glob("refs/**/*"):
        if ref.is_file():
            commit = ref.read_text(encoding="utf-8", errors="replace")
            names[commit] = f" ({ref.relative_to(repository / 'refs')})"
    newest_first = [commit for _, commit in sorted(commits, reverse=True)]
    listed = ", ".join(f"{commit}{names.get(commit, '')}" for commit in newest_first)
    return (
        f"The cache {cache} has commit {listed}: give revision={newest_first[0]!r} "
        f"(--revision={newest_first[0]}) to load it without the Hub."
    )


@contextmanager
def _one_line(
    repo_id: str, revision: str, failed: Callable[[str], str]
) -> Iterator[None]:
    """Say in a line what the Hub refuses, or by ``failed`` why it gave no answer."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # The bases are the errors of whichever HTTP client huggingface_hub stands on. The others
    # are raised of answers that are none of the Hub's, and by hf_xet.
    silent: tuple[type[BaseException], ...] = (
        *HfHubHTTPError.__bases__,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        RuntimeError,
    )
    login = "log in (huggingface_hub.login()) or set HF_TOKEN"
    try:
        yield
    except GatedRepoError as error:
        raise PermissionError(
            f"{repo_id} is gated: ask for access on {constants.ENDPOINT}/{repo_id}, then "
            f"{login}."
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"There is no folder {repo_id} here, and on the Hub ({constants.ENDPOINT}) no "
            f"model {repo_id} that you may read. Check the name; if it is private, {login}."
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} has no revision {revision!r} on the Hub ({constants.ENDPOINT}). "
            "Give a branch, a tag or a commit of it, or none for main."
        ) from error
    except silent as error:
        network = isinstance(error, ConnectionError | TimeoutError)
        if isinstance(error, OSError) and error.errno is not None and not network:
            raise  # of this machine: no space, no permission
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConnectionError(failed(reason[:_MAX_REASON])) from error


@dataclass(frozen=True)
class Trained:
    """An encoder and what must be known to use it.

    Attributes
    ----------
    encoder : SpeakerEncoder
        With its weights, on the CPU.
    settings : mapping of str to object
        ``ENCODER_SETTINGS``, ``front_end`` and ``pooling_variance``, and maybe others.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    thresholds : Thresholds
        Of its scores.
    """

    encoder: SpeakerEncoder
    settings: Mapping[str, Any]
    fingerprint: str
    thresholds: Thresholds

    def model_for(self, device: torch.device, precision: str) -> WaveformEncoder:
        """Put the front-end before the encoder, or before what embeds as it does.

        On a CPU that is its form for inference, which takes from half to all of the
        memory (docs/deploying.md). In half precision its sums would be rounded more often,
        and on a GPU it was not measured.

        Parameters
        ----------
        device : torch.device
            Where the model will be.
        precision : str
            What it will compute in.

        Returns
        -------
        WaveformEncoder
            On the CPU.
        """
        lean = device.type == "cpu" and precision == "fp32"
        return WaveformEncoder(
            inference_form(self.encoder) if lean else self.encoder,
            n_mels=self.settings["n_mels"],
            sample_rate=self.settings["sample_rate"],
            front_end=self.settings["front_end"],
        )


def read_trained(source: str | PathLike[str]) -> Trained:
    """Read a trained encoder from whichever folder it lies in, running nothing of it.

    Parameters
    ----------
    source : str or path-like
        The ``output_folder`` of a training run, or what ``convert_from_wespeaker`` or
        ``export_run`` wrote; the last is read as strictly as it says of itself.

    Returns
    -------
    Trained
        The encoder and what is known of it.

    Raises
    ------
    FileNotFoundError
        If the folder, its hyperparams.yaml or any weights are missing.
    ValueError
        If a file is not what training or export writes, leads out of the folder, or the
        weights are not those of the encoder that hyperparams.yaml names.
    """
    return read_exported(source) if is_exported(source) else read_run(source)


def read_run(folder: str | PathLike[str]) -> Trained:
    """Read what a training run made.

    Parameters
    ----------
    folder : str or path-like
        As of ``SpeakerEmbedder.from_run``.

    Returns
    -------
    Trained

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``SpeakerEmbedder.from_run``.
    """
    settings = run_settings(folder)
    encoder = encoder_of(settings)
    weights = read_weights(folder)
    expected = encoder.state_dict()
    own = unwrapped(weights.state_dict, expected)
    try:
        check_tensors(own, expected, weights.path, exactly=False)
    except ValueError as error:
        left_out = read_objects(folder).left_out()
        if not left_out:
            raise
        defaults = ", ".join(f"{name}: {value}" for name, value in left_out.items())
        raise ValueError(
            f"{error} hyperparams.yaml does not give {defaults}, which are defaults; write "
            "there what was trained."
        ) from error
    encoder.load_state_dict(own, strict=True)
    thresholds = run_thresholds(Path(folder), weights.fingerprint)
    return Trained(encoder, settings, weights.fingerprint, thresholds)


def read_exported(source: str | PathLike[str], revision: str | None = None) -> Trained:
    """Read what export wrote, here or on the Hub.

    Parameters
    ----------
    source, revision
        As of ``SpeakerEmbedder.from_hparams``.

    Returns
    -------
    Trained

    Raises
    ------
    FileNotFoundError, PermissionError, ConnectionError, ValueError
        As of ``SpeakerEmbedder.from_hparams``.
    """
    with reading(source, revision) as folder:
        encoder, settings, fingerprint = read_model(folder)
        thresholds = read_thresholds(folder)
    return Trained(encoder, ASSUMED | settings, fingerprint, thresholds)
