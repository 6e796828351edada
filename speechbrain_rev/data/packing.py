"""Packing a folder of audio into one file, which goes on after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from speechbrain_rev.audio.columns import TextColumn, save_columns
from speechbrain_rev.audio.packed import (
    INDEX,
    JOURNAL,
    SAMPLE_BYTES,
    SAMPLES,
    SUFFIX,
    VERSION,
    digest_of_names,
    forget,
    key_of,
)
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.files import (
    LOCK,
    locked,
    naming_full_disk,
    parse_json,
    write_whole,
)
from speechbrain_rev.processes import interrupted_while

from .checking import Checked, read_checked, report_problems, write_left_out
from .corpora import refuse_lists
from .folders import LAYOUT_FILES, audio_names
from .manifest import Cause, LeftOut
from .rows import counted, read_ahead

LEFT_OUT = "left_out.csv"
# Whole files that wait decoded; some of noise have hours.
_AHEAD = 32
_ADVICE = "Mend them and pack on, or pack without them: --bad_files=drop."
# Samples that an interruption loses at most: 64 MiB of them.
_KEPT_EVERY = 2**25
_FULL_SCALE = 2**15
_LARGEST = float(np.finfo(np.float32).max)


class Packing:
    """Puts audio into a packed folder, one file behind another.

    What was put there is kept from time to time, and when the context is left; the same
    packing begun anew knows it.

    Parameters
    ----------
    folder : str or Path
        The packed folder to be made; its name ends in ``.packed``.
    source : str
        What is packed: another one is not added to what was begun.
    sample_rate : int
        Of all files, Hz.
    channel : int, "mix" or None
        Which channel the files are of, as of ``read_audio``.

    Raises
    ------
    ValueError
        If the folder has another name, is packed already, is being packed, was begun of
        another source or channel, or what was begun is damaged.

    Example
    -------
    >>> folder = getfixture("tmp_path") / "noise.packed"
    >>> with Packing(folder, source="noise", sample_rate=16000) as packing:
    ...     packing.add("hum.wav", torch.tensor([0.5, -0.25]))
    ...     packing.finish()
    >>> from speechbrain_rev.data import read_audio
    >>> read_audio(folder / "hum.wav", sample_rate=16000).tolist()
    [0.5, -0.25]
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        source: str,
        sample_rate: int,
        channel: int | str | None = None,
    ) -> None:
        self.folder = Path(folder)
        if self.folder.suffix != SUFFIX:
            raise ValueError(
                f"{folder} does not end in {SUFFIX}, by which a packed folder is known. "
                f"Give {self.folder.name}{SUFFIX}."
            )
        self._about: dict[str, object] = {"source": source, "sample_rate": sample_rate}
        if channel is not None:
            self._about["channel"] = channel
        #: Length and scale of what is there, by name, in the order of the samples.
        self._rows: dict[str, tuple[int, float]] = {}
        self._waiting: list[str] = []
        self._unkept = 0
        with self._named(), contextlib.ExitStack() as files:
            self.folder.mkdir(parents=True, exist_ok=True)
            place = self.folder / LOCK
            files.enter_context(locked(place, str(self.folder), "packing"))
            # Here: one that was killed at its end left a lock, which goes with this one.
            self._refuse_packed()
            self._journal = files.enter_context((self.folder / JOURNAL).open("a+b"))
            self._samples = files.enter_context((self.folder / SAMPLES).open("ab"))
            self._go_on()
            self._owned = files.pop_all()

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if not self._samples.closed and not (kind and issubclass(kind, OSError)):
                self._keep()
        finally:
            # The error of a full disk is raised already.
            for file in (self._samples, self._journal):
                with contextlib.suppress(OSError):
                    file.close()
            self._owned.close()

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: str, wav: torch.Tensor) -> None:
        """Put a file behind the others.

        Parameters
        ----------
        name : str
            Relative to the source.
        wav : torch.Tensor, [samples]
            Finite. 16-bit samples come back to the bit; of others the largest is made
            a 16-bit one.

        Raises
        ------
        ValueError
            If the name is there already, or a sample is not finite.
        OSError
            If the disk takes no more.
        """
        if name in self._rows:
            raise ValueError(f"{name} is in {self.folder} already.")
        values, scale = _as_integers(wav.numpy(), name)
        with self._named():
            self._samples.write(values.tobytes())
        self._rows[name] = len(values), scale
        row = [name, len(values), scale]
        self._waiting.append(json.dumps([*row, _sum_of(row)]) + "\n")
        self._unkept += len(values)
        if self._unkept > _KEPT_EVERY:
            self._keep()

    def finish(self) -> None:
        """Write the index; from now on the folder can be read."""
        self._keep()
        with self._named():
            self._samples.close()
        lengths = np.array([row[0] for row in self._rows.values()], dtype=np.int64)
        scales = np.array([row[1] for row in self._rows.values()], dtype=np.float32)
        begins = np.cumsum(lengths) - lengths
        names = list(self._rows)
        order = sorted(range(len(names)), key=lambda row: os.fsencode(names[row]))
        keys = np.array(
            [key_of(os.fsencode(names[row])) for row in order], dtype=np.int64
        )
        places = np.argsort(keys)
        texts = TextColumn.of(names[row] for row in order)
        columns: dict[str, TextColumn | NDArray[Any]] = {
            "names": texts,
            "keys": keys[places],
            "places": places,
            "begins": begins[order],
            "lengths": lengths[order],
            "scales": scales[order],
        }
        about = {
            "version": VERSION,
            "sample_rate": str(self._about["sample_rate"]),
            "samples": str(int(lengths.sum())),
            "names": digest_of_names(texts, keys[places], places),
        }
        with self._named():
            save_columns(self.folder / INDEX, columns, about)
            self._journal.close()
            (self.folder / JOURNAL).unlink()
        forget(self.folder)

    def _refuse_packed(self) -> None:
        if (self.folder / INDEX).exists() and not (self.folder / JOURNAL).exists():
            raise ValueError(
                f"{self.folder} is packed already. Delete it to pack anew, or give "
                "another."
            )

    def _keep(self) -> None:
        """Write samples to the disk, and then their rows to the journal."""
        with self._named():
            self._samples.flush()
            os.fsync(self._samples.fileno())
            self._journal.write("".join(self._waiting).encode())
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self._waiting, self._unkept = [], 0

    def _go_on(self) -> None:
        """Read what was kept, and cut off what was not."""
        self._journal.seek(0)
        text = self._journal.read()
        # A line that was not written to its end has none.
        end = text.rfind(b"\n") + 1
        self._journal.truncate(end)
        about, self._rows = self._kept(text[:end])
        if about is None:
            self._waiting = [json.dumps(self._about) + "\n"]
        # What was begun without a channel took files of one.
        elif {**self._about, **about} != {**about, **self._about}:
            raise ValueError(
                f"{self.folder} was begun with {about}, not {self._about}. Delete it, or "
                "give another folder."
            )
        wanted = SAMPLE_BYTES * sum(samples for samples, _ in self._rows.values())
        path = self.folder / SAMPLES
        if path.stat().st_size < wanted:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, less than the {wanted} of "
                f"{JOURNAL}. Delete the folder and pack anew."
            )
        os.truncate(path, wanted)
        self._keep()

    def _kept(
        self, text: bytes
    ) -> tuple[dict[str, object] | None, dict[str, tuple[int, float]]]:
        """Read and check the source and the files of a journal."""
        about, rows, number = None, {}, 0
        try:
            for number, line in enumerate(text.splitlines(), start=1):
                one = parse_json(line)
                if number == 1:
                    if not isinstance(one, dict):
                        raise ValueError(f"{one!r} does not say what is packed")
                    about = one
                    continue
                _check_row(one)
                name, samples, scale = one[:3]
                if name in rows:
                    raise ValueError(f"{name} is there twice")
                rows[name] = samples, scale
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.folder / JOURNAL} is damaged in line {number} ({error}). Delete "
                "the folder and pack anew."
            ) from error
        return about, rows

    def _named(self) -> contextlib.AbstractContextManager[None]:
        advice = "Free some space, or mend what is wrong; the same command goes on where it was."
        return naming_full_disk(self.folder, advice)


def _sum_of(row: list[Any]) -> int:
    return zlib.crc32(json.dumps(row).encode())


def _check_row(row: object) -> None:
    """Refuse what is no name with a number of samples, a scale and their checksum."""
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError(f"{row!r} is no file with its length, scale and checksum")
    name, samples, scale, checksum = row
    if checksum != _sum_of(row[:3]):
        raise ValueError("it is not as it was written")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is no name")
    # The index has 64 bits for places.
    if type(samples) is not int or not 0 <= samples < 2**62:
        raise ValueError(f"{name} has {samples!r} samples")
    if type(scale) is not float or not 0 < scale <= _LARGEST:
        raise ValueError(f"{name} has the scale {scale!r}")


def _as_integers(
    wav: NDArray[np.float32], name: str
) -> tuple[NDArray[np.int16], float]:
    """Give samples as 16-bit integers, and what one of them is worth."""
    if not np.isfinite(wav).all():
        raise ValueError(f"{name} holds NaN or infinity, which 16 bits cannot.")
    scaled = wav * _FULL_SCALE
    whole = (scaled == np.rint(scaled)) & (np.abs(scaled + 0.5) <= _FULL_SCALE)
    scale = float(np.float32(np.abs(wav).max(initial=0) / (_FULL_SCALE - 1)))
    if whole.all() or scale == 0:
        return np.rint(scaled).astype("<i2"), 1 / _FULL_SCALE
    return np.rint(wav / scale).astype("<i2"), scale


def pack(
    source: Path,
    packed: Path,
    *,
    sample_rate: int,
    drop: bool = False,
    resample: bool = False,
    channel: int | str | None = None,
    outside_files: bool = False,
) -> int:
    """Pack all audio below a folder; what was begun goes on.

    Parameters
    ----------
    source : Path
        A folder of speech, noise or room impulse responses.
    packed : Path
        The packed folder, whose name ends in ``.packed``.
    sample_rate : int
        Of the packed samples, Hz.
    drop : bool
        Whether files that cannot be used are left out, and not refused.
    resample, channel : bool, and int, "mix" or None
        As of ``read_audio``.
    outside_files : bool
        Whether links may lead out of the source.

    Returns
    -------
    int
        Files that the packed folder holds.

    Raises
    ------
    ValueError
        If there is no such folder, the packed one is there already, or files cannot be
        used: those that can stay packed for the next time. If lists in the folder name
        its speakers: only audio is packed.

    Example
    -------
    >>> import soundfile
    >>> source = getfixture("tmp_path") / "noise"
    >>> source.mkdir()
    >>> soundfile.write(source / "hum.wav", [0.5, -0.25], 16000)
    >>> pack(source, source.with_suffix(".packed"), sample_rate=16000)
    1
    """
    refuse_lists(source)
    left_out: list[LeftOut] = []
    within = None if outside_files else source
    found = audio_names(source, left_out=left_out, within=within)
    names = sorted(found, key=lambda name: name.split("/"))
    problems = [one for one in left_out if one.cause is Cause.OUTSIDE]
    aside = [one for one in left_out if one.cause is not Cause.OUTSIDE]
    if not names and not problems:
        raise ValueError(f"There is no audio below {source}. Give a folder with some.")

    def read(name: str) -> Checked | LeftOut:
        return read_checked(
            source / name,
            name=name,
            sample_rate=sample_rate,
            whole=True,
            resample=resample,
            channel=channel,
        )

    treated: Counter[str] = Counter()
    with (
        interrupted_while(
            f"in the packing of {source}. What is packed is kept; the same command goes on."
        ),
        Packing(
            packed,
            source=str(source.resolve()),
            sample_rate=sample_rate,
            channel=channel,
        ) as made,
        progress_bar("packing", unit="file", total=len(names), leave=True) as bar,
    ):
        left = [name for name in names if name not in made]
        bar.update(len(names) - len(left))
        for name, one in zip(
            left, read_ahead(read, left, ahead=_AHEAD, together=1), strict=True
        ):
            if isinstance(one, LeftOut):
                problems.append(one)
            else:
                assert one.wav is not None
                made.add(name, one.wav)
                treated.update(one.treated)
            bar.update()
        write_left_out(packed / LEFT_OUT, [*problems, *aside])
        report_problems(
            problems,
            len(names) + len(left_out) - len(aside),
            packed / LEFT_OUT,
            drop=drop,
            advice=_ADVICE,
        )
        if not len(made):
            raise ValueError(f"No file below {source} can be used: nothing is packed.")
        for name in LAYOUT_FILES:
            if (source / name).is_file():
                (packed / name).parent.mkdir(exist_ok=True)
                write_whole(packed / name, (source / name).read_bytes())
        made.finish()
    if aside:
        tqdm.write(
            f"Not packed, for they are hidden, or a WAV or FLAC was made of them: "
            f"{counted(len(aside), 'file')}, such as {min(one.path for one in aside)}."
        )
    if treated:
        counts = ", ".join(f"{how}: {count}" for how, count in sorted(treated.items()))
        tqdm.write(f"Of {counted(len(left), 'file')} packed now, {counts}.")
    return len(made)
