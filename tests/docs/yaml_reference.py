"""Write docs/yaml_reference.md: python -m tests.docs.yaml_reference.

What a key means is its comment in ``hparams/train.yaml``; what it takes, its unit and
its source are its row of ``KNOBS``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from speechbrain_rev.architectures import ARCHITECTURES, TRAINING_DEFAULTS
from speechbrain_rev.files import write_whole
from speechbrain_rev.hparams.knobs import KNOBS
from speechbrain_rev.hparams.rules import RULES
from speechbrain_rev.hparams.shipped import Key, sections

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "hparams"
TRAIN = FOLDER / "train.yaml"
PAGE = ROOT / "docs" / "yaml_reference.md"

#: What the words that sources of knobs begin with stand for.
SOURCES = {
    "paper": '"Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker '
    'Verification"; parts in brackets are its sections and tables.',
    "WeSpeaker": "its VoxCeleb recipe, `examples/voxceleb/v2/conf`: `resnet.yaml` for "
    "ResNets, `gemini_dfresnet_adam.yaml` for DF families, `resnet_lm.yaml` for "
    "large-margin fine-tuning. The paper states no schedule.",
    "SpeechBrain": "its VoxCeleb recipe, `train_ecapa_tdnn.yaml`, or its `Brain`.",
    "Jiang et al.": '"An Efficient Training Framework for Reversible Neural '
    'Architectures".',
    "error-bounded compression": '"A Novel Memory-Efficient Deep Learning Training '
    'Framework via Error-Bounded Lossy Compression".',
    "the study": "of reduced encoders on a small corpus: "
    "[what follows for the defaults](study.md#what-follows-for-the-defaults).",
    "ours": "our choice.",
}

_HEAD = """\
# Every training setting

Written by `python -m tests.docs.yaml_reference` from
[hparams/train.yaml](../hparams/train.yaml) and from the ranges that are checked before training
begins. A setting is given in a file, which names its parent
(`base: train.yaml`), or as `--key=value` on the command line, which overrides all files;
[the recipe](../recipes/VoxCeleb/README.md) has the commands. A parent is a path from the
folder of the file that names it or, if nothing lies there, the name of one of
[these files](#the-files-beside-trainyaml). `speechbrain-rev resolve FILE` prints the sum. A
key that does not exist, or a value outside its range, ends the command with the line of the
file that has it.

These are null in train.yaml, and the encoder's family decides what they are:
"""

_BUILT = (
    "Built from the settings above, whose values, ranges and sources are theirs: to change "
    "one, change what it refers to."
)
#: The text of sections that are no settings.
_SECTIONS = {
    "folders and files": _BUILT,
    "modules": _BUILT,
    "training": _BUILT,
    "SpeechBrain's script": "Only SpeechBrain's own `train_speaker_embeddings.py` asks for "
    "these. Names and values are those of its recipe, but for `prepare_noise_data` and "
    "`prepare_rir_data`, which download nothing here.",
}


def entry(key: Key) -> str:
    """Write what is known of one key."""
    knob = KNOBS.get(key.name)
    values = knob.one_of if knob else ()
    words = " ".join(_sentence(said, values) for said in key.words)
    parts = [f"### `{key.name}`", words]
    if knob is None:
        value = "\n".join([f"{key.name}: {key.value}".rstrip(), *key.lines])
        parts.append(f"```\n{value}\n```")
    else:
        default = "to be given" if key.value == "!PLACEHOLDER" else f"`{key.value}`"
        takes = knob.takes()
        if key.name == "arch":
            takes = f"a name of the [table](choosing_an_encoder.md#the-table): {takes}"
        facts = {"Default": default, "Unit": knob.unit, "Takes": takes}
        facts |= {"Source": knob.source, "Note": knob.why}
        shown = ((head, it.rstrip(".")) for head, it in facts.items() if it)
        parts.append("\n".join(f"- {head}: {it}." for head, it in shown))
    return "\n\n".join(part for part in parts if part)


def _sentence(words: str, values: Sequence[str | int]) -> str:
    """Make a comment a sentence; names and values that begin it keep their case."""
    first = words.partition(" ")[0].rstrip(",;:.")
    kept = ("null", "true", "false", *values)
    if re.fullmatch("[a-z]+", first) and first not in kept:
        words = words[0].upper() + words[1:]
    words = words.replace("<", "&lt;")
    return words if not words or words[-1] in ".:" else f"{words}."


def family_defaults() -> str:
    """Write what null stands for, by family."""
    families = [f.replace("_", "-") for f in TRAINING_DEFAULTS]
    rows = [["key", *families], ["---"] * (1 + len(families))]
    for knob in dataclasses.fields(next(iter(TRAINING_DEFAULTS.values()))):
        values = [getattr(d, knob.name) for d in TRAINING_DEFAULTS.values()]
        rows.append([f"`{knob.name}`", *map(str, values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def override_files() -> str:
    """Write what the other files change, each encoder's own in one line."""
    lines = [
        "## The files beside train.yaml",
        "Each encoder has a file of two lines that names it (`base`, `arch`): "
        f"{', '.join(f'`{name}.yaml`' for name in sorted(ARCHITECTURES))}. "
        "The others are [regimes](glossary.md#training):",
    ]
    for file in sorted(FOLDER.glob("*.yaml")):
        if file != TRAIN and file.stem not in ARCHITECTURES:
            lines += [f"### `{file.name}`", f"```\n{file.read_text().strip()}\n```"]
    return "\n\n".join(lines)


def rules() -> str:
    """Write what has to hold between several keys."""
    rows = [
        f"- {', '.join(f'`{knob}`' for knob in rule.knobs)}: {rule.words}"
        for rule in RULES
    ]
    head = (
        "## What has to hold between settings\n\nValues that are allowed alone may be "
        "refused together. The error then says:"
    )
    return "\n\n".join([head, "\n".join(rows)])


def page() -> str:
    """Write the page."""
    parts = [_HEAD.strip(), family_defaults()]
    words = "\n".join(f"- **{name}**: {what}" for name, what in SOURCES.items())
    parts.append(f"Sources are named by a word:\n\n{words}")
    for name, keys in sections(TRAIN.read_text()).items():
        parts += [f"## {name[0].upper()}{name[1:]}", _SECTIONS.get(name, "")]
        parts += map(entry, keys)
    parts += [rules(), override_files()]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    write_whole(PAGE, page().encode())
