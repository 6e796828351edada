"""What SpeechBrain's VoxCeleb recipe asks of a YAML: its script's Brain and its shapes.

The files are written here with the keys of the recipe's, in small: that of ResNet, whose
classifier gives cosines, and that of x-vectors, whose classifier gives log-probabilities.
"""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import speechbrain
import torch
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.nnet.schedulers import update_learning_rate

from speechbrain_rev.reversible.hooks import WatchingWarning
from tests.docs.documents import fences

SPEAKERS = 4
#: Keys that each take a line of this package.
KEYS = ("embedding_model", "opt_class", "wav_augment", "lr_annealing", "compute_cost")


class Script(speechbrain.Brain):
    """Asks a file for what the script asks for, and in the same way."""

    def compute_forward(self, batch, stage):
        wavs, lens = batch.to(self.device).sig
        if stage == speechbrain.Stage.TRAIN and hasattr(self.hparams, "wav_augment"):
            wavs, lens = self.hparams.wav_augment(wavs, lens)
        feats = self.modules.mean_var_norm(self.modules.compute_features(wavs), lens)
        return self.modules.classifier(self.modules.embedding_model(feats)), lens

    def compute_objectives(self, predictions, batch, stage):
        outputs, lens = predictions
        speakers, _ = batch.spk_id_encoded
        if stage == speechbrain.Stage.TRAIN and hasattr(self.hparams, "wav_augment"):
            speakers = self.hparams.wav_augment.replicate_labels(speakers)
        loss = self.hparams.compute_cost(outputs, speakers, lens)
        annealing = self.hparams.lr_annealing
        if stage == speechbrain.Stage.TRAIN and hasattr(annealing, "on_batch_end"):
            annealing.on_batch_end(self.optimizer)
        if stage != speechbrain.Stage.TRAIN:
            self.errors.append(batch.id, outputs, speakers, lens)
        return loss

    def on_stage_start(self, stage, epoch=None):
        if stage != speechbrain.Stage.TRAIN:
            self.errors = self.hparams.error_stats()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == speechbrain.Stage.TRAIN:
            self.train_loss = stage_loss
            return
        error_rate = self.errors.summarize("average")
        old_rate, new_rate = self.hparams.lr_annealing(epoch)
        update_learning_rate(self.optimizer, new_rate)
        self.hparams.train_logger.log_stats(
            stats_meta={"epoch": epoch, "lr": old_rate},
            train_stats={"loss": self.train_loss},
            valid_stats={"loss": stage_loss, "ErrorRate": error_rate},
        )
        self.checkpointer.save_and_keep_only(
            meta={"ErrorRate": error_rate}, min_keys=["ErrorRate"]
        )


class Watched(Script):
    """Remembers losses, rates, margins and types of activations; may be interrupted."""

    last_step = 0

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        rate = self.optimizer.param_groups[0]["lr"]
        margin = getattr(self.hparams.compute_cost, "margin", None)
        self.steps.append((loss.item(), rate, margin))
        # Before a checkpoint of this step can be written.
        if self.optimizer_step == self.last_step:
            raise KeyboardInterrupt

    def compute_forward(self, batch, stage):
        def remember(module, arguments, output):
            if stage == speechbrain.Stage.TRAIN:
                self.dtypes.add(output.dtype)

        layer = next(
            module
            for module in self.modules.embedding_model.modules()
            if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d)
        )
        with layer.register_forward_hook(remember), warnings.catch_warnings():
            warnings.simplefilter("ignore", WatchingWarning)  # it fires twice
            return super().compute_forward(batch, stage)


def utterances(hparams: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Noise of the file's sentence length, by four speakers in turn."""
    samples = int(hparams["sample_rate"] * hparams["sentence_len"])
    wavs = torch.randn(count, samples, generator=torch.Generator().manual_seed(0))
    return [
        {"id": f"utt{n}", "sig": wav, "spk_id_encoded": torch.tensor([n % SPEAKERS])}
        for n, wav in enumerate(wavs)
    ]


def fit(
    hparams: dict[str, Any],
    *,
    brain: type[Script] = Watched,
    last_step: int = 0,
    run_opts: dict[str, Any] | None = None,
) -> Any:
    """Train on 8 utterances and validate on 5, as the script does; give its Brain."""
    made = brain(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts={"device": "cpu", "noprogressbar": True, **(run_opts or {})},
        checkpointer=hparams["checkpointer"],
    )
    made.steps, made.dtypes, made.last_step = [], set(), last_step
    options = {**hparams["dataloader_options"], "collate_fn": PaddedBatch}
    made.fit(
        hparams["epoch_counter"],
        utterances(hparams, 8),
        utterances(hparams, 5),
        train_loader_kwargs=options,
        valid_loader_kwargs=options,
    )
    return made


def write_experiment(folder: Path, file: Path, overrides: dict[str, Any]) -> None:
    """Write the run's hyperparams.yaml by SpeechBrain itself, as its scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        # They are changed for the whole process.
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(speechbrain.utils.logger, "setup_logging", lambda *_: None)
        speechbrain.create_experiment_directory(
            folder, str(file), overrides, save_env_desc=False
        )


def write_labels(folder: Path) -> None:
    """Number the speakers where the script does."""
    labels = CategoricalEncoder()
    labels.load_or_create(
        path=folder / "save/label_encoder.txt",
        from_iterables=[[f"speaker{n}" for n in range(SPEAKERS)]],
    )


def assert_embeds_as(brain: Any, wav: torch.Tensor, embedding: Any) -> None:
    """Compare an embedding with what the trained modules make of a waveform."""
    modules = brain.modules.eval()
    with torch.no_grad():
        feats = modules.compute_features(wav[None])
        feats = modules.mean_var_norm(feats, torch.ones(1))
        expected = modules.embedding_model(feats).flatten()
    # On a CPU normalisations are folded into convolutions, whose sums round otherwise.
    error = (torch.from_numpy(embedding) - expected).norm()
    assert error <= 1e-5 * expected.norm()


def with_line(text: str, line: str) -> str:
    """Replace what a file says of a key by a line, as an editor would."""
    key = line.partition(":")[0]
    own_lines = re.compile(rf"^{key}:.*\n(?:[ \t]+.*\n)*", re.MULTILINE)
    changed, count = own_lines.subn(f"{line}\n", text)
    assert count == 1, key
    return changed


_COMMON = """\
seed: 1986
__set_seed: !apply:torch.manual_seed [!ref <seed>]
output_folder: !PLACEHOLDER
save_folder: !ref <output_folder>/save
train_log: !ref <output_folder>/train_log.txt
data_folder: !PLACEHOLDER
data_folder_noise: !ref <data_folder>/noise
data_folder_rir: !ref <data_folder>/rir
number_of_epochs: 2
batch_size: 4
lr: 0.001
sample_rate: 16000
sentence_len: 0.3  # seconds
shuffle: true
n_mels: 24
out_n_neurons: 4
dataloader_options:
    batch_size: !ref <batch_size>
    shuffle: !ref <shuffle>
    num_workers: 0

compute_features: !new:speechbrain.lobes.features.Fbank
    n_mels: !ref <n_mels>
    left_frames: 0
    right_frames: 0
    deltas: false
mean_var_norm: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
    std_norm: false
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>

drop_chunk: !new:speechbrain.augment.time_domain.DropChunk
    drop_length_low: 100
    drop_length_high: 200
wav_augment: !new:speechbrain.augment.augmenter.Augmenter
    concat_original: true
    augment_prob: 1.0
    augmentations: [!ref <drop_chunk>]

modules:
    compute_features: !ref <compute_features>
    embedding_model: !ref <embedding_model>
    classifier: !ref <classifier>
    mean_var_norm: !ref <mean_var_norm>
opt_class: !name:torch.optim.Adam
    lr: !ref <lr>
    weight_decay: 0.000002
train_logger: !new:speechbrain.utils.train_logger.FileTrainLogger
    save_file: !ref <train_log>
error_stats: !name:speechbrain.utils.metric_stats.MetricStats
    metric: !name:speechbrain.nnet.losses.classification_error
        reduction: batch
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save_folder>
    recoverables:
        embedding_model: !ref <embedding_model>
        classifier: !ref <classifier>
        normalizer: !ref <mean_var_norm>
        counter: !ref <epoch_counter>
"""

_CYCLIC = """\
lr_annealing: !new:speechbrain.nnet.schedulers.CyclicLRScheduler
    base_lr: 0.00000001
    max_lr: !ref <lr>
    step_size: 6
compute_cost: !new:speechbrain.nnet.losses.LogSoftmaxWrapper
    loss_fn: !new:speechbrain.nnet.losses.AdditiveAngularMargin
        margin: 0.2
        scale: 30
"""

_KEPT = "        lr_annealing: !ref <lr_annealing>\n"

_RESNET = """\
embedding_model: !new:speechbrain.lobes.models.ResNet.ResNet
    input_size: !ref <n_mels>
    channels: [8, 8, 16, 16]
    strides: [1, 2, 2, 2]
    block_sizes: [1, 1, 1, 1]
    lin_neurons: 256
classifier: !new:speechbrain.lobes.models.ECAPA_TDNN.Classifier
    input_size: 256
    out_neurons: !ref <out_n_neurons>
"""

_XVECTOR = """\
emb_dim: 512
embedding_model: !new:speechbrain.lobes.models.Xvector.Xvector
    in_channels: !ref <n_mels>
    activation: !name:torch.nn.LeakyReLU
    tdnn_blocks: 3
    tdnn_channels: [16, 16, 48]
    tdnn_kernel_sizes: [5, 3, 1]
    tdnn_dilations: [1, 2, 1]
    lin_neurons: !ref <emb_dim>
classifier: !new:speechbrain.lobes.models.Xvector.Classifier
    input_shape: [null, null, !ref <emb_dim>]
    activation: !name:torch.nn.LeakyReLU
    lin_blocks: 1
    lin_neurons: !ref <emb_dim>
    out_neurons: !ref <out_n_neurons>
compute_cost: !name:speechbrain.nnet.losses.nll_loss
lr_annealing: !new:speechbrain.nnet.schedulers.LinearScheduler
    initial_value: !ref <lr>
    final_value: 0.0001
    epoch_count: !ref <number_of_epochs>
"""

#: By the name of the recipe's file that has this shape. That of ECAPA-TDNN has the second.
SHAPES = {
    "train_resnet": f"{_COMMON}{_KEPT}{_RESNET}{_CYCLIC}",
    "train_x_vectors": f"{_COMMON}{_XVECTOR}",
}
#: What each of them calls the size of its embeddings.
EMBEDDING_DIMS = {"train_resnet": "256", "train_x_vectors": "!ref <emb_dim>"}


def write_shape(folder: Path, name: str, lines: list[str]) -> Path:
    """Write the file of a shape in which lines take the place of its own."""
    text = SHAPES[name]
    for line in lines:
        text = with_line(text, line)
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating.md"


def blocks(language: str) -> list[str]:
    """The blocks of a language, or of none, in the page for users of other recipes."""
    all_fences = fences(DOCUMENT)
    return [fence.code for fence in all_fences if fence.info.split(" ")[0] == language]


def in_small(line: str, name: str) -> str:
    """Fit a line of the document to a shape written here, whose sizes are small."""
    tiny = "df_revnet89, widths: [8, 8, 8, 8], blocks: [1, 1, 1, 1]"
    for old, new in {
        "df_revnet89": tiny,
        "embedding_dim: 256": f"embedding_dim: {EMBEDDING_DIMS[name]}",
        "input_size: 256": f"input_size: {EMBEDDING_DIMS[name]}",
        "chunk_samples: 47840": "chunk_samples: 4640",  # 30 frames
        "steps_per_epoch: 1000": "steps_per_epoch: 2",
    }.items():
        line = line.replace(old, new)
    return line


def documented_lines(name: str) -> dict[str, str]:
    """The document's line for each key, for a shape; and that of the classifier."""
    five, more, *_ = blocks("yaml")
    lines = [*five.splitlines(), *more.splitlines()[:2]]
    lines = [in_small(line, name) for line in lines if not line.startswith("#")]
    return {line.partition(":")[0]: line for line in lines}
