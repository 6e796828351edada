"""Packing a folder of audio into one tar, which goes on after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from speechbrain_rev.audio.packed import (
    FLOATS,
    FULL_SCALE,
    INDEX,
    INTEGERS,
    JOURNAL,
    SUFFIX,
    TAR,
    forget,
    wav_header,
)
from speechbrain_rev.audio.segments import bytes_of
from speechbrain_rev.audio.texts import Lookup, Texts, encoded
from speechbrain_rev.bars import progress_bar
from speechbrain_rev.files import (
    LOCK,
    locked,
    naming_full_disk,
    opened_whole,
    refusing,
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
# Bytes that an interruption loses at most.
_KEPT_EVERY_BYTES = 2**26
# The end of a tar is two blocks of zeros.
_END_BYTES = 2 * tarfile.BLOCKSIZE


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
    >>> from speechbrain_rev.audio import read_audio
    >>> read_audio(folder / "hum.wav", sample_rate=16000).tolist()
    [0.5, -0.25]
    >>> with tarfile.open(folder / "audio.tar") as tar:
    ...     tar.getnames()
    ['hum.wav']
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
        self._sample_rate = sample_rate
        self._about: dict[str, object] = {"source": source, "sample_rate": sample_rate}
        if channel is not None:
            self._about["channel"] = channel
        #: Where a file's samples begin in the tar, how many, whether of floats, and the
        #: bytes of the file in the source.
        self._rows: dict[str, tuple[int, int, bool, int | None]] = {}
        self._waiting: list[str] = []
        self._kept_bytes = 0
        with self._named(), contextlib.ExitStack() as files:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock_file = self.folder / LOCK
            files.enter_context(locked(lock_file, str(self.folder), "packing"))
            # Here: one that was killed at its end left a lock, which goes with this one.
            if (self.folder / INDEX).exists() and not (self.folder / JOURNAL).exists():
                raise ValueError(
                    f"{self.folder} is packed already. Delete it to pack anew, or give "
                    "another."
                )
            self._journal = files.enter_context((self.folder / JOURNAL).open("a+b"))
            self._tar = files.enter_context((self.folder / TAR).open("ab"))
            self._resume()
            self._owned = files.pop_all()

    def __enter__(self) -> Packing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if not self._tar.closed and not (kind and issubclass(kind, OSError)):
                self._keep()
        finally:
            # The error of a full disk is raised already.
            for file in (self._tar, self._journal):
                with contextlib.suppress(OSError):
                    file.close()
            self._owned.close()

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, name: str, wav: torch.Tensor, source_bytes: int | None = None
    ) -> None:
        """Put a file behind the others.

        Parameters
        ----------
        name : str
            Relative to the source; none that is there already.
        wav : torch.Tensor, [samples]
            Samples come back to the bit: as 16-bit integers, or as floats where those do
            not hold them.
        source_bytes : int, optional
            Of the file in the source, by which a change is seen when packing goes on.

        Raises
        ------
        OSError
            If the disk takes no more.
        """
        values = _stored(wav.numpy())
        header = wav_header(len(values), self._sample_rate, values.dtype)
        member = tarfile.TarInfo(name)
        member.size = len(header) + values.nbytes
        header = member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + header
        begin, is_float = self._tar.tell() + len(header), values.dtype == FLOATS
        row = begin, len(values), is_float, source_bytes
        with self._named():
            self._tar.write(header + values.tobytes())
            self._tar.write(bytes(-self._tar.tell() % tarfile.BLOCKSIZE))
        self._rows[name] = row
        self._waiting.append(json.dumps([name, *row]) + "\n")
        if self._tar.tell() - self._kept_bytes > _KEPT_EVERY_BYTES:
            self._keep()

    def changed_since(self, source: Path) -> list[str]:
        """Name files whose source went, or has other bytes than when it was packed."""
        return [
            name
            for name, (*_, source_bytes) in self._rows.items()
            if source_bytes is not None and bytes_of(source / name) != source_bytes
        ]

    def finish(self) -> None:
        """Write the end of the tar and the index; from now on the folder can be read."""
        names = sorted(self._rows, key=encoded)
        begins, samples, floats, _ = zip(
            *(self._rows[name] for name in names), strict=True
        )
        texts, (lookup, order) = Texts.of(names), Lookup.of(names)
        # Four bytes a length, but for recordings of days.
        size = np.uint32 if max(samples) < 2**32 else np.int64
        with self._named():
            self._tar.write(bytes(_END_BYTES))
            self._keep()
            with opened_whole(self.folder / INDEX) as file:
                np.savez(
                    file,
                    about=np.array([self._sample_rate, self._tar.tell()]),
                    names=texts.data.array,
                    ends=texts.ends.array,
                    keys=lookup.keys,
                    begins=np.array(begins)[order],
                    samples=np.array(samples, size)[order],
                    floats=np.array(floats)[order],
                )
            self._tar.close()
            self._journal.close()
            (self.folder / JOURNAL).unlink()
        forget(self.folder)

    def _keep(self) -> None:
        """Write samples to the disk, and then their rows to the journal."""
        with self._named():
            self._tar.flush()
            os.fsync(self._tar.fileno())
            self._journal.write("".join(self._waiting).encode())
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self._waiting, self._kept_bytes = [], self._tar.tell()

    def _resume(self) -> None:
        """Read what was kept, and cut off what was not."""
        self._journal.seek(0)
        text = self._journal.read()
        # A line that was not written to its end has none.
        text = text[: text.rfind(b"\n") + 1]
        self._journal.truncate(len(text))
        end = 0
        with refusing(
            f"{self.folder / JOURNAL} is damaged", "Delete the folder and pack anew."
        ):
            lines = [json.loads(line) for line in text.splitlines()]
            about, *rows = lines or [self._about]
            for name, begin, samples, is_float, source_bytes in rows:
                self._rows[name] = begin, samples, is_float, source_bytes
                size = samples * (FLOATS if is_float else INTEGERS).itemsize
                end = begin + size + -(begin + size) % tarfile.BLOCKSIZE
            # A packing that was begun without a channel took files of one.
            same = {**self._about, **about} == {**about, **self._about}
        if not text:
            self._waiting = [json.dumps(self._about) + "\n"]
        if not same:
            raise ValueError(
                f"{self.folder} was begun with {about}, not {self._about}. Delete it, or "
                "give another folder."
            )
        if (there := self._tar.tell()) < end:
            raise ValueError(
                f"{self.folder / TAR} has {there} bytes, less than the {end} of "
                f"{JOURNAL}. Delete the folder and pack anew."
            )
        self._tar.truncate(end)
        self._tar.seek(end)
        self._keep()

    def _named(self) -> contextlib.AbstractContextManager[None]:
        advice = "Free some space, or mend what is wrong; the same command goes on where it was."
        return naming_full_disk(self.folder, advice)


def _stored(wav: NDArray[np.float32]) -> NDArray[Any]:
    """Give samples as 16-bit integers, or as they are where those would not hold them."""
    scaled = wav * np.float32(FULL_SCALE)
    exact = (scaled == np.rint(scaled)) & (np.abs(scaled + 0.5) <= FULL_SCALE)
    return scaled.astype(INTEGERS) if exact.all() else wav.astype(FLOATS)


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
        if changed := made.changed_since(source):
            raise ValueError(
                f"{counted(len(changed), 'file')} in {packed} changed or went from {source} "
                f"since, such as {changed[0]}. Delete {packed} and pack anew."
            )
        before, left = len(made), [name for name in names if name not in made]
        bar.update(len(names) - len(left))
        for name, one in zip(
            left, read_ahead(read, left, ahead=_AHEAD, together=1), strict=True
        ):
            if isinstance(one, LeftOut):
                problems.append(one)
            else:
                assert one.wav is not None
                made.add(name, one.wav, bytes_of(source / name))
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
        tqdm.write(f"Of {counted(len(made) - before, 'file')} packed now, {counts}.")
    return len(made)
