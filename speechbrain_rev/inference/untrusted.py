"""Files that somebody else made: opened in their folder alone, and read as data.

Nothing of a file is executed: weights are read from safetensors, or by
``torch.load(weights_only=True)``, and must have the names, shapes and types of the encoder
that they say they are of. They are mapped into memory, and copied only after that.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from speechbrain_rev.files import read_limited
from speechbrain_rev.lobes.description import weights_in
from speechbrain_rev.lobes.pretrained import state_dict_in

#: Sources of weights that errors advise to give.
GIVEN = (
    "the output_folder of a training run (recipes/VoxCeleb/train.py, or SpeechBrain's own "
    "script), a folder that speechbrain-rev export or convert wrote, or the id of a model "
    "on the Hugging Face Hub, owner/model"
)
#: Errors of readers for a file of another format, or a damaged one.
REFUSED = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError, LookupError,
    AttributeError, AssertionError, ArithmeticError, MemoryError, struct.error,
    safetensors.SafetensorError,
)  # fmt: skip

_SNAPSHOT = re.compile(r"models--[\w.-]+/snapshots/[0-9a-f]{40}", re.ASCII)
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def own_file(folder: Path, name: str | Path, *, given: str = GIVEN) -> Path:
    """Find a file that really lies in the folder, links followed.

    The files of a snapshot in the cache of huggingface_hub are links to where the cache
    keeps content by its hash. Those links alone lead out of the folder.

    Parameters
    ----------
    folder : pathlib.Path
        The folder.
    name : str or pathlib.Path
        The file, relative to it.
    given : str
        What has to be given, for the error message.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it leads out of the folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give {given}.")
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {name}. Give {given}.")
    if not _is_within(folder.resolve(), path.resolve()):
        raise ValueError(
            f"{path} is a link out of its folder, to {path.resolve()}. It is not "
            "followed: copy the file there if you trust it."
        )
    return path


def _is_within(folder: Path, file: Path) -> bool:
    """Return whether a file is in a folder or, if that is a snapshot, in its cache."""
    if file.is_relative_to(folder):
        return True
    snapshot = "/".join(folder.parts[-3:])
    if not _SNAPSHOT.fullmatch(snapshot) or not _HASH.fullmatch(file.name):
        return False
    repository = folder.parents[1]
    # Content that several repositories have lies in the cache's own folder since 2.0.
    shared = repository.parent / "blobs" / file.name[:2]
    return file.parent in (repository / "blobs", shared)


def read_own(folder: Path, name: str | Path, most: int) -> bytes:
    """Read a file that ``own_file`` finds.

    Parameters
    ----------
    folder, name
        As of ``own_file``.
    most : int
        Bytes that it may have.

    Returns
    -------
    bytes

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``own_file``, or if it has more bytes.
    """
    return read_limited(own_file(folder, name), most)


def some_names(names: Iterable[str]) -> str:
    """Give the first four names of a file for an error message, and how many follow.

    Example
    -------
    >>> some_names(["fc.weight", "fc.bias"]), some_names(f"w{i}" for i in range(90))
    ('fc.weight, fc.bias', 'w0, w1, w2, w3 and 86 more names')
    """
    all_names = [*names]
    shown = ", ".join(
        name if name.isprintable() and len(name) <= 100 else short(name)
        for name in all_names[:4]
    )
    more = len(all_names) - 4
    return (shown or "nothing") + (f" and {more:,} more names" if more > 0 else "")


def short(value: object) -> str:
    """Show a value in an error, of which no more than its beginning.

    Example
    -------
    >>> short([1] * 1000)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...'
    """
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


_PLAIN = (
    "Weights are a state dict of plain tensors: a .safetensors file, or what "
    "torch.save(encoder.state_dict(), ...) writes; ask whoever made it for one of these."
)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of weights, executing nothing.

    Parameters
    ----------
    path : pathlib.Path
        A .safetensors file, or what ``torch.save`` wrote of a state dict, which may be in
        a dictionary under ``state_dict``, ``model`` or ``model_state_dict``.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU, mapped: of numbers that are not looked at nothing is in memory.

    Raises
    ------
    ValueError
        If it holds anything else, or is damaged.

    Example
    -------
    >>> path = getfixture("tmp_path") / "linear.ckpt"
    >>> torch.save({"epoch": 3, "state_dict": {"weight": torch.ones(2, 3)}}, path)
    >>> read_tensors(path)["weight"].shape
    torch.Size([2, 3])
    """
    try:
        if path.suffix == ".safetensors":
            loaded: Any = safetensors.torch.load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch's own message for a refused pickle advises to load it all the same.
    # Of a file cut short it may raise that a place in it is none.
    except (*REFUSED, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(
            f"{path} is not loaded: it is damaged, or holds more than plain tensors. "
            f"{_PLAIN}"
        ) from error
    state_dict = state_dict_in(loaded)
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and type(value) in (Tensor, torch.nn.Parameter)
        for name, value in state_dict.items()
    ):
        raise ValueError(f"{path} holds {_describe_content(state_dict)}. {_PLAIN}")
    return {name: value.detach() for name, value in state_dict.items()}


def check_weights(
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path | None = None,
) -> None:
    """Compare names, shapes and types of weights with those expected.

    Parameters
    ----------
    weights : mapping of str to torch.Tensor
        What was read. Numbers are looked at last, once they are known to be in the file.
    expected : mapping of str to torch.Tensor
        What it must be, on whatever device. An encoder's description does not count.
    path : pathlib.Path, optional
        The file that the weights were read from.

    Raises
    ------
    ValueError
        If a tensor is missing, surplus, of another shape or type, or not finite, or the
        file is too small for them.
    """
    weights, expected = weights_in(weights), weights_in(expected)
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{short(name)} is surplus" for name in weights if name not in expected]
    for name, weight in expected.items():
        if name not in weights:
            continue
        value = weights[name]
        if value.layout != torch.strided or value.dtype != weight.dtype:
            wrong.append(f"{name} is of {value.dtype}, not {weight.dtype}")
        elif value.shape != weight.shape:
            wrong.append(
                f"{name} is {list(value.shape)} instead of {list(weight.shape)}"
            )
    least = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
    # One number may be expanded to as many as its strides say.
    if path and not wrong and (size := path.stat().st_size) < least:
        wrong.append(f"the file has {size:,} bytes, and they take {least:,}")
    source = path or "the state dict"
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{source} has other weights than its encoder: {', '.join(wrong[:3])}{more}. It "
            f"holds {some_names(weights)}. Copy it again, or give the encoder that was "
            "trained."
        )
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise ValueError(
                f"{source} holds NaN or infinity in {name}: its training has diverged. "
                "Train with a lower lr, or remove the checkpoint to use one before it."
            )


def _describe_content(loaded: object) -> str:
    """Say what a file holds instead of weights."""
    if isinstance(loaded, dict):
        return some_names([str(name) for name in loaded])
    return f"a {type(loaded).__name__}"
