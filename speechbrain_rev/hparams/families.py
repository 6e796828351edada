"""What an encoder's family trains with: the values of null, and a word about others."""

from __future__ import annotations

import dataclasses

from speechbrain_rev.architectures import (
    TRAINING_DEFAULTS,
    TrainingDefaults,
    architecture,
)
from speechbrain_rev.hparams.settings import Settings

# What goes with the optimizer rather than with the family, where the two are not the
# usual pair.
_OPTIMIZER_KNOBS = ("lr", "final_lr", "weight_decay")


class OptimizerWarning(UserWarning):
    """An encoder is to be trained with another optimizer than its family's."""


def fill_family_defaults(settings: Settings) -> None:
    """Replace null in the training knobs by what the architecture's family uses.

    Raises
    ------
    ValueError
        If an optimizer without published settings lacks some of its own.
    """
    arch, optimizer = settings.plain("arch"), settings.plain("optimizer_name")
    if arch is None:
        return
    family = architecture(str(arch)).training
    null = [
        field.name
        for field in dataclasses.fields(TrainingDefaults)
        if settings.is_null(field.name)
    ]
    values = dataclasses.asdict(family)
    if "optimizer_name" in settings.names() and "optimizer_name" not in null:
        for knob in _OPTIMIZER_KNOBS:
            del values[knob]
        if optimizer is not None:
            values.update(_optimizer_defaults(settings, str(optimizer), family, null))
    source = f"default of {arch}"
    settings.give({key: values[key] for key in null if key in values}, source)


def _optimizer_defaults(
    settings: Settings, name: str, family: TrainingDefaults, null: list[str]
) -> dict[str, object]:
    """Return rates and decay that go with an optimizer that was named."""
    for defaults in (family, *TRAINING_DEFAULTS.values()):
        if defaults.optimizer_name == name:
            return {knob: getattr(defaults, knob) for knob in _OPTIMIZER_KNOBS}
    missing = [knob for knob in _OPTIMIZER_KNOBS if knob in null]
    if missing:
        raise ValueError(
            f"{settings.where('optimizer_name')}: no settings are published for "
            f"optimizer_name {name} (only for sgd and adamw): give "
            f"{', '.join(missing)} too."
        )
    return {}


def other_optimizer(settings: Settings) -> str:
    """Say that the optimizer is not the one of the encoder's family, if it is not.

    Returns
    -------
    str
        A warning; nothing where the two are the published pair.
    """
    arch, optimizer = settings.plain("arch"), settings.plain("optimizer_name")
    if arch is None or optimizer is None:
        return ""
    published = architecture(str(arch)).optimizer_name
    if optimizer == published:
        return ""
    return (
        f"Not the family's optimizer: {arch} is to be trained with {optimizer} "
        f"({settings.where('optimizer_name')}), where the paper trains its family "
        f"with {published}; published error rates say nothing about this. "
        "optimizer_name: null takes the family's. To silence this, set "
        'PYTHONWARNINGS="ignore:Not the family".'
    )
