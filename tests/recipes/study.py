"""The study's modules, and a study of seconds."""

import importlib
import itertools
import sys
from pathlib import Path

from tests.corpus import write_corpus, write_noise
from tests.recipes.runs import RECIPE

STUDY = Path(__file__).parents[2] / "recipes" / "study"
#: Of the study that is committed.
ARCHIVE = STUDY.parents[1] / "tests" / "benchmarks" / "results" / "study_small.tar.xz"
#: Of the tiny corpus: speakers that are trained, and those of the trials.
TRAINED, TESTED = 5, 4


def study(name: str):
    """Import a module of the study, which finds its neighbours as when it is run."""
    for folder in (RECIPE, STUDY):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write speech with train_list.txt and two trial lists, and noise."""
    data = write_corpus(folder / "data", speakers=TRAINED + TESTED, seconds=0.6)
    wav = data / "wav"
    names = sorted(str(path.relative_to(wav)) for path in wav.rglob("*.wav"))
    trained = [name for name in names if int(name[2:7]) < TRAINED]
    tested = [name for name in names if int(name[2:7]) >= TRAINED]
    lines = "".join(f"{name.split('/')[0]} {name}\n" for name in trained)
    (data / "train_list.txt").write_text(lines)
    for name, every in (("veri_test", 1), ("veri_test_hard", 2)):
        pairs = list(itertools.combinations(tested, 2))[::every]
        lines = "".join(f"{int(a[:7] == b[:7])} {a} {b}\n" for a, b in pairs)
        (data / f"{name}.txt").write_text(lines)
    return data, write_noise(folder / "noise")


def tiny_size():
    """Two epochs of three steps of encoders of few channels and blocks."""
    conditions = study("conditions")
    settings = {
        **conditions.SIZES["small"].settings,
        "blocks": [1, 1, 1, 1],
        "embedding_dim": 32,
        "chunk_samples": 4640,
        "batch_size": 4,
        "steps_per_epoch": 3,
        "number_of_epochs": 2,
        "average_checkpoints": 1,
        "max_unread": 0,
        "cohort_top_n": 3,
    }
    widths = dict.fromkeys(("resnet34", "revnet46"), (8, 8, 8, 32))
    return conditions.Size("cpu", (1, 2), settings, widths, {}, minutes=6.0)
