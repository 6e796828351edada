"""What train.py would read of a corpus: figures as text, JSON and columns for a picture."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from .accounting import (
    LENGTHENED,
    Account,
    count_short,
    refuse_few_speakers,
    take_account,
)
from .checking import kinds_of
from .listing import DataSettings, list_speech
from .manifest import Utterance

# Seconds at which a bar of the histogram begins.
_EDGES = (0, 0.5, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)
# The longest bar, in characters.
_BAR = 40
_ROWS = 3


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram.

    Attributes
    ----------
    begin, end : float
        Seconds; the end, infinite in the last bar that can be, is not in it.
    count : int
        Utterances of such a length.
    """

    begin: float
    end: float
    count: int

    def name(self) -> str:
        """Name the lengths."""
        last = self.end == float("inf")
        return f"{self.begin:g}+" if last else f"{self.begin:g}-{self.end:g}"


def histogram(seconds: Sequence[float]) -> list[Bar]:
    """Count lengths between fixed edges, without empty bars at both ends.

    Parameters
    ----------
    seconds : sequence of float
        Lengths, 0 or more.

    Returns
    -------
    list of Bar

    Example
    -------
    >>> [(bar.name(), bar.count) for bar in histogram([1.5, 3.0, 3.9])]
    [('1-2', 1), ('2-3', 0), ('3-4', 2)]
    """
    counts = [0] * len(_EDGES)
    for length in seconds:
        counts[bisect_right(_EDGES, length) - 1] += 1
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return []
    edges = (*_EDGES, float("inf"))
    return [
        Bar(edges[place], edges[place + 1], counts[place])
        for place in range(filled[0], filled[-1] + 1)
    ]


@dataclass(frozen=True)
class Overview:
    """What train.py would read of a corpus.

    Attributes
    ----------
    account : Account
        What becomes of each file.
    settings : DataSettings
        What it was read with.
    refused : str
        Why train.py would refuse it; empty if it would not.
    """

    account: Account
    settings: DataSettings
    refused: str

    @cached_property
    def seconds(self) -> list[float]:
        """Lengths of the utterances that would be used."""
        return [one.samples / self.settings.sample_rate for one in self._utterances()]

    def of_speakers(self) -> Mapping[str, int]:
        """Count utterances by speaker."""
        return {speaker: len(names) for speaker, names in self.account.usable.items()}

    def single(self) -> list[str]:
        """List the speakers with one utterance."""
        return [speaker for speaker, count in self.of_speakers().items() if count == 1]

    def _utterances(self) -> list[Utterance]:
        return [u for names in self.account.usable.values() for u in names.values()]

    def plain(self) -> dict[str, Any]:
        """Give all figures as plain data, in seconds, samples and files."""
        utterances, of_speakers = self._utterances(), self.of_speakers()
        return {
            "data_folder": self.settings.data_folder,
            "format": self.account.listing.corpus.format,
            "seen": self.account.listing.seen(),
            "utterances": len(utterances),
            "speakers": len(of_speakers),
            "seconds": sum(self.seconds),
            "sample_rate": self.settings.sample_rate,
            "headers": [
                {"sample_rate": rate, "channels": channels, "files": files}
                for (rate, channels), files in sorted(self.account.headers.items())
            ],
            "utterance_seconds": {
                **_spread(self.seconds),
                "histogram": [
                    {
                        "from": bar.begin,
                        # JSON has no infinity.
                        "to": None if bar.end == float("inf") else bar.end,
                        "utterances": bar.count,
                    }
                    for bar in histogram(self.seconds)
                ],
            },
            "utterances_of_a_speaker": _spread(list(of_speakers.values())),
            "single_speakers": self.single(),
            "lost_speakers": list(self.account.lost),
            "short": {
                "treated": self.settings.short,
                "segment_seconds": self.settings.sentence_len,
                "utterances": count_short(utterances, self.settings),
            },
            "rows": [
                {
                    "ID": one.ID,
                    "wav": one.wav,
                    "samples": one.samples,
                    "spk_id": one.spk_id,
                }
                for one in utterances[:_ROWS]
            ],
            "treated": dict(self.account.treated),
            "left_out": {why: n for why, n in self.account.reasons().items() if n},
            "refused": self.refused or None,
        }

    def text(self) -> str:
        """Write the figures, a histogram of lengths, and what is left out, in lines."""
        plain, single = self.plain(), self.single()
        rows = {
            "utterances": f"{plain['utterances']:,} of {plain['seen']:,} files seen",
            "speakers": f"{plain['speakers']:,}",
            "hours": f"{plain['seconds'] / 3600:.2f}",
            "rate and channels": "; ".join(
                f"{one['files']:,} files of {one['sample_rate']} Hz, "
                f"{one['channels']} channel{'s' * (one['channels'] > 1)}"
                for one in plain["headers"]
            ),
            "seconds of an utterance": _words(plain["utterance_seconds"], ".2f"),
            "utterances of a speaker": _words(plain["utterances_of_a_speaker"], "g"),
            "speakers with one utterance": f"{len(single):,}{_named(single)}",
        }
        if lost := self.account.lost:
            rows["speakers without utterances"] = f"{len(lost):,}{_named(lost)}"
        rows |= {how: f"{count:,}" for how, count in sorted(plain["treated"].items())}
        short = plain["short"]
        if short["utterances"]:
            what = f"shorter than {short['segment_seconds']:g} s"
            rows[what] = f"{short['utterances']:,}, {LENGTHENED[short['treated']]}"
        wide = max(map(len, rows))
        lines = [self.account.listing.understood(), ""]
        lines += [f"{name:<{wide}}  {words or '-'}" for name, words in rows.items()]
        lines += ["", *self._bars()]
        if left := plain["left_out"]:
            wide = max(wide - 2, *map(len, left))
            lines += ["", "Left out:"]
            lines += [f"  {why:<{wide}}  {count:,}" for why, count in left.items()]
        return "\n".join(lines).rstrip() + "\n"

    def _bars(self) -> list[str]:
        """Draw the histogram of lengths."""
        bars = histogram(self.seconds)
        if not bars:
            return []
        most = max(bar.count for bar in bars)
        lines = [f"{'seconds':>9}  {'utterances':>10}"]
        for bar in bars:
            # One that is there is seen.
            length = max(round(_BAR * bar.count / most), bool(bar.count))
            drawn = f"{bar.name():>9}  {bar.count:>10,}  {'#' * length}"
            lines.append(drawn.rstrip())
        return lines


def look_at(settings: DataSettings, option: str = "data_folder") -> Overview:
    """Read what train.py would read, as its preparation does, and write nothing.

    Parameters
    ----------
    settings : DataSettings
        What to read.
    option : str
        What the data folder is given as, for errors.

    Returns
    -------
    Overview

    Raises
    ------
    ValueError
        If nothing can be read: there is no such folder, or a row of a list cannot be used.

    Example
    -------
    >>> import soundfile
    >>> folder = getfixture("tmp_path")
    >>> for speaker, level in ("id1", 0.25), ("id2", 0.5):
    ...     path = folder / "wav" / speaker / "s" / "a.wav"
    ...     path.parent.mkdir(parents=True)
    ...     soundfile.write(path, [0.0, level], 16000)
    >>> overview = look_at(DataSettings(str(folder)))
    >>> overview.plain()["speakers"], overview.single(), overview.refused
    (2, ['id1', 'id2'], '')
    """
    account = take_account(list_speech(settings, option), settings)
    refused = ""
    if account.problems and settings.bad_files == "refuse":
        refused = (
            f"{len(account.problems)} of {account.looked_at()} files cannot be used, and "
            f"train.py refuses them: {kinds_of(account.problems)}. Mend them, or give "
            "--bad_files=drop here and to train.py."
        )
    else:
        try:
            refuse_few_speakers(account)
        except ValueError as error:
            refused = str(error)
    return Overview(account, settings, refused)


def _named(speakers: Sequence[str]) -> str:
    return f", such as {', '.join(speakers[:_ROWS])}" if speakers else ""


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("min", "median", "max"))
    return {"min": min(values), "median": median(values), "max": max(values)}


def _words(spread: Mapping[str, Any], form: str) -> str:
    if spread["min"] is None:
        return ""
    return ", ".join(f"{spread[n]:{form}} {n}" for n in ("min", "median", "max"))
