"""Weights from files that somebody else made: tensors as expected, or an error.

Neither code nor memory is given to a file. What it must hold is known before it is
opened, so that a file of another size is not read at all. Of an exported model, what
torch.save wrote is read here and not by torch.load, which takes files that are a zip to
one reader and something else to another.
"""

from __future__ import annotations

import io
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from speechbrain_rev.inference.own_files import REFUSED

# Beside its numbers, a tensor has a name, a shape and, in a .ckpt, two zip headers and
# room to begin at a multiple of 64 bytes.
_TENSOR_BYTES = 2048
_FILE_BYTES = 65536

# Torch writes 160 bytes and 40 instructions of a tensor, safetensors 110 bytes of header.
# Each byte of those may become a hundred in memory, each of its numbers only one.
_TOLD_BYTES = 512
_INSTRUCTIONS = 128
_MEMBERS = 2


@dataclass(frozen=True)
class _Storage:
    """Numbers of one type, in the member data/<key>."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class _View:
    """A tensor, as what it is of a storage."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


# All that torch.save names for tensors. torch's own list, for weights_only, has more:
# one of bytearray or torch.Tensor takes any memory that a number in the file says.
_GLOBALS: dict[str, object] = {
    "collections OrderedDict": OrderedDict,
    "torch._utils _rebuild_tensor_v2": _View,
    "torch FloatStorage": torch.float32,
    "torch LongStorage": torch.int64,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = {
    "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "NEWTRUE", "NEWFALSE", "NONE",
}  # fmt: skip


def check_size(size: int, path: Path, expected: Mapping[str, Tensor]) -> None:
    """Refuse a file that is shorter or clearly longer than the tensors it must hold.

    Parameters
    ----------
    size : int
        Bytes of the file.
    path : pathlib.Path
        Its name, for the error message.
    expected : mapping of str to torch.Tensor
        What it must hold, on whatever device.

    Raises
    ------
    ValueError
        If it has another size.
    """
    least = sum(t.numel() * t.element_size() for t in expected.values())
    most = least + _TENSOR_BYTES * len(expected) + _FILE_BYTES
    if not least <= size <= most:
        raise ValueError(
            f"{path} has {size:,} bytes; the weights that hyperparams.yaml describes "
            f"take {least:,} to {most:,}. Are both of one model, and complete? Download "
            "the folder again."
        )


def read_safetensors(
    content: bytes, path: Path, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read tensors from a .safetensors file.

    Parameters
    ----------
    content : bytes
        The file.
    path : pathlib.Path
        Its name, for the error message.
    expected : mapping of str to torch.Tensor
        What it must hold; here only how many.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.

    Raises
    ------
    ValueError
        If it is no such file: its header must describe exactly the bytes there are, and
        be no longer than so many tensors take.
    """
    try:
        header, most = int.from_bytes(content[:8], "little"), _most_told(expected)
        if header > most:
            raise ValueError(f"its header has {header:,} bytes, of at most {most:,}")
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, *REFUSED) as error:
        raise ValueError(
            f"{path} is no whole .safetensors file ({error}), and is not loaded. "
            "Download the folder again, or ask whoever made it."
        ) from error


def read_checkpoint(
    content: bytes, path: Path, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read tensors from what ``torch.save`` wrote, and refuse all else in it by name.

    Parameters
    ----------
    content : bytes
        The file.
    path : pathlib.Path
        Its name, for the error message.
    expected : mapping of str to torch.Tensor
        What it must hold; here only how many.

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
        return _tensors(content, expected)
    except (zipfile.BadZipFile, *REFUSED) as error:
        reason = str(error) if type(error) is ValueError else "it is damaged"
        raise ValueError(
            f"{path} is not loaded: {reason}. Weights are plain tensors; ask whoever "
            "made it for torch.save(encoder.state_dict(), ...), or better for a "
            ".safetensors file."
        ) from error


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
    for name, wanted in expected.items():
        if name not in state_dict:
            continue
        value = state_dict[name]
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


def _most_told(expected: Mapping[str, Tensor]) -> int:
    """Give how many bytes may say what the tensors are."""
    return _TOLD_BYTES * len(expected) + _FILE_BYTES


def _tensors(content: bytes, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make the tensors in a file of ``torch.save``."""
    # zipfile takes what begins as something else, and as many members as there are.
    if content[:4] != b"PK\x03\x04":
        raise ValueError("it does not begin as a zip file")
    if content.count(b"PK\x01\x02") > _MEMBERS * len(expected) + 1000:
        raise ValueError("it has more members than tensors")
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        prefix = _checked_members(members, len(content))
        order = members.NameToInfo.get(f"{prefix}/byteorder")
        if order is not None and members.read(order) != sys.byteorder.encode():
            raise ValueError(f"its numbers are not {sys.byteorder}-endian")
        told = members.getinfo(f"{prefix}/data.pkl")
        if told.file_size > _most_told(expected):
            raise ValueError(f"its data.pkl has {told.file_size:,} bytes")
        views = _views(members.read(told), _INSTRUCTIONS * len(expected) + 1000)
        storages: dict[str, Tensor] = {}
        return {
            name: _tensor(view, members, prefix, storages)
            for name, view in views.items()
        }


def _checked_members(members: zipfile.ZipFile, size: int) -> str:
    """Refuse members that readers may take for others; give the folder of all."""
    infos = members.infolist()
    names = [info.filename for info in infos]
    if len({name.casefold() for name in names}) < len(names):
        raise ValueError("two of its members have one name")
    prefix = names[0].partition("/")[0]
    other = [name for name in names if not name.startswith(f"{prefix}/")]
    if other:
        raise ValueError(
            f"its member {other[0][:100]!r} is in no folder of the first's"
        )
    packed = [i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"its member {packed[0][:100]} is compressed")
    if sum(info.file_size for info in infos) > size:
        raise ValueError("its members are larger than the file")
    if f"{prefix}/data.pkl" not in names:
        raise ValueError(f"it has no {prefix[:100]}/data.pkl")
    return prefix


def _tensor(
    view: _View, members: zipfile.ZipFile, prefix: str, storages: dict[str, Tensor]
) -> Tensor:
    """Make a tensor of its storage's record, which is read once."""
    key, numel = view.storage.key, view.storage.numel
    if key not in storages:
        record = members.read(f"{prefix}/data/{key}")
        if len(record) != numel * view.storage.dtype.itemsize:
            raise ValueError(
                f"its storage {key[:100]!r} of {numel:,} numbers has {len(record):,} bytes"
            )
        dtype = view.storage.dtype
        # Of no bytes, torch makes no tensor.
        storages[key] = (
            torch.frombuffer(bytearray(record), dtype=dtype)
            if record
            else torch.empty(0, dtype=dtype)
        )
    storage = storages[key]
    if (storage.dtype, len(storage)) != (view.storage.dtype, numel):
        raise ValueError(f"its storage {key[:100]!r} is of two types or sizes")
    steps = zip(view.size, view.stride, strict=True)
    beyond = view.offset + sum((n - 1) * step for n, step in steps) >= numel
    if 0 not in view.size and beyond:
        raise ValueError(f"a tensor leads out of its storage {key[:100]!r}")
    return storage.as_strided(view.size, view.stride, view.offset)


def _views(pickled: bytes, most: int) -> dict[str, _View]:
    """Follow a pickle's instructions, those alone that tensors take."""
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        if count > most:
            raise ValueError(f"its pickle has more than {most:,} instructions")
        name = opcode.name
        if name == "GLOBAL" and argument not in _GLOBALS:
            raise ValueError(f"it names {str(argument)[:100].replace(' ', '.')}")
        if name == "GLOBAL":
            stack.append(_GLOBALS[str(argument)])
        elif name in _PLAIN:
            stack.append({"NEWTRUE": True, "NEWFALSE": False}.get(name, argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "TUPLE":
            stack, members = below.pop(), stack
            stack.append(tuple(members))
        elif name in _TUPLES:
            start = len(stack) - _TUPLES[name]
            stack[start:] = [_tuple(stack, start)]
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        elif name == "SETITEMS":
            stack, members = below.pop(), stack
            _set(stack[-1], members)
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_reduced(function, arguments))
        elif name == "BUILD":
            # The versions of modules, which a state dict carries along.
            if type(stack.pop()) is not dict or type(stack[-1]) is not dict:
                raise ValueError("its pickle builds something")
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"its pickle has the instruction {name}")
    found = stack.pop()
    if type(found) is not dict or any(type(v) is not _View for v in found.values()):
        raise ValueError("it holds something else than names and tensors")
    return found


def _tuple(stack: list[Any], start: int) -> tuple[Any, ...]:
    if start < 0:
        raise IndexError
    return tuple(stack[start:])


def _set(found: object, members: list[Any]) -> None:
    if type(found) is not dict or any(type(key) is not str for key in members[::2]):
        raise ValueError("a name in it is no text")
    found.update(zip(members[::2], members[1::2], strict=True))


def _storage(identity: object) -> _Storage:
    match identity:
        case ("storage", torch.dtype() as dtype, str(key), str(), int(numel)):
            if numel >= 0 and "/" not in key:
                return _Storage(dtype, key, numel)
    raise ValueError("it names a storage in another way than torch")


def _reduced(function: object, arguments: object) -> dict[str, Any] | _View:
    match function, arguments:
        case (f, ()) if f is OrderedDict:
            return {}
        case (f, (_Storage() as storage, int(offset), tuple(size), tuple(stride), *_)):
            numbers = (offset, *size, *stride)
            known = f is _View and len(size) == len(stride) <= 8
            if known and all(type(n) is int and n >= 0 for n in numbers):
                return _View(storage, offset, size, stride)
    raise ValueError("it makes tensors in another way than torch")
