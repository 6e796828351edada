"""Speakers that are known by several utterances, in memory and on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from speechbrain_rev.inference.fingerprint import check_fingerprint, check_same
from speechbrain_rev.inference.windows import unit_mean
from speechbrain_rev.scoring import subtract_mean
from speechbrain_rev.whole_files import check_path, check_regular, write_whole

# 10,000 utterances of 1,024 dimensions are 41 MB.
_MAX_BYTES = 10**8
_NAMES = {"embeddings", "fingerprint"}


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
            rows = np.asarray(subtract_mean(rows, centre), dtype=np.float32)
        return unit_mean(rows)

    def check_model(self, fingerprint: str, name: str) -> None:
        """Refuse to be compared by another model than the one that enrolled.

        Parameters
        ----------
        fingerprint : str
            Of the model that compares.
        name : str
            How errors call the speaker.

        Raises
        ------
        ValueError
            If it is another one, the same in another precision, or either has no
            fingerprint.
        """
        check_same(name, self.fingerprint, fingerprint, "Enrol it again.")

    def save(self, path: str | PathLike[str]) -> None:
        """Write a .safetensors file; one of that name is replaced in one step.

        Parameters
        ----------
        path : str or path-like
            Its name.
        """
        arrays: dict[str, NDArray[Any]] = {
            "embeddings": np.ascontiguousarray(self.embeddings),
            "fingerprint": np.frombuffer(self.fingerprint.encode(), dtype=np.uint8),
        }
        write_whole(Path(path), safetensors.numpy.save(arrays))

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
        check_path(path, "an enrolled speaker")
        check_regular(path)
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no enrolled speaker at {file}. SpeakerEmbedder.enrol(...) makes "
                "one, and its save(...) writes it."
            )
        with file.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        try:
            if len(content) > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
            arrays = safetensors.numpy.load(content)
            if set(arrays) != _NAMES or arrays["fingerprint"].dtype != np.uint8:
                raise ValueError(f"it holds {json.dumps(sorted(arrays))[:100]}")
            return cls(arrays["embeddings"], arrays["fingerprint"].tobytes().decode())
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no enrolled speaker ({error}). Enrol and save it again."
            ) from error
