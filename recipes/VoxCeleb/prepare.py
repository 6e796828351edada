"""List the training utterances of a folder in VoxCeleb's layout, or pack a folder.

python recipes/VoxCeleb/prepare.py FILE [--key=value ...]
python recipes/VoxCeleb/prepare.py --pack FOLDER PACKED [--sample_rate=16000]
    [--bad_files=refuse|drop] [--first_channel] [--outside_files]

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

import json
import logging
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from data_settings import Prepared, Settings, existing, paths_given
from pack_folder import pack
from run_settings import RESULT, owned
from speech_files import Problem, Wrong, check_files, report_problems
from speechbrain.dataio.encoder import CategoricalEncoder
from tqdm import tqdm
from validation import held_out_speakers, validation_lines

from speechbrain_rev.cli import ArgumentParser, run_script
from speechbrain_rev.data import Corpus, read_manifest, write_manifest
from speechbrain_rev.data.corpus import (
    find_files,
    located,
    refuse_one_folder_twice,
    same_speakers,
)
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.manifest import MAPPED
from speechbrain_rev.hparams import compose, plain_settings
from speechbrain_rev.lists import check_length, read_lines, split_line
from speechbrain_rev.scoring import Trials, read_trials
from speechbrain_rev.whole_files import (
    SUMS,
    check_sum,
    check_writable,
    clear_unfinished,
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
        folder has checkpoints of a run with other settings, or what was written
        before is not as it was written.
    """
    save_folder, fingerprint = Path(save_folder), settings.fingerprint()
    done = save_folder / RECORD
    earlier = _record(save_folder) if done.is_file() else {}
    checks, known = settings.treatment(), earlier.get("settings")
    begun = any(save_folder.glob("CKPT*/CKPT.yaml")) or RESULT in sums_in(save_folder)
    same = known is not None and _contents(known) == _contents(fingerprint)
    folder = os.path.abspath(settings.data_folder)
    if same and folder == _folder_of(earlier):
        treated = {**Settings("").treatment(), **earlier.get("checks", checks)}
        # Without checksums a record vouches for no lists: an interrupted preparation may
        # have written them, or an earlier version, which a run goes on with.
        if treated == checks and (begun or RECORD in sums_in(save_folder)):
            return read_prepared(save_folder)
        if begun:
            logger.warning(
                f"{save_folder.parent} goes on with the files that it began with: "
                f"{', '.join(checks)} are heeded before training begins."
            )
            return read_prepared(save_folder)
    elif begun and not same:
        raise ValueError(_changed(save_folder, known, fingerprint))
    elif begun:
        _refuse_other_data(settings, save_folder, earlier)
        if RESULT in sums_in(save_folder):
            return read_prepared(save_folder)
    save_folder.mkdir(parents=True, exist_ok=True)
    clear_unfinished(save_folder)
    listing = _list(settings)
    prepared = _prepare(listing, settings, save_folder, save_folder / BAD_FILES)
    record = {
        "settings": fingerprint,
        "folder": folder,
        "corpus": listing.digest(),
        "checks": checks,
        "prepared": asdict(prepared),
    }
    write_whole(done, json.dumps(record, indent=1) + "\n")
    write_missing_sums(save_folder)
    return prepared


def write_missing_sums(save_folder: str | Path) -> None:
    """Write checksums of lists that have none.

    Those of a run of an earlier version have none, nor have those of one that was killed
    when its lists were there and their checksums were not.
    """
    sums = sums_in(save_folder)
    if RECORD in sums:
        return
    paths = [Path(save_folder, n) for n in (*LISTS, f"{TRAIN}{MAPPED}", RECORD)]
    # The mapped rows may have found no place on the disk.
    found = {path.name: digest_of(path, "sha256") for path in paths if path.exists()}
    write_sums(save_folder, {**sums, **found})


def read_prepared(save_folder: str | Path) -> Prepared:
    """Read what was prepared in a run's save folder, with lists that belong to it."""
    sums = sums_in(save_folder)
    lacking = [name for name in (*LISTS, RECORD) if name not in sums]
    # A run of an earlier version has none, or that of its weights alone.
    if lacking and Path(save_folder, SUMS).is_file() and sums.keys() != {RESULT}:
        raise ValueError(
            f"{Path(save_folder, SUMS)} lacks {', '.join(lacking)}. Bring the file back as "
            "it was. To take the lists as they are, delete it."
        )
    for name in sums.keys() & {*LISTS}:
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


def _prepare(
    listing: _Listing, settings: Settings, save_folder: Path, bad_files: Path
) -> Prepared:
    corpus, found, problems = listing.corpus, listing.found, [*listing.problems]
    seen = sum(map(len, found.values())) + len(problems) + listing.passed_over
    refuse_one_folder_twice(corpus, found)
    tested = same_speakers(corpus, found, _tested(corpus, settings))
    by_speaker = {s: paths for s, paths in sorted(found.items()) if s not in tested}
    left_out = sum(len(paths) for s, paths in found.items() if s in tested)
    files = sum(map(len, by_speaker.values())) + len(problems)
    usable, wrong = check_files(
        by_speaker,
        corpus,
        sample_rate=settings.sample_rate,
        whole=settings.check_audio,
    )
    problems += wrong
    report_problems(problems, files, bad_files, drop=settings.bad_files == "drop")
    held_out = held_out_speakers(
        {s: list(names) for s, names in usable.items()}, corpus, settings
    )
    lines = validation_lines(held_out, corpus, settings)
    train = {s: list(u.values()) for s, u in usable.items() if s not in held_out}
    if len(train) < 2:
        raise ValueError(
            f"Only {len(train)} speaker(s) are left for training: {len(found)} found, "
            f"{len(found) - len(by_speaker)} in trial lists, {len(held_out)} held out. "
            "Check data_folder, train_list, trial_lists and valid_speakers."
        )
    utterances = [utterance for spoken in train.values() for utterance in spoken]
    prepared = Prepared(
        len(utterances),
        len(train),
        left_out,
        held_out=sum(map(len, held_out.values())),
        valid_trials=len(lines),
        dropped=len(problems),
        single=sum(len(spoken) == 1 for spoken in train.values()),
        seen=seen,
        passed_over=listing.passed_over,
    )
    assert prepared.accounts_for_all()
    # Before the lists: what vouches for them comes last.
    (save_folder / SUMS).unlink(missing_ok=True)
    write_manifest(save_folder / TRAIN, utterances)
    write_whole(save_folder / VALID_TRIALS, "".join(lines))
    write_label_encoder(save_folder / LABELS, train)
    return prepared


def write_label_encoder(path: Path, speakers: Iterable[str]) -> None:
    """Write the number of each speaker, in the order given."""
    encoder = CategoricalEncoder()
    encoder.update_from_iterable(speakers)
    # SpeechBrain writes into the file itself: half of it where a disk is full.
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, LABELS)
        encoder.save(part)
        write_whole(path, part.read_bytes())


def speaker_numbers(save_folder: str | Path) -> dict[str, int]:
    """Read the number of each training speaker in a run's save folder."""
    return read_labels(Path(save_folder, LABELS))


@dataclass(frozen=True)
class _Listing:
    """The files of a corpus or of a training list, before they are looked at."""

    corpus: Corpus
    found: Mapping[str, list[str]]
    problems: Sequence[Problem] = ()
    passed_over: int = 0

    def digest(self) -> str:
        """Digest names and sizes of what was found."""
        return self.corpus.digest(
            name for names in self.found.values() for name in names
        )


def _list(settings: Settings) -> _Listing:
    corpus = settings.corpus()
    if settings.train_list is None:
        return _in_folder(corpus)
    return _Listing(corpus, _listed(corpus, settings))


def _in_folder(corpus: Corpus) -> _Listing:
    """Find all audio: that of speakers, that of none, and how much lies beside."""
    found, problems = defaultdict(list), []
    # Speech of another kind must not be missing without a word.
    names = list(tqdm(corpus.utterances(), desc="listing", unit="file", leave=False))
    for name in names:
        if (speaker := corpus.speaker(name)) is not None:
            found[speaker].append(name)
        else:
            path = located(corpus, name)[0]
            words = f"{path} lies in the folder of the speakers' folders"
            problems.append(Problem(Wrong.NO_SPEAKER, str(path), words))
    remarks = corpus.remarks(names)
    for words in remarks.warnings:
        logger.warning(words)
    problems.sort(key=lambda problem: problem.path)
    by_speaker = {speaker: sorted(spoken) for speaker, spoken in found.items()}
    return _Listing(corpus, by_speaker, problems, remarks.passed_over)


def _listed(corpus: Corpus, settings: Settings) -> dict[str, list[str]]:
    """Read the training list, each file of which is of one speaker."""
    assert settings.train_list is not None
    train_list, form = existing(settings.train_list), "'speaker path'"
    lines: dict[str, tuple[str, int]] = {}
    found = defaultdict(list)
    for number, line in enumerate(read_lines(train_list, form), start=1):
        fields = split_line(line, 2)
        if len(fields) != 2:
            raise ValueError(
                f"{train_list}, line {number}: {line[:60]!r} has {len(fields)} fields "
                f"instead of 2. Lines must be {form}, with a tab between them where one "
                "has spaces."
            )
        # One file, however many slashes a line has.
        speaker, name = fields[0], str(PurePosixPath(fields[1]))
        check_length(name, f"{train_list}, line {number}")
        other, at = lines.setdefault(name, (speaker, number))
        if other != speaker:
            raise ValueError(
                f"{train_list}, lines {at} and {number}: {name!r} is of the speakers "
                f"{other!r} and {speaker!r}. Leave the right one."
            )
        found[speaker].append(name)
    if not found:
        raise ValueError(f"{train_list} is empty; lines must be {form}.")
    there = find_files(corpus, list(lines))
    if there.renamed and settings.bad_files == "refuse":
        raise ValueError(f"{train_list}: {there.lacking()}")
    # Missing files are reported with all else that is wrong.
    return {s: [there.names.get(n, n) for n in names] for s, names in found.items()}


def _tested(corpus: Corpus, settings: Settings) -> set[str]:
    """Return the speakers of the trial lists, whose audio is looked for."""
    tested: set[str] = set()
    lacking = ""
    lists = (*settings.trial_lists, *paths_given(settings.valid_trials))
    if lists:
        try:
            corpus = settings.trials_corpus()
        except ValueError as error:
            # Names tell the speakers all the same.
            lacking = str(error)
    for path in lists:
        trials = read_trials(path)
        speakers = {n: corpus.speaker(n) or n for n in trials.utterances}
        _refuse_other_names(path, trials, speakers)
        files = find_files(corpus, trials.utterances)
        files.refuse_outside(path, trials.utterances)
        missing = lacking or files.lacking()
        if missing and path == settings.valid_trials:
            raise ValueError(
                f"{path}: {missing} Set trials_folder or correct the list."
            )
        if missing:
            logger.warning(
                f"{path}: {missing} Training does without; before extract.py, set "
                "trials_folder to where they are."
            )
        tested.update(speakers.values())
    return tested


def _refuse_other_names(path: str, trials: Trials, by_name: Mapping[str, str]) -> None:
    """Refuse names that do not begin with the speaker: nobody would be left out."""
    for label, *names in zip(trials.labels, trials.enrol, trials.test, strict=True):
        speakers = [by_name[name] for name in names]
        if (speakers[0] == speakers[1]) != bool(label):
            raise ValueError(
                f"{path}: the trial {label} {' '.join(names)} is of the speakers "
                f"{speakers[0]!r} and {speakers[1]!r}, which contradicts its label: "
                "paths must begin with the speaker (id10270/x6uYqmx31kE/00001.wav, not "
                "wav/id10270/...), or the test speakers could not be left out of "
                "training. Correct the paths of the list."
            )


def _folder_of(record: Mapping[str, Any]) -> str:
    """Give the data folder of a preparation; early ones were of one working folder."""
    folder: str = record.get("folder") or record["settings"]["data_folder"]
    return os.path.abspath(folder)


def _contents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give what settings say of the data, wherever folder and lists are."""
    return {
        name: list(value.values()) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name != "data_folder"
    }


def _refuse_other_data(
    settings: Settings, save_folder: Path, record: Mapping[str, Any]
) -> None:
    """Refuse a data folder of another path, unless what it holds is the same."""
    earlier, listing = _folder_of(record), _list(settings)
    changes = []
    # Earlier versions have no digest; audio of another format has another one.
    if record.get("corpus") != listing.digest():
        changes = _changes(listing, settings, save_folder)
    if changes:
        raise ValueError(
            f"{save_folder.parent} has checkpoints of a run on {earlier}, and "
            f"{settings.data_folder} holds other data: {len(changes)} utterances or lists "
            f"differ, such as {changes[0]}. Give another output_folder, or the data as "
            "they were."
        )
    logger.warning(
        f"{settings.data_folder} holds the data of {earlier}: {save_folder.parent} goes "
        "on with them."
    )


def _changes(listing: _Listing, settings: Settings, save_folder: Path) -> list[str]:
    """Prepare a listing elsewhere; say what differs from what was prepared."""
    with tempfile.TemporaryDirectory() as folder:
        _prepare(listing, settings, Path(folder), save_folder / BAD_FILES)
        then, now = (_summary(at) for at in (save_folder, Path(folder)))
    return [
        f"{n}: was {then.get(n)}, is {now.get(n)}"
        for n in {**then, **now}
        if then.get(n) != now.get(n)
    ]


def _summary(save_folder: Path) -> dict[str, object]:
    """Give what is to be the same wherever the data are, of whatever file format."""
    lists: dict[str, object] = {
        f"utterance {one.ID}": f"{one.samples} samples of {one.spk_id}"
        for one in read_manifest(save_folder / TRAIN)
    }
    trials = [
        [field.rpartition(".")[0] or field for field in split_line(line, 3)]
        for line in read_lines(save_folder / VALID_TRIALS, "'label path path'")
    ]
    for name, content in (
        (VALID_TRIALS, trials),
        (LABELS, speaker_numbers(save_folder)),
    ):
        lists[name] = blake2b(repr(content).encode(), digest_size=8).hexdigest()
    return lists


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
        parser.add_argument("--outside_files", action="store_true")
        options = parser.parse_args(argv)
        pack(
            *options.pack,
            sample_rate=options.sample_rate,
            drop=options.bad_files == "drop",
            first_channel=options.first_channel,
            outside_files=options.outside_files,
        )
    else:
        settings = plain_settings(compose(argv).text)
        folder = Path(settings["output_folder"])
        check_writable("output_folder", folder)
        with owned(folder, Path(settings["save_folder"])):
            prepared = prepare(Settings.of(settings), settings["save_folder"])
        print(prepared.in_words())


if __name__ == "__main__":
    run_script(main)
