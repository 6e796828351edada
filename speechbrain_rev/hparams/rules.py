"""Rules between training knobs, each in its own range.

Like the ranges, rules refuse values that would fail late, or train something else than
was asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml.comments import CommentedMap

from speechbrain_rev.architectures import architecture
from speechbrain_rev.heads import POOLINGS
from speechbrain_rev.hparams.document import KeyPath, dump, entries
from speechbrain_rev.modes import Mode
from speechbrain_rev.optimizers import OPTIMIZERS, form_of


@dataclass(frozen=True)
class KnobRule:
    """A condition on several knobs.

    Attributes
    ----------
    knobs : tuple of str
        Names. The rule holds while one is missing, null or a placeholder.
    holds : callable
        Function of their plain values, each in its own range.
    words : str
        What is wrong with values that break it, and what to do.
    """

    knobs: tuple[str, ...]
    holds: Callable[..., bool]
    words: str

    def broken(self, values: Mapping[str, object]) -> bool:
        """Return whether plain values break the rule.

        Examples
        --------
        >>> rule = KnobRule(("final_lr", "lr"), lambda last, first: last <= first, "")
        >>> rule.broken({"final_lr": 0.5, "lr": 0.1})
        True
        """
        given = [values.get(name) for name in self.knobs]
        return None not in given and not self.holds(*given)


def _one_each(arch: str, numbers: list[int]) -> bool:
    return len(numbers) == len(architecture(arch).strides)


def _is_honoured(option: str, value: Any, name: str, bits: int, backend: str) -> bool:
    row = OPTIMIZERS[name]
    known = row.options.get(option)
    return known is not None and known.is_honoured(value, form_of(bits, backend))


_OPTIMIZER_RULES = tuple(
    KnobRule(
        (option, "optimizer_name", "optimizer_bits", "optimizer_backend"),
        functools.partial(_is_honoured, option),
        f"this optimizer has no such {option} in this form. Leave it out, or change one of "
        f"the others.",
    )
    for option in ("nesterov", "weight_decay")
)
RULES = (
    KnobRule(
        ("arch", "mode"),
        lambda arch, mode: (
            not Mode(mode).spec.needs_inverse or architecture(arch).reversible
        ),
        "this encoder is not reversible, nothing can be reconstructed. Give a mode that "
        "needs no inverse: store, selective or recompute.",
    ),
    KnobRule(
        ("arch", "chunk"),
        lambda arch, chunk: chunk == "auto" or architecture(arch).reversible,
        "this encoder is not reversible and works on all channels at once. Give auto or "
        "null.",
    ),
    KnobRule(
        ("arch", "n_mels"),
        lambda arch, n_mels: architecture(arch).geometry(n_mels).fits,
        "the stages' strides divide the frequency axis. Give at least their product: 8, or 16 "
        "in a Gemini-DF-ResNet; in an encoder of type II, a multiple of it.",
    ),
    KnobRule(
        ("arch", "widths"),
        lambda arch, widths: (
            _one_each(arch, widths)
            and all(width % architecture(arch).width_step == 0 for width in widths)
        ),
        "each stage has its channels. Give one number for each; in an encoder of type I "
        "multiples of 2, in one of type II multiples of 4.",
    ),
    KnobRule(
        ("arch", "blocks"),
        lambda arch, blocks: (
            _one_each(arch, blocks)
            and (architecture(arch).reversible or min(blocks) > 0)
        ),
        "each stage has its blocks. Give one number for each; in a vanilla encoder, of at "
        "least 1.",
    ),
    KnobRule(
        ("pooling", "pooling_variance"),
        lambda pooling, variance: variance in POOLINGS[pooling].variances,
        "this pooling has no such estimate. Give population.",
    ),
    KnobRule(
        ("speeds",),
        lambda speeds: (
            1.0 in speeds
            and len(set(speeds)) == len(speeds)
            and all(math.isclose(round(100 * s) / 100, s) for s in speeds)
        ),
        "give different speeds of at most two decimals, 1.0 among them.",
    ),
    KnobRule(
        ("valid_speakers",),
        lambda count: count != 1,
        "one speaker gives no impostor trials. Give 0 (no validation) or at least 2.",
    ),
    KnobRule(
        ("sample_rate", "chunk_samples"),
        lambda rate, samples: samples >= 0.025 * rate,
        "that is less than one window of 25 ms. Give more samples.",
    ),
    KnobRule(
        ("sentence_len", "sample_rate", "chunk_samples", "speeds"),
        lambda seconds, rate, samples, speeds: (
            round(seconds * rate) >= math.ceil(samples * max(speeds))
        ),
        "that is too short for the fastest speed. Give at least chunk_samples * "
        "largest speed / sample_rate seconds.",
    ),
    KnobRule(
        ("margin_start_epoch", "margin_end_epoch"),
        lambda start, end: start <= end,
        "the margin stops rising before it starts. Give a later end, or equal epochs "
        "for a fixed margin.",
    ),
    KnobRule(
        ("lr", "final_lr"),
        lambda lr, final_lr: final_lr <= lr,
        "the rate falls during training. Give a smaller final_lr too.",
    ),
    KnobRule(
        ("warmup_epochs", "number_of_epochs"),
        lambda warmup, epochs: warmup < epochs,
        "the warm-up must end before training does. For a short run, give 0.0.",
    ),
    KnobRule(
        ("freeze_epochs", "number_of_epochs"),
        lambda frozen, epochs: frozen < epochs,
        "the encoder would stay as it is. Give fewer frozen epochs.",
    ),
    *_OPTIMIZER_RULES,
    KnobRule(
        ("optimizer_backend", "optimizer_block"),
        lambda backend, block: backend == "native" or block == 256,
        "bitsandbytes has blocks of 256 values. Give 256, or native.",
    ),
    KnobRule(
        ("optimizer_backend", "optimizer_pack_small"),
        lambda backend, pack: backend == "native" or not pack,
        "bitsandbytes keeps small tensors at 32 bits. Give false, or native.",
    ),
)

# A run's folder is read without building what its YAML describes, so window, hop and
# normalisation are not looked up there: other ones would embed wrongly in silence.
_FEATURES = {
    "compute_features": "!apply:speechbrain_rev.lobes.features.build_features",
    "compute_features.kind": "!ref <features>",
    "compute_features.sample_rate": "!ref <sample_rate>",
    "compute_features.n_mels": "!ref <n_mels>",
    "mean_var_norm": "!new:speechbrain.processing.features.InputNormalization",
    "mean_var_norm.norm_type": "sentence",
    "mean_var_norm.std_norm": "false",
    "modules.compute_features": "!ref <compute_features>",
    "modules.mean_var_norm": "!ref <mean_var_norm>",
}
# Files without the setting features, as those of earlier runs, name the class.
_FEATURES_OF_FBANK = {
    "compute_features": "!new:speechbrain.lobes.features.Fbank",
    "compute_features.win_length": "25",
    "compute_features.hop_length": "10",
}


def refuse_other_features(root: CommentedMap, places: Mapping[KeyPath, str]) -> None:
    """Refuse settings whose features are not those that embedding rebuilds."""
    features = _FEATURES if "features" in root else {**_FEATURES, **_FEATURES_OF_FBANK}
    for path, value, _ in entries(root):
        dotted = ".".join(path)
        if not dotted.startswith(tuple(features)):
            continue
        if (given := dump(value)) != (expected := features.get(dotted, "left out")):
            raise ValueError(
                f"{places[path]}: {dotted} is {given}, but must be {expected}: embedding a "
                "run builds its features anew from features, n_mels and sample_rate "
                "alone, and would not see this change. Change those only."
            )
