"""Composition: the complete file's text with the values of all others put in.

Values are exchanged in the text, so the result keeps the comments and the order of the
complete file, and composing it again changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from speechbrain_rev.architectures import (
    TRAINING_DEFAULTS,
    TrainingDefaults,
    architecture,
)
from speechbrain_rev.hparams.arguments import parse_arguments
from speechbrain_rev.hparams.document import (
    CORE,
    NULL,
    REFERENCES,
    Document,
    Edit,
    apply,
    end_of_value,
    is_object,
    items,
    nearest,
    read,
    walk,
)
from speechbrain_rev.hparams.features import refuse_other_features
from speechbrain_rev.hparams.values import KINDS, Value, given, shown_kind, write

# What goes with the optimizer rather than with the family, where the two are not the
# usual pair.
_OPTIMIZER_KNOBS = ("lr", "final_lr", "weight_decay")


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
        ``FILE [--key=value | --key value | --run_option ...]``. A key of the file that
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
        If a key is unknown, a value has the wrong type, or values are still missing;
        all missing ones are listed together.

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
    overrides, run_arguments = parse_arguments(
        options, keys=top_level_keys(file), run_options=run_options
    )
    text = resolve(file, overrides)
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
        A complete file, or an override file whose chain of bases ends in one.
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
        If a key is unknown at any depth, a value has the wrong type, an object would
        become another one, the features would not be those that embedding rebuilds,
        or a file cannot be read.

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
    complete, *descendants = _chain(Path(file))
    for document in descendants:
        values = {
            key: Value(node, document)
            for key, node in items(document.root).items()
            if key != "base"
        }
        complete = _override(complete, values)
    root = complete.root
    complete = _override(
        complete,
        {key: given(key, value, root) for key, value in (overrides or {}).items()},
    )
    complete = _fill_family_defaults(complete)
    refuse_other_features(complete)
    return complete.text


def top_level_keys(file: str | Path) -> tuple[str, ...]:
    """Return the keys of the complete file that ``file`` builds on, in their order."""
    return tuple(items(_chain(Path(file))[0].root))


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


def _chain(file: Path) -> list[Document]:
    """Return the complete file and its descendants down to ``file``."""
    chain: list[Document] = []
    seen: list[Path] = []
    while True:
        if file.resolve() in seen:
            names = " -> ".join([*(document.source for document in chain), str(file)])
            raise ValueError(f"The base of these files goes in a circle: {names}.")
        seen.append(file.resolve())
        document = read(file, wanted_by=chain[-1].source if chain else "")
        chain.append(document)
        base = items(document.root).get("base")
        if base is None:
            return chain[::-1]
        if not isinstance(base, ScalarNode) or str(base.tag) != f"{CORE}str":
            raise ValueError(
                f"{document.where(base)}: base takes the name of one file, such as "
                "train.yaml."
            )
        file = file.parent / base.value


def _override(complete: Document, values: Mapping[str, Value]) -> Document:
    if not values:
        return complete
    edits = _edits(complete, complete.root, values)
    return dataclasses.replace(complete, text=apply(edits, complete.text))


def _edits(
    complete: Document, node: MappingNode, values: Mapping[str, Value], path: str = ""
) -> Iterator[Edit]:
    """Yield what has to change in ``node`` for it to hold ``values``."""
    known = {key.value: (key, value) for key, value in node.value}
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else name
        if name not in known:
            prefix = f"{path}." if path else ""
            raise ValueError(
                f"{value.where}: unknown key {dotted!r}.{nearest(name, known, prefix)}"
            )
        key, old = known[name]
        if isinstance(old, MappingNode) or is_object(old):
            children = _entries(dotted, old, value)
            if isinstance(old, MappingNode):
                yield from _edits(complete, old, children, dotted)
            continue
        # The table speaks of top-level knobs alone.
        kind = KINDS.get(dotted) or shown_kind(old, complete.root)
        end = end_of_value(complete.text, key, old)
        yield Edit(key.end_mark.index, end, f": {write(value, kind, dotted)}")


def _entries(dotted: str, old: Node, value: Value) -> dict[str, Value]:
    """Return what changes inside a mapping or an object, which must stay what it is."""
    new = value.node
    if isinstance(old, MappingNode) and isinstance(new, MappingNode):
        if str(new.tag) in (f"{CORE}map", str(old.tag)):
            return {
                key: Value(node, value.document) for key, node in items(new).items()
            }
    elif (str(new.tag), new.value) == (str(old.tag), old.value):
        return {}
    what = str(old.tag) if is_object(old) else "a mapping"
    raise ValueError(
        f"{value.where}: {dotted} is {what} and cannot become something else: change "
        "the knobs that it refers to, or its entries by name. For another object, "
        "resolve the file and edit the complete text."
    )


def _fill_family_defaults(complete: Document) -> Document:
    """Replace null in the training knobs by what the architecture's family uses."""
    root = complete.root
    known = items(root)
    if "arch" not in known or str(known["arch"].tag) in REFERENCES:
        return complete
    family = architecture(known["arch"].value).training
    null = [key for key, node in known.items() if str(node.tag) == NULL]
    values = dataclasses.asdict(family)
    optimizer = known.get("optimizer_name")
    if optimizer is not None and "optimizer_name" not in null:
        values.update(_optimizer_defaults(optimizer.value, family, null))
    return _override(
        complete,
        {key: given(key, values[key], root) for key in null if key in values},
    )


def _optimizer_defaults(
    name: str, family: TrainingDefaults, null: Collection[str]
) -> dict[str, object]:
    """Return rates and decay that go with an optimizer other than the family's."""
    for defaults in (family, *TRAINING_DEFAULTS.values()):
        if defaults.optimizer_name == name:
            return {knob: getattr(defaults, knob) for knob in _OPTIMIZER_KNOBS}
    missing = [knob for knob in _OPTIMIZER_KNOBS if knob in null]
    if missing:
        raise ValueError(
            f"No settings are published for optimizer_name {name} (only for sgd and "
            f"adamw): give {', '.join(missing)} too."
        )
    return {}
