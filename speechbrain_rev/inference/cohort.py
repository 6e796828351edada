"""The cohort of AS-Norm: made of a run's training speech, and carried with a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from speechbrain_rev import scoring
from speechbrain_rev.inference.archive import EmbeddingArchive
from speechbrain_rev.inference.model_folder import read_summed

COHORT = "cohort.safetensors"

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
    centre: NDArray[np.float32] | None = None

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
            Nearest speakers to look at; at most all there are.
        subtract_mean : bool
            Whether embeddings are centred on the mean of the training set's.

        Returns
        -------
        Cohort
            One mean for each speaker.

        Raises
        ------
        ValueError
            If a speaker has no embedding.
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
        return cls(means, min(top_n, len(names)), centre)

    def write(self, path: Path) -> None:
        """Write a .safetensors file.

        Parameters
        ----------
        path : pathlib.Path
            Its name.
        """
        arrays = {"means": self.means, "top_n": np.array([self.top_n])}
        if self.centre is not None:
            arrays["centre"] = self.centre
        path.write_bytes(safetensors.numpy.save(arrays))


def read_cohort(source: str | PathLike[str]) -> Cohort:
    """Read the cohort that travels with an exported model.

    Parameters
    ----------
    source : str or path-like
        The model's folder.

    Returns
    -------
    Cohort
        For ``scoring.cohort_statistics(embeddings, cohort.means, top_n=cohort.top_n)``.

    Raises
    ------
    FileNotFoundError
        If the folder has none: embeddings of training speech were not at hand when the
        model was exported.
    ValueError
        If the file is damaged or leads out of the folder.
    """
    path = Path(source, COHORT)
    content, _ = read_summed(Path(source), COHORT, _MAX_BYTES)
    try:
        arrays = safetensors.numpy.load(content)
        means, (top_n,) = arrays.pop("means"), arrays.pop("top_n").tolist()
        centre = arrays.pop("centre", None)
        shapes = [means.shape[1:]] + ([] if centre is None else [centre.shape])
        if arrays or means.ndim != 2 or len(set(shapes)) > 1:
            raise ValueError("it holds something else")
        if means.dtype != np.float64 or not np.isfinite(means).all():
            raise ValueError("its means are not finite float64 numbers")
        if type(top_n) is not int or not 2 <= top_n <= len(means):
            raise ValueError(f"top_n is {top_n} of {len(means)} speakers")
    except (safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no cohort ({error}). Download the folder again."
        ) from error
    return Cohort(means, top_n, centre)
