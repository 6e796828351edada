"""The type and range of each training knob.

The table refuses values that would fail late, or train something else than was asked for.
To add a knob to ``hparams/train.yaml``, add its row: checks and the tests' edge cases
follow from it; its source and unit are in ``tests/docs/yaml_reference.py``. Rules between several knobs are in ``rules``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from speechbrain_rev.architectures import ENCODERS, nearest
from speechbrain_rev.filterbanks import FILTERBANKS
from speechbrain_rev.heads import CORRECTIONS, HEAD_OF, POOLINGS
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
    null : bool
        Whether null means something.
    at_least, above, at_most, below : float
        Bounds. Numbers are always finite, integers fit 64 bits, texts are not empty.
    one_of : tuple of str or int
        All allowed values, if they can be listed.
    or_word : str
        A text that is allowed too.
    reads : callable or None
        Returns whether a text has the form that is asked for.
    form : str
        That form in words.
    why : str
        What a value outside would do, for the error message.
    """

    kind: str
    null: bool = False
    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    one_of: tuple[str | int, ...] = ()
    or_word: str = ""
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
            return all(map(self.allows, value))
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
            return in_range and (isinstance(value, float) or abs(value) < 2**63)
        if self.reads is not None and isinstance(value, str):
            return self.reads(value)
        return value != ""

    def takes(self) -> str:
        """Return what the knob may be, in words.

        Examples
        --------
        >>> Knob("float", at_least=0, below=1).takes()
        'a number of at least 0 and below 1'
        >>> Knob("list of int", null=True, at_least=1).takes()
        'a list of integers of at least 1, or null'
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
            words += self._bounds()
            words += ", or a list of them" if self.several else ""
        words += f", or {self.or_word}" if self.or_word else ""
        return f"{words}, or null" if self.null else words

    def refusal(self, shown: str, value: object = None) -> str:
        """Return the error message for a value, ``None`` if it is of another type.

        Examples
        --------
        >>> Knob("list of str").refusal("3")
        'takes a list of texts, such as [a.txt, b.txt], not 3.'
        """
        # How a list is written.
        example = WORDS[self.kind].partition(" such as ")[2]
        if example:
            example = "" if isinstance(value, list) else f", such as {example}"
        why = f" {self.why}" if self.why else ""
        if len(self.one_of) > MOST_IN_A_SENTENCE and isinstance(value, str):
            why += nearest(value, map(str, self.one_of))
        return f"takes {self.takes()}{example}, not {shown}.{why}"

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
_file = Knob("str", null=True)
_folder = Knob("str")
_switch = Knob("bool")
_count = Knob("int", at_least=1)
_count_or_none = Knob("int", at_least=0)
_count_or_null = Knob("int", null=True, at_least=1)
_rate = Knob("float", null=True, above=0)
_error = Knob("float", above=0, at_most=1)

# fmt: off
KNOBS = {
    # run
    "seed": Knob(
        "int", at_least=0, at_most=2**32 - 1,
        why="For another one, SpeechBrain would seed with 0.",
    ),
    "output_folder": _folder,
    "pretrained": _file,
    "head": Knob("str", null=True, one_of=("keep", "new")),
    "head_init": Knob("str", one_of=("means", "random")),
    "freeze_epochs": _count_or_none,
    "precision": Knob("str", one_of=("fp32", "bf16", "fp16")),
    "num_workers": _count_or_none,
    "ckpt_interval_steps": _count_or_none,
    "logger": Knob("str", null=True, one_of=("tensorboard", "wandb")),
    # encoder
    "arch": Knob("str", one_of=tuple(ENCODERS)),
    "widths": Knob("list of int", null=True, at_least=1, at_most=2**14),
    "blocks": Knob("list of int", null=True, at_least=0, at_most=10_000),
    "n_mels": Knob(
        "int",
        at_least=min(row.geometry().frequency_downsampling for row in ENCODERS.values()),
        at_most=512, why="Strides of the encoder divide them.",
    ),
    "features": Knob("str", one_of=tuple(FILTERBANKS)),
    "embedding_dim": Knob("int", at_least=1, at_most=2**16),
    "pooling": Knob("str", one_of=tuple(POOLINGS)),
    "pooling_variance": Knob("str", one_of=tuple(CORRECTIONS)),
    "mode": Knob("str", null=True, one_of=tuple(mode.value for mode in ALONE)),
    "convolution_error": _error,
    "normalisation_error": _error,
    "memory_budget": Knob(
        "str", null=True, reads=lambda text: text == "auto" or parse_size(text) is not None,
        form="a size such as 11GB, 10.5GiB or 800MB, or auto",
        why="11GB is 11 GiB (2**30 bytes each), as a GPU sold as 11 GB has.",
    ),
    "max_gradient_error": dataclasses.replace(_error, null=True),
    "plan_file": _file,
    "streams": Knob("str", one_of=tuple(STREAMS)),
    "chunk": Knob("int", null=True, or_word="auto", at_least=1),
    "memory_format": Knob("str", one_of=tuple(MEMORY_FORMATS)),
    "deterministic": _switch,
    "verify": Knob("str", null=True, one_of=("first", "raise", "warn")),
    "sync_batchnorm": _switch,
    "zero_init_residual": _switch,
    # data
    "data_folder": Knob("str", several=True),
    "speaker_from": Knob(
        "any", null=True, at_least=1, reads=_is_pattern,
        form="a level, or a regular expression with one group at most (or the groups "
        "speaker and session)",
    ),
    "sample_rate": Knob(
        "int", at_least=4000, at_most=16000,
        why="It is in Hz, and SpeechBrain's Fbank takes windows of at most 400 "
        "samples, 25 ms of 16000 Hz.",
    ),
    "resample": _switch,
    "channel": Knob("int", null=True, or_word="mix", at_least=0),
    "train_list": _file,
    "trial_lists": Knob("list of str"),
    "trials_folder": Knob("str", several=True),
    "bad_files": Knob("str", one_of=("refuse", "drop")),
    "outside_files": _switch,
    "short": Knob("str", one_of=("repeat", "pad", "drop")),
    "check_audio": _switch,
    "max_unread": _count_or_none,
    "valid_speakers": _count_or_none,
    "valid_trials": _file,
    "chunk_samples": _count,
    "sentence_len": Knob("float", above=0, at_most=3600, why="It is in seconds."),
    "out_n_neurons": _count,
    # augmentation
    "speeds": Knob("list of float", above=0, at_most=10),
    "augment_prob": Knob("float", at_least=0, at_most=1),
    "noise_folder": _file,
    "rir_folder": _file,
    # objective
    "loss": Knob("str", one_of=tuple(HEAD_OF)),
    "margin": Knob("float", at_least=0, below=math.pi),
    "scale": Knob("float", above=0),
    "margin_start_epoch": dataclasses.replace(_count_or_none, null=True),
    "margin_end_epoch": dataclasses.replace(_count_or_none, null=True),
    # optimizer
    "optimizer_name": Knob("str", null=True, one_of=tuple(OPTIMIZERS)),
    "optimizer_bits": Knob("int", one_of=(8, 32)),
    "optimizer_block": Knob("int", one_of=(256, 2048)),
    "optimizer_pack_small": _switch,
    "optimizer_backend": Knob("str", one_of=("native", "bitsandbytes")),
    "lr": _rate,
    "final_lr": _rate,
    "encoder_lr": _rate,
    "weight_decay": Knob("float", null=True, at_least=0),
    "nesterov": Knob("bool", null=True),
    "max_grad_norm": Knob(
        "float", above=0,
        why="A negative one would reverse every gradient; a large one, such as "
        "1.0e+9, clips nothing.",
    ),
    "batch_size": _count,
    "number_of_epochs": _count_or_null,
    "warmup_epochs": Knob("float", null=True, at_least=0),
    "steps_per_epoch": _count_or_null,
    "average_checkpoints": _count_or_null,
    # scoring
    "cohort_top_n": Knob(
        "int", at_least=2, why="AS-Norm divides by the deviation of their scores.",
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
