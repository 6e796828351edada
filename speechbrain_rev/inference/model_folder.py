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
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.inference.encoder_settings import check_settings, encoder_of
from speechbrain_rev.inference.fingerprint import fingerprint_of
from speechbrain_rev.inference.model_yaml import ANYWAY, read_model_yaml
from speechbrain_rev.inference.own_files import open_own, own_file
from speechbrain_rev.inference.run_folder import HYPERPARAMS, WEIGHTS
from speechbrain_rev.inference.state_dicts import (
    MAX_BYTES,
    check_size,
    check_tensors,
    load_tensors,
    read_safetensors,
)
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.pretrained import unwrapped
from speechbrain_rev.whole_files import SUMS, check_sum

SAFETENSORS = "embedding_model.safetensors"

# Each is some 30 kB of Python objects, whatever the channels, and never less on disk.
_MAX_BLOCKS, _BLOCK_BYTES = 4000, 512
#: Of settings and checksums.
MAX_TEXT_BYTES = 100_000
# A cohort of 6,000 speakers has 12 MB.
_MAX_BYTES = 10**8
_GIVEN = (
    f"a folder that speechbrain-rev export wrote, with {HYPERPARAMS}, {SAFETENSORS} "
    f"and {SUMS}, or the id of a model on the Hugging Face Hub, owner/model"
)


# Of weights in a .ckpt, without checksums.
_GIVEN_CHECKPOINT = (
    f"a local folder with {HYPERPARAMS}, as speechbrain-rev export wrote it, and {WEIGHTS}, "
    "or such a file in it; download a model on the Hub first "
    "(huggingface_hub.snapshot_download)"
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
        Its folder.

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
    settings = model_settings(folder)
    weights = folder / SAFETENSORS
    if not weights.exists() and (folder / WEIGHTS).exists():
        raise ValueError(
            f"{folder} has its weights in {WEIGHTS} alone, and they are read from "
            f"{SAFETENSORS}. Write a folder with both: {_conversion(folder)}"
        )
    with open_own(folder, SAFETENSORS, given=_GIVEN) as file:
        size = os.fstat(file.fileno()).st_size
        expected = expected_weights(settings, folder, SAFETENSORS, size)
        content = file.read(size)
    _check_sum(folder, SAFETENSORS, hashlib.sha256(content).hexdigest())
    state_dict = read_safetensors(content, weights, expected)
    check_tensors(state_dict, expected, weights)
    encoder = encoder_of(settings)
    encoder.load_state_dict(state_dict, strict=True)
    return Model(encoder, settings, fingerprint_of(state_dict))


def model_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a model, whose weights need not be there.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.

    Returns
    -------
    dict
        The plain values of hyperparams.yaml, checked.

    Raises
    ------
    FileNotFoundError
        If it or the checksums are missing.
    ValueError
        If it is anything else than what export writes, or there is code beside it.
    """
    _refuse_run(folder)
    content, _ = read_summed(folder, HYPERPARAMS, MAX_TEXT_BYTES)
    refuse_code(folder, (path.name for path in folder.glob("*.py")))
    return _settings(folder, content)


def expected_weights(
    settings: dict[str, Any], folder: Path, name: str, size: int
) -> dict[str, Tensor]:
    """Give the weights that settings describe, and refuse a file of another size.

    Parameters
    ----------
    settings : dict
        Of ``model_settings``.
    folder : pathlib.Path
        The model's, for the error message.
    name : str
        The file of the weights, for the error message.
    size : int
        Its bytes.

    Returns
    -------
    dict of str to torch.Tensor
        On the meta device, without memory.

    Raises
    ------
    ValueError
        If they describe no encoder, or one whose weights take another size.
    """
    expected = _expected(settings, folder, folder / name, size)
    check_size(size, folder / name, expected)
    return expected


def read_checkpoint_model(
    source: str | PathLike[str],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a model whose weights are in what ``torch.save`` wrote, executing nothing.

    Parameters
    ----------
    source : str or path-like
        Its folder, with ``embedding_model.ckpt``, or another such file in that folder.
        Checksums are compared where the folder has some.

    Returns
    -------
    settings : dict of str to object
        The plain values of hyperparams.yaml.
    state_dict : dict of str to torch.Tensor
        The encoder's, without what wrappers put before its names.

    Raises
    ------
    FileNotFoundError
        If the folder, its hyperparams.yaml or the file is missing.
    ValueError
        If hyperparams.yaml is not as export writes it, the file holds anything but the
        tensors that it describes, or a folder is given that has .safetensors.
    """
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no folder or file {path}. Give {_GIVEN_CHECKPOINT}."
        )
    folder, name = (path.parent, path.name) if path.is_file() else (path, WEIGHTS)
    if path.is_dir() and (path / SAFETENSORS).exists():
        raise ValueError(
            f"{path} has {SAFETENSORS} already: load it as it is. To take its {WEIGHTS} "
            f"instead, give {path / WEIGHTS}."
        )
    _refuse_run(folder)
    yaml = listed_file(folder, HYPERPARAMS, MAX_TEXT_BYTES)
    refuse_code(folder, (path.name for path in folder.glob("*.py")))
    settings = _settings(folder, yaml.read_bytes())
    loaded = load_listed(folder, name)
    weights = folder / name
    expected = _expected(settings, folder, weights, weights.stat().st_size)
    state_dict = dict(unwrapped(loaded, expected))
    check_tensors(state_dict, expected, weights)
    return settings, state_dict


def listed_file(folder: Path, name: str, most: int = _MAX_BYTES) -> Path:
    """Find a file of a model's folder, which need not have checksums.

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
    pathlib.Path
        The file.

    Raises
    ------
    FileNotFoundError
        If it is missing.
    ValueError
        If it leads out of the folder, is larger, or SHA256SUMS has another checksum.
    """
    path = own_file(folder, name, given=_GIVEN_CHECKPOINT)
    if path.stat().st_size > most:
        raise _too_large(path, most)
    if is_exported(folder):
        # check_sum reads all of them.
        _read(folder, SUMS, MAX_TEXT_BYTES)
        check_sum(path, folder=folder)
    return path


def load_listed(folder: Path, name: str) -> dict[str, Tensor]:
    """Load tensors from a .ckpt of a model's folder, executing nothing.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.
    name : str
        The file.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.

    Raises
    ------
    FileNotFoundError
        If it is missing.
    ValueError
        As of ``listed_file`` and ``load_tensors``.
    """
    return load_tensors(
        listed_file(folder, name, MAX_BYTES),
        "Weights are plain tensors: ask whoever made it for "
        "torch.save(encoder.state_dict(), ...), or for a .safetensors file.",
    )


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
    sha256 = hashlib.sha256(content).hexdigest()
    _check_sum(folder, name, sha256)
    return content, sha256


def _check_sum(folder: Path, name: str, sha256: str) -> None:
    """Refuse a file whose hash is not the one in SHA256SUMS."""
    written = read_sums(folder)
    if written.get(name) != sha256:
        what = "is not as it was written" if name in written else "is not listed"
        raise ValueError(
            f"{folder / name} {what}: {SUMS} has another checksum or none. Download the "
            f"folder again; if you changed {name} yourself, write its checksum there "
            f"(sha256sum {name})."
        )


def read_sums(folder: Path) -> dict[str, str]:
    """Read the checksum of each file of a model that is listed.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.

    Returns
    -------
    dict of str to str
        Of each name, the SHA-256 that was written.

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``read_summed``.
    """
    sums = _read(folder, SUMS, MAX_TEXT_BYTES).decode(errors="replace")
    lines = (line.partition("  ") for line in sums.splitlines())
    return {name: digest for digest, _, name in lines}


def refuse_code(place: str | Path, names: Iterable[str]) -> None:
    """Refuse a model that brings code, which a user might take for part of it.

    Parameters
    ----------
    place : str or pathlib.Path
        Where the model is, for the error message.
    names : iterable of str
        Its files.

    Raises
    ------
    ValueError
        If a Python file is beside the others.

    Example
    -------
    >>> refuse_code("folder", ["README.md", "tools/of_no_concern.py"])
    >>> refuse_code("folder", ["README.md", "custom.py"])
    Traceback (most recent call last):
    ValueError: folder brings code, custom.py, and nothing of a model is run. ...
    """
    code = sorted(n for n in names if n.endswith(".py") and "/" not in n)
    if code:
        # A terminal would obey control characters.
        code = [name if name.isprintable() else ascii(name) for name in code]
        raise ValueError(
            f"{place} brings code, {', '.join(code)}, and nothing of a model is run. An "
            f"exported model needs none: remove it to load the rest. {ANYWAY} (With "
            "custom.py, speechbrain.inference.interfaces.foreign_class does.)"
        )


def _refuse_run(folder: Path) -> None:
    """Refuse a folder of a training run: its save/ is in no exported model."""
    if (folder / "save").is_dir() and not is_exported(folder):
        raise FileNotFoundError(
            f"{folder} is the output_folder of a training run and has no {SUMS}. Load it by "
            "SpeakerEmbedder.from_run, or make a model of it: speechbrain-rev export "
            f"{shlex.quote(str(folder))} OUT."
        )


def _read(folder: Path, name: str, most: int) -> bytes:
    with open_own(folder, name, given=_GIVEN) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_large(folder / name, most)
    return content


def _too_large(path: Path, most: int) -> ValueError:
    return ValueError(
        f"{path} has more than {most:,} bytes, which is more than an exported model's. Is "
        "it another file?"
    )


def _settings(folder: Path, content: bytes) -> dict[str, Any]:
    """Give the plain values of hyperparams.yaml."""
    path = folder / HYPERPARAMS
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from error
    settings = read_model_yaml(text, path)
    check_settings(settings, folder)
    return settings


def _conversion(folder: Path) -> str:
    """Give the command that writes a folder with .safetensors beside one without."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return shlex.join(
        [
            "speechbrain-rev",
            "convert",
            "speechbrain",
            f"{named}",
            f"{named}_safetensors",
        ]
    )


def _expected(
    settings: dict[str, Any], folder: Path, weights: Path, size: int
) -> dict[str, Tensor]:
    """Give the names, shapes and types of the encoder's weights, without their memory."""
    path = folder / HYPERPARAMS
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
