"""The YAML files that come with the package, by their names."""

from __future__ import annotations

from pathlib import Path

from speechbrain_rev.hparams.document import nearest

# In a wheel they lie beside this module, in a checkout at its top.
_FOLDERS = (Path(__file__).parent / "files", Path(__file__).parents[2] / "hparams")


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
    >>> {"train", "revnet57", "fine_tune"} <= shipped().keys()
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
        folder and ending, such as ``revnet57``.

    Returns
    -------
    pathlib.Path
        Path of the file, which may be missing.

    Raises
    ------
    ValueError
        If no file here or in the package has the name, or if a path leads nowhere and
        the package has a file of that name.

    Examples
    --------
    >>> file_of("revnet57").name
    'revnet57.yaml'
    >>> file_of("mine/deep.yaml").as_posix()
    'mine/deep.yaml'
    """
    path = Path(file)
    if path.exists() or path.is_symlink():
        return path
    files = shipped()
    if str(file) == path.name and not path.suffix:
        if path.name in files:
            return files[path.name]
        raise ValueError(
            f"The hyperparameter file {path} cannot be read: there is none here, and none "
            f"of that name comes with the package.{nearest(path.name, files)}"
        )
    if path.suffix in ("", ".yaml") and path.stem in files:
        raise ValueError(
            f"The hyperparameter file {path} cannot be read: No such file or directory. "
            f"The package brings one of that name: give {path.stem}, without folder and "
            "ending."
        )
    return path


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
        Path of the base, which may be missing.

    Raises
    ------
    ValueError
        If there is neither; the message lists the names.

    Examples
    --------
    >>> base_of("train.yaml", Path("mine/deep.yaml")) == shipped()["train"]
    True
    """
    beside = child.parent / name
    try:
        beside.lstat()  # a link that leads nowhere was meant, too
    except FileNotFoundError:
        files = shipped()
    except (OSError, ValueError):
        return beside
    else:
        return beside
    if name.removesuffix(".yaml") not in files:
        raise ValueError(
            f"its base {name} is not there: no file of that path lies beside {child.name}, "
            "and none of that name comes with the package."
            f"{nearest(Path(name).stem, files)} Give a path from the folder of "
            f"{child.name}, or one of {', '.join(files)}."
        )
    return files[name.removesuffix(".yaml")]
