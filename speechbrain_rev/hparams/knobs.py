"""What each knob of the training may be, by itself.

The table speaks of what would fail, or train something else than was asked for: later,
and without a word about the file that said it. To add a knob to ``hparams/train.yaml``,
add its row. What has to hold between several is in ``rules``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.hparams.document import nearest
from speechbrain_rev.modes import Mode
from speechbrain_rev.sizes import parse_size

WORDS = {
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
        A key of ``WORDS``. What follows is meant of each member of a list.
    null : bool
        Whether null means something.
    at_least, above, at_most, below : float
        Bounds. Numbers are finite and integers fit 64 bits in any case; a text is
        never empty.
    one_of : tuple of str or int
        All there is, if that can be listed.
    or_word : str
        A text that it may be as well.
    length : int or None
        Of a list.
    reads : callable or None
        Tells whether a text has the form that is asked for.
    form : str
        That form, in words.
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
    length: int | None = None
    reads: Callable[[str], bool] | None = None
    form: str = ""
    why: str = ""

    def has_kind(self, value: object) -> bool:
        """Tell whether a plain value is of the knob's type.

        Examples
        --------
        >>> Knob("float").has_kind(1), Knob("int").has_kind(True)
        (True, False)
        """
        if value is None:
            return self.null
        if self._is_word(value):
            return True
        if self.kind.startswith("list of "):
            member = Knob(self.kind.removeprefix("list of "))
            return isinstance(value, list) and all(map(member.has_kind, value))
        types = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}
        return type(value) in types[self.kind]

    def allows(self, value: object) -> bool:
        """Tell whether a plain value of the knob's type is in range.

        Examples
        --------
        >>> Knob("float", above=0).allows(0.1), Knob("float").allows(math.inf)
        (True, False)
        """
        if isinstance(value, list):
            length = len(value) if self.length is None else self.length
            return len(value) == length and all(map(self.allows, value))
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
        """Say what the knob may be.

        Examples
        --------
        >>> Knob("float", at_least=0, below=1).takes()
        'a number of at least 0 and below 1'
        >>> Knob("list of int", null=True, length=4, at_least=1).takes()
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
            if self.length is not None:
                words = words.replace("list of", f"list of {self.length}")
            words += self._bounds()
        words += f", or {self.or_word}" if self.or_word else ""
        return f"{words}, or null" if self.null else words

    def advice(self, value: object = None) -> str:
        """Say why a value is refused, or which one it may have meant.

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
        >>> Knob("str", one_of=("sgd", "adam")).advice("adm")
        ' Did you mean adam?'
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
            else:
                # A short list is in the sentence before.
                words += nearest(value, names, far=len(names) > MOST_IN_A_SENTENCE)
        if len(names) > MOST_IN_A_SENTENCE:
            words += f" All are: {', '.join(names)}."
        if isinstance(value, float) and not math.isfinite(value):
            words += " It must be finite."
        if isinstance(value, int) and abs(value) >= 2**63:
            words += " It must fit 64 bits."
        return words

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


_COUNT = Knob("int", at_least=1)
_FILE = Knob("str", null=True)
_FAMILY_RATE = Knob("float", null=True, above=0)

# Names that other packages know are repeated here, since this one imports none of
# them; the tests compare them.
KNOBS = {
    # run
    "seed": Knob(
        "int",
        at_least=0,
        at_most=2**32 - 1,
        why="For another one, SpeechBrain would seed with 0.",
    ),
    "output_folder": Knob("str"),
    "pretrained_run": _FILE,
    "precision": Knob("str", one_of=("fp32", "bf16", "fp16")),
    "num_workers": Knob("int", at_least=0),
    "ckpt_interval_steps": Knob("int", at_least=0),
    "keep_checkpoints": _COUNT,
    "logger": Knob("str", null=True, one_of=("tensorboard", "wandb")),
    "wandb_project": Knob("str", null=True),
    # encoder
    "arch": Knob("str", one_of=tuple(ARCHITECTURES)),
    "widths": Knob("list of int", null=True, length=4, at_least=1, at_most=2**14),
    "blocks": Knob("list of int", null=True, length=4, at_least=0, at_most=10_000),
    "n_mels": Knob(
        "int", at_least=8, at_most=512, why="The encoders halve them three times."
    ),
    "embedding_dim": Knob("int", at_least=1, at_most=2**16),
    "mode": Knob("str", null=True, one_of=tuple(mode.value for mode in Mode)),
    "convolution_error": Knob("float", above=0, at_most=1),
    "normalisation_error": Knob("float", above=0, at_most=1),
    "memory_budget": Knob(
        "str",
        null=True,
        reads=lambda text: text == "auto" or parse_size(text) is not None,
        form="a size such as 11GB, 10.5GiB or 800MB, or auto",
        why="11GB is 11 GiB (2**30 bytes each), as a GPU sold as 11 GB has.",
    ),
    "max_gradient_error": Knob("float", null=True, above=0, at_most=1),
    "plan_file": _FILE,
    "streams": Knob("str", one_of=("exact", "float")),
    "chunk": Knob("int", null=True, or_word="auto", at_least=1),
    "verify": Knob("str", null=True, one_of=("warn", "raise")),
    "sync_batchnorm": Knob("bool"),
    "zero_init_residual": Knob("bool"),
    # data
    "data_folder": Knob("str"),
    "sample_rate": Knob(
        "int",
        at_least=4000,
        at_most=16000,
        why="It is in Hz, and SpeechBrain's Fbank takes windows of at most 400 "
        "samples, 25 ms of 16000 Hz.",
    ),
    "train_list": _FILE,
    "trial_lists": Knob("list of str"),
    "trials_folder": Knob("str"),
    "bad_files": Knob("str", one_of=("refuse", "drop")),
    "any_extension": Knob("bool"),
    "outside_files": Knob("bool"),
    "check_audio": Knob("bool"),
    "max_unread": Knob("int", at_least=0),
    "valid_speakers": Knob("int", at_least=0),
    "valid_trials": _FILE,
    "chunk_samples": _COUNT,
    "sentence_len": Knob("float", above=0, at_most=3600, why="It is in seconds."),
    "out_n_neurons": _COUNT,
    # augmentation
    "speeds": Knob("list of float", above=0, at_most=10),
    "augment_prob": Knob("float", at_least=0, at_most=1),
    "noise_folder": _FILE,
    "rir_folder": _FILE,
    "snr_low": Knob("float"),
    "snr_high": Knob("float"),
    # objective
    "margin": Knob("float", at_least=0, below=math.pi),
    "scale": Knob("float", above=0),
    "margin_start_epoch": Knob("int", null=True, at_least=0),
    "margin_end_epoch": Knob("int", null=True, at_least=0),
    # optimizer
    "optimizer_name": Knob("str", null=True, one_of=("sgd", "adam", "adamw")),
    "optimizer_bits": Knob("int", one_of=(8, 32)),
    "lr": _FAMILY_RATE,
    "final_lr": _FAMILY_RATE,
    "weight_decay": Knob("float", null=True, at_least=0),
    "momentum": Knob("float", at_least=0, below=1),
    "max_grad_norm": Knob(
        "float",
        above=0,
        why="A negative one would reverse every gradient; a large one, such as "
        "1.0e+9, clips nothing.",
    ),
    "batch_size": _COUNT,
    "number_of_epochs": Knob("int", null=True, at_least=1),
    "warmup_epochs": Knob("float", at_least=0),
    "steps_per_epoch": Knob("int", null=True, at_least=1),
    "average_checkpoints": Knob("int", null=True, at_least=1),
    # scoring
    "cohort_top_n": Knob(
        "int", at_least=2, why="AS-Norm divides by the deviation of their scores."
    ),
}
