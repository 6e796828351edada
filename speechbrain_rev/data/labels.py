"""Labels of speakers: their numbers in a file, and where each speed makes another one."""

from __future__ import annotations

from ast import literal_eval
from pathlib import Path

import torch
from speechbrain.dataio.encoder import CategoricalEncoder

from speechbrain_rev.lists import read_lines
from speechbrain_rev.whole_files import check_sum

# Each look at labels on a GPU waits for it.
_LOOKS = (1, 10, 100, 1000)


def check_utterances(labels: torch.Tensor, utterances: int) -> None:
    """Refuse labels of another batch than the one that was augmented last.

    Parameters
    ----------
    labels : torch.Tensor, [batch, 1]
        Speakers.
    utterances : int
        Of the batch that was augmented.

    Raises
    ------
    ValueError
        If there are more labels, or fewer.
    """
    if len(labels) != utterances:
        raise ValueError(
            f"There are {len(labels)} labels, but the batch augmented last had "
            f"{utterances} utterances. Pass the labels of that batch."
        )


def check_speakers(
    labels: torch.Tensor, speakers: int, speeds: int, *, batch: int
) -> None:
    """Refuse a speaker beyond those that classes were counted for.

    At another speed that would be another speaker. On a GPU it is looked for in the 1st,
    10th, 100th and 1000th batch.

    Parameters
    ----------
    labels : torch.Tensor, [batch, 1]
        Speakers.
    speakers, speeds : int
        Whose product is the number of classes.
    batch : int
        Which one it is, from 1 on.

    Raises
    ------
    ValueError
        If a label is negative, or not below the number of speakers.

    Example
    -------
    >>> check_speakers(torch.tensor([[0], [9]]), 10, 3, batch=1)
    """
    if labels.device.type != "cpu" and batch not in _LOOKS:
        return
    lowest, highest = (int(end) for end in labels.aminmax())
    if lowest < 0 or highest >= speakers:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"A label is {wrong}, but out_n_neurons {speakers * speeds} at {speeds} "
            f"speed(s) means speakers 0 to {speakers - 1}. Give --out_n_neurons: the "
            "number of your speakers times that of the speeds."
        )


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
    >>> encoder = CategoricalEncoder()
    >>> encoder.update_from_iterable(["ann", "bob"])
    >>> path = getfixture("tmp_path") / "label_encoder.txt"
    >>> encoder.save(path)
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
