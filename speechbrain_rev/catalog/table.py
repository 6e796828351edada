"""The encoders as a table: sizes, counted memory, published figures, what fits a GPU.

Standard library only: nothing is computed, so that the table is there at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speechbrain_rev.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture,
)
from speechbrain_rev.catalog.counts import FRAMES, Peak, peak_at, work_at
from speechbrain_rev.devices import ASSUMED, Speed, Work, nearest_gpu
from speechbrain_rev.heads import HEAD, Head
from speechbrain_rev.modes import LOSSLESS
from speechbrain_rev.optimizers import OPTIMIZERS
from speechbrain_rev.sizes import GIB, largest_within, reserve_of

PAPER = (
    "Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker "
    "Verification"
)

#: A 2080 Ti.
CARD_BYTES = 11 * GIB

#: VoxCeleb2 dev and the recipe. An epoch has one segment of each utterance: three
#: speeds make classes, drawn for each segment, and no further utterances.
UTTERANCES, EPOCHS = 1_092_009, 150


def training_days(utterances_per_second: float) -> float:
    """Compute how long training on VoxCeleb2 takes.

    Parameters
    ----------
    utterances_per_second : float
        Above 0.

    Returns
    -------
    float
        Days of ``EPOCHS`` epochs of ``UTTERANCES`` utterances.

    Examples
    --------
    >>> round(training_days(100.0), 1)
    19.0
    """
    return EPOCHS * UTTERANCES / utterances_per_second / 86400


#: Modes whose memory is counted, as it does not depend on the speech: columns.
MODES = tuple(mode.value for mode in LOSSLESS)


def stage_of(block: str) -> str:
    """Name the stage of a block: stem, or stages.0.chain.1, which is in stage 1.

    Examples
    --------
    >>> [stage_of(block) for block in ("stem", "stages.0.chain.1")]
    ['stem', 'stage 1']
    """
    place = block.split(".")
    return f"stage {int(place[1]) + 1}" if place[0] == "stages" else place[0]


def modes_by_stage(modes: Mapping[str, str]) -> list[str]:
    """List what blocks do, a line a stage; neighbours of one mode stand together.

    Parameters
    ----------
    modes : mapping of str to str
        A mode for each block of an encoder, in their order.

    Returns
    -------
    list of str
        Blocks of a stage by their numbers; what leads into it is its transition.

    Examples
    --------
    >>> blocks = ["stem", "stages.0.entry", "stages.0.chain.0", "stages.0.chain.1"]
    >>> modes_by_stage(dict.fromkeys(blocks[:3], "store") | {blocks[3]: "reconstruct"})
    ['stem: store', 'stage 1: transition store, block 0 store, 1 reconstruct']
    """
    stages = itertools.groupby(modes, stage_of)
    return [f"{stage}: {_in_runs(names, modes)}" for stage, names in stages]


def _in_runs(blocks: Iterable[str], modes: Mapping[str, str]) -> str:
    named = ((block.rpartition(".")[2], modes[block]) for block in blocks)
    runs, numbered = [], True
    for (mode, counts), run in itertools.groupby(
        named, lambda pair: (pair[1], pair[0].isdecimal())
    ):
        names = [name for name, _ in run]
        span = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        if counts:
            # The word stands before the first of them.
            word = "block " if len(names) == 1 else "blocks "
            span, numbered = f"{word if numbered else ''}{span}", False
        # A stem has no name beside its stage's.
        span = {"stem": "", "entry": "transition "}.get(span, f"{span} ")
        runs.append(f"{span}{mode}")
    return ", ".join(runs)


# The search for the batch that fits ends here.
_LARGEST_BATCH = 10**6

#: 80 filterbanks, the 160 samples of a shift, and the samples before augmentation, which
#: are a tenth more for the speed of 1.1, in float32.
INPUT_BYTES_PER_FRAME = 4 * (80 + 160 + 176)

_FLOAT = 4

# State bytes of a parameter, by bits and by the optimizer's moments. 8-bit states have a
# float32 for each block of 256. Small tensors have 32 bits, and the DF encoders have many.
_STATE_BYTES = {8: {1: 1.03, 2: 2.25}, 32: {1: 4.0, 2: 8.01}}


@functools.cache
def parameters_of(row: Architecture) -> int:
    """Count the parameters of an encoder whose row does not have them.

    Examples
    --------
    >>> parameters_of(architecture("revnet46"))
    6750040
    """
    if row.parameters is not None:
        return row.parameters
    import torch

    from speechbrain_rev.lobes import build_encoder

    with torch.device("meta"):
        return sum(p.numel() for p in build_encoder(row.name).parameters())


@dataclass(frozen=True)
class Training:
    """The training whose memory is asked for.

    Attributes
    ----------
    card_bytes : int or None
        Memory of the GPU, if one was named.
    batch : int
        Utterances of a step.
    frames : int
        Of each utterance.
    optimizer_bits : {8, 32}
        Of the optimizer's states.
    head : Head
        Classifier and loss.

    Raises
    ------
    ValueError
        If batch or frames are out of range, or states do not have such bits.

    Examples
    --------
    >>> training = Training(card_bytes=11 * 2**30, batch=128, frames=200)
    >>> revnet46, resnet152 = architecture("revnet46"), architecture("resnet152")
    >>> training.largest_batch(revnet46, "reconstruct") > 128
    True
    >>> training.largest_batch(resnet152, "store") > 128
    False
    """

    card_bytes: int | None
    batch: int
    frames: int
    optimizer_bits: int = 8
    head: Head = HEAD

    def at(self, batch: int) -> Training:
        """Give the same training with another batch."""
        return dataclasses.replace(self, batch=batch)

    @property
    def reserve_bytes(self) -> int:
        """What is kept free on the GPU for CUDA's own and fragmentation."""
        assert self.card_bytes is not None
        return reserve_of(self.card_bytes)

    @property
    def available_bytes(self) -> int:
        """What the GPU has beside that, below zero on the smallest."""
        assert self.card_bytes is not None
        return self.card_bytes - self.reserve_bytes

    def fixed_bytes(self, row: Architecture, batch: int) -> dict[str, int]:
        """Bytes that a training step needs beside the encoder's own, by what needs them.

        Parameters
        ----------
        row : Architecture
            The encoder.
        batch : int
            Utterances of a step.

        Returns
        -------
        dict of str to int
            Of encoder and classifier, whatever the modes of blocks.
        """
        parameters = parameters_of(row) + self.head.parameters
        moments = OPTIMIZERS[row.optimizer_name].moments
        state_bytes = _STATE_BYTES[self.optimizer_bits][moments]
        return {
            "weights": _FLOAT * parameters,
            "gradients": _FLOAT * parameters,
            "optimizer_states": math.ceil(state_bytes * parameters),
            "classifier_step": self.head.step_bytes(batch),
            "input": batch * self.frames * INPUT_BYTES_PER_FRAME,
        }

    def step_budget_bytes(self, row: Architecture) -> int:
        """Bytes that all else leaves for the encoder's own step at the batch asked about.

        Parameters
        ----------
        row : Architecture
            The encoder.

        Returns
        -------
        int
            Below zero where all else does not fit by itself.
        """
        return self.available_bytes - sum(self.fixed_bytes(row, self.batch).values())

    def optimizer_moved_bytes(self, row: Architecture) -> int:
        """Bytes that a step of the optimizer reads and writes, whatever the batch.

        Parameters
        ----------
        row : Architecture
            The encoder; its family has the optimizer.

        Returns
        -------
        int
            Weights and gradients are read, weights written, states both.
        """
        sizes = self.fixed_bytes(row, 1)
        return 3 * sizes["weights"] + 2 * sizes["optimizer_states"]

    def needed_bytes(
        self, row: Architecture, mode: str, batch: int
    ) -> dict[str, int] | None:
        """Bytes that a training step needs, by what needs them; their sum is the need.

        Parameters
        ----------
        row : Architecture
            The encoder.
        mode : str
            What its blocks keep.
        batch : int
            Utterances of a step.

        Returns
        -------
        dict of str to int, or None
            The parts do not all peak at once, so that the sum is an upper bound. None if
            the encoder has no such mode, or was not counted.
        """
        step = peak_at(row.name, mode, self.frames)
        if step is None:
            return None
        return {"encoder_step": step(batch), **self.fixed_bytes(row, batch)}

    def largest_batch(self, row: Architecture, mode: str) -> int | None:
        """Find the largest batch whose need leaves the reserve free.

        Parameters
        ----------
        row : Architecture
            The encoder.
        mode : str
            What its blocks keep.

        Returns
        -------
        int or None
            Utterances, 0 if not even one fits. None as of :meth:`needed_bytes`.
        """
        step = peak_at(row.name, mode, self.frames)
        if step is None:
            return None
        return largest_within(
            lambda batch: step(batch) + sum(self.fixed_bytes(row, batch).values()),
            self.available_bytes,
            _LARGEST_BATCH,
        )

    def fits(self, row: Architecture) -> bool:
        """Whether the batch asked about is known to fit, in any mode of all blocks."""
        batches = [self.largest_batch(row, mode) for mode in MODES]
        return max(batch or 0 for batch in batches) >= self.batch


def speed_for(training: Training, speed: Speed | None = None) -> Speed:
    """Give the speed that was asked for, or that of the GPU nearest to a training run's."""
    if speed is not None:
        return speed
    size = training.card_bytes
    return ASSUMED if size is None else nearest_gpu(size).speed


def shorter_frames(training: Training, row: Architecture) -> int | None:
    """Find the longest of the shorter lengths that are counted at which a batch fits.

    Parameters
    ----------
    training : Training
        What does not fit.
    row : Architecture
        The encoder.

    Returns
    -------
    int or None
        Frames; None if there is no such length.

    Examples
    --------
    >>> training = Training(11 * 2**30, batch=40, frames=600)
    >>> shorter_frames(training, architecture("resnet152"))
    200
    """
    for frames in sorted(FRAMES, reverse=True):
        shorter = dataclasses.replace(training, frames=frames)
        if frames < training.frames and shorter.fits(row):
            return frames
    return None


def other_encoder(training: Training, row: Architecture) -> str | None:
    """Find the most accurate encoder of those that fit, if possible a counterpart.

    Parameters
    ----------
    training : Training
        What does not fit.
    row : Architecture
        The encoder.

    Returns
    -------
    str or None
        Its name; None if no encoder fits.

    Examples
    --------
    >>> training = Training(11 * 2**30, batch=40, frames=600)
    >>> other_encoder(training, architecture("resnet152"))
    'revnet230'
    """

    def order(other: Architecture) -> tuple[bool, float]:
        rate = other.vox1_h_eer
        return other.counterpart != row.name, math.inf if rate is None else rate

    fitting = [other for other in ARCHITECTURES.values() if training.fits(other)]
    return min(fitting, key=order).name if fitting else None


@dataclass(frozen=True)
class UniformStep:
    """A training step of an encoder all of whose blocks have one mode.

    Attributes
    ----------
    bytes_per_utterance : int
        What one more utterance adds.
    step_peak_bytes : int
        Peak of the encoder's own step.
    needed_bytes : mapping of str to int
        All that training needs, by what needs it, see :meth:`Training.needed_bytes`.
    largest_batch : int or None
        That fits the GPU; None without a GPU.
    days : float or None
        Of training by :func:`training_days`, encoder and optimizer alone, estimated; None
        if the batch does not fit, or without a GPU.
    """

    bytes_per_utterance: int
    step_peak_bytes: int
    needed_bytes: Mapping[str, int]
    largest_batch: int | None
    days: float | None


@dataclass(frozen=True)
class ListedEncoder:
    """One encoder and what training it takes, as :func:`select` lists it.

    Attributes
    ----------
    row : Architecture
        The encoder, with what was published about it.
    parameters : int
        Of the encoder.
    training : Training
        Batch, length and GPU that are asked about.
    speed : Speed
        Of the GPU, for estimates of time.
    modes : mapping of str to UniformStep
        By mode; none of an encoder that was not counted.
    fastest_mode : str or None
        The mode of the fewest days of those that fit; None if none does.
    days : float or None
        Of training in that mode.
    """

    row: Architecture
    parameters: int
    training: Training
    speed: Speed
    modes: Mapping[str, UniformStep]
    fastest_mode: str | None
    days: float | None

    @classmethod
    def of(
        cls, row: Architecture, training: Training, speed: Speed | None = None
    ) -> ListedEncoder:
        """List an encoder; without a speed times are those of the GPU nearest in memory."""
        speed = speed_for(training, speed)
        peaks = {mode: peak_at(row.name, mode, training.frames) for mode in MODES}
        steps = {
            mode: _uniform_step(row, training, speed, mode, peak)
            for mode, peak in peaks.items()
            if peak is not None
        }
        days = {m: step.days for m, step in steps.items() if step.days is not None}
        fastest = min(days, key=days.__getitem__, default=None)
        least = None if fastest is None else days[fastest]
        count = parameters_of(row)
        return cls(row, count, training, speed, steps, fastest, least)

    def figure(self, name: str, mode: str | None = None) -> Any:
        """Take a figure of the step in a mode, by default the encoder's; None without one."""
        step = self.modes.get(mode or self.row.default_mode)
        return None if step is None else getattr(step, name)

    def step_peak_bytes(self, mode: str) -> int | None:
        """Peak of the encoder's own step in a mode; None if that was not counted."""
        return self.modes[mode].step_peak_bytes if mode in self.modes else None


def _uniform_step(
    row: Architecture, training: Training, speed: Speed, mode: str, peak: Peak
) -> UniformStep:
    batch, largest, days = training.batch, None, None
    needed = training.needed_bytes(row, mode, batch)
    assert needed is not None
    if training.card_bytes is not None:
        largest = training.largest_batch(row, mode)
        if sum(needed.values()) <= training.available_bytes:
            moved = Work(0, training.optimizer_moved_bytes(row), 0)
            work = work_at(row.name, mode, training.frames)(batch) + moved
            days = training_days(batch / speed.seconds(work))
    return UniformStep(peak.bytes_per_utterance, peak(batch), needed, largest, days)


def _memory(mode: str | None, model: ListedEncoder) -> Any:
    return model.figure("bytes_per_utterance", mode)


#: By what the table can be sorted.
SORT_KEYS: dict[str, Callable[[ListedEncoder], float | None]] = {
    "layers": lambda model: model.row.layers,
    "parameters": lambda model: model.parameters,
    "vox1-o": lambda model: model.row.vox1_o_eer,
    "vox1-e": lambda model: model.row.vox1_e_eer,
    "vox1-h": lambda model: model.row.vox1_h_eer,
    **{mode: functools.partial(_memory, mode) for mode in MODES},
    "memory": functools.partial(_memory, None),
    "batch": lambda model: model.figure("largest_batch"),
    "days": lambda model: model.days,
}


def select(
    training: Training,
    *,
    names: Sequence[str] = (),
    families: Sequence[str] = (),
    types: Sequence[str] = (),
    fitting: bool = False,
    sort: str | None = None,
    reverse: bool = False,
    speed: Speed | None = None,
) -> list[ListedEncoder]:
    """Choose encoders and put them in order.

    Parameters
    ----------
    training : Training
        Batch, length and GPU that are asked about.
    names, families, types : sequence of str
        Which encoders; none named means all.
    fitting : bool
        Only those whose batch fits the GPU in a mode of all blocks.
    sort : str or None
        One of ``SORT_KEYS``; None for the order of the published tables.
    reverse : bool
        Largest first, or the order of the tables from its end. Encoders without a
        figure come last either way.
    speed : Speed or None
        Of the GPU, for estimates of time; None for that of the listed GPU whose memory is
        nearest.

    Returns
    -------
    list of ListedEncoder
        The encoders.

    Raises
    ------
    ValueError
        If there is no such name, if a GPU is needed and none was named, or if no encoder
        is left.

    Examples
    --------
    >>> training = Training(card_bytes=11 * 2**30, batch=256, frames=200)
    >>> best = select(training, families=["resnet", "revnet"], fitting=True, sort="vox1-h")
    >>> best[0].row.name
    'revnet245'
    """
    if training.card_bytes is None and (fitting or sort in ("batch", "days")):
        option = "--fits" if fitting else f"--sort={sort}"
        raise ValueError(f"{option} needs a GPU: add, for instance, --card=11GB.")
    rows = [architecture(n) for n in names] if names else ARCHITECTURES.values()
    models = [
        ListedEncoder.of(row, training, speed)
        for row in dict.fromkeys(rows)
        if (not families or row.family in families)
        and (not types or row.type in types)
        and (not fitting or training.fits(row))
    ]
    if not models:
        raise ValueError(
            "No encoder is left. Leave out a name, --family, --type or --fits, or lower "
            f"--batch ({training.batch})."
        )
    if sort is None:
        return models[::-1] if reverse else models
    figures = [SORT_KEYS[sort](model) for model in models]
    sign = -1 if reverse else 1
    order = sorted(
        (figure is None, sign * (figure or 0), position)
        for position, figure in enumerate(figures)
    )
    return [models[position] for *_, position in order]
