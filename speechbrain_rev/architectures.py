"""The encoders as rows of one table, and how each family is trained.

Widths, blocks and published figures are those of Tables II to VI of the
memory-efficient speaker embedding paper (RevNets, DF-RevNets, and the ResNets and
DF-ResNets that they are compared with). A second table has further encoders whose
weights WeSpeaker publishes. To add an encoder, add a row.
"""

from __future__ import annotations

import difflib
import itertools
import math
import operator
from collections import ChainMap
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal

Family = Literal["resnet", "df_resnet", "revnet", "df_revnet"]
Type = Literal["vanilla", "I", "II"]
Block = Literal["basic", "bottleneck", "df_bottleneck"]
#: A stride for both axes, or one in frequency and one in time.
Stride = int | tuple[int, int]


#: What is an encoder's own: its name, its depth, its size, and what was published of it.
_OWN = {
    "name",
    "blocks",
    "layers",
    "parameters",
    "published_params_m",
    "published_memory_gb",
    "published_max_batch_11gb",
    "vox1_o_eer",
    "vox1_e_eer",
    "vox1_h_eer",
    "counterpart",
}


@dataclass(frozen=True)
class EncoderGeometry:
    """How many frequencies and frames an encoder has at each of its levels.

    A level is a resolution. The stem has the first one, and each stage whose stride is
    not 1 begins the next.

    Attributes
    ----------
    n_mels : int
        Mel bands of the input.
    strides : tuple of int or (int, int)
        Stride of each stage: one number for both axes, or (frequency, time).
    rearranges : bool
        Whether strides move frequencies and frames into channels, as in type II. These
        must then be whole multiples of ``downsampling``, and frames are padded.

    Examples
    --------
    >>> geometry = architecture("revnet57").geometry(n_mels=80)
    >>> geometry.level_strides, geometry.frequencies, geometry.padding(43)
    ((1, 2, 4, 8), (80, 40, 20, 10), 5)
    >>> geometry.stage_levels
    ((0, 0), (0, 1), (1, 2), (2, 3))

    A Gemini-DF-ResNet divides time once, and frequency in each stage:

    >>> gemini = architecture("gemini_df_resnet60").geometry(n_mels=80)
    >>> gemini.level_strides, gemini.frequencies
    ((1, 1, 2, 2, 2), (80, 40, 20, 10, 5))
    """

    n_mels: int
    strides: tuple[Stride, ...]
    rearranges: bool = False

    @property
    def level_steps(self) -> tuple[tuple[int, int], ...]:
        """Strides in frequency and time from each level but the last to the next one."""
        return tuple(
            stride if isinstance(stride, tuple) else (stride, stride)
            for stride in self.strides
            if stride != 1
        )

    @property
    def level_strides(self) -> tuple[int, ...]:
        """Frames of the input that one frame of each level stands for."""
        return _multiply_steps(time for _, time in self.level_steps)

    @property
    def level_bands(self) -> tuple[int, ...]:
        """Mel bands of the input that one frequency of each level stands for."""
        return _multiply_steps(frequency for frequency, _ in self.level_steps)

    @property
    def levels(self) -> int:
        """Number of levels."""
        return 1 + len(self.level_steps)

    @property
    def stage_levels(self) -> tuple[tuple[int, int], ...]:
        """Level at which each stage begins, and that of its blocks."""
        ends = itertools.accumulate((stride != 1 for stride in self.strides), initial=0)
        return tuple(itertools.pairwise(ends))

    @property
    def downsampling(self) -> int:
        """Frames of the input that one pooled frame stands for."""
        return self.level_strides[-1]

    @property
    def frequency_downsampling(self) -> int:
        """Mel bands of the input that one pooled frequency stands for."""
        return self.level_bands[-1]

    @property
    def frequencies(self) -> tuple[int, ...]:
        """Frequencies of each level; pooling has those of the last one."""
        return tuple(-(-self.n_mels // bands) for bands in self.level_bands)

    @property
    def min_frames(self) -> int:
        """Fewest frames of an input: a deviation needs two pooled ones."""
        return self.downsampling + 1

    @property
    def fits(self) -> bool:
        """Whether there are mel bands for the last level."""
        step = self.frequency_downsampling
        multiple = not self.rearranges or self.n_mels % step == 0
        return multiple and self.n_mels >= step

    def padding(self, frames: int) -> int:
        """Count the frames that are missing to a whole multiple, where one is needed."""
        if not self.rearranges:
            return 0
        multiple = self.downsampling
        return multiple * ((frames - 1) // multiple + 1) - frames


def _multiply_steps(steps: Iterable[int]) -> tuple[int, ...]:
    """Multiply the steps up to each level, from 1 at the first."""
    return tuple(itertools.accumulate(steps, operator.mul, initial=1))


@dataclass(frozen=True)
class Architecture:
    """One encoder: its shape, its exact size and what was published about it.

    Attributes
    ----------
    name : str
        The name, which ends in the number of layers.
    family : {"resnet", "df_resnet", "revnet", "df_revnet"}
        Decides stem, transitions and training defaults.
    type : {"vanilla", "I", "II"}
        "I" keeps ordinary downsampling layers between reversible stages, "II"
        replaces them by an invertible rearrangement (section III-B).
    block : {"basic", "bottleneck", "df_bottleneck"}
        The residual function, equations 5, 6 and 10.
    widths : tuple of int
        Channels of each stage; a bottleneck's are expanded four times.
    blocks : tuple of int
        Residual or reversible blocks of each stage.
    layers : int or None
        Convolutions on the main path and the final linear layer, as the name counts; None
        if nobody counted them.
    parameters : int or None
        Parameters of the encoder with 80 mel bands and 256-dimensional embeddings; None
        to count them when a table asks.
    published_params_m : float or None
        Parameters as published, in millions. This and all that follows is None for an
        encoder of which nothing was published.
    published_memory_gb : float or None
        Training memory as published, GB (1e9 bytes) per utterance of 2 seconds.
    published_max_batch_11gb : int or None
        Largest batch on an 11 GB GPU, as published.
    vox1_o_eer, vox1_e_eer, vox1_h_eer : float or None
        Equal error rates as published, in percent. Not reproduced here.
    counterpart : str or None
        The vanilla encoder that a reversible one is compared with.
    strides : tuple of int or (int, int)
        Stride of each stage: one number for both axes or, but not in type II, (frequency,
        time).
    """

    name: str
    family: Family
    type: Type
    block: Block
    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    layers: int | None = None
    parameters: int | None = None
    published_params_m: float | None = None
    published_memory_gb: float | None = None
    published_max_batch_11gb: int | None = None
    vox1_o_eer: float | None = None
    vox1_e_eer: float | None = None
    vox1_h_eer: float | None = None
    counterpart: str | None = None
    strides: tuple[Stride, ...] = (1, 2, 2, 2)

    def __post_init__(self) -> None:
        numbers = [
            number
            for stride in self.strides
            for number in (
                stride if isinstance(stride, tuple) and self.type != "II" else (stride,)
            )
        ]
        whole = all(type(number) is int and number > 0 for number in numbers)
        if not self.strides or not whole:
            raise ValueError(
                f"strides of {self.name} are {self.strides}; give a whole number of at "
                "least 1 for each stage, or two, (frequency, time), but not in type II."
            )

    def geometry(self, n_mels: int = 80) -> EncoderGeometry:
        """Give the encoder's frequencies and frames at each level."""
        return EncoderGeometry(n_mels, self.strides, rearranges=self.type == "II")

    @property
    def reversible(self) -> bool:
        """Whether the encoder has stages whose inputs follow from their outputs."""
        return self.type != "vanilla"

    @property
    def default_mode(self) -> str:
        """What blocks keep for the backward pass where no mode is given."""
        return "reconstruct" if self.reversible else "store"

    @property
    def expansion(self) -> int:
        """What widths are multiplied by within a stage.

        The paper prints unexpanded widths; its final layer of 24000 inputs proves that a
        bottleneck's are expanded four times.
        """
        return 4 if self.block == "bottleneck" else 1

    @property
    def width_step(self) -> int:
        """Widths are multiples of this: of halves, or of a half's rearranged part."""
        if self.type == "II":
            return math.lcm(2, *(f * t for f, t in self.geometry().level_steps))
        return 2 if self.reversible else 1

    @property
    def kind(self) -> tuple[object, ...]:
        """All that encoders share whose blocks are alike and which differ in depth alone.

        Whatever field an encoder gets beside those of its own is one of its kind.
        """
        shared = [field.name for field in fields(self) if field.name not in _OWN]
        return tuple(getattr(self, name) for name in shared)

    @property
    def training(self) -> TrainingDefaults:
        """How the encoder's family is trained."""
        return TRAINING_DEFAULTS[self.family]

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer that the encoder's family is trained with."""
        return self.training.optimizer_name


@dataclass(frozen=True)
class TrainingDefaults:
    """Optimizer and schedule of a family (section V-C, and WeSpeaker's schedules).

    Attributes
    ----------
    optimizer_name : {"sgd", "adamw"}
        The optimizer.
    lr, final_lr : float
        Learning rate after the warm-up and at the end, for a batch of 64.
    weight_decay : float
        L2 decay for SGD, decoupled decay for AdamW.
    number_of_epochs : int
        Length of the training.
    margin_start_epoch, margin_end_epoch : int
        The AAM margin grows from 0 to its value between these epochs; equal
        numbers hold it fixed.
    warmup_epochs : float
        The learning rate rises from 0 over these.
    average_checkpoints : int
        How many of the last checkpoints are averaged into the final encoder.
    """

    optimizer_name: str
    lr: float
    final_lr: float
    weight_decay: float
    number_of_epochs: int
    margin_start_epoch: int
    margin_end_epoch: int
    warmup_epochs: float
    average_checkpoints: int

    def of_epochs(self, number_of_epochs: int) -> TrainingDefaults:
        """Scale the epochs of margin and warm-up to a run of fewer than 150.

        Examples
        --------
        >>> short = architecture("revnet46").training.of_epochs(30)
        >>> short.margin_start_epoch, short.margin_end_epoch, short.warmup_epochs
        (4, 8, 1.0)
        """
        share = min(1.0, number_of_epochs / _SCHEDULED_EPOCHS)
        return replace(
            self,
            margin_start_epoch=round(share * self.margin_start_epoch),
            margin_end_epoch=round(share * self.margin_end_epoch),
            warmup_epochs=float(round(share * self.warmup_epochs)),
        )


# The training whose schedule WeSpeaker publishes.
_SCHEDULED_EPOCHS = 150
_SGD = TrainingDefaults("sgd", 0.1, 5e-5, 1e-4, 150, 20, 40, 6.0, 10)
_ADAMW = TrainingDefaults("adamw", 1.25e-4, 1e-6, 0.05, 165, 0, 0, 6.0, 2)

TRAINING_DEFAULTS: dict[str, TrainingDefaults] = {
    "resnet": _SGD,
    "revnet": _SGD,
    "df_resnet": _ADAMW,
    "df_revnet": _ADAMW,
}

# fmt: off
_ROWS = (
    # name, family, type, block, widths, blocks, layers, parameters, then published:
    # parameters (M), GB per utterance, largest batch, EER on Vox1-O, -E, -H, counterpart
    Architecture("resnet34", "resnet", "vanilla", "basic", (32, 64, 128, 256), (3, 4, 6, 3), 34, 6634336, 6.6, 0.06, 154, 0.96, 1.01, 1.86, None),
    Architecture("resnet101", "resnet", "vanilla", "bottleneck", (32, 64, 128, 256), (3, 4, 23, 3), 101, 15892448, 15.9, 0.33, 31, 0.62, 0.80, 1.48, None),
    Architecture("resnet152", "resnet", "vanilla", "bottleneck", (32, 64, 128, 256), (3, 8, 36, 3), 152, 19814880, 19.8, 0.47, 22, 0.55, 0.74, 1.39, None),
    Architecture("df_resnet56", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 3, 9, 3), 56, 4693920, 4.5, 0.355, 33, 0.96, 1.09, 1.99, None),
    Architecture("df_resnet110", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 3, 27, 3), 110, 7177632, 7.0, 0.523, 23, 0.75, 0.88, 1.64, None),
    Architecture("df_resnet179", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 8, 45, 3), 179, 9842464, 9.8, 0.858, 14, 0.62, 0.80, 1.51, None),
    Architecture("df_resnet233", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 8, 63, 3), 233, 12326176, 12.3, 1.034, 12, 0.58, 0.76, 1.44, None),
    Architecture("revnet46", "revnet", "I", "basic", (48, 96, 192, 300), (1, 2, 4, 2), 46, 6750040, 6.7, 0.04, 235, 0.85, 1.01, 1.85, 'resnet34'),
    Architecture("revnet57", "revnet", "II", "basic", (48, 96, 192, 300), (2, 3, 5, 3), 57, 6102190, 6.1, 0.03, 300, 0.89, 0.98, 1.83, 'resnet34'),
    Architecture("revnet126", "revnet", "I", "basic", (48, 96, 192, 384), (2, 3, 22, 2), 126, 14976400, 15.0, 0.04, 213, 0.58, 0.80, 1.48, 'resnet101'),
    Architecture("revnet137", "revnet", "II", "basic", (48, 96, 192, 384), (3, 4, 23, 3), 137, 14203264, 14.2, 0.03, 297, 0.58, 0.80, 1.49, 'resnet101'),
    Architecture("revnet140", "revnet", "I", "bottleneck", (48, 96, 192, 300), (2, 3, 14, 2), 140, 15779152, 15.8, 0.15, 62, 0.60, 0.80, 1.43, 'resnet101'),
    Architecture("revnet155", "revnet", "II", "bottleneck", (48, 96, 192, 300), (3, 4, 15, 3), 155, 16426456, 15.6, 0.12, 74, 0.59, 0.81, 1.45, 'resnet101'),
    Architecture("revnet178", "revnet", "I", "basic", (48, 96, 192, 384), (2, 7, 31, 2), 178, 18298384, 18.3, 0.04, 211, 0.54, 0.75, 1.41, 'resnet152'),
    Architecture("revnet197", "revnet", "II", "basic", (48, 96, 192, 384), (3, 8, 34, 3), 197, 18189568, 18.2, 0.03, 295, 0.53, 0.76, 1.42, 'resnet152'),
    Architecture("revnet230", "revnet", "I", "bottleneck", (48, 96, 192, 300), (2, 7, 25, 2), 230, 19544272, 19.6, 0.20, 48, 0.49, 0.72, 1.33, 'resnet152'),
    Architecture("revnet245", "revnet", "II", "bottleneck", (48, 96, 192, 300), (3, 8, 26, 3), 245, 20191576, 19.4, 0.12, 73, 0.50, 0.73, 1.35, 'resnet152'),
    Architecture("df_revnet66", "df_revnet", "I", "df_bottleneck", (48, 96, 192, 384), (2, 2, 4, 2), 66, 4801840, 4.4, 0.080, 137, 0.84, 1.07, 1.98, 'df_resnet56'),
    Architecture("df_revnet89", "df_revnet", "II", "df_bottleneck", (48, 96, 192, 384), (3, 3, 5, 3), 89, 4941856, 4.1, 0.077, 141, 0.87, 1.05, 1.96, 'df_resnet56'),
    Architecture("df_revnet126", "df_revnet", "I", "df_bottleneck", (48, 96, 192, 384), (2, 2, 14, 2), 126, 6360880, 6.8, 0.083, 133, 0.71, 0.87, 1.65, 'df_resnet110'),
    Architecture("df_revnet149", "df_revnet", "II", "df_bottleneck", (48, 96, 192, 384), (3, 3, 15, 3), 149, 6500896, 6.5, 0.077, 137, 0.73, 0.85, 1.62, 'df_resnet110'),
    Architecture("df_revnet258", "df_revnet", "I", "df_bottleneck", (48, 96, 192, 384), (2, 7, 31, 2), 258, 9216688, 9.5, 0.075, 137, 0.59, 0.79, 1.50, 'df_resnet179'),
    Architecture("df_revnet281", "df_revnet", "II", "df_bottleneck", (48, 96, 192, 384), (3, 8, 32, 3), 281, 9356704, 9.1, 0.073, 140, 0.62, 0.81, 1.53, 'df_resnet179'),
    Architecture("df_revnet354", "df_revnet", "I", "df_bottleneck", (48, 96, 192, 384), (2, 7, 47, 2), 354, 11711152, 11.9, 0.075, 146, 0.59, 0.75, 1.45, 'df_resnet233'),
    Architecture("df_revnet377", "df_revnet", "II", "df_bottleneck", (48, 96, 192, 384), (3, 8, 48, 3), 377, 11851168, 11.5, 0.073, 149, 0.60, 0.77, 1.46, 'df_resnet233'),
)

# WeSpeaker's ResNets of other depths, and the Gemini-DF-ResNets of Liu et al., "Golden
# Gemini is all you need: finding the sweet spots for speaker verification", 2023.
_GEMINI = ((2, 1), (2, 2), (2, 1), (2, 1))
_WESPEAKER_ROWS = (
    Architecture("resnet221", "resnet", "vanilla", "bottleneck", (32, 64, 128, 256), (6, 16, 48, 3), 221, 23792224),
    Architecture("resnet293", "resnet", "vanilla", "bottleneck", (32, 64, 128, 256), (10, 20, 64, 3), 293, 28626016),
    Architecture("gemini_df_resnet60", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 3, 9, 3), 60, 4047840, strides=_GEMINI),
    Architecture("gemini_df_resnet114", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 3, 27, 3), 114, 6531552, strides=_GEMINI),
    Architecture("gemini_df_resnet183", "df_resnet", "vanilla", "df_bottleneck", (32, 64, 128, 256), (3, 8, 45, 3), 183, 9196384, strides=_GEMINI),
)
# fmt: on

#: The encoders of the paper, which tables and counts compare.
ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}
#: Their families and types.
FAMILIES = tuple(dict.fromkeys(row.family for row in _ROWS))
TYPES = tuple(dict.fromkeys(row.type for row in _ROWS))
#: Further encoders whose weights WeSpeaker publishes.
WESPEAKER_ARCHITECTURES: dict[str, Architecture] = {
    row.name: row for row in _WESPEAKER_ROWS
}
#: All encoders that can be built by name. The paper's come first: a ChainMap begins with
#: its last map.
ENCODERS: ChainMap[str, Architecture] = ChainMap(WESPEAKER_ARCHITECTURES, ARCHITECTURES)


def architecture(name: str) -> Architecture:
    """Look an encoder up by its name.

    Parameters
    ----------
    name : str
        One of the keys of ``ENCODERS``.

    Returns
    -------
    Architecture
        The encoder's row.

    Raises
    ------
    ValueError
        If there is no such encoder; the message suggests the nearest names.

    Examples
    --------
    >>> architecture("revnet46").blocks
    (1, 2, 4, 2)
    """
    if name in ENCODERS:
        return ENCODERS[name]
    raise ValueError(
        f"There is no encoder {name!r}.{nearest(str(name), ENCODERS)} "
        f"The {len(ENCODERS)} encoders are: {', '.join(ENCODERS)}."
    )


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the known names that a wrong one may have meant: of encoders, or of settings.

    Examples
    --------
    >>> nearest("optimiser_bits", ["optimizer_bits", "lr"])
    ' Did you mean optimizer_bits?'
    """
    by_word = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_word, n=2)
    return (
        f" Did you mean {' or '.join(prefix + by_word[word] for word in close)}?"
        if close
        else ""
    )


def counterparts(name: str) -> list[str]:
    """Name the reversible encoders that stand for a vanilla one.

    Parameters
    ----------
    name : str
        Of the vanilla encoder.

    Returns
    -------
    list of str
        In the order of the table.

    Examples
    --------
    >>> counterparts("resnet34")
    ['revnet46', 'revnet57']
    """
    return [row.name for row in ARCHITECTURES.values() if row.counterpart == name]
