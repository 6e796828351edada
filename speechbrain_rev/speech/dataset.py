"""The training manifest, and random chunks of the utterances in it."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from .reading import read_audio
from .seeding import generator


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
    """

    wavs: torch.Tensor
    lens: torch.Tensor
    speakers: torch.Tensor

    def to(self, device: torch.device | str) -> ChunkBatch:
        """Copy to a device, without waiting where the memory is pinned."""
        return ChunkBatch(
            *(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self))
        )

    def pin_memory(self) -> ChunkBatch:
        """Move to pinned memory, as the loader asks for."""
        return ChunkBatch(*(getattr(self, f.name).pin_memory() for f in fields(self)))

    def __len__(self) -> int:
        return len(self.wavs)


class ChunkDataset(Dataset):
    """Random chunks of utterances, each drawn from (seed, epoch, utterance).

    So the chunk does not depend on the worker that reads it, nor on what was read
    before. An utterance shorter than the chunk is repeated.

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

    def __getitem__(self, place: tuple[int, int]) -> tuple[torch.Tensor, int]:
        """Read one chunk.

        Parameters
        ----------
        place : tuple of int
            Epoch and utterance, as `EpochBatchSampler` yields them.

        Returns
        -------
        chunk : torch.Tensor, [samples]
        speaker : int
        """
        epoch, index = place
        spare = max(0, int(self._lengths[index]) - self.samples)
        draws = generator("chunk", self.seed, epoch, index)
        start = int(torch.randint(spare + 1, (), generator=draws))
        chunk = read_audio(
            self.path_of(index),
            sample_rate=self.sample_rate,
            start=start,
            samples=self.samples,
        )
        return repeat_to(chunk, self.samples), int(self._speakers[index])


def collate_chunks(items: list[tuple[torch.Tensor, int]]) -> ChunkBatch:
    """Make a batch of what `ChunkDataset` returns."""
    wavs = torch.stack([wav for wav, _ in items])
    speakers = torch.tensor([speaker for _, speaker in items]).unsqueeze(1)
    return ChunkBatch(wavs, torch.ones(len(items)), speakers)


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
    return name, collate_chunks([(wav, 0)])
