"""An exported model's hyperparams.yaml: how it is written, and read without running it.

SpeechBrain reads such a file by building whatever it names. Here one text says what a
model of ours looks like; a file is compared with it node by node, and only when nothing
else is in it are its seven plain values taken. Nothing is imported or built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from speechbrain_rev.inference.encoder_settings import ENCODER_SETTINGS

#: The plain values; everything else follows from them.
PLAIN = (*ENCODER_SETTINGS, "out_n_neurons")

# What we write has less than 2,500 bytes; a node in memory takes hundreds for its one.
_MAX_TEXT_CHARACTERS = 20_000
# Ours are three levels deep: the paths of the pretrainer.
_MAX_DEPTH = 4
# Ours is a path of 53; numbers of more digits take time, or have no end.
_MAX_SCALAR = 100
_REFERENCE = re.compile(r"<(\w+)>")

#: How to load what is refused here.
ANYWAY = (
    "If you trust whoever made it to run code on your machine, SpeechBrain's own "
    "EncoderClassifier.from_hparams loads it."
)

_LAYOUT = """\
# A speaker encoder, in the layout of SpeechBrain's models; README.md tells about it.
arch: {arch}
widths: {widths}
blocks: {blocks}
n_mels: {n_mels}
embedding_dim: {embedding_dim}
sample_rate: {sample_rate}  # Hz
out_n_neurons: {out_n_neurons}  # speakers of the training

compute_features: !new:speechbrain.lobes.features.Fbank
    sample_rate: !ref <sample_rate>
    n_mels: !ref <n_mels>
    win_length: 25  # ms
    hop_length: 10  # ms

mean_var_norm: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
    std_norm: false

embedding_model: !apply:speechbrain_rev.lobes.build_encoder
    name: !ref <arch>
    n_mels: !ref <n_mels>
    embedding_dim: !ref <embedding_dim>
    widths: !ref <widths>
    blocks: !ref <blocks>

classifier: !new:speechbrain_rev.lobes.classifier.CosineClassifier
    input_size: !ref <embedding_dim>
    out_neurons: !ref <out_n_neurons>

label_encoder: !new:speechbrain.dataio.encoder.CategoricalEncoder

audio_normalizer: !new:speechbrain.dataio.preprocess.AudioNormalizer
    sample_rate: !ref <sample_rate>

modules:
    compute_features: !ref <compute_features>
    mean_var_norm: !ref <mean_var_norm>
    embedding_model: !ref <embedding_model>
    classifier: !ref <classifier>

# Loads strictly; files without a folder are beside this one.
pretrainer: !new:speechbrain_rev.lobes.pretrained.ModelPretrainer
    loadables:
        embedding_model: !ref <embedding_model>
        classifier: !ref <classifier>
        label_encoder: !ref <label_encoder>
    paths:
        label_encoder: label_encoder.txt
"""

_KNOWN = {"!ref", *re.findall(r"!(?:new|apply):[\w.]+", _LAYOUT)}


@dataclass(frozen=True)
class _Tagged:
    """A value with a tag that is known here, and followed nowhere."""

    tag: str
    value: Any


def model_yaml(settings: Mapping[str, Any]) -> str:
    """Write the hyperparams.yaml of a model.

    Parameters
    ----------
    settings : mapping of str to object
        The plain values, see ``PLAIN``.

    Returns
    -------
    str
        HyperPyYAML.

    Example
    -------
    >>> values = dict(arch="revnet57", widths=None, blocks=None, n_mels=80)
    >>> values |= dict(embedding_dim=256, sample_rate=16000, out_n_neurons=2)
    >>> read_model_yaml(model_yaml(values), "hyperparams.yaml") == values
    True
    """
    words = {n: "null" if settings[n] is None else settings[n] for n in PLAIN}
    return _LAYOUT.format(**words)


def read_model_yaml(text: str, path: str | Path) -> dict[str, Any]:
    """Read the plain values of a model's hyperparams.yaml, and build nothing.

    Parameters
    ----------
    text : str
        The file.
    path : str or Path
        Its name, for errors.

    Returns
    -------
    dict of str to object
        The plain values, see ``PLAIN``; their ranges are not looked at.

    Raises
    ------
    ValueError
        If anything is in the file but those values and the objects of a model of ours,
        made of them; the message names it, its line, and how to load it anyway.

    Example
    -------
    >>> read_model_yaml("arch: !!python/name:os.system", "hyperparams.yaml")
    Traceback (most recent call last):
    ValueError: hyperparams.yaml, line 1: !!python/name:os.system is none of ...
    """
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise ValueError(
            f"{path} has {len(text):,} characters; an exported model's has less than "
            f"{_MAX_TEXT_CHARACTERS:,}. Is it another file?"
        )
    try:
        found = _top_level(text, path)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    expected = _top_level(_LAYOUT.format(**dict.fromkeys(PLAIN, "null")), path)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it is no model that speechbrain-rev "
            f"export wrote. {ANYWAY}"
        )
    plain = {name: found[name][1] for name in PLAIN}
    for name, (line, value) in found.items():
        if name not in expected:
            raise _refusal(path, line, f"{name} is no part of an exported model")
        wanted = _filled(expected[name][1], plain)
        if name not in PLAIN and _filled(value, plain) != wanted:
            raise _refusal(path, line, f"{name} is not as an exported model has it")
    return plain


def _top_level(text: str, path: str | Path) -> dict[str, tuple[int, Any]]:
    """Give line and value of each name at the top."""
    _look_through(text, path)
    loader = yaml.SafeLoader(text)
    document = loader.get_single_node()
    if not isinstance(document, yaml.MappingNode) or document.tag in _KNOWN:
        raise ValueError(f"{path} is no YAML mapping of names to values.")
    values = _value(loader, document, path)
    lines = (_line(key) for key, _ in document.value)
    return dict(zip(values, zip(lines, values.values(), strict=True), strict=True))


def _look_through(text: str, path: str | Path) -> None:
    """Refuse, before anything is made of it, what grows, repeats or names others."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = _line(event)
        anchor, tag = (getattr(event, name, None) for name in ("anchor", "tag"))
        if anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise _refusal(path, line, f"{sign}{anchor} repeats a part of the file")
        if tag is not None and tag not in _KNOWN:
            shown = tag.replace("tag:yaml.org,2002:", "!!", 1)
            raise _refusal(path, line, f"{shown} is none of the tags known here")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_SCALAR:
            what = f"{event.value[:40]!r}... is longer than {_MAX_SCALAR} characters"
            raise _refusal(path, line, what)
        if depth > _MAX_DEPTH:
            raise _refusal(path, line, f"the file is nested deeper than {_MAX_DEPTH}")


def _value(loader: yaml.SafeLoader, node: yaml.Node, path: str | Path) -> Any:
    """Make plain values of a node that was looked through."""
    line = _line(node)
    if isinstance(node, yaml.SequenceNode):
        value: Any = [_value(loader, member, path) for member in node.value]
    elif isinstance(node, yaml.MappingNode):
        value = {}
        for key, member in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag in _KNOWN:
                raise _refusal(path, line, "a key is no plain text")
            if key.value in value:
                raise _refusal(path, line, f"{key.value} stands there twice")
            value[key.value] = _value(loader, member, path)
    elif node.tag in _KNOWN:
        value = node.value
    else:
        try:
            value = loader.construct_object(node)
        except (ValueError, ArithmeticError) as error:
            raise _refusal(path, line, f"{node.value[:40]!r} is no value") from error
    return _Tagged(node.tag, value) if node.tag in _KNOWN else value


def _line(part: yaml.Event | yaml.Node) -> int:
    return part.start_mark.line + 1 if part.start_mark is not None else 1


def _filled(value: Any, plain: Mapping[str, Any]) -> Any:
    """Put the plain values where they are referred to."""
    if isinstance(value, dict):
        return {name: _filled(member, plain) for name, member in value.items()}
    if isinstance(value, list):
        return [_filled(member, plain) for member in value]
    if not isinstance(value, _Tagged):
        return value
    reference = value.tag == "!ref" and _REFERENCE.fullmatch(str(value.value))
    if reference and reference[1] in plain:
        return plain[reference[1]]
    return _Tagged(value.tag, _filled(value.value, plain))


def _refusal(path: str | Path, line: int, what: str) -> ValueError:
    return ValueError(
        f"{path}, line {line}: {what}, and nothing of a model is run. {ANYWAY}"
    )
