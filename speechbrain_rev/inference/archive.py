"""Embeddings by name, in memory and on disk, and of which model they are."""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechbrain_rev.files import opened_whole
from speechbrain_rev.lobes.description import EncoderDescription, weights_in

_MAX_CHARACTERS = 500


def fingerprint_of(
    state_dict: Mapping[str, Tensor], description: EncoderDescription | None = None
) -> str:
    """Hash what embeddings depend on: the same for a run, its export and a copy of either.

    Parameters
    ----------
    state_dict : mapping of str to torch.Tensor
        In any order. What an encoder says of itself there does not count.
    description : EncoderDescription, optional
        Of the encoder and its features, as it is used: equal weights behind other features
        or another pooling make other embeddings.

    Returns
    -------
    str
        The SHA-256 of names, types, shapes and values, and of the description, in
        hexadecimal digits.

    Example
    -------
    >>> first, second = torch.zeros(2), torch.ones(3)
    >>> one = fingerprint_of({"a": first, "b": second})
    >>> one == fingerprint_of({"b": second, "a": first}), len(one)
    (True, 64)
    """
    digest = hashlib.sha256()
    if description is not None:
        digest.update(description.as_tensor().numpy().data)
    for name, value in sorted(weights_in(state_dict).items()):
        # repr quotes the name: none runs into what follows it.
        digest.update(f"{name!r} {value.dtype} {list(value.shape)}\n".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_fingerprint(fingerprint: str) -> None:
    """Refuse a fingerprint that a terminal should not be shown.

    Raises
    ------
    ValueError
        If it is no text, longer than 500 characters or has control characters.

    Example
    -------
    >>> check_fingerprint("f00d, bf16")
    """
    if (
        not isinstance(fingerprint, str)
        or len(fingerprint) > _MAX_CHARACTERS
        or not fingerprint.isprintable()
    ):
        raise ValueError(
            f"a fingerprint is a text of printable characters, at most {_MAX_CHARACTERS}, "
            f"but this is {repr(fingerprint)[:60]}."
        )


def check_same(what: str, made: str, fingerprint: str, remedy: str) -> None:
    """Refuse embeddings that were made by another model than the one at hand.

    Parameters
    ----------
    what : str
        How errors call the embeddings.
    made : str
        The fingerprint of the model that made them.
    fingerprint : str
        Of the model that would compare them with its own.
    remedy : str
        What to do, in a sentence.

    Raises
    ------
    ValueError
        If the fingerprints differ, be it in precision, or are empty.

    Example
    -------
    >>> check_same("ann", "f00d", "f00d", "Enrol it again.")
    >>> check_same("ann", "f00d", "beef", "Enrol it again.")
    Traceback (most recent call last):
    ValueError: ann is of another model or of another precision (f00d) than ...
    """
    if not made or not fingerprint:
        raise ValueError(
            f"{what} cannot be distinguished from those of another model: "
            + ("it has" if fingerprint else "this embedder has")
            + " no fingerprint. Give SpeakerEmbedder one."
        )
    if made != fingerprint:
        raise ValueError(
            f"{what} is of another model or of another precision ({_shown(made)}) than "
            f"this one ({_shown(fingerprint)}), to which it says nothing. {remedy}"
        )


def _shown(fingerprint: str) -> str:
    """Give the beginning of a hash, with the precision where one follows."""
    return f"{fingerprint[:12]}{fingerprint[64:80]}"


@dataclass(frozen=True, eq=False)
class EmbeddingArchive:
    """Embeddings by name.

    Attributes
    ----------
    names : tuple of str
        One per utterance, none twice.
    embeddings : numpy.ndarray, [utterances, dim], float32
        In the order of the names, finite.
    fingerprint : str
        Of the model that made them, see ``SpeakerEmbedder``.
    sources : tuple of str
        The audio of each, as path, size and time of change. Empty where nobody will ask.

    Example
    -------
    >>> import os, tempfile
    >>> archive = EmbeddingArchive(("a",), np.ones((1, 2), np.float32), "f00d")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     archive.save(os.path.join(folder, "some.npz"))
    ...     EmbeddingArchive.load(os.path.join(folder, "some.npz")).names
    ('a',)
    """

    names: tuple[str, ...]
    embeddings: NDArray[np.float32]
    fingerprint: str
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.names)
        if self.embeddings.dtype != np.float32 or self.embeddings.ndim != 2:
            raise ValueError(
                f"embeddings are {list(self.embeddings.shape)} of "
                f"{self.embeddings.dtype}, not [n, dim] of float32"
            )
        check_fingerprint(self.fingerprint)
        if len(self.embeddings) != len(self.names):
            raise ValueError(
                f"{len(self.names)} names for embeddings of shape "
                f"{list(self.embeddings.shape)}: give one name for each row."
            )
        if len(self.sources) not in (0, len(self.names)):
            raise ValueError(
                f"{len(self.names)} names for {len(self.sources)} sources: give one "
                "source for each name, or none at all."
            )
        finite = np.isfinite(self.embeddings).all(axis=1)
        if not finite.all():
            raise ValueError(
                f"the embedding of {self.names[int(finite.argmin())]!r} holds NaN or "
                "infinity"
            )

    def save(self, path: str | Path) -> None:
        """Write a file; one of that name is replaced in one step.

        Parameters
        ----------
        path : str or pathlib.Path
            Ends in ``.npz``. Its folder is made. The arrays are names, embeddings,
            fingerprint and sources.

        Raises
        ------
        ValueError
            If the name ends in something else.
        """
        path = Path(path)
        check_format(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {
            "names": np.array(self.names, dtype=str),
            "embeddings": self.embeddings,
            "fingerprint": np.array(self.fingerprint, dtype=str),
            "sources": np.array(self.sources, dtype=str),
        }
        with opened_whole(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> EmbeddingArchive:
        """Read what ``save`` wrote, without running code that a file may hold.

        Parameters
        ----------
        path : str or pathlib.Path
            An .npz file.

        Returns
        -------
        EmbeddingArchive
            Names, embeddings, the fingerprint, and the sources, if there are any.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no archive of embeddings: damaged, with other arrays or types, a name
            that is missing or there twice, or an embedding that is not finite.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"There are no embeddings at {path}. Run recipes/VoxCeleb/extract.py "
                "on a run first, or speechbrain-rev embed on audio."
            )
        try:
            # numpy takes any other file for a pickle, and advises to allow pickles.
            if not zipfile.is_zipfile(path):
                raise ValueError("it is no .npz file, or only a part of one")
            with np.load(path, allow_pickle=False) as stored:
                return cls(
                    tuple(_read_texts(stored, "names", ndim=1)),
                    stored["embeddings"],
                    _read_texts(stored, "fingerprint", ndim=0),
                    tuple(_read_texts(stored, "sources", ndim=1)),
                )
        except Exception as error:  # numpy, zipfile and zlib have no class in common
            raise ValueError(
                f"{path} is no archive of embeddings ({error}). Remove it and embed again."
            ) from error


def _read_texts(stored: Mapping[str, NDArray[Any]], name: str, *, ndim: int) -> Any:
    """Read a text, or a list of texts."""
    array = stored[name]
    if array.dtype.kind != "U" or array.ndim != ndim:
        raise ValueError(
            f"{name} are {list(array.shape)} of {array.dtype}, not "
            f"{'[n]' if ndim else '[]'} of texts"
        )
    return array.tolist()


def check_format(path: Path) -> None:
    """Refuse a name that does not end in .npz.

    Parameters
    ----------
    path : pathlib.Path
        Of an archive.

    Raises
    ------
    ValueError
        If the name ends in something else.

    Example
    -------
    >>> check_format(Path("some.npz"))
    """
    if path.suffix != ".npz":
        raise ValueError(
            f"embeddings are written to a name that ends in .npz, not {path}."
        )


def check_names(names: Iterable[object]) -> None:
    """Refuse names that numpy would write as other ones, and names that two rows have.

    Raises
    ------
    ValueError
        If one is no text, empty, has a NUL character or is there twice.
    """
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not name or "\0" in name:
            raise ValueError(
                f"{name!r} names no embedding: give texts, not empty and without NUL "
                "characters."
            )
    if len(set(names)) < len(names):
        ((twice, _),) = Counter(names).most_common(1)
        raise ValueError(f"the name {twice!r} is there twice: give each its own.")
