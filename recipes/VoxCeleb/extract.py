"""Embed each utterance of the trial lists and of the training set, once.

``python recipes/VoxCeleb/extract.py RUN_FOLDER`` writes into the run's folder

- embeddings/trials.npz: the utterances of all trial lists
- embeddings/cohort.npz: the training utterances, from which score.py makes the cohort

Where the training data have moved, ``--data_folder`` says where they are now; lists and
trials_folder of the run that lie in the old folder are looked for there too.

Embeddings that are there already from the same weights are kept. Several processes, each
with a GPU of its own, share the work: ``torchrun --nproc_per_node=4
recipes/VoxCeleb/extract.py RUN_FOLDER``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import ALONE, Place, joined, own_device

from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.data import Corpus, VoxCelebFolder, open_corpus, read_manifest
from speechbrain_rev.data.corpus import find_files
from speechbrain_rev.inference import SpeakerEmbedder, embed_into, embed_share
from speechbrain_rev.inference.run_folder import read_settings
from speechbrain_rev.scoring import read_trials

TRIALS, COHORT = "embeddings/trials.npz", "embeddings/cohort.npz"


def moved(path: str, settings: Mapping[str, Any], data_folder: str | None) -> Path:
    """Follow a path of a run's settings to where its data folder is now.

    Parameters
    ----------
    path : str
        In the run's data folder, or elsewhere.
    settings : mapping
        The run's.
    data_folder : str or None
        Where the data are now; None where they were.
    """
    earlier = settings.get("data_folder")
    if data_folder is None or earlier is None:
        return Path(path)
    absolute, earlier = os.path.abspath(path), os.path.abspath(earlier)
    if not Path(absolute).is_relative_to(earlier):
        return Path(path)
    return Path(data_folder, Path(absolute).relative_to(earlier))


def lists_of(
    given: Sequence[str] | None,
    settings: Mapping[str, Any],
    data_folder: str | None = None,
) -> list[Path]:
    """Choose the trial lists: those given, else those of the run."""
    own = [moved(path, settings, data_folder) for path in settings["trial_lists"]]
    paths = [Path(path) for path in given] if given else own
    if not paths:
        raise ValueError(
            "this run has no trial_lists. Give some: --trials LIST [LIST ...], for "
            "example the RUN_FOLDER/save/valid_trials.txt that training made."
        )
    return paths


def trial_files(trial_lists: Sequence[Path], corpus: Corpus) -> dict[str, Path]:
    """Find the audio of every utterance of the trial lists.

    Parameters
    ----------
    trial_lists : sequence of Path
        Lists of the corpus.
    corpus : Corpus
        The folder of the audio.
    """
    listed = {path: read_trials(path).utterances for path in trial_lists}
    names = dict.fromkeys(name for one in listed.values() for name in one)
    found = find_files(corpus, list(names))
    for path, one in listed.items():
        found.refuse_outside(path, one)
    if found.missing:
        raise ValueError(
            f"Of the utterances of the trial lists {found.lacking()} Give their folder "
            "with --trials_folder; names in trial lists begin with the speaker, as in "
            "id10270/..."
        )
    return dict(found.paths)


def cohort_files(
    manifest: str | Path,
    utterances_per_speaker: int | None = None,
    *,
    data_folder: str | Path | None = None,
    any_extension: bool = False,
    outside_files: bool = False,
) -> dict[str, Path]:
    """Find the audio of the training utterances, or of the first of each speaker.

    A speaker is one at the speed recorded; the classes that training makes of other
    speeds are not in the manifest.

    Parameters
    ----------
    manifest : str or Path
        The run's.
    utterances_per_speaker : int or None
        None for all.
    data_folder : str, Path or None
        Where the data are now; None where the manifest says.
    any_extension : bool
        Whether a .flac is taken where the manifest says .wav, or the reverse.
    outside_files : bool
        Whether files may lie outside the data folder that is given.
    """
    by_speaker: dict[str, dict[str, str]] = defaultdict(dict)
    for utterance in read_manifest(manifest):
        wav = utterance.wav
        if data_folder is not None:
            suffix = f".{wav.rpartition('.')[2]}"
            wav = f"{utterance.ID.removesuffix(suffix)}{suffix}"
            if not utterance.wav.endswith(f"/{wav}"):
                raise ValueError(
                    f"{manifest}: {utterance.ID} is no path in a data folder, as "
                    f"{utterance.wav} shows. Leave --data_folder out."
                )
        by_speaker[utterance.spk_id][utterance.ID] = wav
    wavs = {
        name: wav
        for files in by_speaker.values()
        for name, wav in list(files.items())[:utterances_per_speaker]
    }
    if data_folder is None:
        # Paths of a manifest may lead anywhere.
        corpus: Corpus = VoxCelebFolder(
            Path(), any_extension=any_extension, outside_files=True
        )
    else:
        corpus = open_corpus(
            data_folder, any_extension=any_extension, outside_files=outside_files
        )
    found = find_files(corpus, list(wavs.values()))
    found.refuse_outside(manifest, wavs.values())
    if found.missing:
        raise ValueError(
            f"Of the training utterances {found.lacking()} Give the folder where they "
            "are now with --data_folder."
        )
    return {name: found.paths[wav] for name, wav in wavs.items()}


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
        "--data_folder", help="where the training data are now, if they have moved"
    )
    parser.add_argument(
        "--any_extension",
        action="store_true",
        help="take a .flac where a list says .wav, or the reverse",
    )
    parser.add_argument(
        "--outside_files",
        action="store_true",
        help="read what names in lists and links lead to outside the folders",
    )
    parser.add_argument(
        "--utterances_per_speaker",
        type=int,
        help="how many of each training speaker make its mean; default: all",
    )
    parser.add_argument(
        "--device", help="default: the GPU if there is one, each process its own"
    )
    options = parser.parse_args(argv)
    count = options.utterances_per_speaker
    if count is not None and count < 1:
        parser.error(f"--utterances_per_speaker takes 1 or more, not {count}")
    settings = read_settings(
        options.run_folder,
        ("trial_lists", "trials_folder"),
        optional=("data_folder", "any_extension", "outside_files"),
    )
    any_extension = options.any_extension or settings.get("any_extension", False)
    outside_files = options.outside_files or settings.get("outside_files", False)
    folder = options.trials_folder or moved(
        settings["trials_folder"], settings, options.data_folder
    )
    given = [name for name in ("trials_folder", "data_folder") if vars(options)[name]]
    trials = trial_files(
        lists_of(options.trials, settings, options.data_folder),
        open_corpus(
            folder,
            given[0] if given else "data_folder=... or --trials_folder",
            any_extension=any_extension,
            outside_files=outside_files,
        ),
    )
    cohort = cohort_files(
        options.run_folder / "save" / "train.csv",
        count,
        data_folder=options.data_folder,
        any_extension=any_extension,
        outside_files=outside_files,
    )
    device = own_device(options.device)
    embedder = SpeakerEmbedder.from_run(options.run_folder, device=device)
    with joined() as place:
        extract(embedder, options.run_folder, trials, cohort, place=place)


if __name__ == "__main__":
    run_script(main)
