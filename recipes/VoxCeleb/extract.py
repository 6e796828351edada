"""Embed each utterance of the trial lists and of the training set, once.

``python recipes/VoxCeleb/extract.py RUN_FOLDER`` writes into the run's folder

- embeddings/trials.npz: the utterances of all trial lists
- embeddings/cohort.npz: the training utterances, from which score.py makes the cohort

Embeddings that are there already from the same weights are kept. Several processes, each
with a GPU of its own, share the work: ``torchrun --nproc_per_node=4
recipes/VoxCeleb/extract.py RUN_FOLDER``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layout import speech_root
from processes import ALONE, Place, joined, own_device

from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.inference import SpeakerEmbedder, embed_into, embed_share
from speechbrain_rev.inference.run_folder import read_settings
from speechbrain_rev.scoring import read_trials
from speechbrain_rev.speech import audio_exists, read_manifest

TRIALS, COHORT = "embeddings/trials.npz", "embeddings/cohort.npz"


def lists_of(given: Sequence[str] | None, settings: Mapping[str, Any]) -> list[Path]:
    """Choose the trial lists: those given, else those of the run."""
    paths = [Path(path) for path in given or settings["trial_lists"]]
    if not paths:
        raise ValueError(
            "this run has no trial_lists. Give some: --trials LIST [LIST ...], for "
            "example the RUN_FOLDER/save/valid_trials.txt that training made."
        )
    return paths


def trial_files(trial_lists: Sequence[Path], root: Path) -> dict[str, Path]:
    """Find the audio of every utterance of the trial lists."""
    names = (name for path in trial_lists for name in read_trials(path).utterances)
    files = {name: root / name for name in names}
    missing = [file for file in files.values() if not audio_exists(file)]
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(files)} utterances of the trial lists are "
            f"missing, the first {missing[0]}. Give their folder with --trials_folder; "
            "names in trial lists begin with the speaker, as in id10270/..."
        )
    return files


def cohort_files(
    manifest: str | Path, utterances_per_speaker: int | None = None
) -> dict[str, str]:
    """Find the audio of the training utterances, or of the first of each speaker.

    A speaker is one at the speed recorded; the classes that training makes of other
    speeds are not in the manifest.
    """
    by_speaker = defaultdict(dict)
    for utterance in read_manifest(manifest):
        by_speaker[utterance.spk_id][utterance.ID] = utterance.wav
    return {
        name: wav
        for files in by_speaker.values()
        for name, wav in list(files.items())[:utterances_per_speaker]
    }


def extract(
    embedder: SpeakerEmbedder,
    folder: str | Path,
    trials: Mapping[str, str | Path],
    cohort: Mapping[str, str | Path],
    *,
    place: Place = ALONE,
) -> None:
    """Embed both sets into a folder, and say what is there.

    Channels of files that have several are averaged.
    """
    for name, files in ((TRIALS, trials), (COHORT, cohort)):
        path = Path(folder) / name
        if place.processes > 1:
            embed_share(path, embedder, files, channels="mean", **place._asdict())
            place.wait()
        if place.is_main:
            archive = embed_into(path, embedder, files, channels="mean")
            utterances, dim = archive.embeddings.shape
            print(f"{path}: {utterances} embeddings of {dim} dimensions")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_folder", type=Path, help="output_folder of train.py")
    parser.add_argument("--trials", nargs="+", help="instead of the run's trial_lists")
    parser.add_argument("--trials_folder", help="instead of the run's trials_folder")
    parser.add_argument(
        "--utterances_per_speaker",
        type=int,
        help="how many of each training speaker make its mean; default: all",
    )
    parser.add_argument(
        "--device", help="default: the GPU if there is one, each process its own"
    )
    options = parser.parse_args(argv)
    settings = read_settings(options.run_folder, ("trial_lists", "trials_folder"))
    root = speech_root(options.trials_folder or settings["trials_folder"])
    trials = trial_files(lists_of(options.trials, settings), root)
    cohort = cohort_files(
        options.run_folder / "save" / "train.csv", options.utterances_per_speaker
    )
    device = own_device(options.device)
    embedder = SpeakerEmbedder.from_run(options.run_folder, device=device)
    with joined() as place:
        extract(embedder, options.run_folder, trials, cohort, place=place)


if __name__ == "__main__":
    run_script(main)
