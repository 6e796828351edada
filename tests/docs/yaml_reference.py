"""Write docs/yaml_reference.md: python -m tests.docs.yaml_reference.

What a key means is its comment in ``hparams/train.yaml``; what it takes is its row of
``KNOBS``; its source and its unit are below.
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

#: Sources of settings' values in ``hparams/train.yaml``; all others are ours.
SOURCE_OF = {
    "seed": "SpeechBrain",
    "output_folder": "ours, after SpeechBrain",
    "precision": "ours; the paper states none",
    "num_workers": "SpeechBrain",
    "ckpt_interval_steps": "ours; the knob is SpeechBrain's",
    "logger": "SpeechBrain's loggers; the knob is ours",
    "arch": "paper (III, Tables II to VI); which one: [the study](study.md)",
    "widths": "paper (Tables II to IV)",
    "blocks": "paper (Tables II to IV)",
    "n_mels": "paper (V-C)",
    "embedding_dim": "paper (V-C)",
    "pooling": "paper (V-C)",
    "mode": "reconstruct: paper (III); compress: error-bounded compression; which one by "
    "null is ours",
    "convolution_error": "error-bounded compression (0.01 is the coefficient of its equation 8)",
    "normalisation_error": "ours, by the benchmark compressed_bounds",
    "memory_budget": "after Jiang et al.",
    "streams": "ours, by the study: after 3,150 steps weights are the same to the bit whether "
    "activations were stored or reconstructed; float streams took 11 % less time on"
    " a CPU, and end at other weights",
    "chunk": "ours, by the benchmark chunks: it changes memory and time; the study did not "
    "test it",
    "memory_format": "ours, by the benchmark formats",
    "deterministic": "ours, for equal bits in every mode",
    "sync_batchnorm": "ours; the paper states nothing",
    "zero_init_residual": "Goyal et al. 2017, section 5.1; ours, by the study: after 8 epochs the EER of "
    "resnet34, revnet46 and df_resnet56 was 8 to 18 points lower, that of "
    "df_revnet66 the same, with one seed",
    "data_folder": "paper (V-A): VoxCeleb2 dev",
    "sample_rate": "SpeechBrain",
    "trial_lists": "ours; SpeechBrain has one, verification_file",
    "valid_speakers": "ours; the paper trains on all (V-A), which 0 does",
    "chunk_samples": "paper (V-C): 200 frames",
    "sentence_len": "ours: what chunk_samples need at the fastest speed",
    "out_n_neurons": "paper (V-A): 5994 speakers, three speeds",
    "speeds": "paper (V-A)",
    "augment_prob": "paper (V-A)",
    "noise_folder": "paper (V-A): MUSAN",
    "rir_folder": "paper (V-A): RIR",
    "loss": "paper (V-C)",
    "margin": "paper (V-C)",
    "scale": "paper (V-C)",
    "margin_start_epoch": "WeSpeaker",
    "margin_end_epoch": "WeSpeaker",
    "optimizer_name": "paper (V-C)",
    "optimizer_bits": "paper (IV); an update differs from that with 32-bit states by 2 to 4 %, for "
    "AdamW's classifier by 6 % (docs/optimizers.md), so that no layer has to stay "
    "at 32; the study saw no loss",
    "optimizer_block": "ours, as bitsandbytes has it; the paper's is 2048",
    "optimizer_pack_small": "ours, for bitsandbytes keeps them at 32 bits",
    "lr": "WeSpeaker",
    "final_lr": "WeSpeaker",
    "weight_decay": "paper (V-C); in the study neither none nor 0.2 of AdamW was clearly better "
    "than 0.05, and SGD's was not tried",
    "nesterov": "paper (V-C); WeSpeaker's is Nesterov's",
    "max_grad_norm": "SpeechBrain; in the study neither 1 nor no clipping was clearly better",
    "batch_size": "paper (VI-C)",
    "number_of_epochs": "WeSpeaker",
    "warmup_epochs": "WeSpeaker, for 150 epochs and more; of the 30 epochs of the study half an "
    "epoch and 4 did alike",
    "average_checkpoints": "WeSpeaker",
    "cohort_top_n": "paper (V-D): a cohort of 600, as we read it",
}

#: Units of settings that are numbers.
UNIT_OF = {
    "num_workers": "processes",
    "ckpt_interval_steps": "steps",
    "widths": "channels",
    "blocks": "blocks",
    "n_mels": "bands",
    "embedding_dim": "values",
    "convolution_error": "fraction of the momentum",
    "normalisation_error": "fraction of the deviation",
    "memory_budget": "bytes, by the unit in the text",
    "max_gradient_error": "fraction of the gradient's norm",
    "chunk": "bytes for 200 frames",
    "sample_rate": "Hz",
    "max_unread": "files",
    "valid_speakers": "speakers",
    "chunk_samples": "samples",
    "sentence_len": "s",
    "out_n_neurons": "speakers x speeds",
    "speeds": "times",
    "augment_prob": "probability",
    "margin": "radians",
    "margin_start_epoch": "epochs",
    "margin_end_epoch": "epochs",
    "optimizer_bits": "bits",
    "optimizer_block": "values",
    "batch_size": "utterances",
    "number_of_epochs": "epochs",
    "freeze_epochs": "epochs",
    "warmup_epochs": "epochs",
    "steps_per_epoch": "steps",
    "average_checkpoints": "checkpoints",
    "cohort_top_n": "speakers",
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
            takes = (
                "a name of the [table](choosing_an_encoder.md#the-table) or of "
                f"[WeSpeaker's deeper networks](other_networks.md#the-deeper-networks): {takes}"
            )
        facts = {"Default": default, "Unit": UNIT_OF.get(key.name, ""), "Takes": takes}
        facts |= {"Source": SOURCE_OF.get(key.name, "ours"), "Note": knob.why}
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
