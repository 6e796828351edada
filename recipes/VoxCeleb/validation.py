"""Who is held out for validation, and which of their utterances are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from speechbrain_rev.data import Corpus, generator
from speechbrain_rev.data.corpus import find_files
from speechbrain_rev.lists import joined_line
from speechbrain_rev.scoring import read_trials

if TYPE_CHECKING:
    from data_settings import Settings

# Of each held-out speaker; a validation after each epoch must stay short.
VALID_UTTERANCES = 10
IMPOSTORS_PER_TARGET = 4
# Two who are held out, for impostor trials, and two to train on.
FEWEST_SPEAKERS = 4


def held_out_speakers(
    by_speaker: dict[str, list[str]], corpus: Corpus, settings: Settings
) -> dict[str, list[str]]:
    """Choose speakers who are held out for validation, with all they said."""
    if settings.valid_trials is not None or not settings.valid_speakers:
        return {}
    speakers = sorted(by_speaker)
    if len(speakers) < FEWEST_SPEAKERS:
        raise ValueError(_too_few(speakers, corpus, settings))
    if not 2 <= settings.valid_speakers <= len(speakers) - 2:
        raise ValueError(
            f"valid_speakers is {settings.valid_speakers}, of {len(speakers)} speakers. "
            f"Give 0 (no validation) or 2 to {len(speakers) - 2}."
        )
    draws = generator("held out", settings.seed)
    order = torch.randperm(len(speakers), generator=draws).tolist()
    chosen = sorted(speakers[i] for i in order[: settings.valid_speakers])
    return {speaker: by_speaker[speaker] for speaker in chosen}


def _too_few(speakers: Sequence[str], corpus: Corpus, settings: Settings) -> str:
    """Say that nobody can be held out, and why there may be so few speakers."""
    named = f" ({', '.join(speakers)})" if speakers else ""
    beside = ", beside those of trial lists" if settings.trial_lists else ""
    level = ""
    if settings.train_list is None:
        level = f"Is data_folder the right level? {corpus.layout} "
    return (
        f"valid_speakers is {settings.valid_speakers}, and {len(speakers)} speaker(s) were "
        f"found in {settings.train_list or settings.data_folder}{named}{beside}: too few "
        "to hold any out, as validation takes 2 and training 2 others. "
        f"{level}valid_speakers 0 means no validation."
    )


def validation_lines(
    held_out: dict[str, list[str]], corpus: Corpus, settings: Settings
) -> list[str]:
    """Make the lines of the validation list: the user's own, or of held-out speakers."""
    if settings.valid_trials is not None:
        return _own_lines(settings.valid_trials, settings)
    if not held_out:
        return []
    draws = generator("valid trials", settings.seed)
    names = {s: _some(n, VALID_UTTERANCES, draws) for s, n in held_out.items()}
    targets = [pair for n in names.values() for pair in _target_pairs(n, corpus)]
    everyone = [(speaker, name) for speaker, n in names.items() for name in n]
    impostors = [
        (a, b) for (one, a), (other, b) in combinations(everyone, 2) if one != other
    ]
    impostors = _some(impostors, IMPOSTORS_PER_TARGET * len(targets), draws)
    lines = [joined_line("1", a, b) for a, b in targets]
    return lines + [joined_line("0", a, b) for a, b in impostors]


def _own_lines(path: str, settings: Settings) -> list[str]:
    """Copy the user's own list, with the names of the files that are there."""
    trials = read_trials(path)
    files = find_files(settings.trials_corpus(), trials.utterances).names
    return [
        joined_line(str(label), files.get(a, a), files.get(b, b))
        for label, a, b in zip(
            trials.labels.tolist(), trials.enrol, trials.test, strict=True
        )
    ]


def _target_pairs(names: Sequence[str], corpus: Corpus) -> list[tuple[str, str]]:
    """Pair utterances of different sessions: within one, the channel gives them away."""
    pairs = list(combinations(names, 2))
    apart = [(a, b) for a, b in pairs if corpus.session(a) != corpus.session(b)]
    return apart or pairs


def _some(items: Sequence, count: int, draws: torch.Generator) -> list:
    chosen = torch.randperm(len(items), generator=draws)[:count].sort().values
    return [items[i] for i in chosen.tolist()]
