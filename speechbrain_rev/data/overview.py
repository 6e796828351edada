"""What train.py would read of a corpus: figures as text, JSON and columns for a picture."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from speechbrain_rev.lists import printable

from .checking import (
    Account,
    refuse_few_speakers,
    report_problems,
    take_account,
)
from .listing import DataSettings, list_speech
from .manifest import RESERVED
from .rows import counted

# Seconds at which a bar of the histogram begins.
_EDGES = (0, 0.5, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600)
# The longest bar, in characters.
_BAR = 40
_ROWS = 3


def histogram(seconds: Iterable[float]) -> list[dict[str, Any]]:
    """Count lengths between fixed edges, without empty bars at both ends.

    Parameters
    ----------
    seconds : iterable of float
        Lengths, 0 or more.

    Returns
    -------
    list of dict
        "from" and "to", seconds, and "utterances" of such a length. The end is not in a bar,
        and None of the last that can be.

    Example
    -------
    >>> [tuple(bar.values()) for bar in histogram([1.5, 3.0, 3.9])]
    [(1, 2, 1), (2, 3, 0), (3, 4, 2)]
    """
    counts = Counter(bisect_right(_EDGES, length) - 1 for length in seconds)
    # JSON has no infinity.
    edges = (*_EDGES, None)
    return [
        {"from": edges[n], "to": edges[n + 1], "utterances": counts[n]}
        for n in range(min(counts, default=0), max(counts, default=-1) + 1)
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
        rate = self.settings.sample_rate
        return [one.samples / rate for one in self.account.utterances]

    def of_speakers(self) -> Mapping[str, int]:
        """Count utterances by speaker."""
        return {speaker: len(names) for speaker, names in self.account.usable.items()}

    def plain(self) -> dict[str, Any]:
        """Give all figures as plain data, in seconds, samples and files."""
        of_speakers, account = self.of_speakers(), self.account
        return {
            "data_folder": self.settings.data_folder,
            "format": ", ".join(one.format for one in account.listing.sources),
            "seen": account.listing.seen(),
            "utterances": len(self.seconds),
            "speakers": len(of_speakers),
            "seconds": sum(self.seconds),
            "sample_rate": self.settings.sample_rate,
            "headers": [
                {"sample_rate": rate, "channels": channels, "files": files}
                for (rate, channels), files in sorted(account.headers.items())
            ],
            "utterance_seconds": {
                **_spread(self.seconds),
                "histogram": histogram(self.seconds),
            },
            "utterances_of_a_speaker": _spread(list(of_speakers.values())),
            "single_speakers": [s for s, count in of_speakers.items() if count == 1],
            "lost_speakers": account.lost,
            "segment_seconds": self.settings.sentence_len,
            "rows": [
                {column: getattr(one, column) for column in RESERVED}
                for one in account.utterances[:_ROWS]
            ],
            "treated": dict(sorted(account.treated.items())),
            "left_out": account.causes(),
            "refused": self.refused or None,
        }

    def text(self) -> str:
        """Write the figures, a histogram of lengths, and what is left out, in lines."""
        plain = self.plain()
        rows = {
            "utterances": f"{plain['utterances']:,} of {counted(plain['seen'], 'file')} seen",
            "speakers": f"{plain['speakers']:,}",
            "hours": f"{plain['seconds'] / 3600:.2f}",
            "rate and channels": "; ".join(
                f"{counted(one['files'], 'file')} of {one['sample_rate']} Hz, "
                f"{counted(one['channels'], 'channel')}"
                for one in plain["headers"]
            ),
            "seconds of an utterance": _words(plain["utterance_seconds"], ".2f"),
            "utterances of a speaker": _words(plain["utterances_of_a_speaker"], "g"),
            "speakers with one utterance": _named(plain["single_speakers"]),
        }
        if lost := plain["lost_speakers"]:
            rows["speakers without utterances"] = _named(lost)
        rows |= {how: f"{count:,}" for how, count in plain["treated"].items()}
        wide = max(map(len, rows))
        lines = [self.account.listing.understood(), ""]
        lines += [f"{name:<{wide}}  {words or '-'}" for name, words in rows.items()]
        lines += ["", *_bars(plain["utterance_seconds"]["histogram"])]
        if left := plain["left_out"]:
            wide = max(wide - 2, *map(len, left))
            lines += ["", "Left out:"]
            lines += [f"  {why:<{wide}}  {count:,}" for why, count in left.items()]
        return printable("\n".join(lines).rstrip() + "\n")


def _bars(bars: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Draw a histogram of lengths."""
    if bars:
        yield f"{'seconds':>9}  {'utterances':>10}"
    most = max((bar["utterances"] for bar in bars), default=0)
    for bar in bars:
        begin, end, count = bar.values()
        name = f"{begin:g}+" if end is None else f"{begin:g}-{end:g}"
        # One that is there is seen.
        length = max(round(_BAR * count / most), bool(count))
        yield f"{name:>9}  {count:>10,}  {'#' * length}".rstrip()


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
    >>> plain = overview.plain()
    >>> plain["speakers"], plain["single_speakers"], overview.refused
    (2, ['id1', 'id2'], '')
    """
    account = take_account(list_speech(settings, option), settings)
    refused = ""
    try:
        if settings.bad_files == "refuse":
            report_problems(account.problems, account.listing.seen(), None, drop=False)
        refuse_few_speakers(account)
    except ValueError as error:
        refused = str(error)
    return Overview(account, settings, refused)


def _named(speakers: Sequence[str]) -> str:
    such = f", such as {', '.join(speakers[:_ROWS])}" if speakers else ""
    return f"{len(speakers):,}{such}"


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("min", "median", "max"))
    return {"min": min(values), "median": median(values), "max": max(values)}


def _words(spread: Mapping[str, Any], form: str) -> str:
    if spread["min"] is None:
        return ""
    return ", ".join(f"{spread[n]:{form}} {n}" for n in ("min", "median", "max"))
