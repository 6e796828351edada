"""An exported model's folder: its settings, its YAML, and how it is read.

What ``speechbrain-rev export`` writes is known to the last name, so that a folder is
taken if it is exactly that: one text of settings, weights of the names, shapes and
types that they mean, checksums of both. Files are opened and read once, after their
size was looked at, and only from within the folder. What else lies there is not read;
Python files alone are refused.

SpeechBrain reads such a file by building whatever it names. Here one text says what a
model of ours looks like; a file is compared with it node by node, and only when nothing
else is in it are its seven plain values taken. Nothing is imported or built.
"""

from __future__ import annotations

import hashlib
import os
import re
import reprlib
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from speechbrain_rev.files import SUMS, check_sum
from speechbrain_rev.heads import CORRECTIONS, HEADS, POOLINGS
from speechbrain_rev.hparams.knobs import KNOBS, Knob
from speechbrain_rev.inference.archive import fingerprint_of
from speechbrain_rev.inference.front_ends import FRONT_ENDS
from speechbrain_rev.inference.run_folder import (
    ENCODERS,
    HYPERPARAMS,
    WEIGHTS,
    read_objects,
    read_settings,
)
from speechbrain_rev.inference.untrusted import (
    MAX_BYTES,
    check_size,
    check_tensors,
    load_tensors,
    open_own,
    own_file,
    read_safetensors,
)
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.pretrained import unwrapped

ENCODER_SETTINGS = (
    "arch",
    "widths",
    "blocks",
    "n_mels",
    "embedding_dim",
    "sample_rate",
)
#: What training has one of; weights of others may have another.
ASSUMED = {
    "front_end": "speechbrain",
    "pooling": "statistics",
    "pooling_variance": "population",
}
_KNOBS = KNOBS | {
    "front_end": Knob("str", one_of=tuple(FRONT_ENDS)),
    "head": Knob("str", one_of=tuple(HEADS)),
    "pooling": Knob("str", one_of=tuple(POOLINGS)),
    "pooling_variance": Knob("str", one_of=tuple(CORRECTIONS)),
}


def run_settings(folder: str | PathLike[str]) -> dict[str, Any]:
    """Read which encoder a run has, and behind which front-end.

    The encoder, Fbank and InputNormalization that hyperparams.yaml describes have them, under
    whatever names they stand there. A file that describes no encoder, or several, gives them
    by plain values of the names of ``ENCODER_SETTINGS``.

    Parameters
    ----------
    folder : str or path-like
        The run's ``output_folder``.

    Returns
    -------
    dict of str to object
        ``ENCODER_SETTINGS``, and those of ``ASSUMED``.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If a value is missing or none that it takes, or features are not made as
        this package makes them.
    """
    objects = read_objects(folder)
    plain = set(ENCODER_SETTINGS) <= objects.file.top.keys()
    described = None
    if len(objects.encoders()) == 1 or not plain:
        described = objects.settings()
    if described is None:
        described = _plain_settings(folder)
    settings = ASSUMED | described
    check_settings(settings, folder)
    return settings


def _plain_settings(folder: str | PathLike[str]) -> dict[str, Any]:
    """Read the settings of a file that does not describe its encoder as an object."""
    plain = read_settings(folder, [], optional=(*ENCODER_SETTINGS, *ASSUMED))
    missing = [name for name in ENCODER_SETTINGS if name not in plain]
    if missing:
        raise ValueError(
            f"{Path(folder, HYPERPARAMS)} lacks {', '.join(missing)}, and describes no "
            f"encoder of this package ({ENCODERS[0]} or {ENCODERS[1]}; !name: and "
            "!include: are not read). Give the "
            "output_folder of a run that trained one, or add these to the file as plain "
            "values."
        )
    return plain


def check_settings(settings: Mapping[str, Any], folder: str | PathLike[str]) -> None:
    """Refuse values that training does not take.

    Parameters
    ----------
    settings : mapping of str to object
        Plain values by the names of knobs.
    folder : str or path-like
        Where its hyperparams.yaml is, for the error message.

    Raises
    ------
    ValueError
        If a value is of another type or out of range.

    Example
    -------
    >>> check_settings({"n_mels": 80}, "run")
    >>> check_settings({"n_mels": 4}, "run")
    Traceback (most recent call last):
    ValueError: run/hyperparams.yaml has n_mels: 4 (it takes ...
    """
    wrong = []
    for name, value in settings.items():
        knob = _KNOBS[name]
        # build_encoder names the nearest of the architectures.
        if not knob.has_kind(value) or (name != "arch" and not knob.allows(value)):
            wrong.append(f"{name}: {reprlib.repr(value)} (it takes {knob.takes()})")
    if wrong:
        raise ValueError(
            f"{Path(folder, 'hyperparams.yaml')} has {', '.join(wrong)}. Give the "
            "folder of a run of recipes/VoxCeleb/train.py, or one that speechbrain-rev "
            "export wrote, where these are plain values without tags or references."
        )


def encoder_of(settings: Mapping[str, Any]) -> SpeakerEncoder:
    """Build the encoder, with weights that are to be replaced.

    Parameters
    ----------
    settings : mapping of str to object
        ``ENCODER_SETTINGS``, and maybe others; ``pooling`` and ``pooling_variance`` among
        them count.

    Returns
    -------
    SpeakerEncoder
        As training builds it, but for what matters in training alone.

    Example
    -------
    >>> settings = dict(arch="revnet57", widths=[4] * 4, blocks=[1] * 4, n_mels=80)
    >>> encoder_of({**settings, "embedding_dim": 16}).fc.out_features
    16
    """
    given: dict[str, Any] = {**ASSUMED, **settings}
    names = (
        "n_mels",
        "embedding_dim",
        "widths",
        "blocks",
        "pooling",
        "pooling_variance",
    )
    return build_encoder(given["arch"], **{name: given[name] for name in names})


#: The plain values; everything else follows from them.
PLAIN = (*ENCODER_SETTINGS, "out_n_neurons")
#: More of them, in models that have another one than is assumed where there is none.
WRITTEN_IF_UNUSUAL = ("pooling",)
#: The head of models whose plain values name none.
USUAL_HEAD = "cosine"

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
# A speaker encoder, in the layout of SpeechBrain's models; README.md describes it.
arch: {arch}
widths: {widths}
blocks: {blocks}
n_mels: {n_mels}
embedding_dim: {embedding_dim}
pooling: {pooling}
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
    pooling: !ref <pooling>

classifier: {classifier}
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

_HEADS = {head.tag: name for name, head in HEADS.items()}
_KNOWN = {"!ref", *re.findall(r"!(?:new|apply):[\w.]+", _LAYOUT), *_HEADS}


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
        The plain values, see ``PLAIN``, and maybe ``head``, a row of ``HEADS``.

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
    unusual = [
        n for n in WRITTEN_IF_UNUSUAL if settings.get(n, ASSUMED[n]) != ASSUMED[n]
    ]
    names = (*PLAIN, *unusual)
    words = {n: "null" if settings[n] is None else settings[n] for n in names}
    classifier = HEADS[settings.get("head", USUAL_HEAD)].tag
    return _layout(unusual).format(**words, classifier=classifier)


def _layout(unusual: Collection[str]) -> str:
    """Leave out the lines of values that are as assumed."""
    usual = [name for name in WRITTEN_IF_UNUSUAL if name not in unusual]
    return "".join(
        line
        for line in _LAYOUT.splitlines(keepends=True)
        if line.partition(":")[0].strip() not in usual
    )


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
        The plain values, see ``PLAIN``, and ``head`` if it is not the usual one; their
        ranges are not looked at.

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
        given = _top_level(text, path)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from error
    unusual = [name for name in WRITTEN_IF_UNUSUAL if name in given]
    names = (*PLAIN, *unusual)
    tag = getattr(given.get("classifier", (0, None))[1], "tag", None)
    head = _HEADS.get(str(tag), USUAL_HEAD)
    layout = _layout(unusual).format(
        **dict.fromkeys(names, "null"), classifier=HEADS[head].tag
    )
    expected = _top_level(layout, path)
    missing = [name for name in expected if name not in given]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it is no model that speechbrain-rev "
            f"export wrote. {ANYWAY}"
        )
    plain = {name: given[name][1] for name in names}
    for name, (line, value) in given.items():
        if name not in expected:
            raise _refusal(path, line, f"{name} is no part of an exported model")
        wanted = _filled(expected[name][1], plain)
        if name not in names and _filled(value, plain) != wanted:
            raise _refusal(path, line, f"{name} is not as an exported model has it")
    return plain if head == USUAL_HEAD else plain | {"head": head}


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


SAFETENSORS = "embedding_model.safetensors"

# Each is some 30 kB of Python objects, whatever the channels, and never less on disk.
_MAX_BLOCKS, _BLOCK_BYTES = 4000, 512
#: Of settings and checksums.
MAX_TEXT_BYTES = 100_000
# A cohort of 6,000 speakers has 12 MB.
_MAX_BYTES = 10**8
_GIVEN = (
    f"a folder that speechbrain-rev export wrote, with {HYPERPARAMS}, {SAFETENSORS} "
    f"and {SUMS}, or the id of a model on the Hugging Face Hub, owner/model"
)


# Of weights in a .ckpt, without checksums.
_GIVEN_CHECKPOINT = (
    f"a local folder with {HYPERPARAMS}, as speechbrain-rev export wrote it, and {WEIGHTS}, "
    "or such a file in it; download a model on the Hub first "
    "(huggingface_hub.snapshot_download)"
)


def is_exported(folder: str | PathLike[str]) -> bool:
    """Return whether a folder has checksums, as one that export wrote."""
    return Path(folder, SUMS).exists()


def read_model(
    source: str | PathLike[str],
) -> tuple[SpeakerEncoder, dict[str, Any], str]:
    """Read an exported model.

    Parameters
    ----------
    source : str or path-like
        Its folder.

    Returns
    -------
    encoder : SpeakerEncoder
        With its weights, on the CPU.
    settings : dict
        The plain values of hyperparams.yaml.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.

    Raises
    ------
    FileNotFoundError
        If the folder or one of its files is missing.
    ValueError
        If it is anything else than what export writes.
    """
    folder = Path(source)
    settings = model_settings(folder)
    weights = folder / SAFETENSORS
    if not weights.exists() and (folder / WEIGHTS).exists():
        raise ValueError(
            f"{folder} has its weights in {WEIGHTS} alone, and they are read from "
            f"{SAFETENSORS}. Write a folder with both: {_conversion(folder)}"
        )
    with open_own(folder, SAFETENSORS, given=_GIVEN) as file:
        size = os.fstat(file.fileno()).st_size
        expected = expected_weights(settings, folder, SAFETENSORS, size)
        content = file.read()
    _check_sum(folder, SAFETENSORS, content)
    state_dict = read_safetensors(content, weights, expected)
    check_tensors(state_dict, expected, weights)
    encoder = encoder_of(settings)
    encoder.load_state_dict(state_dict, strict=True)
    return encoder, settings, fingerprint_of(state_dict)


def model_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a model, whose weights need not be there.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.

    Returns
    -------
    dict
        The plain values of hyperparams.yaml, checked.

    Raises
    ------
    FileNotFoundError
        If it or the checksums are missing.
    ValueError
        If it is anything else than what export writes, or there is code beside it.
    """
    _refuse_run(folder)
    if (folder / WEIGHTS).exists() and not is_exported(folder):
        raise FileNotFoundError(
            f"{folder} has no {SUMS}, so that it is no folder that speechbrain-rev export "
            "wrote. If it is of a training run or of convert wespeaker, load it by "
            f"SpeakerEmbedder.from_run({str(folder)!r}). If it was exported, download it "
            "again."
        )
    content = read_summed(folder, HYPERPARAMS, MAX_TEXT_BYTES)
    refuse_code(folder, (path.name for path in folder.glob("*.py")))
    return _settings(folder, content)


def expected_weights(
    settings: dict[str, Any],
    folder: Path,
    name: str,
    size: int,
    *,
    checkpoint: bool = False,
) -> dict[str, Tensor]:
    """Give the weights that settings describe, and refuse a file of another size.

    Parameters
    ----------
    settings : dict
        Of ``model_settings``.
    folder : pathlib.Path
        The model's, for the error message.
    name : str
        The file of the weights, for the error message.
    size : int
        Its bytes.
    checkpoint : bool
        Whether it is what ``torch.save`` wrote, which may hold more.

    Returns
    -------
    dict of str to torch.Tensor
        On the meta device, without memory.

    Raises
    ------
    ValueError
        If they describe no encoder, or one whose weights take another size.
    """
    path, weights = folder / HYPERPARAMS, folder / name
    blocks = sum(settings["blocks"] or ())
    if blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{path} describes {blocks:,} blocks, of which no more than {_MAX_BLOCKS:,} "
            f"are built here. {ANYWAY}"
        )
    if size < blocks * _BLOCK_BYTES:
        raise ValueError(
            f"{weights} has {size:,} bytes; the weights of {blocks:,} blocks take more "
            f"than {blocks * _BLOCK_BYTES:,}. Download the folder again."
        )
    try:
        with torch.device("meta"):
            expected = encoder_of(settings).state_dict()
    except ValueError as error:
        raise ValueError(f"{path} describes no encoder: {error}") from error
    if not checkpoint:
        check_size(size, weights, expected)
    return expected


def read_checkpoint_model(
    source: str | PathLike[str],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a model whose weights are in what ``torch.save`` wrote, executing nothing.

    Parameters
    ----------
    source : str or path-like
        Its folder, with ``embedding_model.ckpt``, or another such file in that folder.
        Checksums are compared where the folder has some.

    Returns
    -------
    settings : dict of str to object
        The plain values of hyperparams.yaml.
    state_dict : dict of str to torch.Tensor
        The encoder's, without what wrappers put before its names.

    Raises
    ------
    FileNotFoundError
        If the folder, its hyperparams.yaml or the file is missing.
    ValueError
        If hyperparams.yaml is not as export writes it, the file holds anything but the
        tensors that it describes, or a folder is given that has .safetensors.
    """
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(
            f"There is no folder or file {path}. Give {_GIVEN_CHECKPOINT}."
        )
    folder, name = (path.parent, path.name) if path.is_file() else (path, WEIGHTS)
    if path.is_dir() and (path / SAFETENSORS).exists():
        raise ValueError(
            f"{path} has {SAFETENSORS} already: load it as it is. To take its {WEIGHTS} "
            f"instead, give {path / WEIGHTS}."
        )
    _refuse_run(folder)
    yaml = listed_file(folder, HYPERPARAMS, MAX_TEXT_BYTES)
    refuse_code(folder, (path.name for path in folder.glob("*.py")))
    settings = _settings(folder, yaml.read_bytes())
    loaded = load_listed(folder, name)
    weights = folder / name
    size = weights.stat().st_size
    expected = expected_weights(settings, folder, name, size, checkpoint=True)
    state_dict = dict(unwrapped(loaded, expected))
    check_tensors(state_dict, expected, weights)
    return settings, state_dict


def listed_file(folder: Path, name: str, most: int = _MAX_BYTES) -> Path:
    """Find a file of a model's folder, which need not have checksums.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.
    name : str
        The file.
    most : int
        Bytes that it may have.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    FileNotFoundError
        If it is missing.
    ValueError
        If it leads out of the folder, is larger, or SHA256SUMS has another checksum.
    """
    path = own_file(folder, name, given=_GIVEN_CHECKPOINT)
    if path.stat().st_size > most:
        raise _too_large(path, most)
    if is_exported(folder):
        # check_sum reads all of them.
        _read(folder, SUMS, MAX_TEXT_BYTES)
        check_sum(path, folder=folder)
    return path


def load_listed(folder: Path, name: str) -> dict[str, Tensor]:
    """Load tensors from a .ckpt of a model's folder, executing nothing.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.
    name : str
        The file.

    Returns
    -------
    dict of str to torch.Tensor
        On the CPU.

    Raises
    ------
    FileNotFoundError
        If it is missing.
    ValueError
        As of ``listed_file`` and ``load_tensors``.
    """
    return load_tensors(
        listed_file(folder, name, MAX_BYTES),
        "Weights are plain tensors: ask whoever made it for "
        "torch.save(encoder.state_dict(), ...), or for a .safetensors file.",
    )


def read_summed(folder: Path, name: str, most: int) -> bytes:
    """Read a file of a model's folder and compare it with its checksum.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.
    name : str
        The file.
    most : int
        Bytes that it may have.

    Returns
    -------
    bytes
        What it holds.

    Raises
    ------
    FileNotFoundError
        If it or the checksums are missing.
    ValueError
        If it leads out of the folder, is larger, or differs from what was written.
    """
    content = _read(folder, name, most)
    _check_sum(folder, name, content)
    return content


def _check_sum(folder: Path, name: str, content: bytes) -> None:
    """Refuse a file whose hash is not the one in SHA256SUMS."""
    written = read_sums(folder)
    if written.get(name) != hashlib.sha256(content).hexdigest():
        what = "is not as it was written" if name in written else "is not listed"
        raise ValueError(
            f"{folder / name} {what}: {SUMS} has another checksum or none. Download the "
            f"folder again; if you changed {name} yourself, write its checksum there "
            f"(sha256sum {name})."
        )


def read_sums(folder: Path) -> dict[str, str]:
    """Read the checksum of each file of a model that is listed.

    Parameters
    ----------
    folder : pathlib.Path
        The model's.

    Returns
    -------
    dict of str to str
        Of each name, the SHA-256 that was written.

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``read_summed``.
    """
    sums = _read(folder, SUMS, MAX_TEXT_BYTES).decode(errors="replace")
    lines = (line.partition("  ") for line in sums.splitlines())
    return {name: digest for digest, _, name in lines}


def refuse_code(place: str | Path, names: Iterable[str]) -> None:
    """Refuse a model that brings code, which a user might take for part of it.

    Parameters
    ----------
    place : str or pathlib.Path
        Where the model is, for the error message.
    names : iterable of str
        Its files.

    Raises
    ------
    ValueError
        If a Python file is beside the others.

    Example
    -------
    >>> refuse_code("folder", ["README.md", "tools/of_no_concern.py"])
    >>> refuse_code("folder", ["README.md", "custom.py"])
    Traceback (most recent call last):
    ValueError: folder brings code, custom.py, and nothing of a model is run. ...
    """
    code = sorted(n for n in names if n.endswith(".py") and "/" not in n)
    if code:
        # A terminal would obey control characters.
        code = [name if name.isprintable() else ascii(name) for name in code]
        raise ValueError(
            f"{place} brings code, {', '.join(code)}, and nothing of a model is run. An "
            f"exported model needs none: remove it to load the rest. {ANYWAY} (With "
            "custom.py, speechbrain.inference.interfaces.foreign_class does.)"
        )


def _refuse_run(folder: Path) -> None:
    """Refuse a folder of a training run: its save/ is in no exported model."""
    if (folder / "save").is_dir() and not is_exported(folder):
        raise FileNotFoundError(
            f"{folder} is the output_folder of a training run and has no {SUMS}. Load it by "
            f"SpeakerEmbedder.from_run({str(folder)!r}), or make a model of it: "
            f"speechbrain-rev export {shlex.quote(str(folder))} OUT."
        )


def _read(folder: Path, name: str, most: int) -> bytes:
    with open_own(folder, name, given=_GIVEN) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_large(folder / name, most)
    return content


def _too_large(path: Path, most: int) -> ValueError:
    return ValueError(
        f"{path} has more than {most:,} bytes, which is more than an exported model's. Is "
        "it another file?"
    )


def _settings(folder: Path, content: bytes) -> dict[str, Any]:
    """Give the plain values of hyperparams.yaml."""
    path = folder / HYPERPARAMS
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from error
    settings = read_model_yaml(text, path)
    check_settings(settings, folder)
    return settings


def _conversion(folder: Path) -> str:
    """Give the command that writes a folder with .safetensors beside one without."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    command = ["speechbrain-rev", "convert", "speechbrain"]
    return shlex.join([*command, f"{named}", f"{named}_safetensors"])
