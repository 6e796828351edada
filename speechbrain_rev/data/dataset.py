"""Random chunks of the utterances of a manifest, whole utterances, and their loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from speechbrain_rev.audio import read_audio
from speechbrain_rev.audio.packed import find_packed
from speechbrain_rev.devices import usable_cpus
from speechbrain_rev.processes import process_count, process_rank
from speechbrain_rev.scoring import Trials

from .labels import read_labels
from .manifest import Manifest, Utterance, read_manifest
from .preparation import LABELS, TRAIN, read_valid_files
from .sampling import EpochBatchSampler
from .seeding import draw_below

# Files that are drawn in the place of one that cannot be read, and itself.
_TRIES = 10
# Validation must stay short next to an epoch, and memory grows with the length.
VALID_SECONDS = 10


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
        return self._of_each(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> ChunkBatch:
        """Move to pinned memory, as the loader asks for."""
        return self._of_each(torch.Tensor.pin_memory)

    def _of_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkBatch:
        wavs, lens, speakers = map(change, (self.wavs, self.lens, self.speakers))
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


class ChunkDataset(Dataset[Chunk]):
    """Random chunks of utterances, each drawn from (seed, epoch, utterance).

    So the chunk does not depend on the worker that reads it, nor on what was read
    before. An utterance shorter than the chunk is repeated, or padded with zeros. In the place of a file that
    cannot be read is another one, drawn from the same three.

    Parameters
    ----------
    utterances : Manifest or sequence of Utterance
        The training set.
    speaker_numbers : mapping
        Number of each speaker.
    samples : int
        Length of a chunk.
    sample_rate : int
        Rate that files are read at, Hz.
    resample, channel : bool, and int, "mix" or None
        As of ``read_audio``.
    seed : int
        Seed of the draws.
    short : {"repeat", "pad", "drop"}
        What is done about utterances shorter than a chunk. Those to be left out are in no
        manifest: one that is met is repeated.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        speaker_numbers: Mapping[str, int],
        *,
        samples: int,
        sample_rate: int = 16000,
        resample: bool = False,
        channel: int | str | None = None,
        seed: int = 0,
        short: str = "repeat",
    ) -> None:
        self.manifest = Manifest.of(utterances)
        # A packed folder that is open here costs forked processes no memory.
        find_packed(self.path_of(0))
        self._numbers = np.array(
            [speaker_numbers[name] for name in self.manifest.speaker_names]
        )
        self.samples = samples
        self._read_audio = partial(
            read_audio, sample_rate=sample_rate, resample=resample, channel=channel
        )
        self.seed = seed
        self.short = short

    def __len__(self) -> int:
        return len(self.manifest)

    def path_of(self, index: int) -> str:
        """Give the file of an utterance."""
        return self.manifest[index].wav

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
        return self._chunk(place, torch.empty(self.samples, dtype=torch.float32))

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> ChunkBatch:
        """Read the chunks of a batch into one tensor, as a loader asks for them.

        Parameters
        ----------
        places : sequence of tuple of int
            Epochs and utterances.

        Returns
        -------
        ChunkBatch

        Raises
        ------
        ValueError
            As for one of them.
        """
        wavs = torch.empty(len(places), self.samples, dtype=torch.float32)
        return collate_chunks(
            [self._chunk(p, row) for p, row in zip(places, wavs, strict=True)], wavs
        )

    def _chunk(self, place: tuple[int, int], out: torch.Tensor) -> Chunk:
        """Read a chunk into [samples] that are given."""
        epoch, first = place
        index = first
        unread: list[tuple[str, str]] = []
        while len(unread) < _TRIES:
            why_not = self._read(epoch, index, out)
            if why_not is None:
                number = self._numbers[self.manifest.speakers[index]]
                return Chunk(out, int(number), tuple(unread))
            unread.append((self.path_of(index), why_not))
            place_of_draw = "instead", self.seed, epoch, first, len(unread)
            index = draw_below(len(self), *place_of_draw)
        raise ValueError(
            f"None of {_TRIES} files could be read, the last because: {unread[-1][1]}. Is "
            "the data folder still there?"
        )

    def _read(self, epoch: int, index: int, out: torch.Tensor) -> str | None:
        """Read a chunk, or say why that cannot be done."""
        utterance = self.manifest[index]
        path, length = utterance.wav, utterance.samples
        spare = max(0, length - self.samples)
        start = draw_below(spare + 1, "chunk", self.seed, epoch, index)
        try:
            wav = self._read_audio(path, start=start, samples=self.samples, out=out)
        except (ValueError, OSError) as error:
            return str(error)
        if len(wav) < min(self.samples, length - start):
            return f"{path} is shorter than it was when it was listed"
        if not len(wav):
            return f"{path} holds no samples"
        if len(wav) < self.samples:
            spoken = len(wav)
            out.copy_(repeat_to(wav, self.samples))
            if self.short == "pad":
                out[spoken:] = 0
        return None


def collate_chunks(
    items: Sequence[Chunk] | ChunkBatch, wavs: torch.Tensor | None = None
) -> ChunkBatch:
    """Make a batch of chunks; one that `ChunkDataset` read as a whole is one already.

    Parameters
    ----------
    items : sequence of Chunk, or ChunkBatch
    wavs : torch.Tensor, [batch, samples], optional
        The samples of all, where they are in one tensor.

    Returns
    -------
    ChunkBatch
    """
    if isinstance(items, ChunkBatch):
        return items
    if wavs is None:
        wavs = torch.stack([item.wav for item in items])
    speakers = torch.tensor(
        [item.speaker for item in items], dtype=torch.int64
    ).unsqueeze(1)
    unread = [file for item in items for file in item.unread]
    return ChunkBatch(
        wavs, torch.ones(len(items), dtype=torch.float32), speakers, unread
    )


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
    if len(wav) < samples:
        wav = wav.repeat(-(-samples // len(wav)))
    return wav[:samples]


class WholeUtterances(Dataset[tuple[str, torch.Tensor | str]]):
    """Utterances from their beginning, each with its name.

    Parameters
    ----------
    files : mapping of str to path
        By the names that trial lists give them.
    sample_rate : int
        Rate that files are read at, Hz.
    resample, channel : bool, and int, "mix" or None
        As of ``read_audio``.
    max_samples : int
        Longer utterances are cut there.
    """

    def __init__(
        self,
        files: Mapping[str, str | Path],
        *,
        sample_rate: int = 16000,
        resample: bool = False,
        channel: int | str | None = None,
        max_samples: int,
    ) -> None:
        self.files = files
        self.names = list(files)
        self._read_audio = partial(
            read_audio,
            sample_rate=sample_rate,
            resample=resample,
            channel=channel,
            samples=max_samples,
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor | str]:
        """Read one utterance, or say why that cannot be done.

        Parameters
        ----------
        index : int
            Its place in `names`.

        Returns
        -------
        name : str
        wav : torch.Tensor, [samples], or str
        """
        name = self.names[index]
        try:
            wav = self._read_audio(self.files[name])
        except (ValueError, OSError) as error:
            return name, str(error)
        return name, wav if len(wav) else f"{self.files[name]} holds no samples"


def collate_whole(
    items: list[tuple[str, torch.Tensor | str]],
) -> tuple[str, ChunkBatch | str]:
    """Make a batch of the one utterance that `WholeUtterances` returns."""
    ((name, wav),) = items
    return name, wav if isinstance(wav, str) else collate_chunks([Chunk(wav, 0)])


def train_loader(hparams: Mapping[str, Any]) -> DataLoader[Any]:
    """Build the loader of training chunks: of each step this process's share.

    Parameters
    ----------
    hparams : mapping
        Of the run, whose lists are prepared; ``sentence_len`` is in seconds.

    Returns
    -------
    DataLoader
        Of ``ChunkBatch``.

    Raises
    ------
    ValueError
        If the processes cannot share a step, or there is not one batch.
    """
    utterances = read_manifest(Path(hparams["save_folder"], TRAIN))
    dataset = ChunkDataset(
        utterances,
        read_labels(Path(hparams["save_folder"], LABELS)),
        samples=round(hparams["sentence_len"] * hparams["sample_rate"]),
        sample_rate=hparams["sample_rate"],
        resample=hparams["resample"],
        channel=hparams["channel"],
        seed=hparams["seed"],
        short=hparams["short"],
    )
    sampler = EpochBatchSampler(
        len(utterances),
        hparams["batch_size"],
        steps=hparams["steps_per_epoch"],
        seed=hparams["seed"],
        rank=process_rank(),
        world_size=process_count(),
    )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_chunks,
        num_workers=hparams["num_workers"],
        persistent_workers=hparams["num_workers"] > 0,
        pin_memory=torch.cuda.is_available(),
        # An iterator draws its workers' seed: not from the state that is checkpointed.
        generator=torch.Generator(),
    )


def valid_loader(hparams: Mapping[str, Any], trials: Trials) -> DataLoader[Any]:
    """Build the loader of whole utterances, one by one since lengths differ.

    Parameters
    ----------
    hparams : mapping
        Of the run.
    trials : Trials
        Those of the validation.

    Returns
    -------
    DataLoader
        Of each utterance's name and a ``ChunkBatch``, or the reason why it cannot be read.
    """
    files = read_valid_files(hparams["save_folder"])
    dataset = WholeUtterances(
        {name: files[name] for name in trials.utterances},
        sample_rate=hparams["sample_rate"],
        resample=hparams["resample"],
        channel=hparams["channel"],
        max_samples=VALID_SECONDS * hparams["sample_rate"],
    )
    return DataLoader(
        dataset,
        batch_size=1,
        collate_fn=collate_whole,
        num_workers=hparams["num_workers"],
        generator=torch.Generator(),
    )


def too_many_workers(num_workers: int) -> str | None:
    """Name in a sentence that more processes read speech than CPUs are there.

    Parameters
    ----------
    num_workers : int
        Of a loader.

    Returns
    -------
    str or None
        None where they are not more.

    Examples
    --------
    >>> too_many_workers(9999)
    'num_workers is 9999, more than the ... CPUs of this process: lower it if ...
    >>> too_many_workers(0)
    """
    there = usable_cpus()
    if num_workers <= there:
        return None
    return (
        f"num_workers is {num_workers}, more than the {there} CPUs of this process: lower "
        "it if steps wait for them."
    )
