"""Trained encoders: found in a folder or on the Hub, and built by what their weights say.

The weights of an encoder have its description in them (``lobes.description``), so that no
other file says what it is. Weights of other programs have none, and whoever gives those
gives the description.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from speechbrain.utils.checkpoints import METAFNAME
from torch import Tensor

from speechbrain_rev.files import SUMS, check_sum, write_whole, writing_alone
from speechbrain_rev.inference.archive import fingerprint_of
from speechbrain_rev.inference.front_ends import WaveformEncoder
from speechbrain_rev.inference.runs import WEIGHTS, standing
from speechbrain_rev.inference.thresholds import (
    THRESHOLDS,
    Thresholds,
    read_thresholds,
)
from speechbrain_rev.inference.untrusted import (
    GIVEN,
    check_weights,
    own_file,
    read_tensors,
)
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder, inference_form
from speechbrain_rev.lobes.checkpointer import (
    BRAIN,
    COUNTER,
    check_known,
    place_in_run,
)
from speechbrain_rev.lobes.description import (
    DESCRIPTION,
    EncoderDescription,
    FrontEnd,
    front_end_of,
    weights_in,
)
from speechbrain_rev.lobes.pretrained import unwrapped
from speechbrain_rev.processes import process_rank

logger = logging.getLogger(__name__)

#: The encoder's weights in an exported model, and in a run that has ended.
SAFETENSORS = "embedding_model.safetensors"
#: The description of the encoder as JSON, written for people.
SETTINGS = "settings.json"

# Examples of the description that a user gives of weights without one.
_FEATURES = '{"front_end": {"kind": "speechbrain", "sample_rate": 16000}}'
_NAMED = f'{{"name": "resnet34", {_FEATURES[1:]}'

_COMMIT = re.compile("[0-9a-f]{40}")
_URL = re.compile(
    r"(?:hf:/{1,2}|https?:/{1,2}(?:huggingface\.co|hf\.co)/)(?:models/)?"
    r"([\w.-]+/[\w.-]+)"
)


class UnknownEncoder(ValueError):
    """Weights that do not say of which encoder they are."""


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


def model_folder(
    source: str | PathLike[str],
    revision: str | None = None,
    *,
    also: Sequence[str] = (),
) -> Path:
    """Give the folder of a model, to which one of the Hub is fetched first.

    Parameters
    ----------
    source : str or path-like
        A local folder, or the id of a model on the Hub.
    revision : str, optional
        Of a model on the Hub: a branch, a tag or a commit; the branch main by default.
        Nothing is asked of the Hub for a whole commit hash that is in the cache.
    also : sequence of str
        Files that are fetched beside weights, checksums and thresholds.

    Returns
    -------
    pathlib.Path
        The local folder as it was given, or one in the cache that is called by the
        commit.

    Raises
    ------
    FileNotFoundError
        If there is neither such a folder nor such a model.
    OSError
        If the Hub has no such model or revision, the user has no access, or it cannot be
        reached: in the words of huggingface_hub, whose error is the cause.
    ValueError
        If ``revision`` is given with a local folder.
    """
    if not is_hub_id(source):
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} (--revision) goes with the id of a model on the "
                f"Hub, owner/model, but {source} is none. Leave the revision out."
            )
        address = _URL.match(os.fspath(source))
        if address is not None and not os.path.lexists(source):
            raise FileNotFoundError(
                f"{source} is an address, and not opened. Give the path of a folder, or "
                f"the id of a model on the Hugging Face Hub: {address[1]!r}."
            )
        return Path(source)
    from huggingface_hub import snapshot_download

    names = [SAFETENSORS, SUMS, THRESHOLDS, *also]
    try:
        folder = Path(
            snapshot_download(str(source), revision=revision, allow_patterns=names)
        )
    # Errors are those of whichever HTTP client a version of huggingface_hub has.
    except Exception as error:
        raise OSError(
            f"There is no folder {source} here, and as the id of a model on the Hub it "
            f"cannot be fetched: {' '.join(str(error).split())}"
        ) from error
    if revision is None or not _COMMIT.fullmatch(revision):
        logger.info(
            "%s: %s is commit %s. Load the same again by revision=%r.",
            source,
            revision or "main",
            folder.name,
            folder.name,
        )
    return folder


@contextmanager
def reading(
    source: str | PathLike[str],
    revision: str | None = None,
    *,
    also: Sequence[str] = (),
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
    OSError, ValueError
        As of ``model_folder``.
    """
    on_hub = is_hub_id(source)
    folder = model_folder(source, revision, also=also)
    try:
        yield folder
    except ValueError as error:
        if not on_hub:
            raise
        raise ValueError(
            f"{error} This is {source} of the Hub at commit {folder.name}; to download it "
            f"again, remove {folder.parents[1]} first."
        ) from error


@dataclass(frozen=True)
class Weights:
    """The weights of an encoder, as a file has them.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    description : EncoderDescription
        Of the encoder.
    state_dict : dict of str to torch.Tensor
        On the CPU; they fit the encoder and are finite.
    standing : str
        Of which epoch they are, where that is not the end of their run.
    """

    path: Path
    fingerprint: str
    description: EncoderDescription
    state_dict: dict[str, Tensor]
    standing: str


@dataclass(frozen=True)
class Trained:
    """An encoder and what must be known to use it.

    Attributes
    ----------
    encoder : SpeakerEncoder
        With its weights, on the CPU.
    front_end : FrontEnd
        How its features are made.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    thresholds : Thresholds
        Of its scores.
    """

    encoder: SpeakerEncoder
    front_end: FrontEnd
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
            inference_form(self.encoder) if lean else self.encoder, self.front_end
        )


def read_trained(
    source: str | PathLike[str],
    revision: str | None = None,
    *,
    encoder: Mapping[str, Any] | None = None,
) -> Trained:
    """Read a trained encoder from wherever it lies, running nothing of it.

    Parameters
    ----------
    source : str or path-like
        A file of weights; the ``output_folder`` of a training run; what ``convert`` or
        ``export`` wrote; or the id of a model on the Hub.
    revision : str, optional
        Of a model on the Hub.
    encoder : mapping of str to object, optional
        Of weights that do not say of which encoder they are: arguments of
        ``build_encoder``, its ``name`` and ``front_end`` among them.

    Returns
    -------
    Trained
        The encoder and what is known of it.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no weights in it.
    OSError
        As of ``model_folder``.
    ValueError
        If the file is damaged, leads out of the folder, has other weights than its
        encoder, or is of another run than the folder; if the encoder or its features are not known.
    """
    with reading(source, revision) as folder:
        weights = read_weights(folder, encoder)
        if weights.standing and not process_rank():
            logger.warning(weights.standing)
        thresholds = read_thresholds(
            folder if folder.is_dir() else folder.parent, weights.fingerprint
        )
    front_end = weights.description.front_end
    if front_end is None:
        raise ValueError(
            f"{weights.path} does not say how the features of its encoder were made. Give "
            f"encoder={_FEATURES} (--encoder='{_FEATURES}'), or another kind or rate."
        )
    built = build_encoder(**vars(weights.description))
    built.load_state_dict(weights.state_dict, strict=True)
    return Trained(built, front_end, weights.fingerprint, thresholds)


def read_weights(
    source: str | PathLike[str], encoder: Mapping[str, Any] | None = None
) -> Weights:
    """Read the encoder's weights of a folder, or of a file of weights.

    Parameters
    ----------
    source : str or path-like
        A run's folder, or an exported model's, or a file.
    encoder : mapping, optional
        As of ``read_trained``.

    Returns
    -------
    Weights
        Of ``embedding_model.safetensors`` or ``embedding_model.ckpt``, which is written at
        the end of training; else of the newest checkpoint.

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``read_trained``.
    """
    path = encoder_file(Path(source))
    check_sum(path)
    tensors = dict(unwrapped(read_tensors(path), ()))
    try:
        description = _describe_encoder(tensors, encoder or {})
        with torch.device("meta"):
            expected = build_encoder(**vars(description)).state_dict()
    # Whoever gives another argument than build_encoder takes reads which.
    except (ValueError, TypeError) as error:
        kind = UnknownEncoder if isinstance(error, UnknownEncoder) else ValueError
        raise kind(f"{path}: {error}") from error
    check_weights(tensors, expected, path)
    state_dict = {name: value.clone() for name, value in tensors.items()}
    fingerprint = fingerprint_of(state_dict, description)
    remark = standing(path, fingerprint)
    return Weights(path, fingerprint, description, state_dict, remark)


def _describe_encoder(
    tensors: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> EncoderDescription:
    """Give the description in weights, completed by what a user gave of the encoder."""
    description = EncoderDescription.of_state_dict(tensors)
    if description is None:
        if "name" not in arguments:
            raise UnknownEncoder(
                "these weights do not say of which encoder they are. Give "
                f"encoder={_NAMED} (--encoder='{_NAMED}'), with what else it was built of."
            )
        with torch.device("meta"):
            return build_encoder(**arguments).description
    fields = dataclasses.asdict(description)
    unknown = {name for name in arguments if fields.get(name) is not None}
    if unknown or not arguments.keys() <= fields.keys():
        raise ValueError(
            f"its weights say what encoder they are of: encoder takes front_end alone "
            f"where they do not, and not {', '.join(arguments)}."
        )
    return dataclasses.replace(
        description,
        front_end=description.front_end
        or front_end_of(arguments.get("front_end"), description.n_mels),
    )


def write_weights(
    folder: Path, description: EncoderDescription, weights: Mapping[str, Tensor]
) -> None:
    """Write the weights of an encoder, which say what encoder they are of, into a folder.

    Parameters
    ----------
    folder : pathlib.Path
        That is written; it gets ``embedding_model.safetensors`` and, for people,
        ``settings.json``, which nothing reads back.
    description : EncoderDescription
        Of the encoder.
    weights : mapping of str to torch.Tensor
        The encoder's parameters and buffers.

    Raises
    ------
    OSError
        If they cannot be written.
    """
    tensors = {n: t.contiguous().clone() for n, t in weights_in(weights).items()}
    tensors[DESCRIPTION] = description.as_tensor()
    write_whole(folder / SAFETENSORS, safetensors.torch.save(tensors))
    settings = json.dumps(dataclasses.asdict(description), indent=1)
    write_whole(folder / SETTINGS, settings + "\n")


@contextmanager
def new_folder(folder: str | PathLike[str]) -> Iterator[Path]:
    """Lock a folder that is to be written; folders above are made.

    Raises
    ------
    ValueError
        If it is there and not empty, or another process writes it.
    """
    # "." and ".." have no name that one beside them could begin with.
    folder = Path(folder).resolve()
    with writing_alone(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{folder} is there already and not empty: nothing is overwritten. Give "
                "another folder, or remove it."
            )
        yield folder


def saved_bytes(state_dict: Mapping[str, torch.Tensor]) -> bytes:
    """Give what ``torch.save`` writes of a state dict."""
    content = io.BytesIO()
    torch.save(dict(state_dict), content)
    return content.getvalue()


def encoder_file(source: Path) -> Path:
    """Find the file of an encoder's weights.

    Parameters
    ----------
    source : pathlib.Path
        As of ``read_weights``.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If it leads out of the folder, or a checkpoint does not give its epoch and step.
    """
    if source.is_file():
        return source
    for name in (SAFETENSORS, WEIGHTS):
        if (source / name).exists():
            return own_file(source, name)
    sought = f"{SAFETENSORS} (of a model on the Hub nothing else is read) or {WEIGHTS}"
    checkpoint = newest_checkpoint(source, sought)
    usual = [checkpoint / WEIGHTS] if (source / checkpoint / WEIGHTS).exists() else []
    others = sorted((source / checkpoint).glob("*.ckpt"))
    for candidate in usual or [path.relative_to(source) for path in others]:
        path = own_file(source, candidate)
        if usual or _has_description(path):
            return path
    raise FileNotFoundError(
        f"{source / checkpoint} has no {WEIGHTS}, nor another file of weights that says of "
        "which encoder of this package it is. Give that file."
    )


def _has_description(path: Path) -> bool:
    try:
        return DESCRIPTION in unwrapped(read_tensors(path), ())
    except ValueError:
        return False


def newest_checkpoint(folder: Path, sought: str, *, epoch: int | None = None) -> Path:
    """Find the newest checkpoint of a run, or that of the end of an epoch.

    Parameters
    ----------
    folder : pathlib.Path
        Its ``output_folder``, or a checkpoint.
    sought : str
        What is looked for there, for the error message.
    epoch : int, optional
        The epoch; any by default.

    Returns
    -------
    pathlib.Path
        The checkpoint's folder, relative to it.

    Raises
    ------
    FileNotFoundError
        If there is none.
    ValueError
        If a checkpoint does not give its epoch and step.
    """
    checkpoints = [
        path.parent.relative_to(folder)
        for pattern in (".", "CKPT*", "*/CKPT*")
        for path in folder.glob(f"{pattern}/{METAFNAME}")
    ]
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give {GIVEN}.")
    if not checkpoints:
        raise FileNotFoundError(
            f"{folder} has no {sought}, and no checkpoint. Give {GIVEN}."
        )
    places = {path: checkpoint_place(folder, path) for path in checkpoints}
    if epoch is not None:
        places = {p: place for p, place in places.items() if place[:2] == (epoch, True)}
        if not places:
            raise FileNotFoundError(
                f"{folder} has no checkpoint of the end of epoch {epoch} any more, whose "
                f"{sought} belongs to its weights. Train it to its end first."
            )
    return max(places, key=lambda path: (places[path], path))


def checkpoint_place(folder: Path, checkpoint: Path) -> tuple[int, bool, int, float]:
    """Give the place of a checkpoint in its run.

    Parameters
    ----------
    folder : pathlib.Path
        As of ``newest_checkpoint``.
    checkpoint : pathlib.Path
        Relative to it.

    Returns
    -------
    epoch : int
    ended : bool
    step : int
    unixtime : float
        As of ``place_of``.

    Raises
    ------
    ValueError
        If its files do not give it.
    """
    names = (METAFNAME, COUNTER, BRAIN)
    for name in names:
        if (folder / checkpoint / name).exists():
            own_file(folder, checkpoint / name)
    check_known(folder / checkpoint, names)
    return place_in_run(folder / checkpoint)
