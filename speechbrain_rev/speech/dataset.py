"""The training manifest, and random chunks of the utterances in it."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from .reading import read_audio
from .seeding import generator

# Files that are drawn in the place of one that cannot be read, and itself.
_TRIES = 10


# A million of them are in memory while a manifest is read: no dictionary each.
@dataclass(frozen=True, slots=True)
class Utterance:
    """A row of a manifest.

    Attributes
    ----------
    ID : str
        Unique name.
    wav : str
        Path of the audio file.
    samples : int
        Length in samples.
    spk_id : str
        The speaker's name.
    """

    ID: str
    wav: str
    samples: int
    spk_id: str


def write_manifest(path: str | Path, utterances: Iterable[Utterance]) -> None:
    """Write a manifest as CSV, whole or not at all.

    Parameters
    ----------
    path : str or Path
        The file to write.
    utterances : iterable of Utterance
    """
    part = Path(f"{path}.part")
    with part.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(field.name for field in fields(Utterance))
        rows.writerows(astuple(utterance) for utterance in utterances)
    os.replace(part, path)


def read_manifest(path: str | Path) -> list[Utterance]:
    """Read a manifest.

    Parameters
    ----------
    path : str or Path
        A CSV file with the columns ID, wav, samples, spk_id.

    Returns
    -------
    list of Utterance

    Raises
    ------
    ValueError
        If it is missing, empty or has other columns.

    Example
    -------
    >>> path = getfixture("tmp_path") / "train.csv"
    >>> write_manifest(path, [Utterance("id1/a/1", "wav/id1/a/1.wav", 16000, "id1")])
    >>> read_manifest(path)[0].samples
    16000
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no manifest {path}. Prepare the data first.")
    wanted = [field.name for field in fields(Utterance)]
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        if rows.fieldnames is None or not set(wanted) <= set(rows.fieldnames):
            raise ValueError(
                f"{path} has the columns {rows.fieldnames}; it needs {wanted}."
            )
        utterances = [
            Utterance(row["ID"], row["wav"], int(row["samples"]), row["spk_id"])
            for row in rows
        ]
    if not utterances:
        raise ValueError(f"{path} lists no utterance.")
    return utterances


@dataclass
class ChunkBatch:
    """A batch of chunks.

    Attributes
    ----------
    wavs : torch.Tensor, [batch, samples]
    lens : torch.Tensor, [batch]
        Relative lengths, all 1.
    speakers : torch.Tensor, [batch, 1]
        Speaker numbers; 0 where a speaker has none.
    unread : sequence of tuple of str and str
        Files that could not be read, in whose place others are, and why.
    """

    wavs: torch.Tensor
    lens: torch.Tensor
    speakers: torch.Tensor
    unread: Sequence[tuple[str, str]] = ()

    def to(self, device: torch.device | str) -> ChunkBatch:
        """Copy to a device, without waiting where the memory is pinned."""
        wavs, lens, speakers = (
            x.to(device, non_blocking=True)
            for x in (self.wavs, self.lens, self.speakers)
        )
        return ChunkBatch(wavs, lens, speakers, self.unread)

    def pin_memory(self) -> ChunkBatch:
        """Move to pinned memory, as the loader asks for."""
        wavs, lens, speakers = (
            x.pin_memory() for x in (self.wavs, self.lens, self.speakers)
        )
        return ChunkBatch(wavs, lens, speakers, self.unread)

    def __len__(self) -> int:
        return len(self.wavs)


class Chunk(NamedTuple):
    """What `ChunkDataset` returns.

    Attributes
    ----------
    wav : torch.Tensor, [samples]
    speaker : int
        The number of who speaks.
    unread : tuple of tuple of str and str
        Files that could not be read, in whose place this one is, and why.
    """

    wav: torch.Tensor
    speaker: int
    unread: tuple[tuple[str, str], ...] = ()


class ChunkDataset(Dataset):
    """Random chunks of utterances, each drawn from (seed, epoch, utterance).

    So the chunk does not depend on the worker that reads it, nor on what was read
    before. An utterance shorter than the chunk is repeated. In the place of a file that
    cannot be read is another one, drawn from the same three.

    Parameters
    ----------
    utterances : sequence of Utterance
        The training set.
    speaker_numbers : mapping
        Number of each speaker.
    samples : int
        Length of a chunk.
    sample_rate : int
        Rate that the files must have, Hz.
    seed : int
        Seed of the draws.
    """

    def __init__(
        self,
        utterances: list[Utterance],
        speaker_numbers: dict[str, int],
        *,
        samples: int,
        sample_rate: int = 16000,
        seed: int = 0,
    ) -> None:
        # Arrays, not objects: touching an object's reference count in a worker copies
        # its memory page, for a million utterances in every worker.
        self._paths = np.array([os.fsencode(u.wav) for u in utterances])
        self._lengths = np.array([u.samples for u in utterances], dtype=np.int64)
        self._speakers = np.array([speaker_numbers[u.spk_id] for u in utterances])
        self.samples = samples
        self.sample_rate = sample_rate
        self.seed = seed

    def __len__(self) -> int:
        return len(self._paths)

    def path_of(self, index: int) -> str:
        """Give the file of an utterance."""
        return os.fsdecode(self._paths[index])

    def __getitem__(self, place: tuple[int, int]) -> Chunk:
        """Read one chunk.

        Parameters
        ----------
        place : tuple of int
            Epoch and utterance, as `EpochBatchSampler` yields them.

        Returns
        -------
        Chunk

        Raises
        ------
        ValueError
            If it cannot be read, nor can those that were drawn in its place.
        """
        epoch, first = place
        index = first
        unread: list[tuple[str, str]] = []
        while len(unread) < _TRIES:
            wav = self._read(epoch, index)
            if isinstance(wav, torch.Tensor):
                return Chunk(wav, int(self._speakers[index]), tuple(unread))
            unread.append((self.path_of(index), wav))
            draws = generator("instead", self.seed, epoch, first, len(unread))
            index = int(torch.randint(len(self), (), generator=draws))
        raise ValueError(
            f"None of {_TRIES} files could be read, the last because: {unread[-1][1]}. Is "
            "the data folder still there?"
        )

    def _read(self, epoch: int, index: int) -> torch.Tensor | str:
        """Read a chunk, or say why that cannot be done."""
        spare = max(0, int(self._lengths[index]) - self.samples)
        draws = generator("chunk", self.seed, epoch, index)
        start = int(torch.randint(spare + 1, (), generator=draws))
        try:
            wav = read_audio(
                self.path_of(index),
                sample_rate=self.sample_rate,
                start=start,
                samples=self.samples,
            )
        except (ValueError, OSError) as error:
            return str(error)
        if len(wav) < min(self.samples, int(self._lengths[index]) - start):
            return f"{self.path_of(index)} is shorter than it was when it was listed"
        return repeat_to(wav, self.samples)


def collate_chunks(items: Sequence[Chunk]) -> ChunkBatch:
    """Make a batch of what `ChunkDataset` returns."""
    wavs = torch.stack([item.wav for item in items])
    speakers = torch.tensor([item.speaker for item in items]).unsqueeze(1)
    unread = [file for item in items for file in item.unread]
    return ChunkBatch(wavs, torch.ones(len(items)), speakers, unread)


def repeat_to(wav: torch.Tensor, samples: int) -> torch.Tensor:
    """Repeat a waveform until it has so many samples.

    Parameters
    ----------
    wav : torch.Tensor, [at least one sample]
    samples : int
        Wanted length; a longer waveform is cut.

    Returns
    -------
    torch.Tensor, [samples]

    Example
    -------
    >>> repeat_to(torch.tensor([1, 2, 3]), 5).tolist()
    [1, 2, 3, 1, 2]
    """
    if not len(wav):
        raise ValueError("An utterance without samples cannot be used: leave it out.")
    return wav.repeat(-(-samples // len(wav)))[:samples]


class WholeUtterances(Dataset):
    """Utterances from their beginning, each with its name.

    Parameters
    ----------
    root : str or Path
        Folder that the names are relative to.
    names : sequence of str
        Paths below it, as trial lists give them.
    sample_rate : int
        Rate that the files must have, Hz.
    max_samples : int
        Longer utterances are cut there.
    """

    def __init__(
        self,
        root: str | Path,
        names: Sequence[str],
        *,
        sample_rate: int = 16000,
        max_samples: int,
    ) -> None:
        self.root = Path(root)
        self.names = names
        self.sample_rate = sample_rate
        self.max_samples = max_samples

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]:
        """Read one utterance.

        Parameters
        ----------
        index : int
            Its place in `names`.

        Returns
        -------
        name : str
        wav : torch.Tensor, [samples]
        """
        name = self.names[index]
        return name, read_audio(
            self.root / name, sample_rate=self.sample_rate, samples=self.max_samples
        )


def collate_whole(items: list[tuple[str, torch.Tensor]]) -> tuple[str, ChunkBatch]:
    """Make a batch of the one utterance that `WholeUtterances` returns."""
    ((name, wav),) = items
    return name, collate_chunks([Chunk(wav, 0)])
