"""List the training utterances of a folder in VoxCeleb's layout, or pack a folder.

python recipes/VoxCeleb/prepare.py FILE [--key=value ...]
python recipes/VoxCeleb/prepare.py --pack FOLDER PACKED [--sample_rate=16000]
    [--bad_files=refuse|drop] [--first_channel]

The second packs audio (speech, noise or room responses) into the folder PACKED, whose
name ends in .packed: 16-bit samples in one file, and an index. It stands wherever FOLDER
stood (data_folder, noise_folder, rir_folder, trials_folder), is read many times faster,
and needs FOLDER no more. Interrupted, it goes on when the same command is given again.

The first does what train.py does before a training, with the same settings. It writes
into the run's save folder, never into the data folder:

- train.csv: the training manifest (ID, wav, samples, spk_id)
- valid_trials.txt: trials between held-out speakers, if any are held out
- label_encoder.txt: the number of each speaker, as SpeechBrain writes it
- bad_files.txt: files that cannot be used, and why
- prepared.json: the settings; with the same settings again, nothing is done, and
  with others, once there are checkpoints, it is refused: speakers keep their numbers
- SHA256SUMS: checksums of all these but bad_files.txt, which are compared when one is read
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_settings import Prepared, Settings, existing, paths_given
from layout import (
    OTHER_SUFFIXES,
    audio_below,
    speaker_of,
    speech_root,
    without_originals,
)
from pack_folder import pack
from run_settings import RESULT, owned
from speech_files import check_files, report_problems
from speechbrain.dataio.encoder import CategoricalEncoder
from tqdm import tqdm
from validation import held_out_speakers, validation_lines

from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.hparams import compose, plain_settings
from speechbrain_rev.scoring import Trials, read_trials
from speechbrain_rev.speech import audio_exists, write_manifest
from speechbrain_rev.speech.manifest import MAPPED
from speechbrain_rev.speech.reading import AUDIO_SUFFIXES
from speechbrain_rev.whole_files import (
    SUMS,
    check_sum,
    check_writable,
    digest_of,
    sums_in,
    write_sums,
    write_whole,
)

logger = logging.getLogger(__name__)

TRAIN, VALID_TRIALS = "train.csv", "valid_trials.txt"
RECORD = "prepared.json"
LABELS = "label_encoder.txt"
BAD_FILES = "bad_files.txt"
LISTS = (TRAIN, VALID_TRIALS, LABELS)


def prepare(settings: Settings, save_folder: str | Path) -> Prepared:
    """Write the lists that a training run needs, unless they are there already.

    Parameters
    ----------
    settings : Settings
        What to list.
    save_folder : str or Path
        Where to write.

    Returns
    -------
    Prepared

    Raises
    ------
    ValueError
        If a folder or list is missing, a file cannot be used, no speaker is left, the
        folder has checkpoints of a training with other settings, or what was written
        before is not as it was written.
    """
    save_folder, fingerprint = Path(save_folder), settings.fingerprint()
    done = save_folder / RECORD
    earlier = _record(save_folder) if done.is_file() else {}
    checks = {"bad_files": settings.bad_files, "check_audio": settings.check_audio}
    begun = any(save_folder.glob("CKPT*/CKPT.yaml")) or RESULT in sums_in(save_folder)
    if earlier.get("settings") == fingerprint:
        if earlier.get("checks", checks) == checks:
            return read_prepared(save_folder)
        if begun:
            logger.warning(
                f"{save_folder.parent} goes on with the files that it began with: "
                "bad_files and check_audio are heeded before a training begins."
            )
            return read_prepared(save_folder)
    elif begun:
        raise ValueError(_changed(save_folder, earlier.get("settings"), fingerprint))
    save_folder.mkdir(parents=True, exist_ok=True)
    prepared = _prepare(settings, save_folder)
    record = {"settings": fingerprint, "checks": checks, "prepared": asdict(prepared)}
    text = json.dumps(record, indent=1) + "\n"
    written = (save_folder / name for name in (*LISTS, f"{TRAIN}{MAPPED}"))
    # The mapped rows may have found no place on the disk.
    sums = {path.name: digest_of(path, "sha256") for path in written if path.exists()}
    own = hashlib.sha256(text.encode()).hexdigest()
    write_sums(save_folder, {**sums, RECORD: own})
    write_whole(done, text)
    return prepared


def read_prepared(save_folder: str | Path) -> Prepared:
    """Read what was prepared in a run's save folder, with lists that belong to it."""
    for name in sums_in(save_folder).keys() & {*LISTS}:
        if not Path(save_folder, name).is_file():
            raise ValueError(
                f"{save_folder} has a {RECORD} but no {name}. Bring the file back; where "
                f"no training has begun, deleting {RECORD} lists the data anew."
            )
        check_sum(Path(save_folder, name))
    return Prepared(**_record(save_folder)["prepared"])


def _record(save_folder: str | Path) -> dict[str, Any]:
    """Read what the lists in a run's save folder were made of."""
    path = Path(save_folder, RECORD)
    check_sum(path)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}). Bring back the file as it was; where no "
            "training has begun, deleting it lists the data anew."
        ) from error
    return record


def _prepare(settings: Settings, save_folder: Path) -> Prepared:
    root = speech_root(settings.data_folder)
    found = _listed(settings.train_list) or _found(root)
    tested = _tested(settings)
    by_speaker = {s: paths for s, paths in sorted(found.items()) if s not in tested}
    left_out = sum(len(paths) for s, paths in found.items() if s in tested)
    usable, problems = check_files(
        by_speaker, root, sample_rate=settings.sample_rate, whole=settings.check_audio
    )
    files, drop = sum(map(len, by_speaker.values())), settings.bad_files == "drop"
    report_problems(problems, files, save_folder / BAD_FILES, drop=drop)
    held_out = held_out_speakers(
        {s: list(names) for s, names in usable.items()}, settings
    )
    lines = validation_lines(held_out, settings)
    train = {s: list(u.values()) for s, u in usable.items() if s not in held_out}
    if len(train) < 2:
        raise ValueError(
            f"Only {len(train)} speaker(s) are left for training: {len(found)} found, "
            f"{len(found) - len(by_speaker)} in trial lists, {len(held_out)} held out. "
            "Check data_folder, train_list, trial_lists and valid_speakers."
        )
    utterances = [utterance for spoken in train.values() for utterance in spoken]
    # Before: it must not vouch for lists of a preparation that does not come to its end.
    for name in (RECORD, SUMS):
        (save_folder / name).unlink(missing_ok=True)
    write_manifest(save_folder / TRAIN, utterances)
    write_whole(save_folder / VALID_TRIALS, "".join(lines))
    write_label_encoder(save_folder / LABELS, train)
    return Prepared(
        len(utterances),
        len(train),
        left_out,
        held_out=sum(map(len, held_out.values())),
        valid_trials=len(lines),
        dropped=len(problems),
        single=sum(len(spoken) == 1 for spoken in train.values()),
    )


def write_label_encoder(path: Path, speakers: Iterable[str]) -> None:
    """Write the number of each speaker, in the order given."""
    encoder = CategoricalEncoder()
    encoder.update_from_iterable(speakers)
    encoder.save(f"{path}.part")
    os.replace(f"{path}.part", path)


def speaker_numbers(save_folder: str | Path) -> dict[str, int]:
    """Read the number of each training speaker in a run's save folder."""
    encoder = CategoricalEncoder()
    check_sum(Path(save_folder, LABELS))
    encoder.load(Path(save_folder, LABELS))
    return encoder.lab2ind


def _found(root: Path) -> dict[str, list[str]]:
    found = defaultdict(list)
    # Speech of another kind must not be missing without a word.
    paths = audio_below(root, AUDIO_SUFFIXES + OTHER_SUFFIXES)
    listed = tqdm(paths, desc="listing", unit="file", leave=False)
    for path in without_originals(listed):
        name = path.relative_to(root).as_posix()
        found[speaker_of(name)].append(name)
    return {speaker: sorted(names) for speaker, names in found.items()}


def _listed(train_list: str | None) -> dict[str, list[str]] | None:
    if train_list is None:
        return None
    found = defaultdict(list)
    text = existing(train_list).read_text(encoding="utf-8")
    for number, line in enumerate(text.rstrip().split("\n"), start=1):
        fields = line.split()
        if len(fields) != 2:
            raise ValueError(
                f"{train_list}, line {number}: {line[:60]!r} has {len(fields)} fields "
                "instead of 2. Lines must be 'speaker path'."
            )
        found[fields[0]].append(fields[1])
    return dict(found)


def _tested(settings: Settings) -> set[str]:
    """Return the speakers of the trial lists, whose audio is looked for."""
    tested = set()
    for path in (*settings.trial_lists, *paths_given(settings.valid_trials)):
        trials = read_trials(path)
        _refuse_other_names(path, trials)
        missing = _missing_audio(trials, settings.trials_folder or settings.data_folder)
        if missing and path == settings.valid_trials:
            raise ValueError(
                f"{path}: {missing} Set trials_folder or correct the list."
            )
        if missing:
            logger.warning(
                f"{path}: {missing} Training does without; before extract.py, set "
                "trials_folder to where they are."
            )
        tested.update(map(speaker_of, trials.utterances))
    return tested


def _refuse_other_names(path: str, trials: Trials) -> None:
    """Refuse names that do not begin with the speaker: nobody would be left out."""
    for label, *names in zip(trials.labels, trials.enrol, trials.test, strict=True):
        speakers = [speaker_of(name) for name in names]
        if (speakers[0] == speakers[1]) != bool(label):
            raise ValueError(
                f"{path}: the trial {label} {' '.join(names)} is of the speakers "
                f"{speakers[0]!r} and {speakers[1]!r}, which contradicts its label: "
                "paths must begin with the speaker (id10270/x6uYqmx31kE/00001.wav, not "
                "wav/id10270/...), or the test speakers could not be left out of "
                "training. Correct the paths of the list."
            )


def _missing_audio(trials: Trials, folder: str) -> str | None:
    """Look for the audio of a trial list; say what is missing."""
    try:
        root = speech_root(folder)
    except ValueError as error:
        return str(error)
    paths = [root / name for name in trials.utterances]
    with ThreadPoolExecutor(max_workers=16) as pool:
        there = pool.map(audio_exists, paths)
        missing = [
            path for path, is_file in zip(paths, there, strict=True) if not is_file
        ]
    if not missing:
        return None
    return f"{len(missing)} of {len(paths)} files are missing, such as {missing[0]}."


def _changed(
    save_folder: Path, earlier: dict[str, object] | None, now: dict[str, object]
) -> str:
    """Say which settings changed since the checkpoints were made."""
    folder = save_folder.parent
    if earlier is None:
        return (
            f"{folder} has checkpoints, but no {RECORD} that says of which speakers. "
            "Give another output_folder."
        )
    names = [name for name in now if earlier.get(name) != now[name]]
    changes = "; ".join(f"{n}: {_shown(earlier.get(n), now[n])}" for n in names)
    return (
        f"{folder} has checkpoints of a training on other data settings ({changes}). "
        "Going on would give the speakers other numbers. Give another output_folder, "
        "or the settings as they were."
    )


def _shown(earlier: object, now: object) -> str:
    """Show a change; a list is known by its name and by its content."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        if list(earlier) == list(now):
            return f"the content of {', '.join(now)} changed"
        earlier, now = (", ".join(lists) or None for lists in (earlier, now))
    return f"was {earlier}, is {now}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
    elif "--pack" in argv:
        parser = ArgumentParser()
        parser.add_argument("--pack", nargs=2, type=Path, metavar=("FOLDER", "PACKED"))
        parser.add_argument("--sample_rate", type=int, default=16000)
        parser.add_argument("--bad_files", choices=("refuse", "drop"), default="refuse")
        parser.add_argument("--first_channel", action="store_true")
        options = parser.parse_args(argv)
        pack(
            *options.pack,
            sample_rate=options.sample_rate,
            drop=options.bad_files == "drop",
            first_channel=options.first_channel,
        )
    else:
        settings = plain_settings(compose(argv).text)
        folder = Path(settings["output_folder"])
        check_writable("output_folder", folder)
        with owned(folder):
            prepared = prepare(Settings.of(settings), settings["save_folder"])
        print(prepared.in_words())


if __name__ == "__main__":
    run_script(main)
