"""What the study trains, and what it compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Vanilla encoders, each with reversible ones of as many parameters.
PAIRS = {
    "resnet34": ("revnet46", "revnet57"),
    "df_resnet56": ("df_revnet66", "df_revnet89"),
}
#: The encoder that is trained in every memory mode.
IN_ALL_MODES = "revnet46"


@dataclass(frozen=True)
class Condition:
    """One way to train one encoder.

    Attributes
    ----------
    name : str
        As the report has it.
    arch : str
        The encoder.
    settings : mapping
        Of the recipe, on top of those that all conditions share.
    half_memory : bool
        Whether blocks are planned to take half the memory that storing takes.
    part_of_epochs : float
        Of those that all others are trained for.
    """

    name: str
    arch: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    half_memory: bool = False
    part_of_epochs: float = 1.0

    @property
    def folder(self) -> str:
        """The name as a part of a path."""
        return self.name.replace(",", "").replace(" ", "_")


@dataclass(frozen=True)
class Comparison:
    """Two conditions whose error rates are compared, seed by seed.

    Attributes
    ----------
    question : str
        What is asked.
    candidate, reference : str
        Names of conditions.
    identical : bool
        Whether both must end with the same weights, to the bit.
    control : bool
        Whether the candidate is known to be worse: a study that does not see it could not
        see as much of another one either.
    """

    question: str
    candidate: str
    reference: str
    identical: bool = False
    control: bool = False


def _reversible() -> list[str]:
    return [name for names in PAIRS.values() for name in names]


def references() -> list[Condition]:
    """Give the vanilla encoders, which are trained first: margins are made of them."""
    return [Condition(name, name) for name in PAIRS]


def conditions() -> list[Condition]:
    """Give all that is trained, references first."""
    stored = {"mode": "store"}
    modes = {
        "reconstructed": {"mode": "reconstruct"},
        "float streams": {"mode": "reconstruct", "streams": "float"},
        "bf16": {"mode": "reconstruct", "precision": "bf16"},
        "compressed": {"mode": "compress"},
    }
    return [
        *references(),
        *(Condition(name, name, stored) for name in _reversible()),
        *(
            Condition(f"{name}, 8 bit", name, {**stored, "optimizer_bits": 8})
            for name in _reversible()
        ),
        *(
            Condition(f"{IN_ALL_MODES}, {words}", IN_ALL_MODES, settings)
            for words, settings in modes.items()
        ),
        Condition(
            f"{IN_ALL_MODES}, plan at half the memory", IN_ALL_MODES, half_memory=True
        ),
        Condition(
            f"{IN_ALL_MODES}, half the epochs", IN_ALL_MODES, stored, part_of_epochs=0.5
        ),
    ]


def comparisons() -> list[Comparison]:
    """Give what is asked of the conditions."""
    found = [
        Comparison(f"Is {name} as accurate as {vanilla}?", name, vanilla)
        for vanilla, names in PAIRS.items()
        for name in names
    ]
    found += [
        Comparison(f"Is {name} as accurate at 8 bit as at 32?", f"{name}, 8 bit", name)
        for name in _reversible()
    ]
    # What two comparisons allow may add up.
    found += [
        Comparison(
            f"Is {name} at 8 bit as accurate as {vanilla} at 32?",
            f"{name}, 8 bit",
            vanilla,
        )
        for vanilla, names in PAIRS.items()
        for name in names
    ]
    lossless = ("reconstructed", "plan at half the memory")
    lossy = ("float streams", "bf16", "compressed")
    found += [
        Comparison(
            f"Does it end with the weights of stored activations, {words}?",
            f"{IN_ALL_MODES}, {words}",
            IN_ALL_MODES,
            identical=True,
        )
        for words in lossless
    ]
    found += [
        Comparison(
            f"Is it as accurate with {words}?", f"{IN_ALL_MODES}, {words}", IN_ALL_MODES
        )
        for words in lossy
    ]
    return [
        *found,
        Comparison(
            "Is it seen what half of the epochs cost?",
            f"{IN_ALL_MODES}, half the epochs",
            IN_ALL_MODES,
            control=True,
        ),
    ]
