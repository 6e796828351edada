"""The encoders side by side: selected, sorted, with what they need and what fits."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.models.card import Training
from speechbrain_rev.models.counts import counted_peaks

MODES = ("store", "recompute", "reconstruct")


@dataclass(frozen=True)
class Model:
    """One encoder and what training it takes.

    Attributes
    ----------
    row : Architecture
        The encoder, with what was published about it.
    training : Training
        Batch, length and card that are asked about.
    """

    row: Architecture
    training: Training

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the encoder has."""
        return MODES if self.row.reversible else MODES[:2]

    def bytes_per_utterance(self, mode: str, frames: int) -> int | None:
        """Bytes that one more utterance takes; None if there is no such mode."""
        peak = counted_peaks().get((self.row.name, mode, frames))
        return None if peak is None else peak.bytes_per_utterance

    def step_peak_bytes(self, mode: str) -> int:
        """Peak of the encoder's training step, counted, at the batch asked about."""
        return counted_peaks()[self.row.name, mode, self.training.frames](
            self.training.batch
        )

    def needed_bytes(self, mode: str) -> int:
        """All that training needs of a card at the batch asked about."""
        needed = self.training.needed_bytes(self.row, mode, self.training.batch)
        return sum(needed.values())

    def largest_batch(self, mode: str) -> int | None:
        """Largest batch on the card in a mode; None if there is no such mode."""
        if mode not in self.modes:
            return None
        return self.training.largest_batch(self.row, mode)

    def fits(self, mode: str) -> bool:
        """Whether the batch asked about fits the card."""
        return self.training.largest_batch(self.row, mode) >= self.training.batch


def _per_utterance(mode: str) -> Callable[[Model], float | None]:
    return lambda model: model.bytes_per_utterance(mode, model.training.frames)


#: By what the table can be sorted.
SORT_KEYS: dict[str, Callable[[Model], float | None]] = {
    "layers": lambda model: model.row.layers,
    "parameters": lambda model: model.row.parameters,
    "vox1-o": lambda model: model.row.vox1_o_eer,
    "vox1-e": lambda model: model.row.vox1_e_eer,
    "vox1-h": lambda model: model.row.vox1_h_eer,
    **{mode: _per_utterance(mode) for mode in MODES},
    "memory": lambda model: _per_utterance(model.row.default_mode)(model),
    "batch": lambda model: model.largest_batch(model.row.default_mode),
}


def select(
    training: Training,
    *,
    names: Sequence[str] = (),
    families: Sequence[str] = (),
    types: Sequence[str] = (),
    fitting: bool = False,
    sort: str | None = None,
    reverse: bool = False,
) -> list[Model]:
    """Choose encoders and put them in order.

    Parameters
    ----------
    training : Training
        Batch, length and card that are asked about.
    names, families, types : sequence of str
        Which encoders; none named means all.
    fitting : bool
        Only those whose batch fits the card in their default mode.
    sort : str or None
        One of ``SORT_KEYS``; None for the order of the published tables.
    reverse : bool
        Largest first, or the order of the tables from its end. Encoders without a
        figure come last either way.

    Returns
    -------
    list of Model
        The encoders.

    Raises
    ------
    ValueError
        If there is no such name, family, type or key, if a card is needed and none was
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
    if training.card_bytes is None and (fitting or sort == "batch"):
        option = "--fits" if fitting else "--sort=batch"
        raise ValueError(f"{option} needs a card: add, for instance, --card=11GB.")
    rows = [architecture(n) for n in names] if names else ARCHITECTURES.values()
    models = [
        Model(row, training)
        for row in dict.fromkeys(rows)
        if (not families or row.family in families) and (not types or row.type in types)
    ]
    if fitting:
        models = [model for model in models if model.fits(model.row.default_mode)]
    if not models:
        raise ValueError(
            "No encoder is left. Leave out a name, --family, --type or --fits, or lower "
            f"--batch ({training.batch})."
        )
    return _sorted(models, sort, reverse)


def _sorted(models: list[Model], sort: str | None, reverse: bool) -> list[Model]:
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
        With all names, and the nearest one.

    Examples
    --------
    >>> check_names("--mode", ["stored"], ["store", "recompute"])
    Traceback (most recent call last):
    ValueError: --mode takes store, recompute, not stored. Did you mean store?
    """
    names = list(dict.fromkeys(allowed))
    for name in given:
        if name in names:
            continue
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(f"{option} takes {', '.join(names)}, not {name}.{hint}")
