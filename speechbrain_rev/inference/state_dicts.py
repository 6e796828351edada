"""Weights from files that somebody else made: tensors as expected, or an error.

Neither code nor memory is given to a file. What it must hold is known before it is
opened, so that a file of another size is not read at all.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

# Beside its numbers, a tensor has a name, a shape and, in a .ckpt, two zip headers and
# room to begin at a multiple of 64 bytes.
_TENSOR_BYTES = 2048
_FILE_BYTES = 65536

# All that torch.save needs for tensors. torch's own list, for weights_only, has more:
# one of bytearray or torch.Tensor takes any memory that a number in the file says.
_GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch FloatStorage",
    "torch LongStorage",
}
_REFUSED_OPCODES = {
    "EXT1",
    "EXT2",
    "EXT4",
    "INST",
    "OBJ",
    "NEWOBJ",
    "NEWOBJ_EX",
    "STACK_GLOBAL",
    "PERSID",
}


def check_size(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Refuse a file that is shorter or clearly longer than the tensors it must hold.

    Parameters
    ----------
    path : pathlib.Path
        The file, which is not opened.
    expected : mapping of str to torch.Tensor
        What it must hold, on whatever device.

    Raises
    ------
    ValueError
        If it has another size.
    """
    size = path.stat().st_size
    least = sum(t.numel() * t.element_size() for t in expected.values())
    most = least + _TENSOR_BYTES * len(expected) + _FILE_BYTES
    if not least <= size <= most:
        raise ValueError(
            f"{path} has {size:,} bytes; the weights that hyperparams.yaml describes "
            f"take {least:,} to {most:,}. Are both of one model, and complete? Download "
            "the folder again."
        )


def read_safetensors(content: bytes, path: Path) -> dict[str, Tensor]:
    """Read tensors from a .safetensors file.

    Parameters
    ----------
    content : bytes
        The file.
    path : pathlib.Path
        Its name, for the error message.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.

    Raises
    ------
    ValueError
        If it is no such file: its header must describe exactly the bytes there are.
    """
    try:
        return safetensors.torch.load(content)
    # The library raises KeyError for types of numbers that torch has not.
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{path} is no whole .safetensors file ({error}), and is not loaded. "
            "Download the folder again, or ask whoever made it."
        ) from error


def read_checkpoint(content: bytes, path: Path) -> dict[str, Tensor]:
    """Read tensors from what ``torch.save`` wrote, and refuse all else in it by name.

    Parameters
    ----------
    content : bytes
        The file.
    path : pathlib.Path
        Its name, for the error message.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.

    Raises
    ------
    ValueError
        If it is no whole zip file of uncompressed members, or its pickle names
        anything but float32 and int64 tensors.
    """
    try:
        _check_pickle(_uncompressed(content))
        state_dict = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
        if not isinstance(state_dict, dict):
            raise ValueError("it holds no names and tensors")
    except (
        ValueError,
        RuntimeError,
        EOFError,
        OSError,
        TypeError,
        IndexError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        # torch's own message advises to load it all the same.
        reason = str(error) if type(error) is ValueError else "it is damaged"
        raise ValueError(
            f"{path} is not loaded: {reason}. Weights are plain tensors; ask whoever "
            "made it for torch.save(encoder.state_dict(), ...), or better for a "
            ".safetensors file."
        ) from error
    return state_dict


def check_tensors(
    state_dict: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path
) -> None:
    """Compare names, shapes and types with those expected.

    Parameters
    ----------
    state_dict : mapping of str to torch.Tensor
        What was read.
    expected : mapping of str to torch.Tensor
        What it must be, on whatever device.
    path : pathlib.Path
        Where it was read from, for the error message.

    Raises
    ------
    ValueError
        If a tensor is missing, surplus, of another shape or type, or not finite.
    """
    wrong = [f"{name} is missing" for name in expected if name not in state_dict]
    wrong += [f"{name!r} is surplus" for name in state_dict if name not in expected]
    for name in expected.keys() & state_dict.keys():
        value, wanted = state_dict[name], expected[name]
        if type(value) is not Tensor or value.layout != torch.strided:
            wrong.append(f"{name} is no plain tensor")
        elif (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            wrong.append(
                f"{name} is {value.dtype} {list(value.shape)} instead of "
                f"{wanted.dtype} {list(wanted.shape)}"
            )
        elif not bool(value.isfinite().all()):
            wrong.append(f"{name} holds NaN or infinity")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{path} does not fit the encoder that hyperparams.yaml beside it "
            f"describes: {', '.join(wrong[:3])}{more}. Are both of one model? Download "
            "the folder again."
        )


def _uncompressed(content: bytes) -> bytes:
    """Give the pickle in a file of ``torch.save`` that is as large as it says."""
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        infos = members.infolist()
        names = [info.filename for info in infos]
        if len(set(names)) < len(names):
            raise ValueError("two of its members have one name")
        packed = [i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"its member {packed[0]} is compressed")
        if sum(info.file_size for info in infos) > len(content):
            raise ValueError("its members are larger than the file")
        pickles = [name for name in names if name.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise ValueError("it has not one data.pkl")
        return members.read(pickles[0])


def _check_pickle(content: bytes) -> None:
    """Refuse a pickle that names anything but tensors of weights, and run none of it."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL" and argument not in _GLOBALS:
            raise ValueError(f"it names {str(argument).replace(' ', '.')}")
        if opcode.name in _REFUSED_OPCODES:
            raise ValueError(f"its pickle has the instruction {opcode.name}")
