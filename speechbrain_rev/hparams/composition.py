"""Composition: the complete file's text with the values of all others put in.

Values are exchanged in the text, so the result keeps the comments and the order of the
complete file, and composing it again changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml.nodes import ScalarNode

from speechbrain_rev.hparams.arguments import (
    COMMAND_LINE,
    parse_arguments,
    refuse_swallowed_keys,
)
from speechbrain_rev.hparams.document import CORE, Document, items, read, walk
from speechbrain_rev.hparams.families import (
    OptimizerWarning,
    fill_family_defaults,
    other_optimizer,
)
from speechbrain_rev.hparams.features import refuse_other_features
from speechbrain_rev.hparams.readers import refuse_disagreement
from speechbrain_rev.hparams.settings import Settings
from speechbrain_rev.hparams.shipped import base_of, file_of


@dataclass(frozen=True)
class Composition:
    """What one command line asks for.

    Attributes
    ----------
    file : str
        The hyperparameter file that was named.
    text : str
        The complete HyperPyYAML text, ready for ``load_hyperpyyaml``.
    run_arguments : tuple of str
        The arguments that are SpeechBrain's run options, unchanged, in their order.
    """

    file: str
    text: str
    run_arguments: tuple[str, ...]


def compose(arguments: Sequence[str], run_options: Collection[str] = ()) -> Composition:
    r"""Compose what a training run needs from its command line.

    Parameters
    ----------
    arguments : sequence of str
        ``FILE [--key=value | --key value | --run_option ...]``, FILE as for
        ``resolve``. A key of the file that
        is also a run option (``precision``) goes into the text, where SpeechBrain's
        ``Brain`` finds it and where it is recorded with the run.
    run_options : collection of str
        Names of SpeechBrain's run options, which are passed through; the caller, who
        may import SpeechBrain, reads them off its ``RunOptions``.

    Returns
    -------
    Composition
        Text without placeholders, and the run options.

    Raises
    ------
    ValueError
        As ``resolve`` does, and if values are still missing; all missing ones are
        listed together.

    Warns
    -----
    OptimizerWarning
        As ``resolve`` does.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "tiny.yaml")
    >>> _ = file.write_text("seed: 1\nfolder: !PLACEHOLDER  # of the speech\n")
    >>> composition = compose(
    ...     [str(file), "--folder=data", "--device", "cuda:1"], run_options=["device"]
    ... )
    >>> print(composition.text, end="")
    seed: 1
    folder: data  # of the speech
    >>> composition.run_arguments
    ('--device', 'cuda:1')
    """
    if not arguments or arguments[0].startswith("-"):
        came = f"{arguments[0]} came first" if arguments else "nothing was given"
        raise ValueError(
            f"The hyperparameter file comes first ({came}): FILE [--key=value ...]."
        )
    file, *options = arguments
    chain = _chain(file)
    overrides, run_arguments = parse_arguments(
        options, keys=tuple(items(chain[0].root)), run_options=run_options
    )
    text = _composed(chain, overrides)
    missing = placeholders(text)
    if missing:
        raise ValueError(
            f"{file} leaves {len(missing)} value(s) to be given: {', '.join(missing)}. "
            f"Write {' '.join(f'--{key}=...' for key in missing)} after the file's "
            "name, or set them in an override file."
        )
    return Composition(file, text, run_arguments)


def resolve(file: str | Path, overrides: Mapping[str, object] | None = None) -> str:
    r"""Write a hyperparameter file and all that it builds on as one complete text.

    Parameters
    ----------
    file : str or Path
        A complete file, or an override file whose chain of bases ends in one; or the
        name of one that comes with the package, such as ``revnet57``.
    overrides : mapping, optional
        Values by key that go before all files. A string is read as on the command
        line; any other value is taken as it is.

    Returns
    -------
    str
        Plain HyperPyYAML with the comments of the complete file and without ``base``;
        what a file leaves to the architecture's family (null) is filled in.
        Placeholders that nobody filled stay. Resolving the text again changes nothing.

    Raises
    ------
    ValueError
        If a key is unknown at any depth or would be taken for a run option, a value
        has the wrong type or is out of range, a reference leads nowhere, an object
        would become another one, the features would not be those that embedding
        rebuilds, or a file cannot be read.

    Warns
    -----
    OptimizerWarning
        If the encoder would be trained with another optimizer than its family's.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "train.yaml").write_text("arch: revnet57\nlr: null  # peak\n")
    >>> _ = (folder / "deep.yaml").write_text("base: train.yaml\narch: df_revnet281\n")
    >>> print(resolve(folder / "deep.yaml"), end="")
    arch: df_revnet281
    lr: 0.000125  # peak
    """
    return _composed(_chain(file), overrides or {})


def top_level_keys(file: str | Path) -> tuple[str, ...]:
    """Return the keys of the complete file that ``file`` builds on, in their order."""
    return tuple(items(_chain(file)[0].root))


def placeholders(text: str) -> tuple[str, ...]:
    r"""Return where a complete text still says ``!PLACEHOLDER``, as dotted keys.

    Examples
    --------
    >>> placeholders("a: !PLACEHOLDER\nb:\n    c: !PLACEHOLDER\nd: 1\n")
    ('a', 'b.c')
    """
    return tuple(
        path
        for path, node in walk(Document("text", text).root)
        if str(node.tag) == "!PLACEHOLDER"
    )


def _composed(chain: Sequence[Document], overrides: Mapping[str, object]) -> str:
    """Put the values of a chain and of the command line into one checked text."""
    complete, *descendants = chain
    refuse_swallowed_keys(complete)
    refuse_disagreement(complete)
    settings = Settings(complete)
    for document in descendants:
        settings.override(document)
    settings.give(overrides, COMMAND_LINE)
    settings.check_references()
    for key in ("arch", "optimizer_name"):
        settings.check_knob(key)
    fill_family_defaults(settings)
    settings.check()
    refuse_other_features(settings)
    if warning := other_optimizer(settings):
        # Two calls above is who asked for the composition.
        warnings.warn(warning, OptimizerWarning, stacklevel=3)
    return settings.text()


def _chain(wanted: str | Path) -> list[Document]:
    """Return the complete file and its descendants down to the one that is wanted."""
    file = file_of(wanted)
    chain: list[Document] = []
    seen: list[Path] = []
    while True:
        document = read(file, wanted_by=chain[-1].source if chain else "")
        chain.append(document)
        if file.resolve() in seen:
            names = " -> ".join(document.source for document in chain)
            raise ValueError(f"The base of these files goes in a circle: {names}.")
        seen.append(file.resolve())
        base = items(document.root).get("base")
        if base is None:
            return chain[::-1]
        named = isinstance(base, ScalarNode) and str(base.tag) == f"{CORE}str"
        if not named or not base.value:
            raise ValueError(
                f"{document.where(base)}: base takes the name of one file, such as "
                "train.yaml."
            )
        try:
            file = base_of(base.value, file)
        except ValueError as error:
            raise ValueError(f"{document.where(base)}: {error}") from error
