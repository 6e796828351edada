"""How large the study is: of reduced widths for a CPU, or as published for a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Size:
    """What all trainings of a study have in common besides the settings of minivox.yaml.

    Attributes
    ----------
    device : str
        Where it is trained.
    seeds : sequence of int
        Each condition is trained with each.
    settings : mapping
        Of the recipe.
    widths : mapping of str to list of int
        Channels of the four stages, by encoder; as published where there are none.
    """

    device: str
    seeds: Sequence[int]
    settings: Mapping[str, Any]
    widths: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def settings_of(self, arch: str) -> dict[str, Any]:
        """Give the settings of an encoder."""
        if arch not in self.widths:
            return dict(self.settings)
        return {**self.settings, "widths": list(self.widths[arch])}


#: Of each training speaker, for its mean in the cohort of AS-Norm: half the time of all.
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
    # as many parameters, within 2 percent.
    "small": Size(
        device="cpu",
        seeds=(1, 2, 3, 4, 5),
        settings={
            "n_mels": 24,
            "embedding_dim": 128,
            **_COMMON,
            "number_of_epochs": 30,
            "warmup_epochs": 0.5,
            "average_checkpoints": 3,
            # Of runs that are probed, all.
            "keep_checkpoints": 3,
        },
        widths={
            "resnet34": (8, 16, 32, 64),
            "revnet46": (12, 24, 48, 74),
            "revnet57": (12, 24, 52, 80),
            "df_resnet56": (8, 16, 32, 64),
            "df_revnet66": (12, 24, 48, 100),
            "df_revnet89": (12, 24, 48, 96),
        },
    ),
    "full": Size(
        device="cuda",
        seeds=(1, 2, 3),
        settings={
            **_COMMON,
            "num_workers": 4,
            "batch_size": 64,
            # A fourth of 1e-3 for a batch of 8, as widths are four times as large, times
            # the root of 8, as batches are; nobody has searched.
            "lr": 7.0e-4,
            "final_lr": 7.0e-5,
            "number_of_epochs": 60,
            "warmup_epochs": 2.0,
            "average_checkpoints": 5,
            "keep_checkpoints": 5,
        },
    ),
}
