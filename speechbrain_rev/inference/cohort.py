"""The cohort of AS-Norm: made of a run's training speech, and carried with a model."""

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
from speechbrain_rev.inference.archive import (
    EmbeddingArchive,
    check_fingerprint,
    check_same,
)
from speechbrain_rev.inference.model_folder import is_exported, read_summed
from speechbrain_rev.inference.run_folder import (
    HYPERPARAMS,
    RESULTS,
    by_our_recipe,
    read_results,
    read_settings,
    read_weights,
)
from speechbrain_rev.inference.trained import reading
from speechbrain_rev.inference.untrusted import own_file
from speechbrain_rev.scoring.as_norm import check_top_n
from speechbrain_rev.whole_files import check_path, write_whole

COHORT = "cohort.safetensors"
#: Of training speech, in a run's folder.
EMBEDDINGS = "embeddings/cohort.npz"

# 100,000 speakers of 1,024 dimensions.
_MAX_BYTES = 10**9


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
        found = [speakers[archive.names[row]] for row in rows]
        missing = sorted(set(speakers.values()) - set(found))
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
        names, means = scoring.speaker_means(embeddings, found)
        if isinstance(top_n, int):
            top_n = min(top_n, len(names))
        return cls(means, top_n, archive.fingerprint, centre)

    def check_model(self, fingerprint: str) -> None:
        """Refuse to normalise scores of another model than the one that made it.

        Parameters
        ----------
        fingerprint : str
            Of the model that scores.

        Raises
        ------
        ValueError
            If it is another one, the same in another precision, or either has no
            fingerprint.
        """
        remedy = "Give read_cohort(...) of the model that embeds, and precision fp32."
        check_same("the cohort", self.fingerprint, fingerprint, remedy)

    def write(self, path: Path) -> None:
        """Write a .safetensors file; one of that name is replaced in one step.

        Parameters
        ----------
        path : pathlib.Path
            Its name.
        """
        arrays: dict[str, NDArray[Any]] = {
            "means": self.means,
            "top_n": np.array([self.top_n]),
            "fingerprint": np.frombuffer(self.fingerprint.encode(), dtype=np.uint8),
        }
        if self.centre is not None:
            arrays["centre"] = self.centre
        write_whole(path, safetensors.numpy.save(arrays))


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
    check_path(source, "the cohort of a model", "Give the model's folder.")
    with reading(source, revision, also={COHORT: _MAX_BYTES}) as folder:
        return _read(folder)


def _read(folder: Path) -> Cohort:
    """Read the cohort of an exported model, or average that of a run."""
    if not is_exported(folder) and (folder / HYPERPARAMS).exists():
        found = run_cohort(folder, read_weights(folder).fingerprint)
        if found is None:
            remedy = "Run recipes/VoxCeleb/extract.py on this run first."
            if not by_our_recipe(folder):
                remedy = (
                    "recipes/VoxCeleb/extract.py makes it of runs of "
                    "recipes/VoxCeleb/train.py alone: score without a cohort (without "
                    "--as-norm), or make a Cohort of embeddings of your training speech."
                )
            raise FileNotFoundError(f"{folder} has no {EMBEDDINGS}. {remedy}")
        return found
    path = folder / COHORT
    if is_exported(folder) and not path.exists():
        raise FileNotFoundError(
            f"{folder} has no {COHORT}: its run had no {EMBEDDINGS} when it was exported. "
            "If that is a run of recipes/VoxCeleb/train.py, run recipes/VoxCeleb/extract.py "
            "on it and export it again; else score without a cohort (without --as-norm)."
        )
    content, _ = read_summed(folder, COHORT, _MAX_BYTES)
    try:
        arrays = safetensors.numpy.load(content)
        means, (top_n,) = arrays.pop("means"), arrays.pop("top_n").tolist()
        named, centre = arrays.pop("fingerprint"), arrays.pop("centre", None)
        shapes = [means.shape[1:]] + ([] if centre is None else [centre.shape])
        if arrays or means.ndim != 2 or len(set(shapes)) > 1:
            raise ValueError("it holds something else")
        if means.dtype != np.float64 or not np.isfinite(means).all():
            raise ValueError("its means are not finite float64 numbers")
        if named.dtype != np.uint8:
            raise ValueError("its fingerprint is no text")
        return Cohort(means, top_n, named.tobytes().decode(), centre)
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no cohort ({error}). Download the folder again."
        ) from error


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
    if report is not None and "cohort" in report:
        top_n = report["cohort"]["top_n"]
    else:
        top_n = read_settings(run, ("cohort_top_n",))["cohort_top_n"]
    return Cohort.of(
        archive,
        {utterance.ID: utterance.spk_id for utterance in manifest},
        top_n=top_n,
        subtract_mean=report is not None and report["subtract_mean"],
    )


def check_fresh(path: Path, found: str, fingerprint: str) -> None:
    """Refuse what recipes/VoxCeleb made with other weights than the run's.

    Raises
    ------
    ValueError
        If the fingerprint found there is not that of the weights.
    """
    if found != fingerprint:
        raise ValueError(
            f"{path} is of other weights than the run has now. Run "
            "recipes/VoxCeleb/extract.py and score.py again, or remove it."
        )
