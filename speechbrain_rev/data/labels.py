"""Numbers of speakers in a file, as SpeechBrain's encoder of labels writes them."""

from __future__ import annotations

import tempfile
from ast import literal_eval
from collections.abc import Iterable
from pathlib import Path

from speechbrain.dataio.encoder import CategoricalEncoder

from speechbrain_rev.files import check_sum, write_whole
from speechbrain_rev.lists import read_lines


def read_labels(path: str | Path) -> dict[str, int]:
    """Read the number of each speaker, as SpeechBrain's encoder of labels writes them.

    Parameters
    ----------
    path : str or Path
        ``label_encoder.txt``.

    Returns
    -------
    dict of str to int
        From 0 on, in order.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is damaged or was edited, by its lines or its checksum; it names the file.

    Example
    -------
    >>> path = getfixture("tmp_path") / "label_encoder.txt"
    >>> write_labels(path, ["ann", "bob"])
    >>> read_labels(path)
    {'ann': 0, 'bob': 1}
    """
    check_sum(path)
    numbers: dict[str, int] = {}
    for line, text in enumerate(read_lines(path, "'speaker' => number"), start=1):
        if f"{text}\n" == CategoricalEncoder.EXTRAS_SEPARATOR:
            break
        label, _, number = text.rpartition(CategoricalEncoder.VALUE_SEPARATOR)
        try:
            speaker, placed = literal_eval(label), int(number)
            good = isinstance(speaker, str) and placed == len(numbers)
        except (ValueError, SyntaxError):
            good = False
        if not good or speaker in numbers:
            raise ValueError(
                f"{path}, line {line}: {text[:60]!r} does not number the next speaker, "
                f"{len(numbers)}. Copy the file from the run again, or prepare anew."
            )
        numbers[speaker] = placed
    return numbers


def write_labels(path: str | Path, speakers: Iterable[str]) -> None:
    """Write the number of each speaker, in the order given, as SpeechBrain does.

    Parameters
    ----------
    path : str or Path
        The file, which is written whole or not at all.
    speakers : iterable of str
        Their names.

    Raises
    ------
    OSError
        If it cannot be written.

    Example
    -------
    >>> path = getfixture("tmp_path") / "label_encoder.txt"
    >>> write_labels(path, ["ann", "bob"])
    >>> read_labels(path)
    {'ann': 0, 'bob': 1}
    """
    encoder = CategoricalEncoder()
    encoder.update_from_iterable(speakers)
    # SpeechBrain writes into the file itself: half of it where a disk is full.
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "labels.txt")
        encoder.save(part)
        write_whole(path, part.read_bytes())
