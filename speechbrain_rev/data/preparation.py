"""Preparation of training data: the lists of a run, and what they were made of.

`prepare` writes into a run's save folder:

- train.csv: the training manifest (ID, wav, samples, spk_id)
- valid_trials.txt: trials between held-out speakers, if any are held out
- valid.csv: the files of these trials
- label_encoder.txt: the number of each speaker, as SpeechBrain writes it
- left_out.csv: each file that is not used, and why
- prepared.json: the settings, counts, and a digest of settings and data
- SHA256SUMS: checksums of the lists and the settings, which are compared when one is read
"""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tqdm import tqdm

from speechbrain_rev.files import (
    SUMS,
    check_sum,
    digest_of,
    read_json,
    refusing,
    sums_in,
    write_sums,
    write_whole,
)
from speechbrain_rev.processes import interrupted_while

from .checking import (
    refuse_few_speakers,
    report_problems,
    take_account,
    write_left_out,
)
from .corpora import absolute
from .labels import write_labels
from .listing import (
    VALIDATED_SECONDS,
    DataSettings,
    ListedSpeech,
    held_out_speakers,
    list_speech,
    list_validation,
)
from .manifest import write_manifest
from .rows import Row, counted

logger = logging.getLogger(__name__)

TRAIN, VALID_TRIALS, VALID = "train.csv", "valid_trials.txt", "valid.csv"
LABELS, LEFT_OUT = "label_encoder.txt", "left_out.csv"
RECORD = "prepared.json"
LISTS = (TRAIN, VALID_TRIALS, VALID, LABELS)


@dataclass(frozen=True)
class Prepared:
    """What `prepare` listed.

    Attributes
    ----------
    utterances, speakers : int
        Size of the training set.
    held_out, held_out_speakers : int
        Utterances and speakers that are held out for validation.
    valid_trials : int
        Number of validation trials, 0 for none.
    single : int
        Training speakers with one utterance only.
    lost : sequence of str
        Speakers in no trial list of whom no utterance can be used.
    treated : mapping of str to int
        How many of those used are resampled, mixed, of one of several channels, or shorter
        than a segment.
    left_out : mapping of str to int
        Files that are not used, by reason, as ``left_out.csv`` lists them.

    Example
    -------
    >>> Prepared(12, 3, 4, 2, 10, left_out={"hidden": 1}).in_words()
    'Seen: 17 files of audio. Training: 12 utterances of 3 speakers. ...'
    """

    utterances: int
    speakers: int
    held_out: int
    held_out_speakers: int
    valid_trials: int
    single: int = 0
    lost: Sequence[str] = ()
    treated: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def seen(self) -> int:
        """Count all files, each of which is in one of the counts."""
        return self.utterances + self.held_out + sum(self.left_out.values())

    def in_words(self) -> str:
        """Return all counts in sentences."""
        left_out = [f"{count:,} {why}" for why, count in self.left_out.items()]
        treated = [f"{count:,} {how}" for how, count in sorted(self.treated.items())]
        lost = f", such as {self.lost[0]}" if self.lost else ""
        sentences = {
            f"Seen: {counted(self.seen(), 'file')} of audio.": True,
            f"Training: {counted(self.utterances, 'utterance')} of "
            f"{counted(self.speakers, 'speaker')}.": True,
            f"Validation: {counted(self.valid_trials, 'trial')}, "
            f"{counted(self.held_out, 'utterance')} held out.": True,
            f"Left out: {', '.join(left_out)}.": left_out,
            f"Of those used: {', '.join(treated)}.": treated,
            f"Speakers with one utterance only: {self.single:,}.": self.single,
            f"Speakers without a usable utterance: {len(self.lost):,}{lost}.": self.lost,
        }
        return " ".join(words for words, is_said in sentences.items() if is_said)


def prepare(
    settings: DataSettings, save_folder: str | Path, *, begun: bool = False
) -> Prepared:
    """Write the lists that a training run needs, unless they are there already.

    What the data folder is understood as is printed before anything is written.

    Parameters
    ----------
    settings : DataSettings
        What to list.
    save_folder : str or Path
        Where to write.
    begun : bool
        Whether a run has begun with the lists that are there, as its checkpoints say too.

    Returns
    -------
    Prepared

    Raises
    ------
    ValueError
        If a folder or list is missing, a file cannot be used, no speaker is left, the
        folder has checkpoints of a run with other settings or data, or what was written
        before is not as it was written.

    Example
    -------
    >>> import soundfile
    >>> folder = getfixture("tmp_path")
    >>> for speaker, level in ("id1", 0.25), ("id2", 0.5):
    ...     path = folder / "wav" / speaker / "s" / "a.wav"
    ...     path.parent.mkdir(parents=True)
    ...     soundfile.write(path, [0.0, level], 16000)
    >>> prepared = prepare(
    ...     DataSettings(str(folder)), folder / "save"
    ... )  # doctest: +ELLIPSIS
    Understood as VoxCeleb: 2 utterances of 2 speakers, such as
      id1/s/a.wav of id1: ...
    >>> prepared.utterances, prepared.speakers
    (2, 2)
    """
    save_folder = Path(save_folder)
    finished, folder = begun, absolute(settings.data_folder)
    begun = begun or any(save_folder.glob("CKPT*/CKPT.yaml"))
    earlier = _record(save_folder) if (save_folder / RECORD).is_file() else {}
    # Counts of short utterances depend on the segment.
    segment = {"short": settings.short, "samples": settings.segment_samples()}
    with interrupted_while(
        f"in the listing of {settings.data_folder}, before any training. The same "
        "command lists it anew."
    ):
        given, listing = settings.fingerprint(), list_speech(settings)
        made = blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=16)
        made.update(listing.digest().encode())
        same = earlier.get("digest") == made.hexdigest()
        if begun and not same:
            raise ValueError(_changed(save_folder, earlier.get("settings", {}), given))
        checks = earlier.get("checks", {})
        changed = [name for name in checks if checks[name] != settings.checks()[name]]
        if begun and changed:
            logger.warning(
                f"{' and '.join(changed)}: no effect. The lists of {save_folder.parent} are "
                "there, and a run keeps the files that it began with. To check files anew, "
                "give a new output_folder."
            )
            settings = replace(settings, **checks)
        # Without checksums a record vouches for no lists: an interrupted preparation may
        # have written them.
        unchanged = (
            same
            and not changed
            and earlier["segment"] == segment
            and RECORD in sums_in(save_folder)
        )
        # Lists have the paths of files: a folder that moved is listed again.
        if finished or ((begun or unchanged) and earlier["folder"] == folder):
            return read_prepared(save_folder)
        save_folder.mkdir(parents=True, exist_ok=True)
        tqdm.write(listing.understood())
        prepared = _write_lists(listing, settings, save_folder)
        record = {
            "digest": made.hexdigest(),
            "settings": given,
            "folder": folder,
            "checks": settings.checks(),
            "segment": segment,
            "prepared": asdict(prepared),
        }
        write_whole(save_folder / RECORD, json.dumps(record, indent=1) + "\n")
        write_missing_sums(save_folder)
    return prepared


def _write_lists(
    listing: ListedSpeech, settings: DataSettings, save_folder: Path
) -> Prepared:
    """Check files, choose speakers, and write the lists of a run."""
    account, drop = take_account(listing, settings), settings.bad_files == "drop"
    left_out = save_folder / LEFT_OUT
    if account.problems and not drop:
        write_left_out(left_out, account.left_out)
    report_problems(account.problems, listing.seen(), left_out, drop=drop)
    usable = account.usable
    chosen = held_out_speakers(usable, settings)
    refuse_few_speakers(account, chosen)
    fewest = VALIDATED_SECONDS * settings.sample_rate
    held_out: dict[str, dict[str, Row]] = {speaker: {} for speaker in chosen}
    for row in listing.rows:
        if (speaker := row.speaker or "") in held_out:
            utterance = usable[speaker].get(row.name)
            if utterance is not None and utterance.samples >= fewest:
                held_out[speaker][row.name] = row
    lines, files = list_validation(
        {speaker: [*rows.values()] for speaker, rows in held_out.items()},
        listing,
        settings,
    )
    train = {s: list(u.values()) for s, u in usable.items() if s not in held_out}
    utterances = [utterance for spoken in train.values() for utterance in spoken]
    prepared = Prepared(
        len(utterances),
        len(train),
        len(account.utterances) - len(utterances),
        len(held_out),
        len(lines),
        single=sum(len(spoken) == 1 for spoken in train.values()),
        lost=account.lost,
        treated=dict(account.treated),
        left_out=account.causes(),
    )
    # Checksums go first and come last: they vouch for the lists.
    (save_folder / SUMS).unlink(missing_ok=True)
    write_left_out(left_out, account.left_out)
    write_manifest(save_folder / TRAIN, utterances)
    write_whole(save_folder / VALID_TRIALS, "".join(lines))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((("name", "wav"), *files.items()))
    write_whole(save_folder / VALID, text.getvalue())
    write_labels(save_folder / LABELS, train)
    return prepared


def read_valid_files(save_folder: str | Path) -> dict[str, str]:
    """Read the files of the validation trials by their names.

    Parameters
    ----------
    save_folder : str or Path
        The run's.

    Returns
    -------
    dict of str to str
    """
    path = Path(save_folder, VALID)
    check_sum(path)
    with path.open(newline="", encoding="utf-8") as file:
        return {row["name"]: row["wav"] for row in csv.DictReader(file)}


def write_missing_sums(save_folder: str | Path) -> None:
    """Write checksums of lists that have none.

    A preparation writes them last. Whoever takes changed lists as they are deletes them.

    Parameters
    ----------
    save_folder : str or Path
        The run's.
    """
    sums = sums_in(save_folder)
    if RECORD in sums:
        return
    paths = [Path(save_folder, name) for name in (*LISTS, RECORD)]
    new = {path.name: digest_of(path) for path in paths if path.exists()}
    write_sums(save_folder, {**sums, **new})


def read_prepared(save_folder: str | Path) -> Prepared:
    """Read the record of a run's save folder, and check the lists against it.

    Parameters
    ----------
    save_folder : str or Path
        The run's.

    Returns
    -------
    Prepared

    Raises
    ------
    ValueError
        If a list is not as it was written.
    """
    sums = sums_in(save_folder)
    lacking = [name for name in (*LISTS, RECORD) if name not in sums]
    # Whoever takes changed lists as they are deletes the file.
    if lacking and Path(save_folder, SUMS).is_file():
        raise ValueError(
            f"{Path(save_folder, SUMS)} lacks {', '.join(lacking)}. Bring the file back as "
            "it was. To take the lists as they are, delete it."
        )
    for name in sums.keys() & {*LISTS}:
        check_sum(Path(save_folder, name))
    prepared: Prepared = _record(save_folder)["prepared"]
    return prepared


def _record(save_folder: str | Path) -> dict[str, Any]:
    """Read the record of what the lists in a save folder were made of."""
    path = Path(save_folder, RECORD)
    check_sum(path)
    with refusing(
        f"{path} is damaged",
        "Bring back the file as it was; where no run has begun, deleting it lists the "
        "data anew.",
    ):
        record = read_json(path)
        return {**record, "prepared": Prepared(**record["prepared"])}


def _changed(
    save_folder: Path, earlier: Mapping[str, object], now: Mapping[str, object]
) -> str:
    """Say what differs from the data that a run began with, and how to list them anew."""
    folder = save_folder.parent
    names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    changes = [
        f"the content of {name}"
        if isinstance(now.get(name, earlier.get(name)), list)
        else f"{name}: was {earlier.get(name)}, is {now.get(name)}"
        for name in names
    ]
    return (
        f"{folder} has checkpoints of a run on other data "
        f"({'; '.join(changes) or 'names, sizes or speakers of the files'}), and speakers "
        "keep their numbers. Resume it with the data as they were, or list anew: "
        "--output_folder=FOLDER."
    )
