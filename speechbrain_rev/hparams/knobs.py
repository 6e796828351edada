"""The range, unit and source of each training knob.

The table refuses values that would fail late, or train something else than was asked for.
To add a knob to ``hparams/train.yaml``, add its row: checks, the page of settings and the
tests' edge cases follow from it. Rules between several knobs are in ``rules``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from speechbrain_rev.architectures import ARCHITECTURES, nearest
from speechbrain_rev.heads import HEAD_OF, POOLINGS
from speechbrain_rev.modes import ALONE, MEMORY_FORMATS, STREAMS
from speechbrain_rev.optimizers import OPTIMIZERS
from speechbrain_rev.sizes import parse_size

WORDS = {
    "any": "a plain value or list",
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "list": "a list such as [a, b]",
    "list of int": "a list of integers such as [8, 16]",
    "list of float": "a list of numbers such as [1.0, 0.9]",
    "list of str": "a list of texts such as [a.txt, b.txt]",
}
MOST_IN_A_SENTENCE = 6


@dataclass(frozen=True)
class Knob:
    """What a knob may be.

    Attributes
    ----------
    kind : str
        A key of ``WORDS``. Bounds hold for each member of a list.
    several : bool
        Whether a list of such values is taken too.
    source : str
        Source of the value in ``hparams/train.yaml``, for the page of settings.
    unit : str
        Unit of a number.
    null : bool
        Whether null means something.
    at_least, above, at_most, below : float
        Bounds. Numbers are always finite, integers fit 64 bits, texts are not empty.
    one_of : tuple of str or int
        All allowed values, if they can be listed.
    or_word : str
        A text that is allowed too.
    lengths : tuple of int
        Lengths that a list may have; any if empty.
    reads : callable or None
        Returns whether a text has the form that is asked for.
    form : str
        That form in words.
    why : str
        What a value outside would do, for the error message.
    """

    kind: str
    source: str = ""
    unit: str = ""
    null: bool = False
    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    one_of: tuple[str | int, ...] = ()
    or_word: str = ""
    lengths: tuple[int, ...] = ()
    reads: Callable[[str], bool] | None = None
    form: str = ""
    why: str = ""
    several: bool = False

    def has_kind(self, value: object) -> bool:
        """Return whether a plain value is of the knob's type.

        Examples
        --------
        >>> Knob("float").has_kind(1), Knob("int").has_kind(True)
        (True, False)
        """
        if value is None:
            return self.null
        if self._is_word(value):
            return True
        if self.several and isinstance(value, list):
            return bool(value) and all(type(one).__name__ == self.kind for one in value)
        if self.kind.startswith("list") or (self.kind, type(value)) == ("any", list):
            member = Knob(self.kind.partition(" of ")[2] or "any")
            return isinstance(value, list) and all(map(member.has_kind, value))
        kind = type(value).__name__
        return self.kind in (kind, "any") or (self.kind, kind) == ("float", "int")

    def allows(self, value: object) -> bool:
        """Return whether a plain value of the knob's type is in range.

        Examples
        --------
        >>> Knob("float", above=0).allows(0.1), Knob("float").allows(math.inf)
        (True, False)
        """
        if isinstance(value, list):
            fits = not self.lengths or len(value) in self.lengths
            return fits and all(map(self.allows, value))
        if self._is_word(value):
            return True
        if self.one_of and value is not None:
            return value in self.one_of
        if isinstance(value, int | float):
            # Infinity is not below infinity.
            in_range = (
                self.at_least <= value <= self.at_most
                and self.above < value < self.below
            )
            fits = isinstance(value, float) or -(2**63) <= value < 2**63
            return in_range and fits
        if self.reads is not None and isinstance(value, str):
            return self.reads(value)
        return value != ""

    def takes(self) -> str:
        """Return what the knob may be, in words.

        Examples
        --------
        >>> Knob("float", at_least=0, below=1).takes()
        'a number of at least 0 and below 1'
        >>> Knob("list of int", null=True, lengths=(4,), at_least=1).takes()
        'a list of 4 integers of at least 1, or null'
        >>> Knob("int", one_of=(8, 32)).takes()
        '8 or 32'
        >>> Knob("int", null=True, or_word="auto", at_least=1).takes()
        'an integer of at least 1, or auto, or null'
        """
        if self.one_of:
            *most, last = map(str, self.one_of)
            words = f"{', '.join(most)} or {last}" if most else last
            if len(self.one_of) > MOST_IN_A_SENTENCE:
                words = f"one of {len(self.one_of)} names"
        else:
            words = self.form or WORDS[self.kind].partition(" such as")[0]
            if self.lengths:
                lengths = " or ".join(map(str, self.lengths))
                words = words.replace("list of", f"list of {lengths}")
            words += self._bounds()
            words += ", or a list of them" if self.several else ""
        words += f", or {self.or_word}" if self.or_word else ""
        return f"{words}, or null" if self.null else words

    def advice(self, value: object = None) -> str:
        """Return why a value is refused, or which one it may have meant.

        Parameters
        ----------
        value : object
            The plain value; None where it is of another type than the knob's.

        Returns
        -------
        str
            Sentences, each after a space, or nothing.

        Examples
        --------
        >>> Knob("str", one_of=("sgd", "adam")).advice("[sgd, adam]")
        ' Give one of them.'
        >>> Knob("float", why="It is in seconds.").advice(math.inf)
        ' It is in seconds. It must be finite.'
        """
        words = f" {self.why}" if self.why else ""
        names = [str(name) for name in self.one_of]
        if names and isinstance(value, str):
            if len(set(names) & set(re.findall(r"\w+", value))) > 1:
                words += " Give one of them."
            elif len(names) > MOST_IN_A_SENTENCE:
                words += nearest(value, names)
        if len(names) > MOST_IN_A_SENTENCE:
            words += f" All are: {', '.join(names)}."
        if isinstance(value, float) and not math.isfinite(value):
            words += " It must be finite."
        if isinstance(value, int) and abs(value) >= 2**63:
            words += " It must fit 64 bits."
        return words

    def refusal(self, shown: str, value: object = None) -> str:
        """Return the error message for a value, ``None`` if it is of another type.

        Examples
        --------
        >>> Knob("list of str").refusal("3")
        'takes a list of texts, such as [a.txt, b.txt], not 3.'
        """
        # How a list is written; the example has not the length that some must have.
        example = WORDS[self.kind].partition(" such as ")[2]
        if example and not self.lengths and not isinstance(value, list):
            example = f", such as {example}"
        else:
            example = ""
        shown = shown or ("nothing" if value is None else "an empty one")
        return f"takes {self.takes()}{example}, not {shown}.{self.advice(value)}"

    def _is_word(self, value: object) -> bool:
        return bool(self.or_word) and value == self.or_word

    def _bounds(self) -> str:
        if math.isfinite(self.at_least) and math.isfinite(self.at_most):
            return f" from {self.at_least} to {self.at_most}"
        named = {
            "of at least": self.at_least,
            "above": self.above,
            "of at most": self.at_most,
            "below": self.below,
        }
        bounds = [f"{name} {n:g}" for name, n in named.items() if math.isfinite(n)]
        return f" {' and '.join(bounds)}" if bounds else ""


def _is_pattern(text: str) -> bool:
    """Return whether a text is an expression of one group, or of speaker and session."""
    try:
        pattern = re.compile(text)
    except re.error:
        return False
    named = set(pattern.groupindex) == {"speaker", "session"}
    return text != "" and pattern.groups <= 1 + named


# What several knobs share.
_file = functools.partial(Knob, "str", null=True)
_folder = functools.partial(Knob, "str")
_switch = functools.partial(Knob, "bool")
_count = functools.partial(Knob, "int", at_least=1)
_count_or_none = functools.partial(Knob, "int", at_least=0)
_error = functools.partial(Knob, "float", above=0, at_most=1)
_rate = functools.partial(Knob, "float", null=True, above=0)

#: Numbers of stages that encoders have.
_STAGES = tuple(sorted({len(row.strides) for row in ARCHITECTURES.values()}))

# fmt: off
KNOBS = {
    # run
    "seed": Knob(
        "int", "SpeechBrain", at_least=0, at_most=2**32 - 1,
        why="For another one, SpeechBrain would seed with 0.",
    ),
    "output_folder": _folder("ours, after SpeechBrain"),
    "pretrained_run": _file("ours"),
    "precision": Knob(
        "str", "ours; the paper states none", one_of=("fp32", "bf16", "fp16"),
    ),
    "num_workers": _count_or_none("SpeechBrain", "processes"),
    "ckpt_interval_steps": _count_or_none("ours; the knob is SpeechBrain's", "steps"),
    "logger": Knob(
        "str", "SpeechBrain's loggers; the knob is ours", null=True,
        one_of=("tensorboard", "wandb"),
    ),
    # encoder
    "arch": Knob(
        "str", "paper (III, Tables II to VI); which one is ours", one_of=tuple(ARCHITECTURES),
    ),
    "widths": Knob(
        "list of int", "paper (Tables II to IV)", "channels",
        null=True, lengths=_STAGES, at_least=1, at_most=2**14,
    ),
    "blocks": Knob(
        "list of int", "paper (Tables II to IV)", "blocks",
        null=True, lengths=_STAGES, at_least=0, at_most=10_000,
    ),
    "n_mels": Knob(
        "int", "paper (V-C)", "bands",
        at_least=min(row.geometry().downsampling for row in ARCHITECTURES.values()),
        at_most=512, why="Strides of the encoder divide them.",
    ),
    "embedding_dim": Knob("int", "paper (V-C)", "values", at_least=1, at_most=2**16),
    "pooling": Knob("str", "paper (V-C)", one_of=tuple(POOLINGS)),
    "mode": Knob(
        "str",
        "reconstruct: paper (III); compress: error-bounded compression; which one by null is "
        "ours",
        null=True, one_of=tuple(mode.value for mode in ALONE),
    ),
    "convolution_error": _error(
        "error-bounded compression (0.01 is the coefficient of its equation 8)",
        "fraction of the momentum",
    ),
    "normalisation_error": _error(
        "ours, by the benchmark compressed_bounds", "fraction of the deviation"
    ),
    "memory_budget": Knob(
        "str", "after Jiang et al.", "bytes, by the unit in the text", null=True,
        reads=lambda text: text == "auto" or parse_size(text) is not None,
        form="a size such as 11GB, 10.5GiB or 800MB, or auto",
        why="11GB is 11 GiB (2**30 bytes each), as a GPU sold as 11 GB has.",
    ),
    "max_gradient_error": _error("ours", "fraction of the gradient's norm", null=True),
    "plan_file": _file("ours"),
    "streams": Knob(
        "str",
        "ours, by the study: after 3,150 steps weights are the same to the bit whether "
        "activations were stored or reconstructed; float streams took 11 % less time on a "
        "CPU, and end at other weights",
        one_of=tuple(STREAMS),
    ),
    "chunk": Knob(
        "int",
        "ours, by the benchmark chunks: it changes memory and time; the study did not test it",
        "bytes for 200 frames", null=True, or_word="auto", at_least=1,
    ),
    "memory_format": Knob(
        "str", "ours, by the benchmark formats", one_of=tuple(MEMORY_FORMATS)
    ),
    "deterministic": _switch("ours, for equal bits in every mode"),
    "verify": Knob("str", "ours", null=True, one_of=("first", "raise", "warn")),
    "sync_batchnorm": _switch("ours; the paper states nothing"),
    "zero_init_residual": _switch(
        "Goyal et al. 2017, section 5.1; ours, by the study: after 8 epochs the EER of "
        "resnet34, revnet46 and df_resnet56 was 8 to 18 points lower, that of df_revnet66 the "
        "same, with one seed",
    ),
    # data
    "data_folder": _folder("paper (V-A): VoxCeleb2 dev", several=True),
    "speaker_from": Knob(
        "any", "ours", null=True, at_least=1, reads=_is_pattern,
        form="a level, or a regular expression with one group at most (or the groups "
        "speaker and session)",
    ),
    "sample_rate": Knob(
        "int", "SpeechBrain", "Hz", at_least=4000, at_most=16000,
        why="It is in Hz, and SpeechBrain's Fbank takes windows of at most 400 "
        "samples, 25 ms of 16000 Hz.",
    ),
    "resample": _switch("ours"),
    "channel": Knob("int", "ours", null=True, or_word="mix", at_least=0),
    "train_list": _file("ours"),
    "trial_lists": Knob("list of str", "ours; SpeechBrain has one, verification_file"),
    "trials_folder": _folder("ours", several=True),
    "bad_files": Knob("str", "ours", one_of=("refuse", "drop")),
    "outside_files": _switch("ours"),
    "short": Knob("str", "ours", one_of=("repeat", "pad", "drop")),
    "check_audio": _switch("ours"),
    "max_unread": _count_or_none("ours", "files"),
    "valid_speakers": _count_or_none(
        "ours; the paper trains on all (V-A), which 0 does", "speakers"
    ),
    "valid_trials": _file("ours"),
    "chunk_samples": _count("paper (V-C): 200 frames", "samples"),
    "sentence_len": Knob(
        "float", "ours: what chunk_samples need at the fastest speed", "s",
        above=0, at_most=3600, why="It is in seconds.",
    ),
    # augmentation
    "speeds": Knob("list of float", "paper (V-A)", "times", above=0, at_most=10),
    "augment_prob": Knob("float", "paper (V-A)", "probability", at_least=0, at_most=1),
    "noise_folder": _file("paper (V-A): MUSAN"),
    "rir_folder": _file("paper (V-A): RIR"),
    # objective
    "loss": Knob("str", "paper (V-C)", one_of=tuple(HEAD_OF)),
    "margin": Knob("float", "paper (V-C)", "radians", at_least=0, below=math.pi),
    "scale": Knob("float", "paper (V-C)", above=0),
    "margin_start_epoch": _count_or_none("WeSpeaker", "epochs", null=True),
    "margin_end_epoch": _count_or_none("WeSpeaker", "epochs", null=True),
    # optimizer
    "optimizer_name": Knob(
        "str", "paper (V-C)", null=True, one_of=tuple(OPTIMIZERS),
    ),
    "optimizer_bits": Knob(
        "int",
        "paper (IV); an update differs from that with 32-bit states by 2 to 4 %, for AdamW's "
        "classifier by 6 % (docs/optimizers.md), so that no layer has to stay at 32; the "
        "study saw no loss",
        "bits", one_of=(8, 32),
    ),
    "optimizer_block": Knob(
        "int", "ours, as bitsandbytes has it; the paper's is 2048", "values", one_of=(256, 2048),
    ),
    "optimizer_pack_small": _switch("ours, for bitsandbytes keeps them at 32 bits"),
    "optimizer_backend": Knob("str", "ours", one_of=("native", "bitsandbytes")),
    "lr": _rate("WeSpeaker"),
    "final_lr": _rate("WeSpeaker"),
    "weight_decay": Knob(
        "float",
        "paper (V-C); in the study neither none nor 0.2 of AdamW was clearly better than 0.05, "
        "and SGD's was not tried",
        null=True, at_least=0,
    ),
    "nesterov": _switch("paper (V-C); WeSpeaker's is Nesterov's", null=True),
    "max_grad_norm": Knob(
        "float", "SpeechBrain; in the study neither 1 nor no clipping was clearly better",
        above=0,
        why="A negative one would reverse every gradient; a large one, such as "
        "1.0e+9, clips nothing.",
    ),
    "batch_size": _count("paper (VI-C)", "utterances"),
    "number_of_epochs": _count("WeSpeaker", "epochs", null=True),
    "warmup_epochs": Knob(
        "float",
        "WeSpeaker, for 150 epochs and more; of the 30 epochs of the study half an epoch and 4 "
        "did alike",
        "epochs", at_least=0,
    ),
    "steps_per_epoch": _count("ours", "steps", null=True),
    "average_checkpoints": _count("WeSpeaker", "checkpoints", null=True),
    # scoring
    "cohort_top_n": Knob(
        "int", "paper (V-D): a cohort of 600, as we read it", "speakers", at_least=2,
        why="AS-Norm divides by the deviation of their scores.",
    ),
}
# fmt: on

#: Those that the recipe's help lists, in the order of its pages.
MOST_USED = (
    "data_folder",
    "noise_folder",
    "rir_folder",
    "output_folder",
    "batch_size",
    "number_of_epochs",
    "mode",
    "memory_budget",
    "max_gradient_error",
    "plan_file",
    "precision",
    "streams",
    "verify",
    "ckpt_interval_steps",
    "max_grad_norm",
    "max_unread",
    "logger",
)
