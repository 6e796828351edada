"""Files that somebody else made: opened in their folder alone, and read as data.

Nothing of a file is executed, and it takes no more memory than its size allows. An
exported model is read from safetensors, whose size is known before it is opened. What
``torch.save`` wrote is read by ``torch.load(weights_only=True)``, after a check that its
archive holds what it seems to hold, uncompressed, and that its pickle names tensors only.
"""

from __future__ import annotations

import json
import math
import pickle
import pickletools
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import safetensors.torch
import torch
import yaml
from torch import Tensor

from speechbrain_rev.lobes.description import weights_in
from speechbrain_rev.lobes.pretrained import state_dict_in

_RUN = (
    "the output_folder of a training run (recipes/VoxCeleb/train.py, or SpeechBrain's own "
    "script), which holds hyperparams.yaml and weights"
)
#: What readers raise of a file that is none of their own, or damaged.
REFUSED = (
    pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError,
    LookupError, AttributeError, AssertionError, ArithmeticError, MemoryError,
    struct.error,
)  # fmt: skip

_SNAPSHOT = re.compile(r"models--[\w.-]+/snapshots/[0-9a-f]{40}", re.ASCII)
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def own_file(folder: Path, name: str | Path, *, given: str = _RUN) -> Path:
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
    if folder.exists() and not folder.is_dir():
        graph = " A graph is run by onnxruntime or torch.export, not by this package."
        kind = graph if Path(folder).suffix in (".onnx", ".pt2") else ""
        raise FileNotFoundError(
            f"{folder} is a file, and no folder.{kind} Give {given}."
        )
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
    # What several repositories have lies in the cache's own folder since 2.0.
    shared = repository.parent / "blobs" / file.name[:2]
    return file.parent in (repository / "blobs", shared)


def open_own(folder: Path, name: str | Path, *, given: str = _RUN) -> BinaryIO:
    """Open a file that ``own_file`` finds.

    Parameters
    ----------
    folder, name, given
        As of ``own_file``.

    Returns
    -------
    binary file
        To read.

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``own_file``.
    """
    return own_file(folder, name, given=given).open("rb")


def quoted(text: str) -> str:
    r"""Give a name that somebody else chose for one line of an error message.

    Example
    -------
    >>> quoted("a\nb"), len(quoted("a" * 1000))
    ("'a\\nb'", 105)
    """
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def some_names(names: Iterable[str]) -> str:
    """Give the first four names of a file for an error message, and how many follow.

    Example
    -------
    >>> some_names(["fc.weight", "fc.bias"]), some_names(f"w{i}" for i in range(90))
    ('fc.weight, fc.bias', 'w0, w1, w2, w3 and 86 more names')
    """
    all_names = [*names]
    shown = ", ".join(
        name if name.isprintable() and len(name) <= 100 else quoted(name)
        for name in all_names[:4]
    )
    more = len(all_names) - 4
    return (shown or "nothing") + (f" and {more:,} more names" if more > 0 else "")


def strict_json(content: bytes) -> Any:
    """Read JSON of finite numbers, whose keys stand there once.

    Raises
    ------
    ValueError
        If it is anything else.

    Example
    -------
    >>> strict_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: a stands there twice
    """
    try:
        return json.loads(
            content.decode(),
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_bounded,
            object_pairs_hook=_once,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{short(twice).strip(chr(39))} stands there twice")
    return members


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _bounded(text: str) -> int:
    # The time that longer ones take grows with the square of their length.
    if len(text) > 30:
        raise ValueError(f"{text[:20]}... has too many digits")
    return int(text)


def short(value: object) -> str:
    """Show a value in an error, of which no more than its beginning.

    Example
    -------
    >>> short([1] * 1000)
    '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,...'
    """
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


# What SpeechBrain writes of our complete training YAML has 13 kB, of which 4,000 characters
# are values and names with all aliases expanded. The limit holds for the file, and for those.
_MAX_YAML_BYTES = 1_000_000
# That file is nested 7 deep, with its aliases.
_MAX_DEPTH = 50
# A number of more characters takes time, or has no end.
_MAX_NUMBER = 100

_MERGE = "tag:yaml.org,2002:merge"
_REFERENCE = re.compile(r"<([^<>\[\].]+)>")


class _Loader(yaml.SafeLoader):
    """Knows no tag, and bounds what aliases make of a file, before anything is made."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        #: Characters of each node that is complete, aliases expanded.
        self.sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose as SafeLoader does, within bounds."""
        event = self.peek_event()
        line = event.start_mark.line + 1
        if self.depth == _MAX_DEPTH:
            raise ValueError(f"line {line}: it is nested deeper than {_MAX_DEPTH}")
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        if node is None:
            return None
        if not isinstance(event, yaml.AliasEvent):
            self.sizes[node] = self._size(node)
        elif node not in self.sizes:
            raise ValueError(f"line {line}: *{event.anchor} is a part of itself")
        if self.sizes[node] > _MAX_YAML_BYTES:
            raise ValueError(
                f"line {line}: with aliases expanded it has more than "
                f"{_MAX_YAML_BYTES:,} characters"
            )
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        raise ValueError(
                            f"{_line(key)}: {key.value} stands there twice"
                        )
                    keys.add((key.tag, key.value))
            return 1 + sum(self.sizes[part] for pair in node.value for part in pair)
        if isinstance(node, yaml.SequenceNode):
            return 1 + sum(self.sizes[member] for member in node.value)
        return 1 + len(node.value)


class YamlFile:
    """A YAML mapping of names to values, as nodes that are looked at one by one.

    Parameters
    ----------
    folder : pathlib.Path
        Where the file must really lie.
    name : str or pathlib.Path
        The file, relative to it.

    Attributes
    ----------
    path : pathlib.Path
        The file.
    top : dict of str to yaml.Node
        What stands at top level.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it is no YAML mapping, a key stands in it twice, or it is too large, as it is
        or with its aliases expanded.
    """

    def __init__(self, folder: Path, name: str | Path) -> None:
        self.path = folder / name
        with open_own(folder, name) as file:
            content = file.read(_MAX_YAML_BYTES + 1)
        if len(content) > _MAX_YAML_BYTES:
            raise ValueError(
                f"{self.path} has more than {_MAX_YAML_BYTES:,} bytes; what a training run "
                "writes has less. Is it another file?"
            )
        try:
            self._loader = _Loader(content.decode())
            document = self._loader.get_single_node()
            if not isinstance(document, yaml.MappingNode):
                raise ValueError("it is no YAML mapping of names to values")
            self._document, self.top = document, self._members(document)
        except (yaml.YAMLError, *REFUSED) as error:
            raise ValueError(
                f"{self.path} cannot be read as plain values: {in_words(error)}. Is it "
                "what a training run wrote?"
            ) from error

    def members(self, node: yaml.MappingNode) -> dict[str, yaml.Node]:
        """Give the values of a mapping by their names, what ``<<`` merges among them."""
        try:
            return self._members(node)
        except yaml.YAMLError as error:
            raise ValueError(f"{self.path}, {in_words(error)}") from error

    def _members(self, node: yaml.MappingNode) -> dict[str, yaml.Node]:
        self._loader.flatten_mapping(node)
        return {
            key.value: value
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode)
        }

    def plain(self, node: yaml.Node) -> Any:
        """Make the plain value of a node.

        Returns
        -------
        object
            A number, string, truth value, None, list or mapping.

        Raises
        ------
        ValueError, yaml.YAMLError
            If it has a tag, or a number without end; the message names the line only.
        """
        self._check(node, set())
        return self._loader.construct_object(node, deep=True)

    def nodes(self) -> Iterator[tuple[str, yaml.Node]]:
        """Give each node once, in the order of the file, and the name that it stands under."""
        seen: set[yaml.Node] = set()
        waiting: list[tuple[str, yaml.Node]] = [("", self._document)]
        while waiting:
            name, node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            yield name, node
            if isinstance(node, yaml.MappingNode):
                waiting += [(_name(key), value) for key, value in reversed(node.value)]
            elif isinstance(node, yaml.SequenceNode):
                waiting += [(name, member) for member in reversed(node.value)]

    def follow(self, node: yaml.Node) -> yaml.Node | None:
        """Give what ``!ref <name>`` refers to, or the node if it is no reference.

        Returns
        -------
        yaml.Node or None
            None if it refers to no name at top level alone, or to itself.
        """
        for _ in range(len(self.top) + 1):
            if node.tag != "!ref":
                return node
            name = _REFERENCE.fullmatch(str(node.value))
            if name is None or name[1] not in self.top:
                return None
            node = self.top[name[1]]
        return None

    def refuse(self, node: yaml.Node, what: str) -> NoReturn:
        """Raise a ValueError that names the file and the node's line."""
        raise ValueError(f"{self.path}, {_line(node)}: {what}")

    def _check(self, node: yaml.Node, seen: set[yaml.Node]) -> None:
        """Refuse tags, and numbers without end."""
        if node in seen:
            return
        seen.add(node)
        if node.tag != _MERGE and node.tag not in self._loader.yaml_constructors:
            shown = node.tag.replace("tag:yaml.org,2002:", "!!", 1)
            raise ValueError(f"{_line(node)} has the tag {shown[:60]}")
        if isinstance(node, yaml.ScalarNode):
            if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _MAX_NUMBER:
                raise ValueError(
                    f"{_line(node)} has {node.value[:40]!r}..., which has no end"
                )
            return
        for member in node.value:
            for part in member if isinstance(member, tuple) else (member,):
                self._check(part, seen)


def plain_values(
    folder: Path, name: str | Path, names: Sequence[str]
) -> dict[str, Any]:
    """Read those of the top-level names that a YAML file has, following no tag.

    Parameters
    ----------
    folder : pathlib.Path
        Where the file must really lie.
    name : str or pathlib.Path
        The file, relative to it.
    names : sequence of str
        The keys wanted.

    Returns
    -------
    dict
        A number, string, truth value, None, list or mapping for each name there. Aliases
        of YAML, as SpeechBrain writes them, are followed.

    Raises
    ------
    FileNotFoundError
        If the folder or file is missing.
    ValueError
        If it is no YAML mapping or too large, as it is or with its aliases expanded, or a
        value has a tag or a number without end.
    """
    file = YamlFile(folder, name)
    try:
        # Only these are constructed.
        return {key: file.plain(file.top[key]) for key in names if key in file.top}
    except (yaml.YAMLError, *REFUSED) as error:
        raise ValueError(
            f"{file.path} cannot be read as plain values: {in_words(error)}. The values of "
            f"{', '.join(names)} must stand there without tags and references, as "
            "train.py writes them."
        ) from error


def in_words(error: Exception) -> str:
    """Give what an error says in one line, that of a YAML parser with its line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"


def _name(key: yaml.Node) -> str:
    return key.value if isinstance(key, yaml.ScalarNode) else ""


# Beside its numbers, a tensor of a .safetensors file has a name, a shape and a place, of
# some 110 bytes, each of which may become a hundred in memory.
_TENSOR_BYTES = 512
_FILE_BYTES = 65536

#: Of what torch wrote. A classifier of a million speakers at three speeds has 3 GB.
MAX_BYTES = 2**32
# Torch writes some 130 bytes of a tensor's name and shape, and 60 of its place. Each of
# them may become a hundred in memory.
_MAX_PICKLE_BYTES = 2 * 2**20
_MAX_DIRECTORY_BYTES = 4 * 2**20
# Torch pads each header, for numbers to begin at a multiple of 64 bytes.
_MAX_PADDING_BYTES = 128
# What may follow a member: its checksum and size, in numbers of 32 or of 64 bits.
_DESCRIPTOR_BYTES = (0, 16, 24)
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_LOCAL = struct.Struct("<4s5H3L2H")
# weights_only allows more: a bytearray or a torch.Tensor of any size that a number says.
_TENSORS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)"
    r"|torch \w+Storage"
)


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
    most = least + _most_beside(expected)
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
        header = int.from_bytes(content[:8], "little")
        most = _most_beside(expected)
        if header > most:
            raise ValueError(f"its header has {header:,} bytes, of at most {most:,}")
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, *REFUSED) as error:
        raise ValueError(
            f"{path} is no whole .safetensors file ({error}), and is not loaded. "
            "Download the folder again, or ask whoever made it."
        ) from error


def load_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Load what ``torch.save`` wrote of a state dict, executing nothing.

    Parameters
    ----------
    path : pathlib.Path
        The file. A state dict may be in a dictionary under ``state_dict``, ``model`` or
        ``model_state_dict``; what else is in that is left out.
    remedy : str
        What to do if it is something else, in sentences, for the error message.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU, in memory of their own.

    Raises
    ------
    ValueError
        If it is no zip archive of uncompressed members that fill it, its pickle names
        anything but tensors, it holds anything but names and their tensors, or they are
        larger than the file; or if it has more than 4 GiB.

    Example
    -------
    >>> path = getfixture("tmp_path") / "linear.ckpt"
    >>> torch.save({"epoch": 3, "state_dict": {"weight": torch.ones(2, 3)}}, path)
    >>> load_tensors(path, "Train again.")["weight"].shape
    torch.Size([2, 3])
    """
    with path.open("rb") as file:
        try:
            pickled, sizes = _archived(file)
            _check_pickle(pickled)
        except (zipfile.BadZipFile, *REFUSED) as error:
            reason = str(error) if type(error) is ValueError else "it is damaged"
            raise ValueError(f"{path} is not loaded: {reason}. {remedy}") from error
    try:
        # Mapped, a storage that is larger than its record cannot lead out of the file.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch's own message for a refused pickle advises to load it all the same.
    except REFUSED as error:
        raise ValueError(
            f"{path} is not loaded: it is damaged or holds more than plain tensors. {remedy}"
        ) from error
    state_dict = state_dict_in(loaded)
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor)
        for name, value in state_dict.items()
    ):
        raise ValueError(
            f"{path} is no state dict (names and their tensors): it holds "
            f"{_described(state_dict)}. {remedy}"
        )
    if any(t.untyped_storage().nbytes() not in sizes for t in state_dict.values()):
        raise ValueError(
            f"{path} is not loaded: a tensor has more or fewer numbers than are there. {remedy}"
        )
    # One number may be expanded to as many as its strides say, many times over.
    size, total = path.stat().st_size, sum(t.nbytes for t in state_dict.values())
    if total > size:
        raise ValueError(
            f"{path} is not loaded: its tensors take {total:,} bytes, more than the file "
            f"with {size:,}. {remedy}"
        )
    return {name: value.detach().clone() for name, value in state_dict.items()}


def check_tensors(
    state_dict: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path,
    *,
    exactly: bool = True,
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
    exactly : bool
        Whether types are compared, which torch converts, and numbers must be finite.

    Raises
    ------
    ValueError
        If a tensor is missing, surplus, of another shape or type, or not finite.
    """
    state_dict, expected = weights_in(state_dict), weights_in(expected)
    wrong = [f"{name} is missing" for name in expected if name not in state_dict]
    wrong += [
        f"{quoted(name)} is surplus" for name in state_dict if name not in expected
    ]
    for name, wanted in expected.items():
        if name not in state_dict:
            continue
        value = state_dict[name]
        if type(value) is not Tensor or value.layout != torch.strided:
            wrong.append(f"{name} is no plain tensor")
        elif value.shape != wanted.shape or (exactly and value.dtype != wanted.dtype):
            wrong.append(
                f"{name} is {value.dtype} {list(value.shape)} instead of "
                f"{wanted.dtype} {list(wanted.shape)}"
            )
        elif exactly and not bool(value.isfinite().all()):
            wrong.append(f"{name} holds NaN or infinity")
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{path} does not fit what hyperparams.yaml beside it describes: "
            f"{', '.join(wrong[:3])}{more}. It holds "
            f"{some_names(state_dict)}. Are both of one model? Copy the folder again."
        )


def _most_beside(expected: Mapping[str, Tensor]) -> int:
    """Give how many bytes of a .safetensors file may be other ones than numbers."""
    return _TENSOR_BYTES * len(expected) + _FILE_BYTES


def _archived(file: BinaryIO) -> tuple[bytes, set[int]]:
    """Give data.pkl, and the sizes of members, where every reader finds the same ones."""
    size = file.seek(0, 2)
    if size > MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than the {MAX_BYTES:,} allowed")
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise ValueError(
            "it is no zip archive, which torch.save writes since torch 1.6"
        )
    start, count = _directory(file, size)
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) != count:
            raise ValueError(f"it has {len(members):,} members, not {count:,}")
        prefix, names = members[0].filename.partition("/")[0], set(archive.namelist())
        if f"{prefix}/constants.pkl" in names:
            raise ValueError("it is a TorchScript program, not weights")
        _check_members(members)
        _check_places(file, members, start)
        if f"{prefix}/data.pkl" not in names:
            raise ValueError(f"its archive has no {quoted(prefix)}/data.pkl")
        entry = archive.getinfo(f"{prefix}/data.pkl")
        if entry.file_size > _MAX_PICKLE_BYTES:
            raise ValueError(
                f"its data.pkl has {entry.file_size:,} bytes, more than the "
                f"{_MAX_PICKLE_BYTES:,} allowed"
            )
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"its member {quoted(damaged)} is damaged")
        return archive.read(entry), {member.file_size for member in members}


def _directory(file: BinaryIO, size: int) -> tuple[int, int]:
    """Give where the list of members begins and how many it has, which end the file."""
    most = _END_64.size + _LOCATOR_64.size + _END.size
    file.seek(max(0, size - most))
    last = file.read().rjust(most, b"\0")
    signature, _, _, _, count, length, start, comment = _END.unpack(last[-_END.size :])
    if signature != b"PK\x05\x06" or comment:
        raise ValueError("it is cut short, or something follows its archive")
    stop = size - _END.size
    located, _, place, _ = _LOCATOR_64.unpack(last[_END_64.size : -_END.size])
    if located == b"PK\x06\x07":
        stop = size - most
        signature, *_, count, length, start = _END_64.unpack(last[: _END_64.size])
        if place != stop or signature != b"PK\x06\x06":
            start = -1
    if start + length != stop:
        raise ValueError(
            "something lies before or within its archive that is no part of it"
        )
    if length > _MAX_DIRECTORY_BYTES:
        raise ValueError(
            f"its list of members has {length:,} bytes, more than the "
            f"{_MAX_DIRECTORY_BYTES:,} allowed"
        )
    return start, count


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    """Refuse compressed members, and names that readers may take for others."""
    names = [member.filename for member in members]
    if len({name.casefold() for name in names}) < len(names):
        raise ValueError("two members of its archive have one name")
    folder = f"{names[0].partition('/')[0]}/" if names else ""
    for member, name in zip(members, names, strict=True):
        if not name.startswith(folder) or name != member.orig_filename:
            raise ValueError(
                f"its member {quoted(name)} is not in {quoted(folder)} as the first is"
            )
        stored = member.compress_type == zipfile.ZIP_STORED
        if not stored or member.compress_size != member.file_size:
            raise ValueError(f"its member {quoted(name)} is compressed")


def _check_places(
    file: BinaryIO, members: list[zipfile.ZipInfo], directory: int
) -> None:
    """Refuse an archive whose members overlap or leave gaps."""
    place = 0
    ordered = sorted(members, key=lambda member: member.header_offset)
    following = [*(member.header_offset for member in ordered[1:]), directory]
    for member, after in zip(ordered, following, strict=True):
        file.seek(member.header_offset)
        *_, name, padding = _LOCAL.unpack(file.read(_LOCAL.size))
        numbers = member.header_offset + _LOCAL.size + name + padding
        fits = after - numbers - member.file_size in _DESCRIPTOR_BYTES
        if member.header_offset != place or padding > _MAX_PADDING_BYTES or not fits:
            raise ValueError(
                f"its member {quoted(member.filename)} does not fill its place in the "
                f"archive, bytes {place:,} to {after:,}"
            )
        place = after


def _check_pickle(pickled: bytes) -> None:
    """Refuse what names anything but tensors, before any of it is called."""
    for opcode, argument, _ in pickletools.genops(pickled):
        protocol = argument if opcode.name == "PROTO" else opcode.proto
        if protocol not in (0, 1, 2):
            raise ValueError(f"its pickle is of protocol {protocol}; torch writes 2")
        if opcode.name == "GLOBAL" and not _TENSORS.fullmatch(str(argument)):
            named = quoted(str(argument).replace(" ", "."))
            raise ValueError(f"it names {named}, and weights are plain tensors")


def _described(loaded: object) -> str:
    """Say what a file holds instead of weights."""
    if isinstance(loaded, dict):
        return some_names([str(name) for name in loaded])
    return f"a {type(loaded).__name__}"
