"""Loaders of a training's speech: random chunks, and whole utterances for validation."""

from __future__ import annotations

from pathlib import Path

import torch
from prepare import speaker_numbers
from torch.utils.data import DataLoader

from speechbrain_rev.data import (
    ChunkDataset,
    EpochBatchSampler,
    WholeUtterances,
    collate_chunks,
    collate_whole,
    open_corpus,
    read_manifest,
)

# Validation must stay short next to an epoch, and memory grows with the length.
VALID_SECONDS = 10


def train_loader(hparams):
    """Build the loader of training chunks: batches of this process's share of each step.

    Parameters
    ----------
    hparams : dict
        Of the run, whose lists are prepared; ``sentence_len`` is in seconds.

    Returns
    -------
    DataLoader
        Of ``ChunkBatch``.

    Raises
    ------
    ValueError
        If the processes cannot share a step, or there is not one batch.
    """
    distributed = torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if distributed else 1
    utterances = read_manifest(Path(hparams["save_folder"], "train.csv"))
    dataset = ChunkDataset(
        utterances,
        speaker_numbers(hparams["save_folder"]),
        samples=round(hparams["sentence_len"] * hparams["sample_rate"]),
        sample_rate=hparams["sample_rate"],
        seed=hparams["seed"],
    )
    sampler = EpochBatchSampler(
        len(utterances),
        hparams["batch_size"],
        steps=hparams["steps_per_epoch"],
        seed=hparams["seed"],
        rank=torch.distributed.get_rank() if distributed else 0,
        world_size=world_size,
    )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_chunks,
        num_workers=hparams["num_workers"],
        persistent_workers=hparams["num_workers"] > 0,
        pin_memory=torch.cuda.is_available(),
        # An iterator draws its workers' seed: not from the state that is checkpointed.
        generator=torch.Generator(),
    )


def valid_loader(hparams, trials):
    """Build the loader of whole utterances, one by one since lengths differ.

    Parameters
    ----------
    hparams : dict
        Of the run.
    trials : Trials
        Those of the validation.

    Returns
    -------
    DataLoader
        Of each utterance's name and a ``ChunkBatch``, or why it cannot be read.
    """
    folder = hparams["trials_folder" if hparams["valid_trials"] else "data_folder"]
    dataset = WholeUtterances(
        # What leads out was refused when the trials were prepared.
        open_corpus(folder, outside_files=True),
        trials.utterances,
        sample_rate=hparams["sample_rate"],
        max_samples=VALID_SECONDS * hparams["sample_rate"],
    )
    return DataLoader(
        dataset,
        batch_size=1,
        collate_fn=collate_whole,
        num_workers=hparams["num_workers"],
        generator=torch.Generator(),
    )
