"""Reading a model's folder that somebody else made, without running any of it.

What ``speechbrain-rev export`` writes is known to the last name, so that a folder is
taken if it is exactly that: one text of settings, weights of the names, shapes and
types that they mean, checksums of both. Files are opened and read once, after their
size was looked at, and only from within the folder. What else lies there is not read;
Python files alone are refused.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.inference.encoder_settings import check_settings, encoder_of
from speechbrain_rev.inference.fingerprint import fingerprint_of
from speechbrain_rev.inference.model_yaml import ANYWAY, read_model_yaml
from speechbrain_rev.inference.own_files import open_own
from speechbrain_rev.inference.run_folder import HYPERPARAMS, WEIGHTS
from speechbrain_rev.inference.state_dicts import (
    check_size,
    check_tensors,
    read_checkpoint,
    read_safetensors,
)
from speechbrain_rev.lobes import SpeakerEncoder

SAFETENSORS = "embedding_model.safetensors"
SUMS = "SHA256SUMS"

# Each is some 30 kB of Python objects, whatever the channels, and never less on disk.
_MAX_BLOCKS, _BLOCK_BYTES = 4000, 512
_MAX_TEXT_BYTES = 100_000
_GIVEN = (
    f"a folder that speechbrain-rev export wrote, with {HYPERPARAMS}, {SAFETENSORS} "
    f"and {SUMS}; a model that lies elsewhere has to be downloaded first, as files and "
    "not as links: huggingface_hub.snapshot_download(NAME, local_dir=FOLDER)"
)


def is_exported(folder: str | PathLike[str]) -> bool:
    """Tell whether a folder says of itself that export wrote it: it has checksums."""
    return Path(folder, SUMS).exists()


@dataclass(frozen=True)
class Model:
    """An encoder and what belongs to it.

    Attributes
    ----------
    encoder : SpeakerEncoder
        With its weights, on the CPU.
    settings : dict
        The plain values of hyperparams.yaml.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    """

    encoder: SpeakerEncoder
    settings: dict[str, Any]
    fingerprint: str


def read_model(source: str | PathLike[str]) -> Model:
    """Read an exported model.

    Parameters
    ----------
    source : str or path-like
        Its folder. ``embedding_model.safetensors`` is taken if it is there, else
        ``embedding_model.ckpt``.

    Returns
    -------
    Model
        The encoder, built of checked values.

    Raises
    ------
    FileNotFoundError
        If the folder or one of its files is missing.
    ValueError
        If it is anything else than what export writes.
    """
    folder = Path(source)
    content, _ = read_summed(folder, HYPERPARAMS, _MAX_TEXT_BYTES)
    refuse_code(folder)
    path = folder / HYPERPARAMS
    try:
        settings = read_model_yaml(content.decode(), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from error
    check_settings(settings, folder)
    name = SAFETENSORS if (folder / SAFETENSORS).exists() else WEIGHTS
    weights = folder / name
    with open_own(folder, name, given=_GIVEN) as file:
        size = os.fstat(file.fileno()).st_size
        expected = _expected(settings, path, weights, size)
        check_size(size, weights, expected)
        content = file.read(size)
    _summed(folder, name, content)
    read = read_safetensors if name == SAFETENSORS else read_checkpoint
    state_dict = read(content, weights, expected)
    check_tensors(state_dict, expected, weights)
    encoder = encoder_of(settings)
    encoder.load_state_dict(state_dict, strict=True)
    return Model(encoder, settings, fingerprint_of(state_dict))


def read_summed(folder: Path, name: str, most: int) -> tuple[bytes, str]:
    """Read a file of a model's folder and compare it with its checksum.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.
    name : str
        The file.
    most : int
        Bytes that it may have.

    Returns
    -------
    content : bytes
        What it holds.
    sha256 : str
        Its hash, which is the one in SHA256SUMS.

    Raises
    ------
    FileNotFoundError
        If it or the checksums are missing.
    ValueError
        If it leads out of the folder, is larger, or differs from what was written.
    """
    content = _read(folder, name, most)
    return content, _summed(folder, name, content)


def _summed(folder: Path, name: str, content: bytes) -> str:
    """Give the hash of a file's content, which must be the one in SHA256SUMS."""
    sums = _read(folder, SUMS, _MAX_TEXT_BYTES).decode(errors="replace")
    lines = (line.partition("  ") for line in sums.splitlines())
    written = {name: digest for digest, _, name in lines}
    sha256 = hashlib.sha256(content).hexdigest()
    if written.get(name) != sha256:
        what = "is not as it was written" if name in written else "is not listed"
        raise ValueError(
            f"{folder / name} {what}: {SUMS} has another checksum or none. Download the "
            f"folder again; if you changed {name} yourself, write its checksum there "
            f"(sha256sum {name})."
        )
    return sha256


def refuse_code(folder: Path) -> None:
    """Refuse a folder that brings code, which a user might take for part of the model.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.

    Raises
    ------
    ValueError
        If there is a Python file in it.
    """
    code = sorted(path.name for path in folder.glob("*.py"))
    if code:
        raise ValueError(
            f"{folder} brings code, {', '.join(code)}, and nothing of a model is run. An "
            f"exported model needs none: remove it to load the rest. {ANYWAY} (With "
            "custom.py, speechbrain.inference.interfaces.foreign_class does.)"
        )


def _read(folder: Path, name: str, most: int) -> bytes:
    with open_own(folder, name, given=_GIVEN) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(
            f"{folder / name} has more than {most:,} bytes, which is more than an exported "
            "model's. Is it another file?"
        )
    return content


def _expected(
    settings: dict[str, Any], path: Path, weights: Path, size: int
) -> dict[str, Tensor]:
    """Give the names, shapes and types of the encoder's weights, without their memory."""
    blocks = sum(settings["blocks"] or ())
    if blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{path} describes {blocks:,} blocks, of which no more than {_MAX_BLOCKS:,} "
            f"are built here. {ANYWAY}"
        )
    if size < blocks * _BLOCK_BYTES:
        raise ValueError(
            f"{weights} has {size:,} bytes; the weights of {blocks:,} blocks take more "
            f"than {blocks * _BLOCK_BYTES:,}. Download the folder again."
        )
    try:
        with torch.device("meta"):
            return encoder_of(settings).state_dict()
    except ValueError as error:
        raise ValueError(f"{path} describes no encoder: {error}") from error
