"""What the study trains and compares, and how large it is: a row a condition, a row a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What a comparison claims of a candidate: rates within the margin, equal weights to the
#: bit, or, of the control, a higher rate.
NOT_WORSE, EQUAL, WORSE = "not worse", "equal", "worse"


@dataclass(frozen=True)
class Condition:
    """One way to train one encoder.

    Attributes
    ----------
    name : str
        The encoder and, behind a comma, what is special, as the tables have it.
    settings : mapping
        Settings of the recipe that only this condition has.
    references : tuple of str
        The conditions that it is compared with; none for a reference of all.
    claim : str
        What is claimed of it against each of them.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    references: tuple[str, ...] = ()
    claim: str = NOT_WORSE

    @property
    def arch(self) -> str:
        """The encoder."""
        return self.name.partition(",")[0]

    @property
    def folder(self) -> str:
        """The name as a part of a path."""
        return self.name.replace(",", "").replace(" ", "_")


_STORE = {"mode": "store"}
_8_BIT = {**_STORE, "optimizer_bits": 8}
_RECONSTRUCT = {"mode": "reconstruct"}
_FLOAT = {**_RECONSTRUCT, "streams": "float"}
_BF16 = {**_RECONSTRUCT, "precision": "bf16"}
_STORED = ("revnet46",)
PLANNED, CONTROL = "revnet46, plan at half the memory", "revnet46, half the epochs"

CONDITIONS = (
    Condition("resnet34"),
    Condition("df_resnet56"),
    Condition("revnet46", _STORE, ("resnet34",)),
    Condition("revnet57", _STORE, ("resnet34",)),
    Condition("df_revnet66", _STORE, ("df_resnet56",)),
    Condition("df_revnet89", _STORE, ("df_resnet56",)),
    Condition("revnet46, 8 bit", _8_BIT, ("revnet46", "resnet34")),
    Condition("revnet57, 8 bit", _8_BIT, ("revnet57", "resnet34")),
    Condition("df_revnet66, 8 bit", _8_BIT, ("df_revnet66", "df_resnet56")),
    Condition("df_revnet89, 8 bit", _8_BIT, ("df_revnet89", "df_resnet56")),
    Condition("revnet46, reconstructed", _RECONSTRUCT, _STORED, EQUAL),
    Condition("revnet46, float streams", _FLOAT, _STORED),
    Condition("revnet46, bf16", _BF16, _STORED),
    Condition("revnet46, compressed", {"mode": "compress"}, _STORED),
    # Their memory and epochs depend on the size.
    Condition(PLANNED, {}, _STORED, EQUAL),
    Condition(CONTROL, _STORE, _STORED, WORSE),
)


@dataclass(frozen=True)
class Size:
    """What all runs of a study share besides ``hparams/minivox.yaml``.

    Attributes
    ----------
    device : str
        Where it is trained.
    seeds : sequence of int
        Each condition is trained with each.
    settings : mapping
        Settings of the recipe.
    widths : mapping of str to sequence of int
        Channels of the four stages, by encoder; as published where there are none.
    of_conditions : mapping of str to mapping
        Settings of a condition that depend on the size.
    minutes : float or None
        How long one run takes, about; None where nobody knows.
    """

    device: str
    seeds: Sequence[int]
    settings: Mapping[str, Any]
    widths: Mapping[str, Sequence[int]]
    of_conditions: Mapping[str, Mapping[str, Any]]
    minutes: float | None


#: Of each training speaker, for its mean in the cohort of AS-Norm.
COHORT_UTTERANCES = 3
_COMMON = {
    "optimizer_bits": 32,
    "valid_speakers": 0,
    "num_workers": 0,
    "ckpt_interval_steps": 0,
    "cohort_top_n": 40,
    # All channels at once: with "auto" a plan chooses, and with it the order of sums.
    "chunk": None,
}
SIZES = {
    # A fourth of the published widths; the last ones so that the encoders of a pair have
    # as many parameters, within 2 percent. Minutes are the mean of the committed study.
    "small": Size(
        device="cpu",
        seeds=(1, 2, 3, 4, 5),
        settings={
            **_COMMON,
            "n_mels": 24,
            "embedding_dim": 128,
            "number_of_epochs": 30,
            "warmup_epochs": 0.5,
            "average_checkpoints": 3,
        },
        widths={
            "resnet34": (8, 16, 32, 64),
            "revnet46": (12, 24, 48, 74),
            "revnet57": (12, 24, 52, 80),
            "df_resnet56": (8, 16, 32, 64),
            "df_revnet66": (12, 24, 48, 100),
            "df_revnet89": (12, 24, 48, 96),
        },
        of_conditions={
            # Half of what storing its activations takes; half of all is less than any plan.
            PLANNED: {"memory_budget": "16.618524MB"},
            CONTROL: {"number_of_epochs": 15},
        },
        minutes=11.0,
    ),
    # As published, on a GPU; nobody has run it, nor tuned its rate.
    "full": Size(
        device="cuda",
        seeds=(1, 2, 3),
        settings={
            **_COMMON,
            "num_workers": 4,
            "batch_size": 64,
            # A fourth of 1e-3 for a batch of 8, as widths are four times as large, times
            # the root of 8, as batches are.
            "lr": 7.0e-4,
            "final_lr": 7.0e-5,
            "number_of_epochs": 60,
            "warmup_epochs": 2.0,
            "average_checkpoints": 5,
        },
        widths={},
        of_conditions={
            PLANNED: {"memory_budget": "2.5GB"},
            CONTROL: {"number_of_epochs": 30},
        },
        minutes=None,
    ),
}
