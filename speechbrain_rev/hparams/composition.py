"""Composition: the complete file with the values of override files and the command line.

Values are replaced in what ruamel.yaml's round trip read, so the result keeps the comments
and the order of the complete file, and composing it again changes nothing. The complete
file is the measure: its values show the types, and its knobs have ranges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperpyyaml.core import parse_arithmetic
from ruamel.yaml.comments import CommentedMap, CommentedSeq

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
    KeyPath,
    dump,
    entries,
    flow_list,
    is_object,
    line_of,
    parse,
    parse_file,
    read_file,
    tag_of,
    text_of,
)
from speechbrain_rev.hparams.knobs import KNOBS, WORDS, Knob
from speechbrain_rev.hparams.rules import RULES, refuse_other_features
from speechbrain_rev.hparams.shipped import base_of, file_of

_REFERENCE = re.compile(r"<[^>]*>")
# Defaults that depend on the optimizer, not on the family.
_OPTIMIZER_KNOBS = ("lr", "final_lr", "weight_decay")


# Defaults that scale with the number of epochs, and stay when a run gets more of them.
_SCHEDULE_KNOBS = ("margin_start_epoch", "margin_end_epoch", "warmup_epochs")

#: Returns settings that follow from the plain values of the others.
Following = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def _no_settings(_values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


class NotPlain(Exception):
    """A value that is known only once a placeholder is filled or an object built."""


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


def compose(
    arguments: Sequence[str],
    run_options: Collection[str] = (),
    *,
    model_of: Following = _no_settings,
    recorded_of: Following = _no_settings,
) -> Composition:
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
    model_of : callable, optional
        Returns the settings of the model that a run starts from, for the run's plain
        values. Another value for one of them is refused, unless it is a default.
    recorded_of : callable, optional
        Returns the recorded settings of the run that is resumed, for its plain values.
        Null epochs of the schedule take the recorded values, though the run may be longer
        now.

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
        options, keys=settings.root, run_options=run_options
    )
    text = _composed(settings, descendants, overrides, model_of, recorded_of)
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
        name of one that comes with the package, such as ``revnet46``.
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
    >>> _ = (folder / "train.yaml").write_text("arch: revnet46\nlr: null  # peak\n")
    >>> _ = (folder / "deep.yaml").write_text("base: train.yaml\narch: df_revnet281\n")
    >>> print(resolve(folder / "deep.yaml"), end="")
    arch: df_revnet281
    lr: 0.000125  # peak
    """
    return _composed(*_chain(file), overrides or {}, _no_settings, _no_settings)


def top_level_keys(file: str | Path) -> tuple[str, ...]:
    """Return the keys of the complete file that ``file`` builds on, in their order."""
    return tuple(_chain(file)[0].root)


def placeholders(text: str) -> tuple[str, ...]:
    r"""Return the dotted keys of a complete text whose values are ``!PLACEHOLDER``.

    Examples
    --------
    >>> placeholders("a: !PLACEHOLDER\nb:\n    c: !PLACEHOLDER\nd: 1\n")
    ('a', 'b.c')
    """
    root = parse_file(text, "text")
    return tuple(
        ".".join(path)
        for path, value, _ in entries(root)
        if tag_of(value) == PLACEHOLDER
    )


def _composed(
    settings: Settings,
    descendants: Sequence[tuple[CommentedMap, str]],
    overrides: Mapping[str, object],
    model_of: Following,
    recorded_of: Following,
) -> str:
    """Put the values of a chain and of the command line into one checked text."""
    refuse_swallowed_keys(settings.root, settings.places)
    default_places = dict(settings.places)
    for values, source in descendants:
        settings.override(values, source)
    settings.override(
        {key: settings.typed(key, value) for key, value in overrides.items()},
        COMMAND_LINE,
    )
    settings.check()
    model = model_of(settings.plain_values())
    if model:
        _refuse_other_model(settings, model, default_places)
        settings.override(model, f"pretrained {settings.root['pretrained']}")
        settings.check()
    recorded = recorded_of(settings.plain_values())
    other_optimizer = _fill_family_defaults(settings, recorded)
    settings.check_rules()
    refuse_other_features(settings.root, settings.places)
    if other_optimizer:
        # The caller of resolve or compose is two calls above.
        warnings.warn(other_optimizer, OptimizerWarning, stacklevel=3)
    return text_of(settings.root)


def _refuse_other_model(
    settings: Settings, model: Mapping[str, Any], default_places: Mapping[KeyPath, str]
) -> None:
    """Refuse a setting of the model with another value, unless that is a default."""
    values = settings.plain_values()
    for name, model_value in model.items():
        value, place = values[name], settings.places[(name,)]
        is_default = value is None or place == default_places[(name,)]
        if not is_default and _model_size(values, name) != _model_size(model, name):
            raise ValueError(
                f"{place}: {name} is {dump(value)}, and pretrained {values['pretrained']} has "
                f"{dump(model_value)}. Leave it out: it follows from the weights."
            )


def _model_size(values: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a model; widths and blocks without a value are as published."""
    if name in ("widths", "blocks") and not values[name]:
        return list(getattr(architecture(values["arch"]), name))
    return values[name]


def _chain(name: str | Path) -> tuple[Settings, list[tuple[CommentedMap, str]]]:
    """Return the complete file, and its descendants down to the named file."""
    file, wanted_by = file_of(name), ""
    seen: dict[Path, str] = {}
    descendants: list[tuple[CommentedMap, str]] = []
    while True:
        root = read_file(file, wanted_by)
        if file.resolve() in seen:
            names = " -> ".join([*seen.values(), str(file)])
            raise ValueError(f"The base of these files goes in a circle: {names}.")
        seen[file.resolve()] = str(file)
        if "base" not in root:
            return Settings(root, str(file)), descendants[::-1]
        where, base = f"{file}{line_of(root, 'base')}", root.pop("base")
        if not isinstance(base, str) or not base:
            raise ValueError(
                f"{where}: base takes the name of one file, such as train.yaml."
            )
        descendants.append((root, str(file)))
        try:
            file, wanted_by = base_of(base, file), str(file)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


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
    return Settings(parse_file(text, "text"), "text").plain_values()


class Settings:
    r"""A complete file into which values of other files and the command line are put.

    Parameters
    ----------
    root : CommentedMap
        The complete file; ``override`` changes it.
    source : str
        Its name, for error messages.

    Examples
    --------
    >>> settings = Settings(parse_file("lr: 0.1  # peak\nrate: !ref <lr>", "x.yaml"), "x.yaml")
    >>> settings.override({"lr": 0.2}, "command line")
    >>> settings.plain_values(), settings.places[("lr",)]
    ({'lr': 0.2, 'rate': 0.2}, 'command line')
    >>> print(text_of(settings.root), end="")
    lr: 0.2  # peak
    rate: !ref <lr>
    """

    def __init__(self, root: CommentedMap, source: str) -> None:
        self.root = root
        self.places: dict[KeyPath, str] = {}
        # Rows of the knobs, also where a value at depth is a reference to one; of other
        # values that are overridden, the type that they had.
        self._knobs: dict[KeyPath, Knob] = {}
        for path, value, line in entries(root):
            self.places[path] = f"{source}{line}"
            name = path[0] if len(path) == 1 else _referred_key(value)
            if name in KNOBS:
                self._knobs[path] = KNOBS[name]

    def typed(self, key: str, value: object) -> object:
        """Read text of the command line; for a knob that takes text it stays what it is."""
        if not isinstance(value, str) or key not in self.root:
            return value
        knob = self._takes((key,), self.root[key])
        is_list = knob.several and value[:1] == "[" and value[-1:] == "]"
        if knob.kind == "str" and value[:1] != "!" and value != "null" and not is_list:
            return value
        return parse(value, f"{COMMAND_LINE}: --{key}")

    def override(self, values: Mapping[str, Any], source: str) -> None:
        """Put plain values, or those of an override file, in."""
        self._override(self.root, values, source, ())

    def _override(
        self, old: CommentedMap, new: Mapping[str, Any], source: str, path: KeyPath
    ) -> None:
        for key, value in new.items():
            below = (*path, str(key))
            where = f"{source}{line_of(new, key)}"
            if key not in old:
                words = unknown_key(str(key), old, "".join(f"{k}." for k in path))
                raise ValueError(f"{where}: {words}")
            if isinstance(old[key], CommentedMap) or is_object(old[key]):
                _refuse_another(old[key], value, f"{where}: {'.'.join(below)}")
                if isinstance(value, Mapping):
                    self._override(old[key], value, source, below)
                continue
            self.places[below] = where
            knob = self._knobs[below] = self._takes(below, old[key])
            _replace(old, key, value, are_floats=knob.kind.endswith("float"))

    def plain_values(self) -> dict[str, Any]:
        """Return what is plain at the top, by key, references followed.

        A value that needs a filled placeholder or a built object is left out.
        """
        values = {}
        for key, value in self.root.items():
            with contextlib.suppress(NotPlain):
                values[key] = self._plain(value, ((key,),))
        return values

    def check(self) -> None:
        """Refuse references to nothing or in a circle, and values that no knob may take."""
        for path, value, _ in entries(self.root):
            knob = self._knobs.get(path)
            plain: object = None
            try:
                plain = self._plain(value, (path,))
                fits = knob is None or (knob.has_kind(plain) and knob.allows(plain))
            except NotPlain:
                is_other = isinstance(value, Mapping) or is_object(value)
                fits = knob is None or not is_other
            if knob and not fits:
                shown = (
                    f"{plain} ({dump(value)})" if _is_followed(value) else dump(value)
                )
                refusal = knob.refusal(shown, plain)
                raise ValueError(f"{self.places[path]}: {'.'.join(path)} {refusal}")

    def check_rules(self) -> None:
        """Refuse values that do not go together."""
        values = self.plain_values()
        for rule in RULES:
            if rule.broken(values):
                named = ", ".join(
                    f"{name} is {values[name]} ({self.places[(name,)]})"
                    for name in rule.knobs
                )
                raise ValueError(f"{named}: {rule.words}")

    def _takes(self, path: KeyPath, value: object) -> Knob:
        """Return what a value of the complete file may become."""
        if path in self._knobs:
            return self._knobs[path]
        try:
            kind = type(self._plain(value, (path,))).__name__
        except (NotPlain, ValueError):
            kind = "any"
        return Knob(kind) if kind in WORDS else Knob("any", null=True)

    def _plain(self, value: Any, trail: tuple[KeyPath, ...]) -> Any:
        """Return a plain value; ``trail`` are the keys whose references led to it."""
        if isinstance(value, list):
            members = [self._plain(member, trail) for member in value]
            if not tag_of(value):
                return members
        if _is_followed(value):
            return self._follow(value.value, trail)
        if tag_of(value) or isinstance(value, Mapping | list):
            raise NotPlain
        # ruamel.yaml's own numbers and texts remember how they were written.
        kinds = (kind for kind in (bool, int, float, str) if isinstance(value, kind))
        return next(kinds, lambda other: other)(value)

    def _follow(self, text: str, trail: tuple[KeyPath, ...]) -> object:
        """Follow ``!ref``: to a value, into a text, or into arithmetic."""
        values = {r: self._referred(r, trail) for r in _REFERENCE.findall(text)}
        if text in values or not values:
            return values.get(text, text)
        filled = _REFERENCE.sub(lambda match: str(values[match[0]]), text)
        try:
            return parse_arithmetic(filled)
        except ArithmeticError as error:
            raise ValueError(
                f"{self.places[trail[0]]}: {'.'.join(trail[0])} cannot be computed: {text} "
                f"is {filled}."
            ) from error

    def _referred(self, reference: str, trail: tuple[KeyPath, ...]) -> object:
        """Return the plain value of ``<key>`` or ``<key[below]>``."""
        key, _, attribute = reference.strip("<>").partition(".")
        target = tuple(part.strip("]") for part in key.split("["))
        value: Any = self.root
        for depth, name in enumerate(target):
            siblings = value if isinstance(value, Mapping) else {}
            if name not in siblings:
                words = unknown_key(
                    name, siblings, "".join(f"{k}." for k in target[:depth])
                )
                raise ValueError(
                    f"{self.places[trail[-1]]}: {'.'.join(trail[-1])} refers to an {words}"
                )
            value = siblings[name]
        if target in trail:
            circle = " -> ".join(map(".".join, (*trail, target)))
            where = self.places[trail[0]]
            raise ValueError(f"{where}: references go in a circle: {circle}.")
        plain = self._plain(value, (*trail, target))
        if attribute:
            raise NotPlain
        # HyperPyYAML follows what a text refers to with or without a tag.
        return (
            self._follow(plain, (*trail, target)) if isinstance(plain, str) else plain
        )


def _is_followed(value: object) -> bool:
    return tag_of(value) in FOLLOWED and not isinstance(value, Mapping | list)


def _referred_key(value: Any) -> str:
    """Return the one key that a reference stands for, else nothing."""
    key = re.fullmatch(r"<(\w+)>", value.value) if _is_followed(value) else None
    return key[1] if key else ""


def _refuse_another(old: Any, new: Any, where: str) -> None:
    """Refuse what would make a mapping or an object another one."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        is_same = tag_of(new) in (tag_of(old), "")
    else:
        is_same = tag_of(new) == tag_of(old) and dump(new) == dump(old)
    if not is_same:
        raise ValueError(
            f"{where} is {tag_of(old) or 'a mapping'} and cannot become something else: "
            "change the knobs that it refers to, or its entries by name. For another "
            "object, resolve the file and edit the complete text."
        )


def _replace(mapping: CommentedMap, key: str, value: Any, *, are_floats: bool) -> None:
    """Replace a value; the comments around it stay."""
    old = mapping[key]
    if isinstance(old, CommentedSeq) and old:
        # ruamel.yaml keeps comments behind a list over several lines with its last member.
        behind = (old.ca.items.get(len(old) - 1) or (None,))[0]
        if behind is not None:
            tokens = mapping.ca.items.setdefault(key, [None] * 4)
            if tokens[2] is not None:
                behind.value = tokens[2].value + behind.value.removeprefix("\n")
            tokens[2:] = [behind, None]
    mapping[key] = _as_written(value, are_floats)


def _as_written(value: Any, are_floats: bool) -> Any:
    """Return a value without comments and marks of its own; numbers may have to be floats."""
    if isinstance(value, list | tuple) and not tag_of(value):
        return flow_list(_as_written(member, are_floats) for member in value)
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if are_floats or isinstance(value, float) else int(value)
    return value


def _fill_family_defaults(settings: Settings, recorded: Mapping[str, object]) -> str:
    """Replace null in training knobs by the family's values; return a warning or nothing."""
    values = settings.plain_values()
    arch, optimizer = values.get("arch"), values.get("optimizer_name")
    if arch is None:
        return ""
    family = architecture(arch).training
    epochs = values.get("number_of_epochs") or family.number_of_epochs
    defaults = dataclasses.asdict(family.of_epochs(epochs))
    defaults |= {n: recorded[n] for n in _SCHEDULE_KNOBS if n in recorded}
    root = settings.root
    null = [name for name in defaults if root.get(name, "") is None]
    if root.get("optimizer_name") is not None:
        missing = [knob for knob in _OPTIMIZER_KNOBS if knob in null]
        rows = (family, *TRAINING_DEFAULTS.values())
        published = next((r for r in rows if r.optimizer_name == optimizer), None)
        if published is not None:
            defaults |= {key: getattr(published, key) for key in _OPTIMIZER_KNOBS}
        elif optimizer is not None and missing:
            raise ValueError(
                f"{settings.places[('optimizer_name',)]}: no settings are published for "
                f"optimizer_name {optimizer} (only for sgd and adamw): give "
                f"{', '.join(missing)} too."
            )
        else:
            null = [name for name in null if name not in missing]
    settings.override({name: defaults[name] for name in null}, f"default of {arch}")
    if optimizer in (None, family.optimizer_name):
        return ""
    return (
        f"Not the family's optimizer: {arch} is to be trained with {optimizer} "
        f"({settings.places[('optimizer_name',)]}), where the paper trains its family "
        f"with {family.optimizer_name}; published error rates say nothing about this. "
        "optimizer_name: null takes the family's. To silence this, set "
        'PYTHONWARNINGS="ignore:Not the family".'
    )
