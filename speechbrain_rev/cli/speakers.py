"""Subcommands that use a trained encoder: ``embed`` and ``verify``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.cli.files import check_writable

if TYPE_CHECKING:
    from speechbrain_rev.inference import SpeakerEmbedder


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    run_help = (
        "output_folder of a training run (recipes/VoxCeleb/train.py), or what export or "
        "convert wrote"
    )
    device_help = "cpu, cuda or cuda:N (default: the GPU if there is one)"
    less_memory = "Give shorter files, or --device=cpu."
    command = add(
        "embed",
        _embed,
        "compute speaker embeddings of audio files",
        "Files may have any sample rate; several channels are averaged.",
    )
    command.add_argument("run_folder", metavar="RUN", help=run_help)
    command.add_argument("audio", metavar="FILE", nargs="+", help="audio files")
    command.add_argument(
        "--out",
        metavar="EMBEDDINGS.npz",
        help="write arrays `embeddings` [files, dim] and `files`; without it, a "
        "summary is printed",
    )
    command.add_argument("--device", help=device_help)
    command.set_defaults(less_memory=less_memory)

    command = add(
        "verify",
        _verify,
        "score whether two audio files have the same speaker",
        "The score is the cosine of the two embeddings, from -1 to 1.",
    )
    command.add_argument("run_folder", metavar="RUN", help=run_help)
    command.add_argument("first", metavar="A", help="audio file")
    command.add_argument("second", metavar="B", help="audio file")
    command.add_argument("--device", help=device_help)
    command.set_defaults(less_memory=less_memory)


def _embed(parsed: argparse.Namespace) -> None:
    if parsed.out is not None and not parsed.out.endswith(".npz"):
        # numpy would write to another name than the one asked for.
        raise ValueError(f"--out takes a name that ends in .npz, not {parsed.out}.")
    if parsed.out is not None:
        check_writable("--out", parsed.out)
    import numpy as np

    from speechbrain_rev.inference.archive import write_arrays

    embedder = _embedder(parsed)
    embeddings = embedder.embed_files(parsed.audio)
    if parsed.out is not None:
        files = np.array(parsed.audio)
        write_arrays(Path(parsed.out), {"embeddings": embeddings, "files": files})
        print(f"{parsed.out}: embeddings {list(embeddings.shape)}, files")
        return
    for file, embedding in zip(parsed.audio, embeddings, strict=True):
        start = " ".join(f"{value:.3f}" for value in embedding[:4])
        norm = np.linalg.norm(embedding)
        print(f"{file}: {len(embedding)} values, norm {norm:.3f}: {start} ...")
    print("--out=embeddings.npz writes them to a file.")


def _verify(parsed: argparse.Namespace) -> None:
    score = _embedder(parsed).verify(parsed.first, parsed.second)
    print(f"{score:.4f}  cosine, from -1 to 1; higher means more alike")
    print(
        "The score above which two voices count as one speaker's has to be chosen on "
        "trials of your own kind of speech."
    )


def _embedder(parsed: argparse.Namespace) -> SpeakerEmbedder:
    """Load a run, or an exported model as strictly as it says of itself."""
    from speechbrain_rev.inference import SpeakerEmbedder
    from speechbrain_rev.inference.model_folder import SUMS

    if Path(parsed.run_folder, SUMS).exists():
        return SpeakerEmbedder.from_hparams(parsed.run_folder, device=parsed.device)
    return SpeakerEmbedder.from_run(parsed.run_folder, device=parsed.device)
