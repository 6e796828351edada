"""The YAML files that come with the package: by their names, and what they say of settings."""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from speechbrain_rev.architectures import nearest
from speechbrain_rev.hparams.document import PLACEHOLDER
from speechbrain_rev.hparams.knobs import KNOBS, MOST_USED

# In a wheel they lie beside this module, in a checkout at its top.
_FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[2] / "hparams")

_RULE = re.compile(r"# -+ (.+)")
_KEY = re.compile(r"(\w+):(?: (.*?))?(?:  # (.*))?")
# Columns of the help.
_NAMES, _WIDTH = 24, 79


def shipped() -> dict[str, Path]:
    """Return the files that come with the package by their names without ``.yaml``.

    Returns
    -------
    dict of str to pathlib.Path
        One for each encoder, those of regimes (``large_margin``, ``minivox``, ...), and
        the complete file on which all others build, ``train``.

    Raises
    ------
    FileNotFoundError
        If they are in neither folder.

    Examples
    --------
    >>> {"train", "revnet46", "fine_tune"} <= shipped().keys()
    True
    """
    for folder in _FOLDERS:
        files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
        if "train" in files:
            return files
    raise FileNotFoundError(
        "The package's own YAML files are missing: train.yaml is in neither "
        f"{' nor '.join(map(str, _FOLDERS))}. Install the package again."
    )


def file_of(file: str | Path) -> Path:
    """Return the file of a path, or of the name of one of the package's files.

    Parameters
    ----------
    file : str or Path
        A path; or, if nothing of that name is in the current folder, a name without
        folder and ending, such as ``revnet46``.

    Returns
    -------
    pathlib.Path
        Path of the file.

    Raises
    ------
    ValueError
        If there is none, here or in the package; the message has the nearest name.

    Examples
    --------
    >>> file_of("revnet46").name
    'revnet46.yaml'
    """
    path, files = Path(file), shipped()
    if os.path.lexists(path):
        return path
    if str(file) in files:
        return files[str(file)]
    raise ValueError(
        f"The hyperparameter file {path} cannot be read: No such file or directory. Files "
        "that come with the package are named without folder and ending."
        f"{nearest(path.stem, files)}"
    )


def base_of(name: str, child: Path) -> Path:
    """Return the file that another one names as its ``base``.

    Parameters
    ----------
    name : str
        A path from the folder of the child; or, if nothing is there, the name of one of
        the package's files, with or without ``.yaml``.
    child : pathlib.Path
        The file that names it.

    Returns
    -------
    pathlib.Path
        Path of the base.

    Raises
    ------
    ValueError
        If there is neither; the message has the nearest name.

    Examples
    --------
    >>> base_of("train.yaml", Path("mine/deep.yaml")) == shipped()["train"]
    True
    """
    beside, files = child.parent / name, shipped()
    # A link that leads nowhere was meant, too.
    if os.path.lexists(beside):
        return beside
    if (known := name.removesuffix(".yaml")) in files:
        return files[known]
    raise ValueError(
        f"its base {name} is not there: no file of that path lies beside {child.name}, "
        f"and none of that name comes with the package.{nearest(known, files)}"
    )


@dataclass
class Key:
    """A top-level key of a file: its value as written, and its comments.

    Attributes
    ----------
    name, value : str
        As they are written.
    words : list of str
        The comments above it and behind it.
    lines : list of str
        Those of a value that is longer than its first one.
    """

    name: str
    value: str
    words: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def sections(text: str) -> dict[str, list[Key]]:
    r"""Read the keys of ``train.yaml`` with their comments, by section.

    Parameters
    ----------
    text : str
        The file's content.

    Returns
    -------
    dict of str to list of Key
        In the file's order.

    Examples
    --------
    >>> by_section = sections("# ---- run\nseed: 1986  # of all\nmodules:\n    a: b\n")
    >>> [(key.name, key.value, key.words, key.lines) for key in by_section["run"]]
    [('seed', '1986', ['of all'], []), ('modules', '', [], ['    a: b'])]
    """
    by_section: dict[str, list[Key]] = {}
    keys: list[Key] = []
    said: list[str] = []
    for line in text.splitlines():
        if rule := _RULE.fullmatch(line):
            keys, said = by_section.setdefault(rule[1], []), []
        elif line.startswith("# "):
            said.append(line.removeprefix("# "))
        elif line.startswith(" "):
            keys[-1].lines.append(line)
        elif match := _KEY.fullmatch(line):
            words = [" ".join(part) for part in (said, [match[3] or ""]) if any(part)]
            keys.append(Key(match[1], match[2] or "", words))
            said = []
        elif not line:
            # A comment above an empty line belongs to a section, not to a key.
            said = []
    return {name: keys for name, keys in by_section.items() if keys}


def settings_help() -> str:
    """List the most used settings: what each does, and what it is if it is left out.

    Returns
    -------
    str
        Lines of at most 79 characters.

    Examples
    --------
    >>> for line in settings_help().splitlines()[:2]:
    ...     print(line)
    settings that are used most:
      --data_folder         folders of audio (VoxCeleb, LibriSpeech, VCTK,
    """
    text = shipped()["train"].read_text(encoding="utf-8")
    keys = {key.name: key for section in sections(text).values() for key in section}
    lines = ["settings that are used most:"]
    for name in MOST_USED:
        knob, value = KNOBS[name], keys[name].value
        facts = [knob.takes()] if knob.one_of else []
        facts += ["required" if value == PLACEHOLDER else f"default: {value}"]
        said = " ".join(keys[name].words).rstrip(".")
        if said[1].islower():
            said = said[0].lower() + said[1:]
        lines += textwrap.wrap(
            f"{said} ({'; '.join(facts)})",
            _WIDTH,
            initial_indent=f"  --{name}".ljust(_NAMES),
            subsequent_indent=" " * _NAMES,
            break_on_hyphens=False,
        )
    return "\n".join(lines)
