"""Starting from a pretrained model: its encoder, and its head or a new one."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speechbrain.utils.distributed import run_on_main
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.augmentation import at_speed
from speechbrain_rev.data.dataset import collate_chunks
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.preparation import LABELS
from speechbrain_rev.data.rows import counted
from speechbrain_rev.heads import HeadRow, head_of
from speechbrain_rev.inference.export import CLASSIFIER, labels_of, read_head
from speechbrain_rev.inference.runs import read_record
from speechbrain_rev.inference.trained import (
    SAFETENSORS,
    UnknownEncoder,
    Weights,
    read_weights,
    reading,
)
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.lobes.description import EncoderDescription
from speechbrain_rev.processes import process_count, process_rank
from speechbrain_rev.training import progress
from speechbrain_rev.training.epochs import ValidatedEpochs
from speechbrain_rev.training.run_folder import has_run

logger = logging.getLogger("train")

#: At most so many utterances of a speaker are embedded for the directions of a new head.
UTTERANCES_PER_SPEAKER = 12
_CONVERT = (
    "Weights of WeSpeaker are converted first: speechbrain-rev convert wespeaker "
    "avg_model.pt FOLDER."
)
#: Settings of a start from a pretrained model.
START_SETTINGS = "pretrained", "head", "head_init", "freeze_epochs", "encoder_lr"
#: Settings that follow from the pretrained weights.
MODEL_SETTINGS = (
    "arch", "widths", "blocks", "n_mels", "embedding_dim", "pooling",
    "pooling_variance", "features", "sample_rate",
)  # fmt: skip


@dataclass(frozen=True)
class PretrainedHead:
    """The classifier that was trained with an encoder.

    Attributes
    ----------
    row : HeadRow
        The kind of classifier.
    weight : torch.Tensor, [classes, ...]
        All speakers at the first speed, then all at the next one.
    speakers : mapping of str to int
        The number of each speaker, by name.
    speeds : sequence of float
        Speeds of the training; each made a class of every speaker.
    """

    row: HeadRow
    weight: Tensor
    speakers: Mapping[str, int]
    speeds: Sequence[float]


@dataclass(frozen=True)
class PretrainedModel:
    """The model that a run starts from.

    Attributes
    ----------
    source : str
        The setting ``pretrained``: a folder, a file, or an id on the Hub.
    weights : Weights
        The encoder's weights.
    head : PretrainedHead or None
        The classifier, if the source has one.
    no_head_reason : str
        Why there is no classifier; empty if there is one.
    """

    source: str
    weights: Weights
    head: PretrainedHead | None
    no_head_reason: str

    def settings(self) -> dict[str, Any]:
        """Return the run's settings that follow from the weights."""
        return settings_of_model(self.weights.description)


def settings_of_model(description: EncoderDescription) -> dict[str, Any]:
    """Return the settings of a run with which it builds an encoder and its features.

    Parameters
    ----------
    description : EncoderDescription
        The encoder's description, with its front end.

    Returns
    -------
    dict of str to object
        The values of ``MODEL_SETTINGS``; published widths and blocks are None.

    Example
    -------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> front_end = {"kind": "kaldi", "sample_rate": 16000}
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1), front_end=front_end)
    >>> settings = settings_of_model(encoder.description)
    >>> settings["features"], settings["widths"], settings["blocks"]
    ('kaldi', None, [1, 1, 1, 1])
    """
    front_end, row = description.front_end, architecture(description.name)
    assert front_end is not None
    sizes = {
        name: None if tuple(size) == tuple(published) else list(size)
        for name, size, published in (
            ("widths", description.widths, row.widths),
            ("blocks", description.blocks, row.blocks),
        )
    }
    return {
        "arch": description.name,
        **sizes,
        "n_mels": description.n_mels,
        "embedding_dim": description.embedding_dim,
        "pooling": description.pooling,
        "pooling_variance": description.pooling_variance,
        "features": front_end.kind,
        "sample_rate": front_end.sample_rate,
    }


def read_pretrained(source: str) -> PretrainedModel:
    """Read the model that a run starts from; none of its code is executed.

    Parameters
    ----------
    source : str
        A run's folder, a folder that ``export`` or ``convert`` wrote, a file of weights of
        this package, or the id of a model on the Hub.

    Returns
    -------
    PretrainedModel

    Raises
    ------
    FileNotFoundError
        If there are no weights.
    OSError
        If a model of the Hub cannot be fetched.
    ValueError
        If a file is damaged, or the weights have no description of their encoder and its
        features.
    """
    try:
        with reading(source, also=(CLASSIFIER, LABELS)) as folder:
            weights = read_weights(folder)
            if weights.description.front_end is None:
                raise ValueError(
                    f"{weights.path} does not say how the features of its encoder were made. "
                    "Export it from its run, or convert it, which both write that."
                )
            head, no_head_reason = _read_head(folder, weights)
    except UnknownEncoder as error:
        raise ValueError(
            f"pretrained: {source} has no description. {_CONVERT}"
        ) from error
    except (ValueError, OSError) as error:
        theirs = [*Path(source).glob("*.pt")] if Path(source).is_dir() else []
        raise type(error)(
            f"pretrained: {error}{f' {_CONVERT}' * bool(theirs)}"
        ) from error
    return PretrainedModel(source, weights, head, no_head_reason)


def _read_head(folder: Path, weights: Weights) -> tuple[PretrainedHead | None, str]:
    """Read the classifier of a model, or return None and the reason why there is none."""
    if not folder.is_dir():
        return None, "a file of weights has no head"
    record = read_record(folder)
    try:
        labels = labels_of(folder)
    except FileNotFoundError:
        return None, "it has no list of training speakers"
    try:
        speakers = read_labels(labels)
        row, weight = read_head(folder, weights, record)
    except FileNotFoundError:
        return None, "its classifier is not there"
    speeds = [1.0]
    if record is not None and not (folder / CLASSIFIER).exists():
        speeds = record.settings["speeds"]
    if len(weight) != len(speakers) * len(speeds):
        return None, (
            f"its head has {len(weight)} classes, which are not {len(speakers)} speakers at "
            f"{counted(len(speeds), 'speed')}"
        )
    return PretrainedHead(row, weight, speakers, speeds), ""


def check_start(settings: Mapping[str, Any]) -> None:
    """Refuse settings with which a run cannot start from a pretrained model.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If a setting of a start is missing; if ``head`` or ``freeze_epochs`` is given
        without ``pretrained``; if output_folder is an exported model, or the folder of
        ``pretrained`` or in it; if a run that is resumed was started otherwise.
    """
    if lacking := [name for name in START_SETTINGS if name not in settings]:
        raise ValueError(
            f"The file lacks {', '.join(lacking)}: it was written before there were these "
            "settings. Give the file in hparams/ that it comes from, or add them."
        )
    source, output_folder = settings["pretrained"], settings["output_folder"]
    if Path(output_folder, SAFETENSORS).exists():
        raise ValueError(
            f"output_folder {output_folder} is a model that was exported or converted: a run "
            "would leave two models in it. Give another output_folder."
        )
    _refuse_other_start(settings)
    if source is None:
        for name, default in (("head", None), ("freeze_epochs", 0)):
            if settings[name] != default:
                raise ValueError(
                    f"{name} is {settings[name]}, and pretrained is null: there are no "
                    "weights to start from. Give pretrained, or leave it out."
                )
        return
    if Path(output_folder).resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(
            f"output_folder {output_folder} is pretrained {source} or in it: the settings and "
            "checkpoints of that model would be overwritten. Give another output_folder."
        )


def _refuse_other_start(settings: Mapping[str, Any]) -> None:
    """Refuse to resume a run that was started otherwise."""
    record = read_record(settings["output_folder"])
    if record is None or not has_run(settings):
        return
    unset: dict[str, Any] = {"head_init": settings["head_init"], "freeze_epochs": 0}
    for name in START_SETTINGS:
        before = record.settings.get(name, unset.get(name))
        now = settings[name]
        if name == "encoder_lr":
            # With pretrained the encoder has a group of its own in any case.
            other = settings["pretrained"] is None and (before is None) != (now is None)
        elif name == "pretrained" and None not in (before, now):
            other = Path(before).resolve() != Path(now).resolve()
        else:
            other = before != now
        if other:
            raise ValueError(
                f"The run in {settings['output_folder']} was started with {name}: {before}, "
                f"and {name} is {now}: give it as it was, or another output_folder."
            )


class Start:
    """What a command line starts from, as ``hparams.compose`` asks for it.

    Attributes
    ----------
    model : PretrainedModel or None
        Of a run that begins.
    """

    def __init__(self) -> None:
        self.model: PretrainedModel | None = None

    def recorded_of(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the settings of the run in output_folder, if there is one."""
        record = read_record(values["output_folder"])
        return {} if record is None else record.settings

    def model_of(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the settings that follow from the pretrained model."""
        if values.get("pretrained") is None:
            return {}
        if has_run(values) and (recorded := self.recorded_of(values)):
            # A resumed run does not read its pretrained model again.
            return {name: recorded[name] for name in MODEL_SETTINGS if name in recorded}
        self.model = read_pretrained(values["pretrained"])
        return self.model.settings()


def start_from(model: PretrainedModel, hparams: Mapping[str, Any]) -> str:
    """Load the encoder of a pretrained model, and its head where that fits.

    Parameters
    ----------
    model : PretrainedModel
        The model that the run starts from.
    hparams : mapping
        The run's loaded settings with its ``modules``; save_folder has its lists.

    Returns
    -------
    str
        Why the head is new; empty if the model's is kept.

    Raises
    ------
    ValueError
        If ``head`` is keep, and the model's head does not fit.
    """
    hparams["modules"]["embedding_model"].load_state_dict(model.weights.state_dict)
    if model.weights.standing:
        run_on_main(logger.warning, args=[f"pretrained: {model.weights.standing}"])
    if hparams["head"] == "new":
        return "head is new"
    mismatch = _head_mismatch(model, hparams)
    if not mismatch:
        head = model.head
        assert head is not None
        weight = head.weight
        if list(hparams["speeds"]) != list(head.speeds):
            weight = true_speakers(weight, speeds=len(head.speeds))
        hparams["modules"]["classifier"].load_state_dict({"weight": weight})
    elif hparams["head"] == "keep":
        raise ValueError(
            f"head is keep, and that of pretrained {model.source} does not fit: {mismatch}. "
            "Give head: new, or leave it out, which takes a new head where the old one does "
            "not fit."
        )
    return mismatch


def _head_mismatch(model: PretrainedModel, hparams: Mapping[str, Any]) -> str:
    """Return why a run cannot keep the head of a model; empty if it can."""
    head, row = model.head, head_of(hparams["loss"])
    if head is None:
        return model.no_head_reason
    if head.row.name != row.name:
        return (
            f"its head is {head.row.name}, and loss {hparams['loss']} takes {row.name}"
        )
    speeds = list(hparams["speeds"])
    takes_true_speakers = speeds == [1.0] and head.speeds[0] == 1.0
    if speeds != list(head.speeds) and not takes_true_speakers:
        return f"its head has the speeds {list(head.speeds)}, this run {speeds}"
    speakers = read_labels(Path(hparams["save_folder"], LABELS))
    if speakers != head.speakers:
        same = speakers.keys() == head.speakers.keys()
        return (
            "it has the speakers in another order" if same else "it has other speakers"
        )
    return ""


class DirectionMeans:
    """The mean embeddings of the training speakers, as directions of a new head.

    A class's direction is the mean of the normalised embeddings of its speaker, at its
    speed. If a class has several directions, each is the mean over another part of the
    utterances. The lengths of the random directions stay, since learning rates are chosen
    for them.

    Parameters
    ----------
    brain : ValidatedEpochs
        Before its first step. Its modules have a ``classifier``, and its hparams are those
        of the recipe.
    """

    def __init__(self, brain: ValidatedEpochs) -> None:
        self.brain = brain
        dataset, sampler = brain.train_dataset, brain.train_sampler
        weight = brain.modules["classifier"].weight
        #: Directions of a class.
        self.centers = 1 if weight.dim() == 2 else weight.shape[1]
        utterances = chosen_utterances(
            dataset.manifest.speakers, UTTERANCES_PER_SPEAKER
        )
        #: Utterances that all processes embed.
        self.utterances = len(utterances)
        share = utterances[process_rank() :: process_count()]
        size = -(-sampler.batch_size // process_count())
        self._batches = [share[n : n + size] for n in range(0, len(share), size)]

    @property
    def batches(self) -> int:
        """How many batches this process embeds."""
        return len(self._batches)

    def measure_batch_seconds(self) -> float:
        """Embed two batches, and return the seconds of the second."""
        begin = end = time.monotonic()
        for _ in itertools.islice(self._embed_batches(), 2):
            begin, end = end, time.monotonic()
        return end - begin

    def fill(self) -> None:
        """Set the directions of the head."""
        brain = self.brain
        weight = brain.modules["classifier"].weight
        n_speakers = brain.hparams.wav_augment.n_speakers
        shape = len(weight), self.centers, weight.shape[-1]
        sums = torch.zeros(shape, dtype=torch.float64)
        share = sum(map(len, self._batches))
        bar = progress.epoch_bar("head", share, 0, off=brain.noprogressbar)
        for speakers, centers, by_speed in self._embed_batches():
            for speed, embeddings in enumerate(by_speed):
                index = speakers + speed * n_speakers, centers
                sums.index_put_(index, embeddings, accumulate=True)
            bar.update(len(speakers))
        bar.close()
        if process_count() > 1:
            on_device = sums.to(brain.device)
            torch.distributed.all_reduce(on_device)
            sums = on_device.cpu()
        # A speaker of too few utterances leaves centers empty: these take its mean of all.
        empty = sums.abs().sum(-1) == 0
        sums[empty] = sums.sum(1, keepdim=True).expand_as(sums)[empty]
        directions = normalize(sums, dim=-1).reshape(weight.shape)
        with torch.no_grad():
            lengths = weight.norm(dim=-1, keepdim=True)
            weight.copy_(directions.to(weight) * lengths)

    def _embed_batches(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield each batch's speakers, centers, and normalised embeddings at each speed."""
        brain, hparams = self.brain, self.brain.hparams
        loader = DataLoader(
            brain.train_dataset,
            # Epochs of training begin at 1, so epoch 0 draws segments of its own.
            batch_sampler=[[(0, row) for row, _ in batch] for batch in self._batches],
            collate_fn=collate_chunks,
            num_workers=hparams.num_workers,
            # A generator of its own: without one the loader draws its workers' seed from
            # the global state, which checkpoints keep.
            generator=torch.Generator(),
        )
        brain.modules.eval()
        for batch, utterances in zip(loader, self._batches, strict=True):
            wavs = batch.wavs.to(brain.device)
            centers = torch.tensor(
                [rank % self.centers for _, rank in utterances], dtype=torch.int64
            )
            by_speed = []
            for speed in hparams.wav_augment.speeds:
                played = at_speed(wavs, speed)[:, : hparams.chunk_samples]
                lens = torch.ones(len(played), device=brain.device, dtype=torch.float32)
                with torch.no_grad(), brain.evaluation_ctx:
                    feats = brain.modules.compute_features(played)
                    feats = brain.modules.mean_var_norm(feats, lens)
                    embeddings = brain.modules.embedding_model(feats).squeeze(1)
                by_speed.append(normalize(embeddings.float(), dim=-1).double().cpu())
            yield batch.speakers.flatten(), centers, by_speed


def chosen_utterances(
    speakers: np.ndarray[Any, Any], most: int
) -> list[tuple[int, int]]:
    """Choose utterances of each speaker, spread evenly over those that it has.

    Parameters
    ----------
    speakers : numpy.ndarray, [utterances], int
        Each utterance's speaker.
    most : int
        Utterances of a speaker, at most.

    Returns
    -------
    list of (int, int)
        Each chosen utterance, and how many of its speaker are chosen before it.

    Example
    -------
    >>> chosen_utterances(np.array([0, 0, 0, 0, 1]), 2)
    [(0, 0), (2, 1), (4, 0)]
    """
    order = np.argsort(speakers, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(speakers[order])) + 1, len(order))
    chosen, begin = [], 0
    for end in ends.tolist():
        count = min(most, end - begin)
        rows = order[begin + np.arange(count) * (end - begin) // count]
        chosen += [(int(row), rank) for rank, row in enumerate(rows)]
        begin = end
    return chosen


def head_in_words(
    model: PretrainedModel,
    new_head_reason: str,
    means: DirectionMeans | None,
    freeze_epochs: int,
) -> str:
    """Describe the encoder and head that a run begins with.

    Parameters
    ----------
    model : PretrainedModel
        The model that the run starts from.
    new_head_reason : str
        What ``start_from`` returned.
    means : DirectionMeans or None
        The directions of a new head; None if they are random.
    freeze_epochs : int
        Epochs in which the encoder is frozen.

    Returns
    -------
    str
        Two sentences, or three.
    """
    encoder = f"Encoder: the {model.weights.description.name} of {model.source}."
    if freeze_epochs:
        encoder += f" It is frozen up to epoch {freeze_epochs}."
    if not new_head_reason:
        return f"{encoder} Head: kept, its speakers and speeds are this run's."
    directions = "random directions"
    if means is not None:
        directions = (
            f"each direction is a mean of its speaker's embeddings, of "
            f"{counted(means.utterances, 'utterance')} ({UTTERANCES_PER_SPEAKER} of a "
            "speaker at most)"
        )
    return f"{encoder} Head: new, since {new_head_reason}; {directions}."
