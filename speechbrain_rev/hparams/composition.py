"""Composition: the complete file's text with the values of all others put in.

Values are exchanged in the text, so the result keeps the comments and the order of the
complete file, and composing it again changes nothing. Everything is held against the
complete file as it stands: its values show the types, its knobs their ranges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from speechbrain_rev.architectures import (
    TRAINING_DEFAULTS,
    TrainingDefaults,
    architecture,
)
from speechbrain_rev.hparams.arguments import (
    COMMAND_LINE,
    parse_arguments,
    refuse_swallowed_keys,
    unknown_key,
)
from speechbrain_rev.hparams.document import (
    CORE,
    FOLLOWED,
    NULL,
    PLACEHOLDER,
    Document,
    NotPlain,
    Unreadable,
    Value,
    as_json,
    compute,
    dump,
    end_of_value,
    excerpt,
    is_object,
    is_reference,
    items,
    plain,
    read,
    reference,
    refuse_disagreement,
    scalar_kind,
    unknown,
    walk,
)
from speechbrain_rev.hparams.knobs import KNOBS, WORDS, Knob
from speechbrain_rev.hparams.rules import RULES, refuse_other_features
from speechbrain_rev.hparams.shipped import base_of, file_of

KeyPath = tuple[str, ...]
#: Objects that files of version 0.1.0 name in another way, which still works.
_NOW_NAMED = {
    "!apply:speechbrain_rev.lobes.build_encoder": "!new:speechbrain_rev.lobes.SpeakerEncoder",
    "!new:speechbrain_rev.lobes.classifier.AAMSoftmax": (
        "!apply:speechbrain_rev.lobes.classifier.build_loss"
    ),
}
_REFERENCE = re.compile(r"<[^>]*>")
# What goes with the optimizer rather than with the family, where the two are not the
# usual pair.
_OPTIMIZER_KNOBS = ("lr", "final_lr", "weight_decay")


class OptimizerWarning(UserWarning):
    """An encoder is to be trained with another optimizer than its family's."""


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
        if str(node.tag) == PLACEHOLDER
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
    _fill_family_defaults(settings)
    settings.check()
    refuse_other_features(settings.nodes())
    if warning := _other_optimizer(settings):
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


def plain_settings(text: str) -> dict[str, Any]:
    r"""Read the plain values at the top of a complete text, following references.

    Nothing that the text describes is built.

    Parameters
    ----------
    text : str
        Complete HyperPyYAML.

    Returns
    -------
    dict
        Numbers, texts, truth values, None and lists of them by key. Keys of objects,
        functions, mappings and placeholders are left out.

    Raises
    ------
    ValueError
        If the text is no HyperPyYAML, or a reference leads nowhere.

    Examples
    --------
    >>> plain_settings("seed: 3\nfolder: !ref results/<seed>\nencoder: !new:os.system")
    {'seed': 3, 'folder': 'results/3'}
    """
    return Settings(Document("text", text)).plain_values()


class Settings:
    r"""A complete file with values of other files and of the command line put in.

    Parameters
    ----------
    complete : Document
        The complete file.

    Examples
    --------
    >>> settings = Settings(Document("train.yaml", "lr: 0.1  # peak\nrate: !ref <lr>"))
    >>> settings.give({"lr": "0.2"}, "command line")
    >>> settings.plain_values(), settings.where("lr")
    ({'lr': 0.2, 'rate': 0.2}, 'command line')
    >>> print(settings.text())
    lr: 0.2  # peak
    rate: !ref <lr>
    """

    def __init__(self, complete: Document) -> None:
        self._text = complete.text
        self._entries = dict(_entries(complete.root))
        self._values = {
            path: Value(value, complete) for path, (_, value) in self._entries.items()
        }
        self._written: dict[KeyPath, str] = {}

    def where(self, key: str) -> str:
        """Return where a top-level key's value was written."""
        return self._values[(key,)].where

    def tag(self, key: str) -> str:
        """Return the tag of a top-level key's value; nothing where the key is missing."""
        return str(self._values[(key,)].node.tag) if (key,) in self._values else ""

    def override(self, document: Document) -> None:
        """Put the values of an override file in.

        Raises
        ------
        ValueError
            If a key is unknown at any depth, a value has the wrong type, or an object
            would become another one.
        """
        values = {
            key: Value(node, document)
            for key, node in items(document.root).items()
            if key != "base"
        }
        self._replace((), values)

    def give(self, values: Mapping[str, object], source: str) -> None:
        """Put values of the command line or of a caller in: text as typed, or plain ones.

        Raises
        ------
        ValueError
            As ``override`` does.
        """
        self._replace(
            (), {key: self._given(key, value, source) for key, value in values.items()}
        )

    def plain_values(self) -> dict[str, Any]:
        """Return what is plain at the top, by key, references followed.

        What is known only once a placeholder is filled or an object built is left out.
        """
        found = {}
        for path in self._values:
            if len(path) == 1:
                with contextlib.suppress(NotPlain):
                    found[path[0]] = self._plain(path)
        return found

    def text(self) -> str:
        """Return the complete text."""
        text = self._text
        # From the end on, so that places before it stay what they are.
        for path in sorted(
            self._written, key=lambda path: -self._entries[path][0].end_mark.index
        ):
            key, value = self._entries[path]
            end = end_of_value(self._text, key, value)
            text = f"{text[: key.end_mark.index]}: {self._written[path]}{text[end:]}"
        return text

    def nodes(self) -> Iterator[tuple[str, Value]]:
        """Yield every value at any depth with its dotted key, lists entered."""
        for path, value in self._values.items():
            dotted = ".".join(path)
            if isinstance(value.node, MappingNode):
                yield dotted, value
                continue
            for inner, node in walk(value.node, dotted):
                yield inner, Value(node, value.document)

    def check_references(self) -> None:
        """Refuse references to nothing, and circles of them.

        Raises
        ------
        ValueError
            With the key, the place and the nearest known name.
        """
        for dotted, value in self.nodes():
            for _, target in _targets(value.node):
                self._refuse_unknown(target, value, dotted)
        for path, value in self._values.items():
            if str(value.node.tag) in FOLLOWED:
                with contextlib.suppress(NotPlain):
                    self._plain(path)

    def check_knob(self, key: str) -> None:
        """Refuse a top-level value that is not among those its knob may take.

        Raises
        ------
        ValueError
            With the key, the place, what was given and what is allowed.
        """
        if (key,) in self._values:
            self._check((key,))

    def check(self) -> None:
        """Refuse values that their knobs may not take, alone or together.

        Raises
        ------
        ValueError
            With the keys, the places, what was given and what is allowed.
        """
        for path in sorted(self._values, key=len):
            if len(path) == 1 or path in self._written:
                self._check(path)
        values = self.plain_values()
        for rule in RULES:
            if rule.broken(values):
                named = [
                    f"{key} is {values[key]} ({self.where(key)})" for key in rule.knobs
                ]
                raise ValueError(f"{', '.join(named)}: {rule.advice(values)}")

    def _given(self, key: str, value: object, source: str) -> Value:
        """Read a value; text for a knob that takes text stays: a folder may be called 007."""
        try:
            written = value if isinstance(value, str) else as_json(value)
        except TypeError as error:
            raise ValueError(
                f"{source}: {key} is a {type(value).__name__}: give a plain number, "
                "text, truth value, None, or a list of these."
            ) from error
        document = Document(source, written, is_file=False)
        literal = isinstance(value, str) and value != "null" and value[:1] != "!"
        known = (key,) in self._entries
        if literal and (not known or self._takes((key,)).kind == "str"):
            return Value(ScalarNode(f"{CORE}str", value), document)
        try:
            node = document.node()
        except ValueError as error:
            raise ValueError(
                f"{error} It is the value of {key}; a text may need quotes."
            ) from error
        return Value(node or ScalarNode(NULL, ""), document)

    def _replace(self, parent: KeyPath, values: Mapping[str, Value]) -> None:
        siblings = self._below(parent)
        for name, value in values.items():
            path = (*parent, name)
            dotted = ".".join(path)
            if name not in siblings:
                words = unknown_key(name, siblings)
                if parent:
                    words = unknown(name, siblings, dotted.removesuffix(name))
                raise ValueError(f"{value.where}: {words}")
            _, old = self._entries[path]
            if isinstance(old, MappingNode) or is_object(old):
                self._replace(path, _children(dotted, old, value))
            else:
                self._written[path] = _written(value, self._takes(path), dotted)
                self._values[path] = value

    def _below(self, parent: KeyPath) -> list[str]:
        return [path[-1] for path in self._entries if path[:-1] == parent]

    def _knob(self, path: KeyPath) -> Knob | None:
        """Return the row that an entry is held to; a reference to a knob stands for it."""
        if len(path) == 1 and path[0] in KNOBS:
            return KNOBS[path[0]]
        return KNOBS.get(_alone(self._entries[path][1]))

    def _takes(self, path: KeyPath) -> Knob:
        """Return an entry's row, or the type that its value in the complete file shows."""
        if knob := self._knob(path):
            return knob
        kind = self._shown_kind(self._entries[path][1])
        return Knob(kind, null=kind == "any")

    def _shown_kind(self, node: Node, seen: tuple[str, ...] = ()) -> str:
        """Return the type that a value shows; ``seen`` are the keys that referred to it."""
        if isinstance(node, SequenceNode):
            kinds = {self._shown_kind(item, seen) for item in node.value}
            inner = f"list of {kinds.pop()}" if len(kinds) == 1 else ""
            return inner if inner in WORDS else "list"
        if not isinstance(node, ScalarNode):
            return "any"
        if (key := _alone(node)) in KNOBS:
            return KNOBS[key].kind
        if key:
            if key in seen or (key,) not in self._entries:
                return "any"
            return self._shown_kind(self._entries[(key,)][1], (*seen, key))
        if is_reference(node):
            # Letters outside the references make a text, the rest is arithmetic.
            letters = re.search(r"[^\W\d]", _REFERENCE.sub("", str(node.value)))
            return "str" if letters else "any"
        return scalar_kind(node).replace("null", "any")

    def _check(self, path: KeyPath) -> None:
        knob = self._knob(path)
        if knob is None:
            return
        value, dotted = self._values[path], ".".join(path)
        try:
            found = self._plain(path)
        except NotPlain:
            return
        shown = excerpt(value.node)
        if str(value.node.tag) in FOLLOWED:
            shown = f"{found} ({value.node.tag} {shown})"
        if not knob.has_kind(found):
            raise ValueError(knob.wrong_kind(value.where, dotted, shown))
        if not knob.allows(found):
            raise ValueError(
                f"{value.where}: {dotted} takes {knob.takes()}, not "
                f"{shown or 'an empty one'}.{knob.advice(found)}"
            )

    def _plain(self, path: KeyPath, trail: tuple[KeyPath, ...] = ()) -> Any:
        """Return a plain value; ``trail`` are the keys whose references led here."""
        value, dotted = self._values[path], ".".join(path)
        trail = (*trail, path)
        if path in trail[:-1]:
            circle = " -> ".join(map(".".join, trail))
            raise ValueError(f"{value.where}: references go in a circle: {circle}.")

        def follow(node: ScalarNode) -> object:
            return self._referred(node, value, trail)

        try:
            return plain(value.node, follow)
        except Unreadable as error:
            raise ValueError(
                f"{value.where}: {dotted} is {error}, which is no number that can be "
                "read."
            ) from error

    def _referred(
        self, node: ScalarNode, value: Value, trail: tuple[KeyPath, ...]
    ) -> object:
        """Follow ``!ref``: to a value, into a text, or into arithmetic."""
        if str(node.tag) == PLACEHOLDER:
            raise NotPlain
        dotted, filled = ".".join(trail[-1]), str(node.value)
        for written, target in _targets(node):
            self._refuse_unknown(target, value, dotted)
            found = self._plain(target, trail)
            if "." in written:
                raise NotPlain  # an attribute
            if isinstance(found, str) and _REFERENCE.search(found):
                raise ValueError(
                    f"{self._values[target].where}: {'.'.join(target)} is {found}, and "
                    f"where {dotted} refers to it, HyperPyYAML would follow what stands "
                    "between < and >. Rename it, or write !ref before it."
                )
            if written == node.value:
                return found
            filled = filled.replace(written, str(found))
        if filled == node.value:
            return filled
        try:
            return compute(filled)
        except ArithmeticError as error:
            raise ValueError(
                f"{value.where}: {dotted} cannot be computed: {node.value} is {filled}."
            ) from error

    def _refuse_unknown(self, target: KeyPath, value: Value, dotted: str) -> None:
        for depth, name in enumerate(target):
            siblings = self._below(target[:depth])
            if name not in siblings:
                prefix = ".".join([*target[:depth], ""])
                raise ValueError(
                    f"{value.where}: {dotted} refers to an "
                    f"{unknown(name, siblings, prefix)}"
                )


def _entries(
    node: MappingNode, parent: KeyPath = ()
) -> Iterator[tuple[KeyPath, tuple[Node, Node]]]:
    """Yield keys and values of a mapping and of the mappings in it."""
    for key, value in node.value:
        path = (*parent, str(key.value))
        yield path, (key, value)
        if isinstance(value, MappingNode):
            yield from _entries(value, path)


def _alone(node: Node) -> str:
    """Return the one key that a reference stands for, else nothing."""
    alone = is_reference(node) and re.fullmatch(r"<(\w+)>", node.value)
    return alone[1] if alone else ""


def _targets(node: Node) -> Iterator[tuple[str, KeyPath]]:
    """Yield what a reference refers to: as written, and as keys from the top."""
    if not is_reference(node) or str(node.tag) == PLACEHOLDER:
        return
    for written in _REFERENCE.findall(node.value):
        # What follows a dot is an attribute of the object.
        key = written[1:-1].partition(".")[0]
        yield written, tuple(part.strip("]") for part in key.split("["))


def _children(dotted: str, old: Node, value: Value) -> dict[str, Value]:
    """Return what changes inside a mapping or an object, which must stay what it is."""
    new = value.node
    tags = [_NOW_NAMED.get(str(node.tag), str(node.tag)) for node in (old, new)]
    if isinstance(old, MappingNode) and isinstance(new, MappingNode):
        if tags[1] in (tags[0], f"{CORE}map"):
            return {
                key: Value(node, value.document) for key, node in items(new).items()
            }
    elif tags[0] == tags[1] and new.value == old.value:
        return {}
    what = str(old.tag) if is_object(old) else "a mapping"
    raise ValueError(
        f"{value.where}: {dotted} is {what} and cannot become something else: change "
        "the knobs that it refers to, or its entries by name. For another object, "
        "resolve the file and edit the complete text."
    )


def _written(value: Value, knob: Knob, key: str) -> str:
    """Write a value as it will stand in the text; one of another type is refused."""
    node = value.node
    if is_reference(node):
        return reference(node)
    for _, part in walk(node):
        signs = "\x85" if part is node else "\x85?"
        if isinstance(part, ScalarNode) and set(signs) & set(part.value):
            # It writes texts anew before it reads them, some of them wrongly.
            raise ValueError(
                f"{value.where}: {key} is {excerpt(node)}: HyperPyYAML cannot read a "
                "question mark in a list, nor the sign U+0085. Rename what it names."
            )
    with contextlib.suppress(NotPlain, OverflowError, ValueError):
        found = plain(node, reference)
        if knob.has_kind(found):
            return dump(_floats(found) if knob.kind.endswith("float") else found)
    raise ValueError(knob.wrong_kind(value.where, key, excerpt(node)))


def _floats(found: Any) -> Any:
    """Make integers floats; they serve where numbers are taken."""
    if isinstance(found, list):
        return [_floats(item) for item in found]
    return float(found) if type(found) is int else found


def _fill_family_defaults(settings: Settings) -> None:
    """Replace null in the training knobs by what the architecture's family uses.

    Raises
    ------
    ValueError
        If an optimizer without published settings lacks some of its own.
    """
    found = settings.plain_values()
    arch, optimizer = found.get("arch"), found.get("optimizer_name")
    if arch is None:
        return
    fields = [field.name for field in dataclasses.fields(TrainingDefaults)]
    null = [name for name in fields if settings.tag(name) == NULL]
    family = architecture(arch).training
    values = dataclasses.asdict(family)
    if settings.tag("optimizer_name") not in ("", NULL):
        published = [
            dataclasses.asdict(defaults)
            for defaults in (family, *TRAINING_DEFAULTS.values())
            if defaults.optimizer_name == optimizer
        ]
        missing = [knob for knob in _OPTIMIZER_KNOBS if knob in null]
        if optimizer is not None and missing and not published:
            raise ValueError(
                f"{settings.where('optimizer_name')}: no settings are published for "
                f"optimizer_name {optimizer} (only for sgd and adamw): give "
                f"{', '.join(missing)} too."
            )
        for knob in _OPTIMIZER_KNOBS:
            del values[knob]
            if published:
                values[knob] = published[0][knob]
    settings.give(
        {name: values[name] for name in null if name in values}, f"default of {arch}"
    )


def _other_optimizer(settings: Settings) -> str:
    """Say that the optimizer is not the one of the encoder's family, if it is not."""
    found = settings.plain_values()
    arch, optimizer = found.get("arch"), found.get("optimizer_name")
    if arch is None or optimizer is None:
        return ""
    published = architecture(arch).optimizer_name
    if optimizer == published:
        return ""
    return (
        f"Not the family's optimizer: {arch} is to be trained with {optimizer} "
        f"({settings.where('optimizer_name')}), where the paper trains its family "
        f"with {published}; published error rates say nothing about this. "
        "optimizer_name: null takes the family's. To silence this, set "
        'PYTHONWARNINGS="ignore:Not the family".'
    )
