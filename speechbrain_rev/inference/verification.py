"""Whether two voices are one speaker's: enrolled speakers, cohorts and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from speechbrain_rev import scoring
from speechbrain_rev.data import read_manifest
from speechbrain_rev.files import check_sum, read_limited, refusing, write_whole
from speechbrain_rev.inference.archive import EmbeddingArchive, check_fingerprint
from speechbrain_rev.inference.running import unit_mean
from speechbrain_rev.inference.runs import record_of
from speechbrain_rev.inference.thresholds import (
    RESULTS,
    Normalisation,
    Thresholds,
    read_results,
)
from speechbrain_rev.inference.trained import read_weights, reading
from speechbrain_rev.inference.untrusted import own_file, read_own, short
from speechbrain_rev.scoring.as_norm import check_top_n

COHORT = "cohort.safetensors"
#: The archive of training speech in a run's folder.
EMBEDDINGS = "embeddings/cohort.npz"

# 100,000 speakers of 1,024 dimensions.
_MAX_COHORT_BYTES = 10**9


@dataclass(frozen=True, eq=False)
class Cohort:
    """Mean embeddings of training speakers, against which scores are normalised.

    Attributes
    ----------
    means : numpy.ndarray, [speakers, dim], float64
        See ``scoring.speaker_means``.
    top_n : int
        How many of the nearest AS-Norm looks at.
    fingerprint : str
        Of the model that made the embeddings, see ``SpeakerEmbedder``.
    centre : numpy.ndarray, [dim], float32, or None
        What is subtracted from embeddings before all else; None for nothing.

    Example
    -------
    >>> archive = EmbeddingArchive(("a", "b"), np.eye(2, dtype=np.float32), "f00d")
    >>> cohort = Cohort.of(archive, {"a": "ann", "b": "bob"}, top_n=600)
    >>> cohort.means.shape, cohort.top_n
    ((2, 2), 2)
    """

    means: NDArray[np.float64]
    top_n: int
    fingerprint: str
    centre: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        check_fingerprint(self.fingerprint)
        check_top_n(self.top_n, len(self.means))

    @classmethod
    def of(
        cls,
        archive: EmbeddingArchive,
        speakers: Mapping[str, str],
        *,
        top_n: int,
        subtract_mean: bool = False,
    ) -> Cohort:
        """Average the embeddings of each training speaker.

        Parameters
        ----------
        archive : EmbeddingArchive
            Of training utterances, as recipes/VoxCeleb/extract.py writes it.
        speakers : mapping of str to str
            The speaker of each training utterance; every one must have an embedding.
        top_n : int
            Nearest speakers to look at, 2 or more; all there are where it is more.
        subtract_mean : bool
            Whether embeddings are centred on the mean of the training set's.

        Returns
        -------
        Cohort
            One mean for each speaker.

        Raises
        ------
        ValueError
            If a speaker has no embedding, or ``top_n`` or the number of speakers is
            below two.
        """
        rows = [row for row, name in enumerate(archive.names) if name in speakers]
        labels = [speakers[archive.names[row]] for row in rows]
        missing = sorted(set(speakers.values()) - set(labels))
        if missing:
            raise ValueError(
                f"{len(missing)} training speakers have no embedding in "
                f"embeddings/cohort.npz, the first {missing[0]}: the extraction was "
                "interrupted or is of another training set. Run "
                "recipes/VoxCeleb/extract.py again."
            )
        embeddings = archive.embeddings[rows]
        centre = None
        if subtract_mean:
            centre = embeddings.mean(axis=0)
            embeddings = scoring.subtract_mean(embeddings, centre)
        names, means = scoring.speaker_means(embeddings, labels)
        if isinstance(top_n, int):
            top_n = min(top_n, len(names))
        return cls(means, top_n, archive.fingerprint, centre)

    def write(self, path: Path) -> None:
        """Write a .safetensors file; one of that name is replaced in one step.

        Parameters
        ----------
        path : pathlib.Path
            Its name.
        """
        arrays = {"means": self.means, "top_n": np.array([self.top_n])}
        if self.centre is not None:
            arrays["centre"] = self.centre
        _save_arrays(path, self.fingerprint, arrays)


def read_cohort(source: str | PathLike[str], *, revision: str | None = None) -> Cohort:
    """Read the cohort of a model.

    Parameters
    ----------
    source : str or path-like
        The folder of an exported model, or of a run that extract.py has been through, or
        the id of a model on the Hugging Face Hub, from which the cohort is fetched too.
    revision : str, optional
        Of a model on the Hub, see ``SpeakerEmbedder.from_hparams``. Give the embedder's.

    Returns
    -------
    Cohort
        For ``SpeakerEmbedder.verify(a, b, cohort=cohort)``, or
        ``scoring.cohort_statistics(embeddings, cohort.means, top_n=cohort.top_n)``.

    Raises
    ------
    FileNotFoundError
        If there is none: embeddings of training speech are not at hand, or were not when
        the model was exported.
    PermissionError, ConnectionError
        As of ``SpeakerEmbedder.from_hparams``.
    ValueError
        If a file is damaged, leads out of the folder or is of other weights.
    """
    with reading(source, revision, also=[COHORT]) as folder:
        return _read_cohort(folder)


def _read_cohort(folder: Path) -> Cohort:
    """Read the cohort of an exported model, or average that of a run."""
    path = folder / COHORT
    if not path.exists():
        cohort = run_cohort(folder, read_weights(folder).fingerprint)
        if cohort is None:
            raise FileNotFoundError(
                f"{folder} has neither {COHORT} nor {EMBEDDINGS}. If it is a run of "
                "recipes/VoxCeleb/train.py, or was exported from one, run "
                "recipes/VoxCeleb/extract.py on that run first, and export it again; else "
                "score without a cohort (without --as_norm), or make a Cohort of "
                "embeddings of your training speech."
            )
        return cohort
    content = read_own(folder, COHORT, _MAX_COHORT_BYTES)
    check_sum(path)
    with refusing(f"{path} is no cohort", "Download the folder again."):
        arrays, fingerprint = _load_arrays(content, {"means", "top_n"}, {"centre"})
        means, (top_n,) = arrays["means"], arrays["top_n"].tolist()
        centre = arrays.get("centre")
        if means.ndim != 2 or (centre is not None and centre.shape != means.shape[1:]):
            raise ValueError("it holds something else")
        if means.dtype != np.float64 or not np.isfinite(means).all():
            raise ValueError("its means are not finite float64 numbers")
        return Cohort(means, top_n, fingerprint, centre)


def _save_arrays(
    path: Path, fingerprint: str, arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write arrays and the fingerprint of the model that made them."""
    text = np.frombuffer(fingerprint.encode(), dtype=np.uint8)
    write_whole(path, safetensors.numpy.save({**arrays, "fingerprint": text}))


def _load_arrays(
    content: bytes, required: set[str], optional: set[str]
) -> tuple[dict[str, NDArray[Any]], str]:
    """Read the arrays and the fingerprint that ``_save_arrays`` wrote."""
    try:
        arrays = safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    text = arrays.pop("fingerprint")
    if not required <= arrays.keys() <= required | optional or text.dtype != np.uint8:
        raise ValueError(f"it holds {short(sorted(arrays))}")
    return arrays, text.tobytes().decode()


def run_cohort(run: Path, fingerprint: str) -> Cohort | None:
    """Average a run's embeddings of training speech, if there are any.

    Parameters
    ----------
    run : pathlib.Path
        Its folder.
    fingerprint : str
        Of its weights.

    Returns
    -------
    Cohort or None
        Centred and as large as score.py had it, where that was run; None without
        embeddings.

    Raises
    ------
    ValueError
        If they or the results of score.py are of other weights or lead out of the
        folder, or the embeddings are of another training set.
    """
    path = run / EMBEDDINGS
    if not path.exists():
        return None
    archive = EmbeddingArchive.load(own_file(run, EMBEDDINGS))
    check_fresh(path, archive.fingerprint, fingerprint)
    manifest = read_manifest(own_file(run, "save/train.csv"))
    report = read_results(run)
    if report is not None:
        check_fresh(run / RESULTS, report["model"], fingerprint)
        top_n = report["cohort"]["top_n"]
    else:
        top_n = record_of(run).settings["cohort_top_n"]
    return Cohort.of(
        archive,
        {utterance.ID: utterance.spk_id for utterance in manifest},
        top_n=top_n,
        subtract_mean=report is not None and report["subtract_mean"],
    )


def check_fresh(path: Path, made: str, fingerprint: str) -> None:
    """Refuse what recipes/VoxCeleb made with other weights than the run's.

    Raises
    ------
    ValueError
        If other weights made it.
    """
    if made != fingerprint:
        raise ValueError(
            f"{path} is of other weights than the run has now. Run "
            "recipes/VoxCeleb/extract.py and score.py again, or remove it."
        )


# 10,000 utterances of 1,024 dimensions are 41 MB.
_MAX_SPEAKER_BYTES = 10**8


@dataclass(frozen=True, eq=False)
class EnrolledSpeaker:
    """A speaker as a model knows it: the embeddings of some utterances.

    They are kept one by one, since what is subtracted before averaging (a cohort's
    centre) is known only when the speaker is compared.

    Attributes
    ----------
    embeddings : numpy.ndarray, [utterances, dim], float32
        As ``SpeakerEmbedder.embed`` gives them.
    fingerprint : str
        Of the model that made them.

    Example
    -------
    >>> ann = EnrolledSpeaker(np.array([[2, 0], [0, 4]], np.float32), "f00d")
    >>> ann.utterances, ann.embedding.tolist()
    (2, [0.5, 0.5])
    """

    embeddings: NDArray[np.float32]
    fingerprint: str

    def __post_init__(self) -> None:
        rows = self.embeddings
        if rows.ndim != 2 or not rows.size or rows.dtype != np.float32:
            raise ValueError(
                f"embeddings are {list(rows.shape)} of {rows.dtype}, but must be "
                "[utterances, dim] of float32, with at least one utterance."
            )
        if not np.isfinite(rows).all() or not rows.any(axis=1).all():
            raise ValueError("an embedding is zero, NaN or infinite.")
        check_fingerprint(self.fingerprint)

    @property
    def utterances(self) -> int:
        """How many utterances it is known by."""
        return len(self.embeddings)

    @property
    def embedding(self) -> NDArray[np.float32]:
        """The mean of the embeddings, each at length one: [dim]."""
        return self.centred(None)

    def centred(self, centre: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Average after a mean was subtracted: [dim].

        Parameters
        ----------
        centre : numpy.ndarray, [dim], or None
            What is subtracted from each embedding; None for nothing.
        """
        rows = self.embeddings
        if centre is not None:
            rows = np.asarray(scoring.subtract_mean(rows, centre), dtype=np.float32)
        return unit_mean(rows)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a .safetensors file; one of that name is replaced in one step.

        Parameters
        ----------
        path : str or path-like
            Its name.
        """
        embeddings = np.ascontiguousarray(self.embeddings)
        _save_arrays(Path(path), self.fingerprint, {"embeddings": embeddings})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> EnrolledSpeaker:
        """Read what ``save`` wrote.

        Parameters
        ----------
        path : str or path-like
            A .safetensors file.

        Returns
        -------
        EnrolledSpeaker

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no enrolled speaker.
        """
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no enrolled speaker at {file}. SpeakerEmbedder.enrol(...) makes "
                "one, and its save(...) writes it."
            )
        with refusing(f"{file} is no enrolled speaker", "Enrol and save it again."):
            content = read_limited(file, _MAX_SPEAKER_BYTES)
            arrays, fingerprint = _load_arrays(content, {"embeddings"}, set())
            return cls(arrays["embeddings"], fingerprint)


@dataclass(frozen=True)
class Verification:
    """What came of comparing two speakers.

    Attributes
    ----------
    score : float
        Higher is more alike.
    normalisation : {"cosine", "as_norm"}
        A cosine, from -1 to 1, or AS-Norm's, in deviations.
    threshold : float or None
        The score from which on they count as one; None if nothing says which.
    same_speaker : bool or None
        Whether the score reaches the threshold; None without one.
    origin : str
        Where the threshold is from: the list of trials it was measured on, with its error
        rate, or the caller. Without a threshold, how to get one.
    remark : str
        Where the threshold is of other speakers than these, what to do; else empty.

    Example
    -------
    >>> verified = Verification(0.5, "cosine", 0.3, True, "given by the caller")
    >>> verified.same_speaker == (verified.score >= verified.threshold)
    True
    """

    score: float
    normalisation: Normalisation
    threshold: float | None
    same_speaker: bool | None
    origin: str
    remark: str = ""


def compare(
    a: EnrolledSpeaker,
    b: EnrolledSpeaker,
    *,
    cohort: Cohort | None,
    thresholds: Thresholds,
    threshold: float | str | None,
) -> Verification:
    """Score two speakers and judge the score.

    Parameters
    ----------
    a, b : EnrolledSpeaker
        By one utterance or more.
    cohort : Cohort or None
        For AS-Norm; None for the cosine.
    thresholds : Thresholds
        Those the model has.
    threshold : float, str or None
        As of ``Thresholds.choose``.

    Returns
    -------
    Verification

    Raises
    ------
    ValueError
        If there is no such threshold, or the dimensions of the three differ.

    Example
    -------
    >>> ann = EnrolledSpeaker(np.ones((1, 2), np.float32), "f00d")
    >>> verified = compare(ann, ann, cohort=None, thresholds=Thresholds(), threshold=0.3)
    >>> verified.same_speaker, verified.origin
    (True, 'given by the caller')
    """
    dimensions = {"a": a.embeddings.shape[1], "b": b.embeddings.shape[1]}
    if cohort is not None:
        dimensions["the cohort"] = cohort.means.shape[1]
    if len(set(dimensions.values())) > 1:
        # A model of that fingerprint cannot have made them.
        sizes = ", ".join(f"{name} has {count}" for name, count in dimensions.items())
        raise ValueError(
            f"embeddings of one model have one number of dimensions, but {sizes}. A file "
            "was changed: enrol again, or download the cohort's folder again."
        )
    normalisation: Normalisation = "cosine" if cohort is None else "as_norm"
    known_by = max(a.utterances, b.utterances)
    value, origin, remark = thresholds.choose(threshold, normalisation, known_by)
    centre = None if cohort is None else cohort.centre
    sides = np.stack([a.centred(centre), b.centred(centre)])
    cosines = scoring.cosine(sides[:1], sides[1:])
    score = float(cosines[0])
    if cohort is not None:
        mean, std = scoring.cohort_statistics(sides, cohort.means, top_n=cohort.top_n)
        normed = scoring.as_norm(cosines, mean[:1], std[:1], mean[1:], std[1:])
        score = float(normed[0])
    same = None if value is None else score >= value
    return Verification(score, normalisation, value, same, origin, remark)
