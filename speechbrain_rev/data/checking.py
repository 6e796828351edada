"""Which files can be used, and what is wrong with the others."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from speechbrain_rev.audio import AudioInfo, audio_info, read_audio
from speechbrain_rev.audio.checks import MIX, check_channel, is_silent
from speechbrain_rev.files import write_whole
from speechbrain_rev.lists import is_listable, printable

from .manifest import Cause, LeftOut
from .rows import AUDIO_SUFFIXES, LOSSLESS, counted

#: Treatments of audio when it is read.
RESAMPLED, MIXED, CHOSEN = "resampled", "channels mixed", "one of several channels"
# Files that an error names of each problem.
_EXAMPLES = 3

ADVICE = (
    "Mend them, or train without them: leave them out of train_list, or give "
    "bad_files: drop."
)


class Checked(NamedTuple):
    """Audio that can be used.

    Attributes
    ----------
    path : Path
        The file.
    samples : int
        Its length at the rate that it is read at.
    wav : torch.Tensor, [samples], or None
        What was decoded.
    treated : tuple of str
        What is done when it is read: of ``RESAMPLED``, ``MIXED`` and ``CHOSEN``.
    """

    path: Path
    samples: int
    wav: torch.Tensor | None = None
    treated: tuple[str, ...] = ()


def read_checked(
    path: str | Path,
    *,
    name: str | None = None,
    sample_rate: int,
    whole: bool,
    resample: bool = False,
    channel: int | str | None = None,
    header: Callable[[AudioInfo], None] | None = None,
) -> Checked | LeftOut:
    """Read a file's header or all of it, and check it.

    Parameters
    ----------
    path : str or Path
        The file, or a segment of one.
    name : str, optional
        Its name in lists; the path by default.
    sample_rate : int
        That it is read at, Hz.
    whole : bool
        Whether it is decoded, or its header read only.
    resample, channel : bool, and int, "mix" or None
        As of ``read_audio``.
    header : callable, optional
        Takes what the header says, of files that cannot be used too.

    Returns
    -------
    Checked or LeftOut
        The second if it cannot be used.
    """

    def problem(cause: Cause, words: str) -> LeftOut:
        return LeftOut(str(path), cause, f"{path} {words}")

    path = Path(path)
    name = str(path) if name is None else name
    if not is_listable(name):
        words = f"{name!r} has a tab or a line break, or a space at an end"
        # As one line of the list of such files.
        return LeftOut(repr(str(path))[1:-1], Cause.NAME, words)
    if path.suffix.lower() not in AUDIO_SUFFIXES:
        return problem(Cause.SUFFIX, "is of another kind")
    treated = []
    try:
        # Decoding below gives the length, too.
        info = audio_info(path, estimate=whole)
        if header is not None:
            header(info)
        if info.lossy and path.suffix.lower() in LOSSLESS:
            return problem(Cause.NAMED, "is OGG or MP3 by its content")
        if info.sample_rate != sample_rate:
            if not resample:
                words = f"has {info.sample_rate} samples per second"
                if channel is None and info.channels != 1:
                    words += f" and {info.channels} channels, not {sample_rate} and 1"
                    return problem(Cause.RATE_AND_CHANNELS, words)
                return problem(Cause.RATE, f"{words}, not {sample_rate}")
            treated.append(RESAMPLED)
        try:
            check_channel(path, info.channels, channel)
        except ValueError:
            cause = Cause.CHANNELS if channel is None else Cause.NO_CHANNEL
            return problem(cause, f"has {counted(info.channels, 'channel')}")
        if info.channels != 1:
            treated.append(MIXED if channel == MIX else CHOSEN)
        if not info.samples and not (whole and info.lossy):
            return problem(Cause.EMPTY, "holds none")
        samples = info.samples_at(sample_rate)
        if not whole:
            return Checked(path, samples, None, tuple(treated))
        wav = read_audio(
            path, sample_rate=sample_rate, resample=resample, channel=channel
        )
    except (ValueError, OSError) as error:
        return LeftOut(str(path), Cause.UNREADABLE, str(error))
    if info.lossy:
        samples = len(wav)
    if not samples:
        return problem(Cause.EMPTY, "holds none")
    if len(wav) < samples:
        words = f"has {len(wav)} of the {samples} samples that it says"
        return problem(Cause.UNREADABLE, words)
    if not bool(wav.isfinite().all()):
        place = int((~wav.isfinite()).nonzero()[0]) / sample_rate
        words = f"{path}, first at {place:.2f} s"
        return LeftOut(str(path), Cause.NOT_FINITE, words)
    if is_silent(wav):
        return problem(Cause.SILENT, f"is at most {float(wav.abs().max()):.1e} loud")
    return Checked(path, samples, wav, tuple(treated))


def write_left_out(path: Path, left_out: Iterable[LeftOut]) -> None:
    r"""Write each file that is left out, and why, as CSV.

    Parameters
    ----------
    path : Path
        Replaced whole.
    left_out : iterable of LeftOut
        A row each: file, reason, detail.

    Example
    -------
    >>> path = getfixture("tmp_path") / "left_out.csv"
    >>> write_left_out(path, [LeftOut("a.wav", Cause.EMPTY, "a.wav holds none")])
    >>> path.read_text()
    'file,reason,detail\na.wav,no samples,a.wav holds none\n'
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("file", "reason", "detail"))
    table.writerows((one.path, one.cause.words, one.detail) for one in left_out)
    # A name that is not in UTF-8 can be written in no other way.
    write_whole(path, text.getvalue().encode(errors="backslashreplace"))


def report_problems(
    problems: Sequence[LeftOut],
    files: int,
    path: Path,
    *,
    drop: bool,
    advice: str = ADVICE,
) -> None:
    """Refuse files that cannot be used, or print which are dropped.

    Parameters
    ----------
    problems : sequence of LeftOut
        Files that cannot be used.
    files : int
        How many files there were.
    path : Path
        Where they are listed.
    drop : bool
        Whether such files are left out, and not refused.
    advice : str
        What to do about them where they are refused.

    Raises
    ------
    ValueError
        If there are problems and they are not to be dropped; it has examples of each.

    Example
    -------
    >>> problem = LeftOut("a.wav", Cause.EMPTY, "a.wav holds none")
    >>> report_problems([problem], 7, Path("left_out.csv"), drop=True)
    1 of 7 files cannot be used: 1 no samples (a.wav holds none; delete it). left_out.csv ...
    """
    if problems:
        words = (
            f"{len(problems):,} of {counted(files, 'file')} cannot be used: "
            f"{kinds_of(problems)}. {path} lists each."
        )
        if not drop:
            raise ValueError(f"{words} {advice}")
        tqdm.write(printable(words))


def kinds_of(problems: Sequence[LeftOut]) -> str:
    """Count each problem in one line, with examples and what to do.

    Parameters
    ----------
    problems : sequence of LeftOut
        Files that cannot be used.

    Returns
    -------
    str

    Example
    -------
    >>> kinds_of([LeftOut("a.wav", Cause.EMPTY, "a.wav holds none")])
    '1 no samples (a.wav holds none; delete it)'
    >>> cut = "b.wav is cut. Copy or convert it again."
    >>> kinds_of([LeftOut("b.wav", Cause.UNREADABLE, cut)])
    '1 cannot be read (b.wav is cut; copy or convert it again)'
    """
    kinds = []
    for cause in Cause:
        group = [one for one in problems if one.cause is cause]
        if not group:
            continue
        also = "".join(f"; also {p.path}" for p in group[1:_EXAMPLES])
        # A message that ends in the advice does not get it twice.
        detail = group[0].detail.removesuffix(f"{cause.advice.capitalize()}.")
        detail = detail.strip().removesuffix(".")
        kinds.append(f"{len(group)} {cause.words} ({detail}{also}; {cause.advice})")
    return ", ".join(kinds)
