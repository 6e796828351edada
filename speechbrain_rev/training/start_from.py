"""Starting from weights that exist: the encoder of a model, and its head or a new one."""

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
from speechbrain_rev.inference.trained import Weights, read_weights, reading
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.lobes.description import EncoderDescription
from speechbrain_rev.processes import process_count, process_rank
from speechbrain_rev.training import progress
from speechbrain_rev.training.epochs import ValidatedEpochs

logger = logging.getLogger("train")

#: Utterances of each speaker that are read, at most, for the directions of a new head.
UTTERANCES = 12
#: Settings that follow from the weights a run starts from.
MODEL_SETTINGS = (
    "arch", "widths", "blocks", "n_mels", "embedding_dim", "pooling",
    "pooling_variance", "features", "sample_rate",
)  # fmt: skip


@dataclass(frozen=True)
class SourceHead:
    """The classifier that was trained with an encoder.

    Attributes
    ----------
    row : HeadRow
        Its kind.
    weight : torch.Tensor, [classes, ...]
        Of each speaker at each speed, in the order of the speeds.
    speakers : dict of str to int
        Their numbers.
    speeds : list of float
        That made classes.
    """

    row: HeadRow
    weight: Tensor
    speakers: Mapping[str, int]
    speeds: Sequence[float]


@dataclass(frozen=True)
class Source:
    """What a run starts from.

    Attributes
    ----------
    name : str
        As it was given.
    weights : Weights
        The encoder's.
    head : SourceHead or None
        Its classifier.
    headless : str
        Why it has none.
    """

    name: str
    weights: Weights
    head: SourceHead | None
    headless: str

    def settings(self) -> dict[str, Any]:
        """Give the settings of a run that follow from the weights."""
        return settings_of_model(self.weights.description)


def settings_of_model(description: EncoderDescription) -> dict[str, Any]:
    """Give the settings of a run that make an encoder and its features.

    Parameters
    ----------
    description : EncoderDescription
        Of the encoder, with its front end.

    Returns
    -------
    dict of str to object
        ``MODEL_SETTINGS``; widths and blocks as published are null.

    Example
    -------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1), front_end={"kind": "kaldi"})
    >>> settings = settings_of_model(encoder.description)
    >>> settings["features"], settings["widths"], settings["blocks"]
    ('kaldi', None, [1, 1, 1, 1])
    """
    front_end, row = description.front_end, architecture(description.name)
    assert front_end is not None
    sizes = {
        name: None if tuple(given) == tuple(published) else list(given)
        for name, given, published in (
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


def read_source(source: str) -> Source:
    """Read what a run starts from, running nothing of it.

    Parameters
    ----------
    source : str
        A run's folder, what ``export`` or ``convert`` wrote, a file of weights of this
        package, or the id of a model on the Hub.

    Returns
    -------
    Source

    Raises
    ------
    FileNotFoundError
        If there are no weights.
    OSError
        If a model of the Hub cannot be fetched.
    ValueError
        If a file is damaged, or the weights do not say of which encoder and features they
        are.
    """
    try:
        with reading(source, also=(CLASSIFIER, LABELS)) as folder:
            weights = read_weights(folder)
            if weights.description.front_end is None:
                raise ValueError(
                    f"{weights.path} does not say how the features of its encoder were made. "
                    "Export it from its run, or convert it, which both write that."
                )
            head, headless = _read_head(folder, weights)
    except (ValueError, OSError) as error:
        raise type(error)(f"pretrained: {error}") from error
    return Source(source, weights, head, headless)


def _read_head(folder: Path, weights: Weights) -> tuple[SourceHead | None, str]:
    """Read the classifier of a model; or say why there is none."""
    if not folder.is_dir():
        return None, "a file of weights has no head"
    record = read_record(folder)
    try:
        listed = labels_of(folder)
    except FileNotFoundError:
        return None, "it has no list of training speakers"
    try:
        speakers, (row, weight) = (
            read_labels(listed),
            read_head(folder, weights, record),
        )
    except FileNotFoundError:
        return None, "the head of its last epoch is not there"
    in_run = record is not None and not (folder / CLASSIFIER).exists()
    speeds = record.settings["speeds"] if record is not None and in_run else [1.0]
    if len(weight) != len(speakers) * len(speeds):
        return None, (
            f"its head has {len(weight)} classes, which are not {len(speakers)} speakers at "
            f"{counted(len(speeds), 'speed')}"
        )
    return SourceHead(row, weight, speakers, speeds), ""


def check_start(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a start that cannot work, and a run within its own source.

    Parameters
    ----------
    settings : mapping
        The run's plain settings.

    Raises
    ------
    ValueError
        If output_folder is pretrained or a folder in it; if the encoder would be frozen in
        all epochs, or one that is not pretrained; if ``head`` is asked of none.
    """
    source, frozen = settings["pretrained"], settings["freeze_epochs"]
    if source is None:
        for name, default in (("head", None), ("freeze_epochs", 0)):
            if settings[name] != default:
                raise ValueError(
                    f"{name} is {settings[name]}, and pretrained is null: there are no "
                    "weights to start from. Give pretrained, or leave it out."
                )
        return
    if frozen >= settings["number_of_epochs"]:
        raise ValueError(
            f"freeze_epochs is {frozen}, and number_of_epochs is "
            f"{settings['number_of_epochs']}: the encoder would stay as it is. Give fewer "
            "frozen epochs."
        )
    ours = settings["output_folder"]
    if Path(ours).resolve().is_relative_to(Path(source).resolve()):
        raise ValueError(
            f"output_folder {ours} is pretrained {source} or in it: the settings and "
            "checkpoints of that model would be overwritten. Give another output_folder."
        )


def start_from(source: Source, settings: Mapping[str, Any]) -> str:
    """Load the encoder of a source, and its head where that fits.

    Parameters
    ----------
    source : Source
        What the run starts from.
    settings : mapping
        The run's settings with its ``modules``; its lists are in save_folder.

    Returns
    -------
    str
        Why its head is not kept; empty where it is.

    Raises
    ------
    ValueError
        If the head is to be kept and does not fit.
    """
    settings["modules"]["embedding_model"].load_state_dict(source.weights.state_dict)
    if source.weights.standing:
        run_on_main(logger.warning, args=[f"pretrained: {source.weights.standing}"])
    if settings["head"] == "new":
        return "head is new"
    other = _misfit(source, settings)
    if not other:
        head = source.head
        assert head is not None
        weight = head.weight
        if list(settings["speeds"]) != list(head.speeds):
            weight = true_speakers(weight, speeds=len(head.speeds))
        settings["modules"]["classifier"].load_state_dict({"weight": weight})
    elif settings["head"] == "keep":
        raise ValueError(
            f"head is keep, and that of pretrained {source.name} does not fit: {other}. Give "
            "head: new, or leave it out, which takes a new head where the old one does not fit."
        )
    return other


def _misfit(source: Source, settings: Mapping[str, Any]) -> str:
    """Say why the head of a source is not that of a run; empty where it is."""
    head, wanted = source.head, head_of(settings["loss"])
    if head is None:
        return source.headless
    if head.row.name != wanted.name:
        return (
            f"its head is {head.row.name}, and loss {settings['loss']} takes "
            f"{wanted.name}"
        )
    ours = list(settings["speeds"])
    alone = ours == [1.0] and head.speeds[0] == 1.0
    if ours != list(head.speeds) and not alone:
        return f"its head has the speeds {list(head.speeds)}, this run {ours}"
    speakers = read_labels(Path(settings["save_folder"], LABELS))
    if speakers != head.speakers:
        same = speakers.keys() == head.speakers.keys()
        return "it numbers the speakers otherwise" if same else "it has other speakers"
    return ""


class DirectionMeans:
    """The mean embeddings of the training speakers, as directions of a new head.

    Each class's direction is the mean of normalised embeddings of its speaker, at its
    speed; of a head of several directions a class each is that of another part of the
    utterances. They are as long as the head's were, for whose length learning rates are
    chosen.

    Parameters
    ----------
    brain : ValidatedEpochs
        Before its first step. Its modules have a ``classifier`` and its hparams what the
        recipe's have.
    """

    def __init__(self, brain: ValidatedEpochs) -> None:
        self.brain = brain
        dataset, sampler = brain.train_dataset, brain.train_sampler
        weight = brain.modules["classifier"].weight
        #: Directions of a class.
        self.centers = 1 if weight.dim() == 2 else weight.shape[1]
        places = chosen_utterances(dataset.manifest.speakers, UTTERANCES)
        #: Utterances that are embedded, by all processes.
        self.utterances = len(places)
        share = places[process_rank() :: process_count()]
        size = -(-sampler.batch_size // process_count())
        self._batches = [share[n : n + size] for n in range(0, len(share), size)]

    @property
    def batches(self) -> int:
        """How many batches this process embeds."""
        return len(self._batches)

    def seconds_of_a_batch(self) -> float:
        """Embed two batches, and give the seconds of the second."""
        begin = end = time.monotonic()
        for _ in itertools.islice(self._embedded(), 2):
            begin, end = end, time.monotonic()
        return end - begin

    def fill(self) -> None:
        """Set the directions of the head."""
        brain = self.brain
        weight = brain.modules["classifier"].weight
        speakers = brain.hparams.wav_augment.n_speakers
        shape = len(weight), self.centers, weight.shape[-1]
        sums = torch.zeros(shape, dtype=torch.float64)
        share = sum(map(len, self._batches))
        bar = progress.epoch_bar("head", share, 0, off=brain.noprogressbar)
        for whose, parts, embeddings in self._embedded():
            for speed, each in enumerate(embeddings):
                places = whose + speed * speakers, parts
                sums.index_put_(places, each, accumulate=True)
            bar.update(len(whose))
        bar.close()
        if process_count() > 1:
            on_device = sums.to(brain.device)
            torch.distributed.all_reduce(on_device)
            sums = on_device.cpu()
        # A speaker of fewer utterances than directions has that of all for the others.
        empty = sums.abs().sum(-1) == 0
        sums[empty] = sums.sum(1, keepdim=True).expand_as(sums)[empty]
        directions = normalize(sums, dim=-1).reshape(weight.shape)
        with torch.no_grad():
            lengths = weight.norm(dim=-1, keepdim=True)
            weight.copy_(directions.to(weight) * lengths)

    def _embedded(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Give of each batch its speakers, parts, and embeddings at each speed."""
        brain, hparams = self.brain, self.brain.hparams
        loader = DataLoader(
            brain.train_dataset,
            # Of epoch 0, so that no segment is one of the training.
            batch_sampler=[[(0, row) for row, _ in batch] for batch in self._batches],
            collate_fn=collate_chunks,
            num_workers=hparams.num_workers,
            # An iterator draws its workers' seed: not from the state that is checkpointed.
            generator=torch.Generator(),
        )
        brain.modules.eval()
        for batch, places in zip(loader, self._batches, strict=True):
            wavs = batch.wavs.to(brain.device)
            parts = torch.tensor([rank % self.centers for _, rank in places])
            embeddings = []
            for speed in hparams.wav_augment.speeds:
                played = at_speed(wavs, speed)[:, : hparams.chunk_samples]
                lens = torch.ones(len(played), device=brain.device)
                with torch.no_grad(), brain.evaluation_ctx:
                    feats = brain.modules.compute_features(played)
                    feats = brain.modules.mean_var_norm(feats, lens)
                    y = brain.modules.embedding_model(feats).squeeze(1)
                embeddings.append(normalize(y.float(), dim=-1).double().cpu())
            yield batch.speakers.flatten(), parts, embeddings


def chosen_utterances(
    speakers: np.ndarray[Any, Any], most: int
) -> list[tuple[int, int]]:
    """Choose utterances of each speaker, evenly among its own.

    Parameters
    ----------
    speakers : numpy.ndarray, [utterances]
        Who speaks.
    most : int
        How many of a speaker.

    Returns
    -------
    list of tuple of int
        Each utterance, and how many of its speaker are before it.

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


def head_in_words(source: Source, other: str, means: DirectionMeans | None) -> str:
    """Say what a run starts from.

    Parameters
    ----------
    source : Source
        What it starts from.
    other : str
        As ``start_from`` gives it.
    means : DirectionMeans or None
        What a new head begins as; None for random directions.

    Returns
    -------
    str
        Two sentences.
    """
    begun = f"Encoder: the {source.weights.description.name} of {source.name}."
    if not other:
        return f"{begun} Head: kept, its speakers and speeds are this run's."
    directions = "random directions"
    if means is not None:
        directions = (
            f"each direction is a mean of its speaker's embeddings, of "
            f"{counted(means.utterances, 'utterance')} ({UTTERANCES} of a speaker at most)"
        )
    return f"{begun} Head: new, since {other}; {directions}."
