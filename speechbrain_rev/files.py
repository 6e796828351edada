"""Files and folders that are written whole, by one process, and checked when they are read."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import re
import reprlib
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import (
    IO,
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Instance = TypeVar("Instance", bound=DataclassInstance)

logger = logging.getLogger(__name__)

#: Checksums of a folder's files, as ``sha256sum -c`` reads them.
SUMS = "SHA256SUMS"
#: The lock of a folder that one process owns, in it.
LOCK = ".lock"

_BLOCK_BYTES = 2**20
_MOST_JSON_BYTES = 10_000_000
_MOST_SUMS_BYTES = 1_000_000
# More bytes, or seconds, than anything has.
_LARGEST = 2**60
# Errors of a disk that takes no more, whatever the file.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file, which takes the place of an earlier one when it is complete.

    Parameters
    ----------
    path : str or Path
        The file, in a folder that exists.
    content : str or bytes
        A text is written as UTF-8.

    Raises
    ------
    OSError
        If it cannot be written; an earlier file stays as it was.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "plan.json")
    >>> write_whole(file, "{}")
    >>> file.read_text(), len(list(file.parent.iterdir()))
    ('{}', 1)
    """
    with opened_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def opened_whole(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file to write, which takes its place when the block ends without an error.

    Of processes that write one file at once, one succeeds.

    Parameters
    ----------
    path : str or Path
        As of ``write_whole``.

    Yields
    ------
    binary file

    Raises
    ------
    OSError
        As of ``write_whole``.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "rows")
    >>> with opened_whole(file) as opened:
    ...     _ = opened.write(b"rows")
    ...     file.exists()
    False
    >>> file.read_bytes()
    b'rows'
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        # A rename would replace /dev/null, a pipe or /dev/stdout by a file.
        with open(path, "wb") as device:
            yield device
        return
    advice = "What was there is as it was."
    with _part_of(path, advice) as part, open(part, "xb") as file:
        if path.exists():
            shutil.copymode(path, part)
        yield file
        file.flush()
        # fsync first: a power cut after the rename must not leave an empty file.
        os.fsync(file.fileno())


@contextlib.contextmanager
def folder_whole(path: str | Path) -> Iterator[Path]:
    """Make a folder, which takes its place when the block ends without an error.

    Parameters
    ----------
    path : str or Path
        The folder, which is not there or empty; the one that it is in exists.

    Yields
    ------
    pathlib.Path
        The folder that becomes it.

    Raises
    ------
    OSError
        If it cannot be written; nothing of it stays.

    Examples
    --------
    >>> folder = Path(tempfile.mkdtemp(), "model")
    >>> with folder_whole(folder) as part:
    ...     write_whole(part / "weights", b"1")
    ...     folder.exists()
    False
    >>> [file.name for file in folder.iterdir()]
    ['weights']
    """
    with _part_of(path, "Then give the same command again.") as part:
        part.mkdir()
        yield part


@contextlib.contextmanager
def _part_of(path: str | Path, advice: str) -> Iterator[Path]:
    """Name a part beside a file or folder, and rename it to that at the end."""
    path = Path(path).resolve()  # a link stays a link
    with naming_full_disk(path, f"Free some space there. {advice}"):
        delete_leftovers(path)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            yield part
            try:
                os.replace(part, path)
            except FileNotFoundError as error:
                raise OSError(
                    f"{path} cannot be written: another process writes it, too, or has "
                    "deleted its folder. Give another name, or the same command again."
                ) from error
        except BaseException:
            _delete(part)
            raise


def delete_leftovers(path: str | Path) -> None:
    """Delete what killed processes left of a file or folder that is written whole.

    Writing it does so too.

    Examples
    --------
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / ".plan.json.abcdefgh.part").touch()
    >>> delete_leftovers(folder / "plan.json")
    >>> list(folder.iterdir())
    []
    """
    path = Path(path)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}.part"):
        _delete(leftover)


def _delete(part: Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(part) if part.is_dir() else part.unlink()


def is_of_disk(error: BaseException) -> bool:
    """Return whether an error means that a disk is full, or takes nothing.

    Examples
    --------
    >>> is_of_disk(OSError(errno.ENOSPC, "No space left on device"))
    True
    >>> is_of_disk(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    False
    """
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


@contextlib.contextmanager
def naming_full_disk(path: str | Path, advice: str) -> Iterator[None]:
    """Name the file that cannot be written where a disk takes no more, and what to do.

    Parameters
    ----------
    path : str or Path
        What is written in the block.
    advice : str
        In whole sentences.

    Raises
    ------
    OSError
        In the place of the system's error, with its number; other errors stay as they are.

    Examples
    --------
    >>> with naming_full_disk("plan.json", "Free some space."):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    OSError: plan.json cannot be written (No space left on device). Free some space.
    """
    try:
        yield
    except OSError as error:
        if not is_of_disk(error) or not error.strerror:
            raise
        named = OSError(f"{path} cannot be written ({error.strerror}). {advice}")
        named.errno = error.errno
        raise named from error


def check_writable(name: str, folder: str | Path) -> None:
    """Make a folder, and see that files can be written to it.

    Parameters
    ----------
    name : str
        What the folder is called, for the error.
    folder : str or Path
        The folder.

    Raises
    ------
    OSError
        If it cannot be made or nothing can be written to it.

    Examples
    --------
    >>> check_writable("output_folder", Path(tempfile.mkdtemp(), "new"))
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise OSError(
            f"{name}: {folder} cannot be written to ({error.strerror}). Give another one, "
            "or make it writable."
        ) from error


def check_file(name: str, file: str | Path) -> None:
    """Refuse a file that cannot be written, before the work and not after it.

    Parameters
    ----------
    name : str
        What the file is called, for the error.
    file : str or Path
        Its path.

    Raises
    ------
    ValueError
        If there is no such folder, it may not be written to, or the path is a folder.

    Examples
    --------
    >>> check_file("--out", Path(tempfile.mkdtemp(), "rows.npz"))
    """
    path = Path(file)
    reason = ""
    if not path.parent.is_dir():
        reason = f"there is no folder {path.parent}. Make it first"
    elif path.is_dir():
        reason = "it is a folder. Give the name of a file"
    elif not os.access(path.parent, os.W_OK):
        reason = f"you may not write into the folder {path.parent}. Give another one"
    if reason:
        raise ValueError(f"{name} {path} cannot be written: {reason}.")


@contextlib.contextmanager
def locked(
    lock_file: Path, what: str, doing: str, *, instead: str = "name"
) -> Iterator[None]:
    """Keep other processes from what is done in the block.

    The lock ends with its process, however that ends. The file goes with the block.

    Parameters
    ----------
    lock_file : pathlib.Path
        In a folder that exists.
    what : str
        What is locked, for the error.
    doing : str
        What is done to it: "packing".
    instead : str
        What the user may give another of: "name", "output_folder".

    Raises
    ------
    ValueError
        If another process has the lock.

    Examples
    --------
    >>> lock_file = Path(tempfile.mkdtemp(), LOCK)
    >>> with locked(lock_file, "a.packed", "packing"):
    ...     with locked(lock_file, "a.packed", "packing"):
    ...         pass
    Traceback (most recent call last):
    ValueError: Another process is packing a.packed. Wait for it, or give another name.
    >>> lock_file.exists()
    False
    """
    # A soft lock, for file systems without locks, would outlive its process.
    lock = FileLock(
        lock_file, blocking=False, thread_local=False, fallback_to_soft=False
    )
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"Another process is {doing} {what}. Wait for it, or give another {instead}."
        ) from error
    except (OSError, NotImplementedError) as error:
        logger.warning(
            f"{what} cannot be locked ({error}): see that no other process is {doing} it."
        )
    try:
        yield
    finally:
        if lock.is_locked:
            # The lock is still held: whoever comes later makes another file.
            with contextlib.suppress(OSError):
                lock_file.unlink()
            lock.release()


@contextlib.contextmanager
def writing_alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file: one with .lock added lies beside it.

    Parameters
    ----------
    path : pathlib.Path
        The file; its folder is made.

    Raises
    ------
    ValueError
        If another process is writing it.

    Examples
    --------
    >>> path = Path(tempfile.mkdtemp(), "rows.npz")
    >>> with writing_alone(path), writing_alone(path):
    ...     pass
    Traceback (most recent call last):
    ValueError: Another process is writing ...rows.npz. Wait for it, or give another name.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"{path.name}.lock"), str(path), "writing"):
        yield


def digest_of(path: str | Path) -> str:
    """Compute a file's SHA-256, in hexadecimal digits.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "empty")
    >>> file.touch()
    >>> digest_of(file)[:8]
    'e3b0c442'
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sums_in(folder: str | Path) -> dict[str, str]:
    """Read a folder's ``SHA256SUMS``: digests by name, none where there is no such file.

    Examples
    --------
    >>> sums_in(tempfile.mkdtemp())
    {}
    """
    path = Path(folder, SUMS)
    if not path.is_file():
        return {}
    if path.stat().st_size > _MOST_SUMS_BYTES:
        raise ValueError(
            f"{path} has more than {_MOST_SUMS_BYTES:,} bytes, and is no list of checksums. "
            "Bring back the file as it was, or delete it."
        )
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (x.partition("  ") for x in lines)}


def write_sums(folder: str | Path, digests: Mapping[str, str]) -> None:
    """Write a folder's ``SHA256SUMS``.

    Parameters
    ----------
    folder : str or Path
        The folder.
    digests : mapping of str to str
        SHA-256 in hexadecimal digits by name, relative to the folder.

    Examples
    --------
    >>> folder = tempfile.mkdtemp()
    >>> write_sums(folder, {"train.csv": "f00d"})
    >>> sums_in(folder)
    {'train.csv': 'f00d'}
    """
    lines = (f"{digest}  {name}\n" for name, digest in digests.items())
    write_whole(Path(folder, SUMS), "".join(lines))


def check_sum(path: str | Path) -> None:
    """Refuse a file that is not as its checksum says; one without is as it is.

    Parameters
    ----------
    path : str or Path
        The file, which is there; ``SHA256SUMS`` are beside it.

    Raises
    ------
    ValueError
        If it is not as it was written.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "train.csv")
    >>> file.touch()
    >>> check_sum(file)
    >>> write_sums(file.parent, {"train.csv": digest_of(file)})
    >>> check_sum(file)
    >>> write_whole(file, "x")
    >>> check_sum(file)
    Traceback (most recent call last):
    ValueError: ...train.csv is not as it was written: ...
    """
    folder, name = Path(path).parent, Path(path).name
    written = sums_in(folder).get(name)
    if written is not None and digest_of(path) != written:
        raise ValueError(
            f"{path} is not as it was written: its checksum in {folder / SUMS} differs. "
            f"Bring back the file as it was. To take it as it is, delete the line of "
            f"{name} there."
        )


def parse_json(content: str | bytes) -> Any:
    """Parse JSON in whose objects each name stands once.

    Raises
    ------
    ValueError, RecursionError
        If it is anything else.

    Examples
    --------
    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: 'a' is there twice
    """
    return json.loads(content, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{reprlib.repr(twice)} is there twice")
    return values


class _Plain(yaml.SafeLoader):
    """Reads plain values. Merge keys are none: they double what they merge."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave a merge key as it is, which is then refused like any unknown tag."""


def plain_yaml(content: bytes) -> Any:
    """Read YAML of plain values.

    Raises
    ------
    ValueError
        If it is anything else.

    Examples
    --------
    >>> plain_yaml(b"epoch: !new:os.system [ls]")
    Traceback (most recent call last):
    ValueError: could not determine a constructor for the tag '!new:os.system' ...
    """
    try:
        return yaml.load(content, _Plain)
    except (
        *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
        *(RecursionError, yaml.YAMLError),
    ) as error:
        raise ValueError(" ".join(str(error).split())) from error


def read_limited(path: Path, most: int) -> bytes:
    """Read a file of at most so many bytes.

    Raises
    ------
    ValueError
        If it has more.
    OSError
        If it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes. Is it another file?")
    return content


def read_json(path: str | Path) -> Any:
    """Read a file of JSON, as ``parse_json`` does.

    Raises
    ------
    ValueError
        If it is no such file, or has more than 10 MB.
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(_MOST_JSON_BYTES + 1)
    if len(content) > _MOST_JSON_BYTES:
        raise ValueError(f"it has more than {_MOST_JSON_BYTES:,} bytes")
    return parse_json(content)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    r"""Read a file with an object of JSON in each line.

    Raises
    ------
    ValueError
        If a line is anything else; file and line are named.

    Examples
    --------
    >>> file = Path(tempfile.mkdtemp(), "train_log.jsonl")
    >>> write_whole(file, '{"epoch": 1}\n{"epo')
    >>> read_rows(file)
    Traceback (most recent call last):
    ValueError: ...train_log.jsonl, line 2, is no JSON object (Unterminated string...). ...
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        with refusing(
            f"{path}, line {number}, is no JSON object",
            "Bring back the file as it was, or move it away: its lines are then missing.",
        ):
            rows.append({**parse_json(line)})
    return rows


@contextlib.contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Refuse a document in one line, whatever is wrong with it.

    Parameters
    ----------
    what : str
        The file, and what it should be: "plan.json is no plan".
    remedy : str
        What to do, in a sentence.

    Raises
    ------
    ValueError
        In the place of errors that reading a damaged document raises.

    Examples
    --------
    >>> with refusing("plan.json is no plan", "Plan anew."):
    ...     {}["plans"]
    Traceback (most recent call last):
    ValueError: plan.json is no plan ('plans' is missing). Plan anew.
    """
    try:
        yield
    except (
        *(TypeError, AttributeError, LookupError, ValueError, RecursionError),
    ) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{what} ({reason}). {remedy}") from error


def made_of(kind: type[Instance], values: Mapping[str, Any]) -> Instance:
    """Make a dataclass of the values that JSON has of its fields, each of its declared type.

    A list becomes the tuple and a mapping the dataclass that a field declares. Numbers are
    finite, and none is below 0 unless the field's metadata has ``signed``.

    Parameters
    ----------
    kind : type
        The dataclass.
    values : mapping of str to object
        By name.

    Returns
    -------
    object
        Of that type.

    Raises
    ------
    TypeError
        If a field is missing, or a name is none of a field.
    ValueError
        If a value has another type, or the dataclass refuses it.

    Examples
    --------
    >>> from speechbrain_rev.devices import Work
    >>> made_of(Work, {"flops": 3, "moved_bytes": -2, "operations": 1, "host_bytes": 0})
    Traceback (most recent call last):
    ValueError: moved_bytes is -2 and takes int of 0 to 1152921504606846976
    """
    values, hints = {**values}, get_type_hints(kind)
    for field in fields(kind):
        if field.name not in values:
            continue
        given, hint = values[field.name], hints[field.name]
        value = given
        for part in get_args(hint) if get_origin(hint) is UnionType else (hint,):
            if isinstance(value, list) and get_origin(part) is tuple:
                item = get_args(part)[0]
                nested = is_dataclass(item)
                value = tuple(made_of(item, each) if nested else each for each in value)
            elif isinstance(value, dict) and is_dataclass(part):
                value = made_of(cast("type[DataclassInstance]", part), value)
        values[field.name] = value
        least = -_LARGEST if "signed" in field.metadata else 0
        if not fits(value, hint, least):
            has_numbers = re.search(r"\b(int|float)\b", str(field.type))
            bounds = f" of {least} to {_LARGEST}" if has_numbers else ""
            raise ValueError(
                f"{field.name} is {reprlib.repr(given)} and takes {field.type}{bounds}"
            )
    return kind(**values)


def fits(value: Any, hint: Any, least: int = 0) -> bool:
    """Return whether a value of JSON is of a type, and its numbers are within bounds.

    Parameters
    ----------
    value : object
        The value.
    hint : type
        As a dataclass declares it: ``list[str] | None``.
    least : int
        The least that a number may be.

    Examples
    --------
    >>> fits([1.5, 2], list[float]), fits([True], list[float]), fits(float("nan"), float)
    (True, False, False)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is UnionType:
        return any(fits(value, part, least) for part in parts)
    if origin is not None:
        if not isinstance(value, origin):
            return False
        items = value.values() if origin is Mapping else value
        return all(fits(item, parts[origin is Mapping], least) for item in items)
    if hint in (int, float):
        return type(value) in (int, hint) and least <= value <= _LARGEST
    return hint is Any or isinstance(value, hint)
