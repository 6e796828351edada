"""A study of seconds: a tiny corpus with its lists, tiny encoders."""

import itertools
from pathlib import Path

from tests.corpus import write_corpus, write_noise
from tests.recipes.study import study

TRAINED, TESTED = 5, 4
WIDTHS = (8, 8, 8, 32)


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


def tiny_size(device: str = "cpu", seeds: tuple[int, ...] = (1, 2)):
    """Two epochs of three steps of encoders of few channels and blocks."""
    settings = {
        **study("design.sizes").SIZES["small"].settings,
        "blocks": [1, 1, 1, 1],
        "embedding_dim": 32,
        "chunk_samples": 4640,
        "batch_size": 4,
        "steps_per_epoch": 3,
        "number_of_epochs": 2,
        "warmup_epochs": 0.5,
        "average_checkpoints": 1,
        "keep_checkpoints": 1,
        "max_unread": 0,
        "cohort_top_n": 3,
    }
    archs = ("resnet34", "revnet46")
    return study("design.sizes").Size(
        device, seeds, settings, dict.fromkeys(archs, WIDTHS)
    )


def recipe_settings(data: Path, noise: Path | None, device: str = "cpu"):
    """What all trainings are given of data and device."""
    return {
        "data_folder": data,
        "train_list": data / "train_list.txt",
        "trial_lists": sorted(data.glob("veri_test*.txt")),
        "noise_folder": noise,
        "device": device,
    }
