"""Profiles as files, each under all that it depends on, so that none is made twice."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from speechbrain_rev.files import write_whole
from speechbrain_rev.planner.network import warn_caller
from speechbrain_rev.planner.profile import Profile
from speechbrain_rev.reversible.flags import flags_in_words

#: Names the folder of profiles where it is set.
VARIABLE = "SPEECHBRAIN_REV_PROFILES"

#: Profiles that are kept; a sweep of all encoders makes some hundreds, of 10 to 100 kB.
KEPT = 1000

# Costs of a block follow from these, and from the modules beside them.
_PACKAGES = "compression", "kernels", "lobes", "catalog", "planner", "reversible"

# Names of our files, and of what a killed process leaves of one.
_OURS = re.compile(r".+-[0-9a-f]{16}\.json(\.[0-9a-f]{8}\.part)?", re.ASCII)


def profile_folder() -> Path:
    """Where profiles are kept: ``SPEECHBRAIN_REV_PROFILES``, or in the user's cache.

    Raises
    ------
    RuntimeError
        If neither is known, for the user has no home folder.

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

    The folder holds the ``KEPT`` profiles that were used last: where one more is written
    the others are deleted. Files that are no profiles stay.

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
        If a file is damaged, and so the profile is made anew, or none can be written or
        the user has no home folder.

    Examples
    --------
    >>> import tempfile
    >>> from speechbrain_rev.planner.knapsack import Cost
    >>> from speechbrain_rev.planner.profile import BlockProfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> block = BlockProfile("b.0", 0, {(None, "store"): Cost(8, 9, 0.5)})
    >>> tiny = Profile([block], 0, {"store": 0}, 0.0, {})
    >>> make = lambda: print("making") or tiny
    >>> first = saved_profile({"encoder": "tiny", "batch": "4"}, make, folder)
    making
    >>> saved_profile({"encoder": "tiny", "batch": "4"}, make, folder) == first
    True
    >>> other = saved_profile({"encoder": "tiny", "batch": "8"}, make, folder)
    making
    """
    key = {
        **key,
        "torch": torch.__version__,
        "kernels": flags_in_words(),
        "code": _code_digest(),
    }
    if folder is None:
        try:
            folder = profile_folder()
        except RuntimeError:
            warn_caller(
                "The profile is not kept, for this user has no home folder. Name a folder "
                f"by {VARIABLE}."
            )
            made = make()
            return replace(made, about={**made.about, **key})
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = folder / f"{key.get('encoder', 'network')}-{digest[:16]}.json"
    profile = _read(path, key)
    if profile is None:
        made = make()
        profile = replace(made, about={**made.about, **key})
        _write(path, profile)
    return profile


def _read(path: Path, key: Mapping[str, str]) -> Profile | None:
    try:
        profile = Profile.from_json(path.read_text(encoding="utf-8"))
        kept = key.items() <= profile.about.items()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        warn_caller(f"{path} cannot be read and is made anew: {error}")
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return profile if kept else None


def _write(path: Path, profile: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, profile.to_json())
        _forget(path.parent)
    except (OSError, ValueError) as error:
        warn_caller(
            f"The profile is not kept, for {path} cannot be written: {error}. Name a "
            f"folder that can be by {VARIABLE}."
        )


def _forget(folder: Path) -> None:
    """Delete all but the profiles that were used last; other processes may do so too."""
    used: list[tuple[int, Path]] = []
    for name in os.listdir(folder):
        if _OURS.fullmatch(name):
            with contextlib.suppress(OSError):
                used.append(((folder / name).stat().st_mtime_ns, folder / name))
    for _, path in sorted(used, reverse=True)[KEPT:]:
        with contextlib.suppress(OSError):
            path.unlink()


@functools.cache
def _code_digest() -> str:
    """Digest the code that profiles depend on: one of older code serves no more."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    modules = sorted(package.glob("*.py"))
    for name in _PACKAGES:
        modules += sorted((package / name).rglob("*.py"))
    for path in modules:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
