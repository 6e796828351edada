"""Profiles as files, each under what it was made for, so that none is made twice."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.reversible.flags import flags_in_words
from speechbrain_rev.whole_files import write_whole

#: Names the folder of profiles where it is set.
VARIABLE = "SPEECHBRAIN_REV_PROFILES"

# Whatever these do decides what a block costs.
_PACKAGES = ("kernels", "lobes", "memory", "models", "planner", "reversible")


def profile_folder() -> Path:
    """Tell where profiles are kept: in ``SPEECHBRAIN_REV_PROFILES``, or the user's cache.

    Examples
    --------
    >>> profile_folder().is_absolute()
    True
    """
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache") / "speechbrain_rev" / "profiles"


def saved_profile(
    key: Mapping[str, str],
    make: Callable[[], Profile],
    folder: Path | None = None,
) -> Profile:
    """Read a profile from its file, or make it and write the file.

    Parameters
    ----------
    key : mapping of str to str
        All that the profile depends on: hardware, encoder, batch, frames, precision.
        The versions of torch, cuDNN and the code that is profiled are added, and the
        flags by which kernels are chosen.
    make : callable
        Makes the profile where there is none for just this key.
    folder : Path or None
        Of the files; None for ``profile_folder()``.

    Returns
    -------
    Profile
        What it is about includes the key.

    Warns
    -----
    UserWarning
        If a file is damaged, and so the profile is made anew, or none can be written.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> make = lambda: print("making") or Profile([], 0, {}, 0.0, {})
    >>> first = saved_profile({"encoder": "tiny", "batch": "4"}, make, folder)
    making
    >>> saved_profile({"encoder": "tiny", "batch": "4"}, make, folder) == first
    True
    >>> other = saved_profile({"encoder": "tiny", "batch": "8"}, make, folder)
    making
    """
    import torch

    key = {
        **key,
        "torch": torch.__version__,
        "kernels": flags_in_words(),
        "code": _code_digest(),
    }
    folder = profile_folder() if folder is None else folder
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = folder / f"{key.get('encoder', 'network')}-{digest[:16]}.json"
    found = _read(path, key)
    if found is not None:
        return found
    made = make()
    profile = Profile(
        made.blocks,
        made.base_bytes,
        made.after_bytes,
        made.after_seconds,
        {**made.about, **key},
    )
    _write(path, profile)
    return profile


def _read(path: Path, key: Mapping[str, str]) -> Profile | None:
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
        kept = key.items() <= profile.about.items()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        warnings.warn(f"{path} cannot be read and is made anew: {error}", stacklevel=3)
        return None
    return profile if kept else None


def _write(path: Path, profile: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, profile.to_json())
    except OSError as error:
        warnings.warn(
            f"The profile is not kept, for {path} cannot be written: {error}. Name a "
            f"folder that can be by {VARIABLE}.",
            stacklevel=3,
        )


@functools.cache
def _code_digest() -> str:
    """Digest the code that profiles depend on: one of older code serves no more."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for name in _PACKAGES:
        for path in sorted((package / name).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
