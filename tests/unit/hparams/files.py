"""A complete file that has something of everything, and the project's own."""

from pathlib import Path

from ruamel.yaml import YAML

from speechbrain_rev.hparams import resolve

FOLDER = Path(__file__).parents[3] / "hparams"
TRAIN = FOLDER / "train.yaml"
# Every knob that a run needs and that train.yaml leaves open.
DATA = {"data_folder": "data"}
#: What the paper and WeSpeaker's recipe train with.
PUBLISHED_SETTINGS = {
    "n_mels": 80,
    "chunk_samples": 199 * 160,
    "speeds": [1.0, 0.9, 1.1],
    "augment_prob": 0.6,
    "margin": 0.2,
    "scale": 32.0,
    "embedding_dim": 256,
    "weight_decay": 1e-4,
    "optimizer_bits": 8,
    "batch_size": 256,
    "lr": 0.1,
    "final_lr": 5e-5,
    "number_of_epochs": 150,
    "warmup_epochs": 6,
    "margin_start_epoch": 20,
    "margin_end_epoch": 40,
    "average_checkpoints": 10,
}

COMPLETE = """\
# What this trains.
seed: 1986
arch: revnet57  # the encoder
optimizer_name: null
lr: null  # peak
final_lr: null
weight_decay: null
number_of_epochs: null
margin: 0.2
steps_per_epoch: null
sync_batchnorm: false
folder: !ref results/<arch>/<seed>
data_folder: !PLACEHOLDER  # speech
trials_folder: !ref <data_folder>
seconds: !ref <seed> * 2
speeds: [1.0, 0.9]
names: [a, b]  # of nobody, größer 🎤
empty:
lines:
  - one
  # between
  - two

# objects
loader:
    batch: 2  # utterances
    inner: {deep: 1}
encoder: !new:package.Encoder
    width: 3
    name: !ref <arch>
schedule: !name:package.schedule
"""


def flat(text):
    """The settings of a complete text, without the objects that follow."""
    return text.split("# objects")[0].split("# What follows is built")[0]


def values(composed):
    """All plain values, tags ignored."""
    return YAML(typ="rt").load(composed)


def refusal(file, overrides=None):
    """The message that a composition is refused with; nothing if it is not."""
    try:
        resolve(file, overrides)
    except ValueError as error:
        return str(error)
    return ""
