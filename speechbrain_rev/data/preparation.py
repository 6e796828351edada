"""Preparation of training data: the lists of a run, and what they were made of.

`prepare` writes into a run's save folder:

- train.csv: the training manifest (ID, wav, samples, spk_id)
- valid_trials.txt: trials between held-out speakers, if any are held out
- label_encoder.txt: the number of each speaker, as SpeechBrain writes it
- bad_files.txt: files that cannot be used, and why
- accounting.csv: how many files were seen, used, and left out for which reason
- left_out.csv: each file that is left out, and why
- single_speakers.txt: speakers with one utterance to train on
- lost_speakers.txt: speakers of whom no utterance can be used
- prepared.json: the settings
- SHA256SUMS: checksums of the lists and the settings, which are compared when one is read
"""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

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
from speechbrain_rev.hparams.document import dump
from speechbrain_rev.lists import read_lines, split_line
from speechbrain_rev.processes import interrupted_while

from .accounting import (
    LOST,
    count_short,
    refuse_few_speakers,
    take_account,
    write_account,
)
from .checking import report_problems
from .corpora import absolute
from .labels import read_labels, write_labels
from .listing import (
    VALIDATED_SECONDS,
    DataSettings,
    ListedSpeech,
    held_out_speakers,
    list_speech,
    validation_lines,
)
from .manifest import Cause, read_manifest, write_manifest

logger = logging.getLogger(__name__)

TRAIN, VALID_TRIALS = "train.csv", "valid_trials.txt"
LABELS = "label_encoder.txt"
RECORD = "prepared.json"
BAD_FILES = "bad_files.txt"
LISTS = (TRAIN, VALID_TRIALS, LABELS)

# What `prepare` records of its settings and lists.
_ENTRIES = {"settings", "folder", "corpus", "checks", "segment", "prepared"}
# What a record lacks of settings: those that leave the lists as they would be without.
_EITHER = "repeat or pad"
_UNRECORDED: dict[str, object] = {"short": _EITHER, "data_lists": {}}


@dataclass(frozen=True)
class Prepared:
    """What `prepare` listed.

    Attributes
    ----------
    utterances, speakers : int
        Size of the training set.
    left_out : int
        Utterances left out because their speaker is in a trial list.
    held_out : int
        Utterances of speakers held out for validation.
    valid_trials : int
        Number of validation trials, 0 for none.
    dropped : int
        Files that could not be used.
    single : int
        Training speakers with one utterance only.
    seen : int
        Files of audio in the data folder or the training list, each of which is in one of
        the counts.
    passed_over : int
        Of these, those beside the folder of the speakers' folders.
    treated : mapping of str to int
        How many of those used are resampled, mixed, or of one of several channels.
    short : int
        Utterances that are trained on and shorter than a segment.
    short_left_out : int
        Utterances left out because they are shorter than a segment.
    aside : int
        Hidden files, and originals beside the WAV or FLAC that was made of them.
    lost : int
        Speakers in no trial list of whom no utterance can be used.
    held_out_speakers : int
        Speakers held out for validation.

    Example
    -------
    >>> prepared = Prepared(12, 3, left_out=0, held_out=4, valid_trials=10, seen=16)
    >>> prepared.in_words()
    'Seen: 16 files of audio. Training: 12 utterances of 3 speakers. ...'
    """

    utterances: int
    speakers: int
    left_out: int
    held_out: int
    valid_trials: int
    dropped: int = 0
    single: int = 0
    seen: int = 0
    passed_over: int = 0
    treated: Mapping[str, int] = field(default_factory=dict)
    short: int = 0
    short_left_out: int = 0
    aside: int = 0
    lost: int = 0
    held_out_speakers: int = 0

    def in_words(self) -> str:
        """Return all counts in sentences."""
        treated = [f"{how}: {count}" for how, count in sorted(self.treated.items())]
        sentences = {
            f"Seen: {self.seen} files of audio.": True,
            f"Training: {self.utterances} utterances of {self.speakers} speakers.": True,
            f"Validation: {self.valid_trials} trials, {self.held_out} utterances held out.": True,
            f"Left out because their speakers are in trial lists: {self.left_out}.": True,
            f"Dropped because they cannot be used: {self.dropped}.": True,
            f"Passed over beside the speakers' folders: {self.passed_over}.": self.passed_over,
            f"Hidden, or converted to WAV or FLAC: {self.aside}.": self.aside,
            f"Of those used, {', '.join(treated)}.": treated,
            f"Shorter than a segment: {self.short} trained on, {self.short_left_out} left "
            "out.": self.short or self.short_left_out,
            f"Speakers with one utterance only: {self.single}.": True,
            f"Speakers without a usable utterance: {self.lost}.": self.lost,
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
        folder has checkpoints of a run with other settings, or what was written
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
    save_folder, fingerprint = Path(save_folder), settings.fingerprint()
    done = save_folder / RECORD
    earlier = _record(save_folder) if done.is_file() else {}
    checks, known = settings.checks(), earlier.get("settings")
    # What the counts of short utterances are of.
    segment = {"short": settings.short, "samples": settings.segment_samples()}
    trained = begun
    begun = begun or any(save_folder.glob("CKPT*/CKPT.yaml"))
    same = known is not None and _contents(known) == _contents(fingerprint)
    folder = absolute(settings.data_folder)
    if same and folder == earlier["folder"]:
        treated = earlier["checks"]
        # Without checksums a record vouches for no lists: an interrupted preparation may
        # have written them.
        counted = begun or earlier["segment"] == segment
        kept = begun or RECORD in sums_in(save_folder)
        if treated == checks and counted and kept:
            return read_prepared(save_folder)
        if begun:
            changed = [name for name in checks if checks[name] != treated[name]]
            logger.warning(
                f"{' and '.join(changed)} {'has' if len(changed) == 1 else 'have'} no "
                f"effect: the lists of {save_folder.parent} are there, and a run keeps the "
                "files that it began with. To check files anew, give a new output_folder."
            )
            return read_prepared(save_folder)
    elif begun and not same:
        raise ValueError(_changed(save_folder, known, fingerprint))
    elif begun:
        _refuse_other_data(settings, save_folder, earlier)
        if trained:
            return read_prepared(save_folder)
    save_folder.mkdir(parents=True, exist_ok=True)
    with interrupted_while(
        f"in the listing of {settings.data_folder}, before any training. The same "
        "command lists it anew."
    ):
        listing = list_speech(settings)
        tqdm.write(listing.understood())
        prepared = _write_lists(listing, settings, save_folder, save_folder / BAD_FILES)
        record = {
            "settings": fingerprint,
            "folder": folder,
            "corpus": listing.digest(),
            "checks": checks,
            "segment": segment,
            "prepared": asdict(prepared),
        }
        write_whole(done, json.dumps(record, indent=1) + "\n")
        write_missing_sums(save_folder)
    return prepared


def _write_lists(
    listing: ListedSpeech, settings: DataSettings, save_folder: Path, bad_files: Path
) -> Prepared:
    """Check files, choose speakers, and write the lists of a run."""
    corpus, account = listing.corpus, take_account(listing, settings)
    report_problems(
        account.problems,
        account.looked_at(),
        bad_files,
        drop=settings.bad_files == "drop",
    )
    usable = account.usable
    held_out = held_out_speakers(
        {s: list(names) for s, names in usable.items()}, corpus, settings
    )
    fewest = VALIDATED_SECONDS * settings.sample_rate
    validated = {
        speaker: [n for n in names if usable[speaker][n].samples >= fewest]
        for speaker, names in held_out.items()
    }
    lines = validation_lines(validated, corpus, settings)
    refuse_few_speakers(account, held_out)
    train = {s: list(u.values()) for s, u in usable.items() if s not in held_out}
    utterances = [utterance for spoken in train.values() for utterance in spoken]
    single = [speaker for speaker, spoken in train.items() if len(spoken) == 1]
    causes = account.causes()
    prepared = Prepared(
        len(utterances),
        len(train),
        left_out=causes[Cause.TESTED],
        held_out=sum(map(len, held_out.values())),
        valid_trials=len(lines),
        dropped=len(account.problems),
        single=len(single),
        seen=listing.seen(),
        passed_over=causes[Cause.BESIDE],
        treated=dict(account.treated),
        short=count_short(utterances, settings),
        short_left_out=causes[Cause.SHORT],
        aside=causes[Cause.HIDDEN] + causes[Cause.ORIGINAL],
        lost=len(account.lost),
        held_out_speakers=len(held_out),
    )
    write_account(
        account,
        save_folder,
        training=utterances,
        validation=prepared.held_out,
        single=single,
        settings=settings,
    )
    if account.lost:
        logger.warning(
            f"{len(account.lost)} speakers have no utterance that can be used, such as "
            f"{account.lost[0]}. {save_folder / LOST} lists all."
        )
    # Checksums go first and come last: they vouch for the lists.
    (save_folder / SUMS).unlink(missing_ok=True)
    write_manifest(save_folder / TRAIN, utterances)
    write_whole(save_folder / VALID_TRIALS, "".join(lines))
    write_labels(save_folder / LABELS, train)
    return prepared


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
        If a list is missing or is not as it was written.
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
        if not Path(save_folder, name).is_file():
            raise ValueError(
                f"{save_folder} has a {RECORD} but no {name}. Bring the file back; where "
                f"no run has begun, deleting {RECORD} lists the data anew."
            )
        check_sum(Path(save_folder, name))
    return Prepared(**_record(save_folder)["prepared"])


def _record(save_folder: str | Path) -> dict[str, Any]:
    """Read the record of what the lists in a save folder were made of."""
    path = Path(save_folder, RECORD)
    check_sum(path)
    with refusing(
        f"{path} is damaged",
        "Bring back the file as it was; where no run has begun, deleting it lists the "
        "data anew.",
    ):
        record: dict[str, Any] = read_json(path)
        if lacking := sorted(_ENTRIES - record.keys()):
            raise ValueError(f"it lacks {', '.join(lacking)}")
        return record


def _contents(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the places of folder and lists."""
    return {
        name: list(value.values()) if isinstance(value, dict) else value
        for name, value in settings.items()
        if name != "data_folder"
    }


def _refuse_other_data(
    settings: DataSettings, save_folder: Path, record: Mapping[str, Any]
) -> None:
    """Refuse a data folder of another path, unless what it holds is the same."""
    earlier, listing = record["folder"], list_speech(settings)
    changes = []
    # Audio of another format has another digest.
    if record["corpus"] != listing.digest():
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


def _changes(
    listing: ListedSpeech, settings: DataSettings, save_folder: Path
) -> list[str]:
    """Prepare a listing elsewhere, and list the differences to what was prepared."""
    with tempfile.TemporaryDirectory() as folder:
        _write_lists(listing, settings, Path(folder), save_folder / BAD_FILES)
        then, now = (_summary(at) for at in (save_folder, Path(folder)))
    return [
        f"{n}: was {then.get(n)}, is {now.get(n)}"
        for n in {**then, **now}
        if then.get(n) != now.get(n)
    ]


def _summary(save_folder: Path) -> dict[str, object]:
    """Return what must be equal wherever the data are, in whatever format."""
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
        (LABELS, read_labels(save_folder / LABELS)),
    ):
        lists[name] = blake2b(repr(content).encode(), digest_size=8).hexdigest()
    return lists


def _changed(
    save_folder: Path, earlier: dict[str, object] | None, now: dict[str, object]
) -> str:
    """Explain which settings changed since the checkpoints were made."""
    folder = save_folder.parent
    if earlier is None:
        return (
            f"{folder} has checkpoints, but no {RECORD} that names their speakers. "
            "Give another output_folder."
        )
    earlier, now = _UNRECORDED | earlier, _UNRECORDED | now
    names = [name for name in earlier | now if earlier.get(name) != now.get(name)]
    if "short" in names:
        # Only where short utterances are dropped the seconds of a segment are recorded.
        names.remove("sentence_len")
    changes = "; ".join(f"{n}: {_shown(earlier.get(n), now.get(n))}" for n in names)
    return (
        f"{folder} has checkpoints of a run on other data settings ({changes}). "
        "Going on would give the speakers other numbers. Give another output_folder, "
        f"or{_as_they_were({n: earlier.get(n) for n in names}, now)}."
    )


def _as_they_were(earlier: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Put in words how to give changed settings as a run began with them."""
    given, left_out = [], []
    for name, value in earlier.items():
        if isinstance(value, dict):
            is_same_list = list(value) == list(cast(dict[str, str], now[name]))
            if name == "data_lists" or is_same_list:
                continue  # It is the content that differs, not the option.
            # Models of a trial list are found beside it.
            paths = [path for path in value if not path.endswith("spk2utt")]
            value = paths if name == "trial_lists" else next(iter(paths), None)
        if value in (None, [], _EITHER):
            left_out.append(f"--{name}")
        else:
            written = value if isinstance(value, str) else dump(value)
            given.append(shlex.quote(f"--{name}={written}"))
    words = [f"give {' '.join(given)} again"] * bool(given)
    words += [f"leave {' '.join(left_out)} out"] * bool(left_out)
    return f" {' and '.join(words)} to go on" if words else " the data as they were"


def _shown(earlier: object, now: object) -> str:
    """Show a change; a list is known by its name and by its content."""
    if isinstance(earlier, dict) and isinstance(now, dict):
        if list(earlier) == list(now):
            return f"the content of {', '.join(now)} changed"
        earlier, now = (", ".join(lists) or None for lists in (earlier, now))
    return f"was {earlier}, is {now}"
