"""Composition: the complete file's text with the values of all others put in.

Values are replaced in the text, so the result keeps the comments and the order of the
complete file, and composing it again changes nothing. The complete file is the measure:
its values show the types, and its knobs have ranges.
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

from speechbrain_rev.architectures import TRAINING_DEFAULTS, architecture
from speechbrain_rev.hparams.arguments import (
    COMMAND_LINE,
    parse_arguments,
    refuse_swallowed_keys,
    unknown_key,
)
from speechbrain_rev.hparams.document import (
    FOLLOWED,
    PLACEHOLDER,
    SCALARS,
    NotPlain,
    Value,
    as_json,
    compute,
    dump,
    parse,
    parse_file,
    read,
    refuse_disagreement,
    unknown,
)
from speechbrain_rev.hparams.knobs import KNOBS, WORDS, Knob
from speechbrain_rev.hparams.rules import RULES, refuse_other_features
from speechbrain_rev.hparams.shipped import base_of, file_of

KeyPath = tuple[str, ...]
_REFERENCE = re.compile(r"<[^>]*>")
# Defaults that depend on the optimizer, not on the family.
_OPTIMIZER_KNOBS = ("lr", "final_lr", "weight_decay")


class OptimizerWarning(UserWarning):
    """The encoder's optimizer is not the one of its family."""


@dataclass(frozen=True)
class Composition:
    """The settings and run options of one command line.

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
    settings, descendants = _chain(file)
    overrides, run_arguments = parse_arguments(
        options, keys=settings.keys, run_options=run_options
    )
    text = _composed(settings, descendants, overrides)
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
        Values by key that override all files. A string is read as on the command
        line; any other value is taken as it is.

    Returns
    -------
    str
        Plain HyperPyYAML with the comments of the complete file and without ``base``.
        Null is replaced by the default of the architecture's family. Placeholders that
        nobody filled stay. Resolving the text again changes nothing.

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
    return _composed(*_chain(file), overrides or {})


def top_level_keys(file: str | Path) -> tuple[str, ...]:
    """Return the keys of the complete file that ``file`` builds on, in their order."""
    return _chain(file)[0].keys


def placeholders(text: str) -> tuple[str, ...]:
    r"""Return the dotted keys of a complete text whose values are ``!PLACEHOLDER``.

    Examples
    --------
    >>> placeholders("a: !PLACEHOLDER\nb:\n    c: !PLACEHOLDER\nd: 1\n")
    ('a', 'b.c')
    """
    values = parse_file(text, "text").walk()
    return tuple(value.path for value in values if value.tag == PLACEHOLDER)


def _composed(
    settings: Settings, descendants: Sequence[Value], overrides: Mapping[str, object]
) -> str:
    """Put the values of a chain and of the command line into one checked text."""
    refuse_swallowed_keys(settings.root)
    refuse_disagreement(settings.root)
    for file in descendants:
        settings.override(file)
    settings.give(overrides, COMMAND_LINE)
    settings.check()
    other_optimizer = _fill_family_defaults(settings)
    settings.check_rules()
    refuse_other_features(settings.all_values())
    if other_optimizer:
        # Two calls above is who asked for the composition.
        warnings.warn(other_optimizer, OptimizerWarning, stacklevel=3)
    return settings.text()


def _chain(wanted: str | Path) -> tuple[Settings, list[Value]]:
    """Return the complete file and its descendants down to the one that is wanted."""
    file, wanted_by = file_of(wanted), ""
    seen: dict[Path, str] = {}
    descendants: list[Value] = []
    while True:
        settings = Settings(read(file, wanted_by), str(file))
        if file.resolve() in seen:
            names = " -> ".join([*seen.values(), str(file)])
            raise ValueError(f"The base of these files goes in a circle: {names}.")
        seen[file.resolve()] = str(file)
        base = settings.root.content.pop("base", None)
        if base is None:
            return settings, descendants[::-1]
        if base.tag != "str" or not base.content:
            raise ValueError(
                f"{base.where}: base takes the name of one file, such as train.yaml."
            )
        descendants.append(settings.root)
        try:
            file, wanted_by = base_of(base.content, file), str(file)
        except ValueError as error:
            raise ValueError(f"{base.where}: {error}") from error


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
    return Settings(text, "text").plain_values()


@dataclass
class _Entry:
    """A value of the complete file, the value that counts now, and its text if changed."""

    old: Value
    now: Value
    written: str = ""


class Settings:
    r"""A complete file with values of other files and of the command line put in.

    Examples
    --------
    >>> settings = Settings("lr: 0.1  # peak\nrate: !ref <lr>", "train.yaml")
    >>> settings.give({"lr": "0.2"}, "command line")
    >>> settings.plain_values(), settings["lr"].where
    ({'lr': 0.2, 'rate': 0.2}, 'command line')
    >>> print(settings.text())
    lr: 0.2  # peak
    rate: !ref <lr>
    """

    def __init__(self, text: str, source: str) -> None:
        self.root = parse_file(text, source)
        self.keys = tuple(self.root.content)
        self._text = text
        self._entries = dict(_entries(self.root))

    def __getitem__(self, key: str) -> Value:
        """Return a top-level value that counts now."""
        return self._entries[(key,)].now

    def override(self, file: Value) -> None:
        """Put the values of an override file in."""
        self._replace((), file.content)

    def give(self, values: Mapping[str, object], source: str) -> None:
        """Put values of the command line or of a caller in: text as typed, or plain ones."""
        self._replace((), {k: self._given(k, v, source) for k, v in values.items()})

    def plain_values(self) -> dict[str, Any]:
        """Return what is plain at the top, by key, references followed.

        What is known only once a placeholder is filled or an object built is left out.
        """
        values = {}
        for key in self.keys:
            with contextlib.suppress(NotPlain):
                values[key] = self._plain((key,))
        return values

    def text(self) -> str:
        """Return the complete text."""
        text = self._text
        # From the end on, so that places before it stay what they are.
        for entry in reversed(self._entries.values()):
            if entry.written:
                before, after = text[: entry.old.start], text[entry.old.end :]
                text = f"{before}: {entry.written}{after}"
        return text

    def all_values(self) -> Iterator[Value]:
        """Yield every value at any depth, lists entered."""
        for entry in self._entries.values():
            is_map = isinstance(entry.now.content, dict)
            yield from [entry.now] if is_map else entry.now.walk()

    def check(self) -> None:
        """Refuse references to nothing or in a circle, and values that no knob may take."""
        for value in self.all_values():
            for _, target in _targets(value):
                self._refuse_unknown(target, value)
        for path in sorted(self._entries, key=len):
            try:
                plain, knob = self._plain(path), self._knob(path)
            except NotPlain:
                continue
            if knob and not (knob.has_kind(plain) and knob.allows(plain)):
                now = self._entries[path].now
                is_followed = now.tag in FOLLOWED
                shown = f"{plain} ({now.tag} {now.shown})" if is_followed else now.shown
                raise ValueError(
                    f"{now.where}: {now.path} {knob.refusal(shown, plain)}"
                )

    def check_rules(self) -> None:
        """Refuse values that do not go together."""
        values = self.plain_values()
        for rule in RULES:
            if rule.broken(values):
                named = (f"{k} is {values[k]} ({self[k].where})" for k in rule.knobs)
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
        is_text = isinstance(value, str) and value != "null" and value[:1] != "!"
        knob = self._takes((key,)) if key in self.keys else Knob("str")
        is_list = knob.several and written[:1] == "[" and written[-1:] == "]"
        if is_text and knob.kind == "str" and not is_list:
            return Value("str", written, source, key)
        try:
            return parse(written, source, key) or Value("null", "", source, key)
        except ValueError as error:
            raise ValueError(
                f"{error} It is the value of {key}; a text may need quotes."
            ) from error

    def _replace(self, parent: KeyPath, values: Mapping[str, Value]) -> None:
        siblings = self._entries[parent].old.content
        for name, value in values.items():
            if name not in siblings:
                words = unknown_key(name, siblings, value.path.removesuffix(name))
                raise ValueError(f"{value.where}: {words}")
            entry = self._entries[path := (*parent, name)]
            if isinstance(entry.old.content, dict) or entry.old.is_object:
                self._replace(path, _children(entry.old, value))
            else:
                entry.written, entry.now = _written(value, self._takes(path)), value

    def _knob(self, path: KeyPath) -> Knob | None:
        """Return the row that an entry is held to; a reference to a knob stands for it."""
        if len(path) == 1 and path[0] in KNOBS:
            return KNOBS[path[0]]
        return KNOBS.get(_alone(self._entries[path].old))

    def _takes(self, path: KeyPath) -> Knob:
        """Return an entry's row, or the type that its value in the complete file shows."""
        kind = self._shown_kind(self._entries[path].old)
        return self._knob(path) or Knob(kind, null=kind == "any")

    def _shown_kind(self, value: Value, seen: tuple[str, ...] = ()) -> str:
        """Return the type that a value shows; ``seen`` are the keys that referred to it."""
        if isinstance(value.content, list):
            kinds = {self._shown_kind(member, seen) for member in value.content}
            inner = f"list of {kinds.pop()}" if len(kinds) == 1 else ""
            return inner if inner in WORDS else "list"
        if (key := _alone(value)) in KNOBS:
            return KNOBS[key].kind
        if key and key not in seen and key in self.keys:
            return self._shown_kind(self._entries[(key,)].old, (*seen, key))
        if key or isinstance(value.content, dict) or value.tag == "null":
            return "any"
        if value.is_reference:
            # Letters outside the references make a text, the rest is arithmetic.
            letters = re.search(r"[^\W\d]", _REFERENCE.sub("", value.content))
            return "str" if letters else "any"
        return value.tag if value.tag in SCALARS else "str"

    def _plain(self, path: KeyPath, trail: tuple[KeyPath, ...] = ()) -> Any:
        """Return a plain value; ``trail`` are the keys whose references led here."""
        now, trail = self._entries[path].now, (*trail, path)
        if path in trail[:-1]:
            circle = " -> ".join(map(".".join, trail))
            raise ValueError(f"{now.where}: references go in a circle: {circle}.")
        return now.plain(lambda value: self._referred(value, trail))

    def _referred(self, value: Value, trail: tuple[KeyPath, ...]) -> object:
        """Follow ``!ref``: to a value, into a text, or into arithmetic."""
        if value.tag == PLACEHOLDER:
            raise NotPlain
        dotted, filled = ".".join(trail[-1]), value.content
        for written, target in _targets(value):
            self._refuse_unknown(target, value)
            referred = self._plain(target, trail)
            if "." in written:
                raise NotPlain  # an attribute
            if isinstance(referred, str) and _REFERENCE.search(referred):
                raise ValueError(
                    f"{self._entries[target].now.where}: {'.'.join(target)} is {referred}, "
                    f"and where {dotted} refers to it, HyperPyYAML would follow what "
                    "stands between < and >. Rename it, or write !ref before it."
                )
            if written == value.content:
                return referred
            filled = filled.replace(written, str(referred))
        if filled == value.content:
            return filled
        try:
            return compute(filled)
        except ArithmeticError as error:
            raise ValueError(
                f"{value.where}: {dotted} cannot be computed: {value.content} is {filled}."
            ) from error

    def _refuse_unknown(self, target: KeyPath, value: Value) -> None:
        for depth, name in enumerate(target):
            siblings = self._entries[target[:depth]].old.content
            if not isinstance(siblings, dict) or name not in siblings:
                known = siblings if isinstance(siblings, dict) else ()
                words = unknown(name, known, ".".join([*target[:depth], ""]))
                raise ValueError(f"{value.where}: {value.path} refers to an {words}")


def _entries(value: Value, path: KeyPath = ()) -> Iterator[tuple[KeyPath, _Entry]]:
    """Yield the entries of a file and of the mappings in it, itself first."""
    yield path, _Entry(value, value)
    if isinstance(value.content, dict):
        for key, child in value.content.items():
            yield from _entries(child, (*path, key))


def _alone(value: Value) -> str:
    """Return the one key that a reference stands for, else nothing."""
    alone = value.is_reference and re.fullmatch(r"<(\w+)>", value.content)
    return alone[1] if alone else ""


def _targets(value: Value) -> Iterator[tuple[str, KeyPath]]:
    """Yield what a reference refers to: as written, and as keys from the top."""
    if value.is_reference and value.tag != PLACEHOLDER:
        for written in _REFERENCE.findall(value.content):
            # What follows a dot is an attribute of the object.
            key = written[1:-1].partition(".")[0]
            yield written, tuple(part.strip("]") for part in key.split("["))


def _children(old: Value, new: Value) -> dict[str, Value]:
    """Return what changes inside a mapping or an object, which must stay what it is."""
    if isinstance(old.content, dict) and isinstance(new.content, dict):
        if new.tag in (old.tag, "map"):
            return new.content
    elif new.tag == old.tag and new.content == old.content:
        return {}
    what = old.tag if old.is_object else "a mapping"
    raise ValueError(
        f"{new.where}: {new.path} is {what} and cannot become something else: change the "
        "knobs that it refers to, or its entries by name. For another object, resolve the "
        "file and edit the complete text."
    )


def _written(value: Value, knob: Knob) -> str:
    """Write a value as it will stand in the text; one of another type is refused."""
    if value.is_reference:
        return value.as_reference()
    for part in value.walk():
        signs = "\x85" if part is value else "\x85?"
        if isinstance(part.content, str) and set(signs) & set(part.content):
            # It writes texts anew before it reads them, some of them wrongly.
            raise ValueError(
                f"{value.where}: {value.path} is {value.shown}: HyperPyYAML cannot read a "
                "question mark in a list, nor the sign U+0085. Rename what it names."
            )
    with contextlib.suppress(NotPlain, OverflowError, ValueError):
        plain = value.plain(Value.as_reference)
        if knob.has_kind(plain):
            return dump(_floats(plain) if knob.kind.endswith("float") else plain)
    shown = value.shown or "nothing"
    raise ValueError(f"{value.where}: {value.path} {knob.refusal(shown)}")


def _floats(value: Any) -> Any:
    """Make integers floats; they serve where numbers are taken."""
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return float(value) if type(value) is int else value


def _fill_family_defaults(settings: Settings) -> str:
    """Replace null in training knobs by the family's values; return a warning or nothing."""
    values = settings.plain_values()
    arch, optimizer = values.get("arch"), values.get("optimizer_name")
    if arch is None:
        return ""
    family = architecture(arch).training
    defaults = dataclasses.asdict(family)
    tags = {key: settings[key].tag for key in settings.keys}
    null = [name for name in defaults if tags.get(name) == "null"]
    if tags.get("optimizer_name", "null") != "null":
        missing = [knob for knob in _OPTIMIZER_KNOBS if knob in null]
        rows = (family, *TRAINING_DEFAULTS.values())
        published = next((r for r in rows if r.optimizer_name == optimizer), None)
        if published is not None:
            defaults |= {key: getattr(published, key) for key in _OPTIMIZER_KNOBS}
        elif optimizer is not None and missing:
            raise ValueError(
                f"{settings['optimizer_name'].where}: no settings are published for "
                f"optimizer_name {optimizer} (only for sgd and adamw): give "
                f"{', '.join(missing)} too."
            )
        else:
            null = [name for name in null if name not in missing]
    settings.give({name: defaults[name] for name in null}, f"default of {arch}")
    if optimizer in (None, family.optimizer_name):
        return ""
    return (
        f"Not the family's optimizer: {arch} is to be trained with {optimizer} "
        f"({settings['optimizer_name'].where}), where the paper trains its family "
        f"with {family.optimizer_name}; published error rates say nothing about this. "
        "optimizer_name: null takes the family's. To silence this, set "
        'PYTHONWARNINGS="ignore:Not the family".'
    )
