"""What tells one state of one model from all others, whatever file it lies in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

_MAX_CHARACTERS = 500


def fingerprint_of(state_dict: Mapping[str, Tensor]) -> str:
    """Hash weights: the same for a run, its export and a copy of either.

    Parameters
    ----------
    state_dict : mapping of str to torch.Tensor
        In any order.

    Returns
    -------
    str
        The SHA-256 of names, types, shapes and values, in hexadecimal digits.

    Example
    -------
    >>> first, second = torch.zeros(2), torch.ones(3)
    >>> one = fingerprint_of({"a": first, "b": second})
    >>> one == fingerprint_of({"b": second, "a": first}), len(one)
    (True, 64)
    """
    digest = hashlib.sha256()
    for name, value in sorted(state_dict.items()):
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
            f"{what} cannot be told from those of another model: "
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
