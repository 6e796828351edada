"""Put a study into one small file, or back: what its report reads, no weights.

python recipes/study/archive.py pack STUDY FILE.tar.xz
python recipes/study/archive.py unpack FILE.tar.xz STUDY --data DATA [--noise NOISE]

What is unpacked is the study, wherever speech is there: run.py writes its report from it,
does not train again what was scored, and goes on with the rest. Checkpoints are not in it,
so trainings that were not scored begin anew.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "VoxCeleb"))

from memory_plan import PLAN
from results.files import SETTING
from results.runs import EPOCHS, SCORED

from speechbrain_rev.cli import run_script
from speechbrain_rev.inference.run_folder import HYPERPARAMS
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.whole_files import write_whole

#: Of each training, below its folder.
OF_A_RUN = (HYPERPARAMS, EPOCHS, PLAN, "save/train.csv", "scores/*.txt", str(SCORED))
#: What stands for the places of the study, its speech and its noise.
STUDY, DATA, NOISE = "{STUDY}", "{DATA}", "{NOISE}"
#: Of all files together, unpacked.
MAX_BYTES = 2**30


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(argv)
    if options.work == "pack":
        size = pack(options.study, options.file)
        print(f"{options.file}: {size / 1e6:.1f} MB")
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
        If there is no study.
    """
    setting = study / SETTING
    if not setting.is_file():
        raise ValueError(f"{study} holds no study: it lacks {SETTING}.")
    known = json.loads(setting.read_text(encoding="utf-8"))
    places = {STUDY: str(study.resolve()), DATA: known["data"]}
    if known["noise"]:
        places[NOISE] = known["noise"]["folder"]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _small_files(study):
            text = path.read_text(encoding="utf-8")
            # The longest first: one place may be below another.
            for name, place in sorted(places.items(), key=lambda x: -len(x[1])):
                text = text.replace(place, name)
            content = text.encode()
            info = tarfile.TarInfo(path.relative_to(study).as_posix())
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    packed = lzma.compress(raw.getvalue(), preset=9)
    write_whole(file, packed)
    return len(packed)


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
        If there is a study already, or the file holds what no study has.
    """
    if (study / SETTING).exists():
        raise ValueError(f"{study} holds a study already. Name another folder.")
    places = {STUDY: str(study.resolve()), DATA: str(data.resolve())}
    if noise:
        places[NOISE] = str(noise.resolve())
    texts = dict(_texts(file))
    if SETTING not in texts:
        raise ValueError(f"{file} holds no study: it lacks {SETTING}.")
    if NOISE in texts[SETTING] and not noise:
        raise ValueError(f"The study of {file} had noise. Give --noise.")
    with writing_alone(study):
        # The setting makes it a study: it comes last.
        for name in sorted(texts, key=lambda name: name == SETTING):
            (study / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(study / name, _in_place(texts[name], places))
    return sum(Path(name).match(f"*/{SCORED}") for name in texts)


def _small_files(study: Path) -> Iterator[Path]:
    """List what a report reads: of the study, and of the trainings that were scored."""
    yield from sorted(study.glob("*.json"))
    for scored in sorted(study.glob(f"runs/*/*/{SCORED}")):
        folder = scored.parents[1]
        for pattern in OF_A_RUN:
            yield from sorted(path for path in folder.glob(pattern) if path.is_file())


def _texts(file: Path) -> Iterator[tuple[str, str]]:
    """Read the files of an archive, by names that lead nowhere else."""
    left = MAX_BYTES
    with tarfile.open(file, mode="r|xz") as tar:
        for member in tar:
            path = Path(member.name)
            left -= member.size
            if path.is_absolute() or ".." in path.parts or left < 0:
                raise ValueError(
                    f"{file} is no study: {member.name!r} leads out of it or is too large."
                )
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                raise ValueError(f"{file} is no study: {member.name!r} is no file.")
            yield member.name, content.read().decode()


def _in_place(text: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
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
    unpacking.add_argument("--data", type=Path, required=True, help="run.py's DATA")
    unpacking.add_argument("--noise", type=Path, help="run.py's --noise")
    return parser


if __name__ == "__main__":
    run_script(main)
