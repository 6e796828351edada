"""The encoders as a table: sizes, counted memory, published figures, what fits a GPU.

Standard library only: nothing is computed, so that the table is there at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from speechbrain_rev.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture,
)
from speechbrain_rev.catalog.counts import FRAMES, peak_at, work_at
from speechbrain_rev.devices import ASSUMED, Speed, Work, nearest_gpu
from speechbrain_rev.heads import HEAD, Head
from speechbrain_rev.modes import LOSSLESS, WITHOUT_INVERSE, Mode
from speechbrain_rev.optimizers import OPTIMIZERS
from speechbrain_rev.sizes import GIB, largest_within, reserve_of

PAPER = (
    "Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker "
    "Verification"
)

#: A 2080 Ti.
CARD_BYTES = 11 * GIB
PUBLISHED_FRAMES = 200

#: Of VoxCeleb2 dev, and of the recipe. An epoch has one segment of each utterance: three
#: speeds make classes, drawn for each segment, and no further utterances.
UTTERANCES, EPOCHS = 1_092_009, 150

#: The paper's example of a batch that several GPUs share.
TOTAL_BATCH = 256


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


def as_published(training: Training) -> bool:
    """Whether largest batches of Tables V and VI are for such utterances and GPU.

    Parameters
    ----------
    training : Training
        The GPU and the length that are asked about.

    Returns
    -------
    bool
        If not, published batches and numbers of GPUs compare with nothing.

    Examples
    --------
    >>> [as_published(Training(CARD_BYTES, 128, frames)) for frames in (200, 600)]
    [True, False]
    """
    return (training.card_bytes, training.frames) == (CARD_BYTES, PUBLISHED_FRAMES)


class PublishedCards(NamedTuple):
    """A row of Table VII as printed.

    Attributes
    ----------
    cards : int
        11 GB GPUs for a batch of ``TOTAL_BATCH``.
    days : int
        Of training.
    vox1_h_eer : float
        In percent.
    """

    cards: int
    days: int
    vox1_h_eer: float


TABLE_SEVEN = {
    "resnet101": PublishedCards(9, 2, 1.48),
    "revnet137": PublishedCards(1, 3, 1.49),
    "resnet152": PublishedCards(12, 3, 1.39),
    "revnet197": PublishedCards(1, 5, 1.42),
    "df_resnet179": PublishedCards(19, 3, 1.51),
    "df_revnet281": PublishedCards(2, 5, 1.53),
    "df_resnet233": PublishedCards(22, 4, 1.44),
    "df_revnet377": PublishedCards(2, 6, 1.46),
}


#: Modes whose memory is counted, as it does not depend on the speech: columns.
MODES = tuple(mode.value for mode in LOSSLESS)

#: Modes that plans give blocks of encoders.
PLANNED = tuple(mode.value for mode in Mode if mode.spec.lossless)


def mode_counts(modes: Iterable[str]) -> dict[str, int]:
    """Count the blocks of each mode; those that join only where there are any.

    Examples
    --------
    >>> mode_counts(["recompute", "store", "store"])
    {'store': 2, 'selective': 0, 'reconstruct': 0, 'recompute': 1}
    """
    counts = Counter(modes)
    return {mode: counts[mode] for mode in PLANNED if mode in MODES or counts[mode]}


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


LARGEST_FRAMES = 100_000  # of an utterance: a thousand seconds

LARGEST_BATCH = 10**6

#: The encoder whose time, all stored, that of the others is compared with.
BASELINE = "resnet34"

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
    >>> parameters_of(architecture("revnet57"))
    6102190
    """
    if row.parameters is not None:
        return row.parameters
    import torch

    from speechbrain_rev.lobes import build_encoder

    with torch.device("meta"):
        return sum(p.numel() for p in build_encoder(row.name).parameters())


def check_batch(batch: int) -> None:
    """Refuse a batch that no training has.

    Parameters
    ----------
    batch : int
        Utterances of a step.

    Raises
    ------
    ValueError
        If it is not from 1 to a million.

    Examples
    --------
    >>> check_batch(128)
    """
    if not 1 <= batch <= LARGEST_BATCH:
        raise ValueError(
            f"A batch has from 1 to {LARGEST_BATCH} utterances, not {batch}."
        )


def check_frames(frames: int) -> None:
    """Refuse a length that no utterance has.

    Parameters
    ----------
    frames : int
        Of an utterance.

    Raises
    ------
    ValueError
        If it is not from 1 to ``LARGEST_FRAMES``.

    Examples
    --------
    >>> check_frames(400)
    """
    if not 1 <= frames <= LARGEST_FRAMES:
        raise ValueError(
            f"An utterance has from 1 to {LARGEST_FRAMES} frames of 10 ms, not {frames}."
        )


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
    >>> revnet57, resnet152 = architecture("revnet57"), architecture("resnet152")
    >>> training.largest_batch(revnet57, "reconstruct") > 128
    True
    >>> training.largest_batch(resnet152, "store") > 128
    False
    """

    card_bytes: int | None
    batch: int
    frames: int
    optimizer_bits: int = 8
    head: Head = HEAD

    def __post_init__(self) -> None:
        """Refuse what no training has."""
        check_batch(self.batch)
        check_frames(self.frames)
        if self.optimizer_bits not in _STATE_BYTES:
            raise ValueError(
                f"States of an optimizer have 8 or 32 bits, not {self.optimizer_bits}."
            )

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

        def needed(batch: int) -> int:
            return step(batch) + sum(self.fixed_bytes(row, batch).values())

        return largest_within(needed, self.available_bytes, LARGEST_BATCH)

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
class ListedEncoder:
    """One encoder and what training it takes.

    Attributes
    ----------
    row : Architecture
        The encoder, with what was published about it.
    training : Training
        Batch, length and GPU that are asked about.
    speed : Speed or None
        Of the GPU, for estimates of time; None for that of the listed GPU whose memory is
        nearest.
    """

    row: Architecture
    training: Training
    speed: Speed | None = None

    @property
    def known_speed(self) -> Speed:
        """That speed, or the assumed one."""
        return speed_for(self.training, self.speed)

    @property
    def parameters(self) -> int:
        """Parameters of the encoder."""
        return parameters_of(self.row)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the encoder has."""
        own = LOSSLESS if self.row.reversible else WITHOUT_INVERSE
        return tuple(mode.value for mode in own)

    @property
    def planned_modes(self) -> tuple[str, ...]:
        """Those that a plan may give its blocks."""
        return self.modes if self.row.reversible else (*self.modes, Mode.JOIN.value)

    def bytes_per_utterance(self, mode: str, frames: int) -> int | None:
        """Bytes that one more utterance takes; None if that was not counted."""
        peak = peak_at(self.row.name, mode, frames)
        return None if peak is None else peak.bytes_per_utterance

    def step_peak_bytes(self, mode: str) -> int | None:
        """Peak of the encoder's own step at the batch asked about; None likewise."""
        peak = peak_at(self.row.name, mode, self.training.frames)
        return None if peak is None else peak(self.training.batch)

    def needed_bytes(self, mode: str) -> int | None:
        """All that training needs of a GPU at the batch asked about; None likewise."""
        needed = self.training.needed_bytes(self.row, mode, self.training.batch)
        return None if needed is None else sum(needed.values())

    def largest_batch(self, mode: str) -> int | None:
        """Largest batch on the GPU in a mode; None likewise."""
        return self.training.largest_batch(self.row, mode)

    def fits(self, mode: str) -> bool | None:
        """Whether the batch asked about fits the GPU; None likewise."""
        largest = self.largest_batch(mode)
        return None if largest is None else largest >= self.training.batch

    def days(self, mode: str) -> float | None:
        """Days of training in a mode, estimated; None if the batch does not fit so.

        They are those of :func:`training_days`, encoder and optimizer alone.
        """
        if self.training.card_bytes is None or not self.fits(mode):
            return None
        step = work_at(self.row.name, mode, self.training.frames)
        batch, moved = (
            self.training.batch,
            self.training.optimizer_moved_bytes(self.row),
        )
        seconds = self.known_speed.seconds(step(batch) + Work(0, moved, 0))
        return training_days(batch / seconds)

    @property
    def fastest_mode(self) -> str | None:
        """The mode of the fewest days of those that fit; None if none does."""
        days = {mode: self.days(mode) for mode in self.modes}
        known = {mode: each for mode, each in days.items() if each is not None}
        return min(known, key=known.__getitem__, default=None)

    @property
    def least_days(self) -> float | None:
        """Days of training in the fastest mode; None if none fits."""
        fastest = self.fastest_mode
        return None if fastest is None else self.days(fastest)


def _per_utterance(mode: str) -> Callable[[ListedEncoder], float | None]:
    return lambda model: model.bytes_per_utterance(mode, model.training.frames)


#: By what the table can be sorted.
SORT_KEYS: dict[str, Callable[[ListedEncoder], float | None]] = {
    "layers": lambda model: model.row.layers,
    "parameters": lambda model: model.parameters,
    "vox1-o": lambda model: model.row.vox1_o_eer,
    "vox1-e": lambda model: model.row.vox1_e_eer,
    "vox1-h": lambda model: model.row.vox1_h_eer,
    **{mode: _per_utterance(mode) for mode in MODES},
    "memory": lambda model: _per_utterance(model.row.default_mode)(model),
    "batch": lambda model: model.largest_batch(model.row.default_mode),
    "days": lambda model: model.least_days,
}

# What sorts by what a GPU decides.
_OF_A_GPU = ("batch", "days")


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
        Of the GPU, see :class:`ListedEncoder`.

    Returns
    -------
    list of ListedEncoder
        The encoders.

    Raises
    ------
    ValueError
        If there is no such name, family, type or key, if a GPU is needed and none was
        named, or if no encoder is left.

    Examples
    --------
    >>> training = Training(card_bytes=11 * 2**30, batch=256, frames=200)
    >>> best = select(training, families=["resnet", "revnet"], fitting=True, sort="vox1-h")
    >>> best[0].row.name
    'revnet245'
    """
    check_names("--family", families, [row.family for row in ARCHITECTURES.values()])
    check_names("--type", types, [row.type for row in ARCHITECTURES.values()])
    check_names("--sort", [] if sort is None else [sort], SORT_KEYS)
    if training.card_bytes is None and (fitting or sort in _OF_A_GPU):
        option = "--fits" if fitting else f"--sort={sort}"
        raise ValueError(f"{option} needs a GPU: add, for instance, --card=11GB.")
    rows = [architecture(n) for n in names] if names else ARCHITECTURES.values()
    models = [
        ListedEncoder(row, training, speed)
        for row in dict.fromkeys(rows)
        if (not families or row.family in families) and (not types or row.type in types)
    ]
    if fitting:
        models = [model for model in models if training.fits(model.row)]
    if not models:
        raise ValueError(
            "No encoder is left. Leave out a name, --family, --type or --fits, or lower "
            f"--batch ({training.batch})."
        )
    return _sorted(models, sort, reverse)


def _sorted(
    models: list[ListedEncoder], sort: str | None, reverse: bool
) -> list[ListedEncoder]:
    if sort is None:
        return models[::-1] if reverse else models
    figures = [(model, SORT_KEYS[sort](model)) for model in models]
    known = [(model, figure) for model, figure in figures if figure is not None]
    known.sort(key=lambda pair: pair[1], reverse=reverse)
    return [model for model, _ in known] + [
        m for m, figure in figures if figure is None
    ]


def check_names(option: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse names that an option does not take.

    Parameters
    ----------
    option : str
        What takes them, for the error message.
    given : iterable of str
        What was given.
    allowed : iterable of str
        All that there are.

    Raises
    ------
    ValueError
        With all names.

    Examples
    --------
    >>> check_names("--mode", ["stored"], ["store", "recompute"])
    Traceback (most recent call last):
    ValueError: --mode takes store, recompute, not stored.
    """
    names = list(dict.fromkeys(allowed))
    for name in given:
        if name not in names:
            raise ValueError(f"{option} takes {', '.join(names)}, not {name}.")
