"""Subcommand that hands a trained model on: ``export``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

# Of weights and programs, which nobody means as a folder's name.
_OF_FILES = (".pt", ".pth", ".pt1", ".ckpt", ".safetensors", ".torchscript")


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommand.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "export",
        _export,
        "write a trained model as a folder or a graph for others",
        "What OUT is called says as what. A folder: SpeechBrain's EncoderClassifier and "
        "SpeakerRecognition load it, and SpeakerEmbedder.from_hparams without running "
        "anything of it. Score a run of recipes/VoxCeleb/train.py first (extract.py, "
        "score.py): error rates and AS-Norm's cohort go with it. A file that ends in .onnx or .pt2: "
        "one graph from waveforms to embeddings, for onnxruntime or torch.export.load, "
        "which is compared with PyTorch before it is written. Both are made of local "
        "folders only. embed and verify take the folder from the Hugging Face Hub, too, "
        "once it is uploaded as it is.",
    )
    run_help = (
        "output_folder of a training run (recipes/VoxCeleb/train.py, or SpeechBrain's own "
        "script); for a graph also what export or convert wrote"
    )
    command.add_argument("run_folder", metavar="RUN", help=run_help)
    out_help = "folder to write, new or empty; or a file, MODEL.onnx or MODEL.pt2"
    command.add_argument("out", metavar="OUT", help=out_help)
    labels_help = (
        "for a folder: the label_encoder.txt that numbers the training's speakers; default: "
        "RUN/save/label_encoder.txt"
    )
    command.add_argument("--labels", metavar="FILE", help=labels_help)
    speeds_help = (
        "for a folder: how many classes the training made of each speaker, as speed "
        "perturbation does, the speaker as recorded first; default: what RUN's "
        "hyperparams.yaml says, or 1 where there are as many classes as speakers"
    )
    command.add_argument("--speeds", metavar="N", type=int, help=speeds_help)


def _export(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import export_run
    from speechbrain_rev.inference.graph_files import ENDINGS

    if Path(parsed.out).suffix.lower() in ENDINGS:
        if parsed.labels is not None or parsed.speeds is not None:
            raise ValueError(
                f"--labels and --speeds are of the classifier, and {parsed.out} is a graph, "
                "which has none. Leave them out, or give a folder."
            )
        _export_graph(parsed)
        return
    suffix = Path(parsed.out).suffix
    if suffix.lower() in _OF_FILES:
        stem = parsed.out.removesuffix(suffix)
        raise ValueError(
            f"{parsed.out} would be a folder, and {suffix} is an ending of files. For a "
            f"graph give {stem}.pt2 or {stem}.onnx, for a folder {stem}."
        )
    missing = export_run(
        parsed.run_folder, parsed.out, labels=parsed.labels, speeds=parsed.speeds
    )
    print(f"{parsed.out}: README.md says what is in it and how it is loaded.")
    for words in missing:
        print(f"It lacks {words}.")


def _export_graph(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import export_graph

    written = export_graph(parsed.run_folder, parsed.out)
    print(
        f"{written.path}: {written.size_bytes:,} bytes; inputs waveforms [batch, samples] "
        "and samples [batch], output embeddings [batch, dim]."
    )
    if written.deviation is None:
        print(
            "It was not compared with PyTorch, for which onnxruntime is needed: pip "
            "install 'speechbrain_rev[onnx]', and export again."
        )
    else:
        print(
            f"Of a generated signal its embeddings are off by {written.deviation:.1e} of "
            "those of PyTorch."
        )
