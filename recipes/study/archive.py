"""Put a study into one small file, or back: what its report reads, no weights.

python recipes/study/archive.py pack STUDY FILE.tar.xz
python recipes/study/archive.py unpack FILE.tar.xz STUDY --data DATA [--noise NOISE]

What is unpacked is the study, wherever its speech is: run.py does not train again what was
scored, goes on with the rest, and writes its report. Checkpoints are not in it: trainings
that were not scored begin anew, and what is measured and probed of the first seed stays as
it was, which is to be there when the study is packed. Trainings of a seed that must end with
equal weights go together or not at all: another processor may round otherwise.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

from design.conditions import Comparison, Condition
from memory_plan import PLAN
from results.files import MEASURES, ORIGIN, PROBES, SETTING
from results.runs import BASELINE, EPOCHS, SCORED, SCORES, Study
from running.command_line import existing_folder

from speechbrain_rev.cli import run_script
from speechbrain_rev.hparams import plain_settings
from speechbrain_rev.inference.run_folder import HYPERPARAMS
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.whole_files import check_file, check_regular, write_whole

#: Of a study, of what needs no training, and of each training that was scored.
FILES = ("*.json", f"{BASELINE}/*/{SCORES}", f"{BASELINE}/*/{SCORED}")
FILES_OF_A_RUN = (
    HYPERPARAMS,
    ORIGIN,
    EPOCHS,
    PLAN,
    "save/train.csv",
    SCORES,
    str(SCORED),
)
#: What stands for the places of the study, its speech and its noise.
STUDY, DATA, NOISE = "{STUDY}", "{DATA}", "{NOISE}"
#: What paths are made of: settings write others in another way.
_IN_PATHS = r"[\w./+@=-]"
#: Of all files together, unpacked.
MAX_BYTES = 2**30
#: Each takes memory, however small it is.
MAX_FILES = 100_000
#: What lzma may take beside that; what is packed here needs a quarter of it.
_LZMA_BYTES = 2**28
# Of headers of sparse files tarfile raises what it meets.
_DAMAGED = (
    tarfile.TarError, lzma.LZMAError, EOFError, ValueError, LookupError, OverflowError,
)  # fmt: skip


class _RefusedError(ValueError):
    """What can be read and is no study."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    if options.work == "pack":
        size = pack(options.study, options.file)
        for folder in without_equals(options.study):
            print(f"Left out, as what must be equal is not there yet: {folder}")
        print(f"{options.file}: {size / 1e6:.1f} MB")
        for name in (MEASURES, PROBES):
            if not (options.study / name).is_file():
                print(f"{name} is not there yet, and cannot be made of what is packed.")
    else:
        count = unpack(options.file, options.study, options.data, options.noise)
        print(f"{options.study}: {count} trainings")


def pack(study: Path, file: Path) -> int:
    """Write a study's small files into one; equal ones make the same bits.

    Parameters
    ----------
    study : Path
        The --output of run.py.
    file : Path
        Where to.

    Returns
    -------
    int
        Its bytes.

    Raises
    ------
    ValueError
        If there is no study, it is too large, was moved by hand, or a path has unusual
        characters; if the file is there already or cannot be written, or the study is
        written to.
    """
    check_file("FILE", file)
    if file.exists():
        raise ValueError(f"{file} is there already. Name another file, or remove it.")
    setting = study / SETTING
    if not setting.is_file():
        raise ValueError(f"{study} holds no study: it lacks {SETTING}.")
    known = json.loads(setting.read_text(encoding="utf-8"))
    places = {_place(study.resolve()): STUDY, _place(known["data"]): DATA}
    if known["noise"]:
        places[_place(known["noise"]["folder"])] = NOISE
    raw = io.BytesIO()
    with (
        writing_alone(study),
        tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in _small_files(study):
            if path.name == HYPERPARAMS:
                _check_place(path)
            content = _replaced(path.read_bytes().decode(), places).encode()
            info = tarfile.TarInfo(path.relative_to(study).as_posix())
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            if raw.tell() > MAX_BYTES:
                raise ValueError(
                    f"The files of {study} have more than {MAX_BYTES} bytes, which is "
                    "the most that is unpacked. Copy the folder as it is."
                )
    packed = lzma.compress(raw.getvalue(), preset=9)
    write_whole(file, packed)
    return len(packed)


def without_equals(study: Path) -> list[Path]:
    """List the trainings that were scored before all that must end with equal weights."""
    setting = json.loads((study / SETTING).read_text(encoding="utf-8"))
    known = Study(
        study,
        [Condition(**plain) for plain in setting["conditions"]],
        [Comparison(**plain) for plain in setting["comparisons"]],
        setting["seeds"],
    )
    groups: dict[str, set[str]] = {}
    for one in known.comparisons:
        if one.identical:
            groups.setdefault(one.reference, {one.reference}).add(one.candidate)
    found = []
    for names in groups.values():
        for seed in known.seeds:
            folders = [known.run_folder(name, seed) for name in sorted(names)]
            scored = [folder for folder in folders if (folder / SCORED).is_file()]
            found += scored if len(scored) < len(folders) else []
    return found


def unpack(file: Path, study: Path, data: Path, noise: Path | None) -> int:
    """Write the files of a study to where its speech is.

    Parameters
    ----------
    file : Path
        As ``pack`` wrote it.
    study : Path
        An --output for run.py, which has none yet.
    data, noise : Path
        Its speech and noise; noise is None if it had none.

    Returns
    -------
    int
        How many trainings it has.

    Raises
    ------
    ValueError
        If there is a study already, the file is missing, damaged, too large or holds what
        no study has, a path has unusual characters, or there is noise and there was none,
        or the other way round.
    """
    check_regular(file)
    if not file.is_file():
        raise ValueError(f"There is no file {file}. Name one that pack wrote.")
    try:
        texts = dict(_texts(file))
    except _RefusedError:
        raise
    except _DAMAGED as error:
        raise ValueError(f"{file} is damaged, or no study that was packed.") from error
    if SETTING not in texts:
        raise ValueError(f"{file} holds no study: it lacks {SETTING}.")
    if (NOISE in texts[SETTING]) != (noise is not None):
        had = "none: leave out" if noise else "noise: give"
        raise ValueError(f"The study of {file} had {had} --noise.")
    places = {STUDY: _place(study.resolve()), DATA: _place(data.resolve())}
    if noise:
        places[NOISE] = _place(noise.resolve())
    # A text may be words for places alone, which are longer.
    characters = sum(
        len(text) + sum(text.count(word) * len(place) for word, place in places.items())
        for text in texts.values()
    )
    if characters > MAX_BYTES:
        raise ValueError(_too_large(file))
    with writing_alone(study):
        if (study / SETTING).exists():
            raise ValueError(f"{study} holds a study already. Name another folder.")
        # The setting makes it a study: it comes last.
        for name in sorted(texts, key=lambda name: name == SETTING):
            text = texts[name]
            for word, place in places.items():
                text = text.replace(word, place)
            (study / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(study / name, text.encode())
    return sum(PurePosixPath(name).match(f"runs/*/*/{SCORED}") for name in texts)


def _check_place(hyperparams: Path) -> None:
    """Refuse a training that is not where it was trained: paths would not be found."""
    folder = hyperparams.parent.resolve()
    trained = plain_settings(hyperparams.read_text(encoding="utf-8"))["output_folder"]
    if Path(trained).resolve() != folder:
        raise ValueError(
            f"{folder} was trained as {trained}, and moved by hand. Move the study back "
            "there, and pack it there."
        )


def _small_files(study: Path) -> Iterator[Path]:
    """List what a report reads: of the study, and of the trainings that were scored."""
    for pattern in FILES:
        yield from sorted(study.glob(pattern))
    scored = {path.parents[1] for path in study.glob(f"runs/*/*/{SCORED}")}
    for folder in sorted(scored.difference(without_equals(study))):
        for pattern in FILES_OF_A_RUN:
            yield from sorted(folder.glob(pattern))


def _texts(file: Path) -> Iterator[tuple[str, str]]:
    """Read the files of an archive, of names that a study has."""
    # Of names and sizes, too, no more is read than there may be.
    unpacking = lzma.LZMADecompressor(memlimit=_LZMA_BYTES)
    with file.open("rb") as packed:
        raw = unpacking.decompress(packed.read(MAX_BYTES), MAX_BYTES)
        if packed.read(1) or (not unpacking.eof and not unpacking.needs_input):
            raise _RefusedError(_too_large(file))
    if not unpacking.eof:
        raise EOFError(f"{file} ends too soon.")
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
        seen: set[str] = set()
        for member in tar:
            # Of a sparse one only its size tells how much it is.
            wanted = (
                member.isreg() and not member.issparse() and member.name not in seen
            )
            content = tar.extractfile(member) if wanted else None
            if content is None or not _is_of_a_study(member.name):
                raise _RefusedError(
                    f"{file} holds {member.name[:200]!r}, which no study has, or "
                    "not twice. Take one that this script packed."
                )
            seen.add(member.name)
            if len(seen) > MAX_FILES:
                raise _RefusedError(
                    f"{file} holds more than {MAX_FILES} files; studies have less."
                )
            yield member.name, content.read().decode()


def _too_large(file: Path) -> str:
    return f"{file} holds more than {MAX_BYTES} bytes; studies have less."


def _is_of_a_study(name: str) -> bool:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name:
        return False
    known = [*FILES, *(f"runs/*/*/{pattern}" for pattern in FILES_OF_A_RUN)]
    return any(
        len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)
        for pattern in known
    )


def _place(path: str | Path) -> str:
    """Give a path as files of all kinds have it, without quotes and escapes."""
    text = str(path)
    if not re.fullmatch(rf"/{_IN_PATHS}*", text, re.ASCII):
        raise ValueError(
            f"{text!r} has characters that settings write in another way. Use a folder "
            "whose path has letters, digits and _ - + . = @ alone."
        )
    return text


def _replaced(text: str, places: Mapping[str, str]) -> str:
    """Put words in place of paths, where these begin and end; longer ones first."""
    for path in sorted(places, key=len, reverse=True):
        whole = rf"(?<!{_IN_PATHS})(?<!~){re.escape(path)}(?=/|(?!{_IN_PATHS}))"
        text = re.sub(whole, places[path], text)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    works = parser.add_subparsers(dest="work", required=True)
    packing = works.add_parser("pack", help="write a study's small files into one")
    packing.add_argument("study", type=Path, help="the --output of run.py")
    packing.add_argument("file", type=Path, help="where to")
    unpacking = works.add_parser("unpack", help="write them where speech is")
    unpacking.add_argument("file", type=Path, help="what pack wrote")
    unpacking.add_argument("study", type=Path, help="an --output for run.py")
    unpacking.add_argument(
        "--data", type=existing_folder, required=True, help="run.py's DATA"
    )
    unpacking.add_argument("--noise", type=existing_folder, help="run.py's --noise")
    return parser


if __name__ == "__main__":
    run_script(main)
