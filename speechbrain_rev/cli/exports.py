"""Subcommands that hand models on, or take them: ``export`` and ``convert``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from speechbrain_rev.cli.options import OUTPUT, READS

# Endings of weights and programs: nobody means a folder by such a name.
_FILE_ENDINGS = (".pt", ".pth", ".ckpt", ".safetensors")


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    _add_export(add)
    _add_convert(add)


def _add_export(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "export",
        _export,
        "write a trained model as a folder or a graph for others",
        "The ending of OUT decides. A folder is for SpeechBrain's EncoderClassifier and "
        "SpeakerRecognition, and for SpeakerEmbedder.from_hparams, which runs nothing of "
        "it. Score a run of recipes/VoxCeleb/train.py first (extract.py, score.py): its "
        "error rates and AS-Norm's cohort are exported, too. A file that ends in .onnx or "
        ".pt2 is one graph from waveforms to embeddings, for onnxruntime or "
        "torch.export.load. It is compared with PyTorch before it is written. Both are "
        "made of local folders only. embed and verify take the folder from the Hugging "
        "Face Hub, too, once it is uploaded as it is.",
        [
            " results/df_revnet281/1986 my_model",
            " results/df_revnet281/1986 model.onnx",
        ],
    )
    reads, output = (command.add_argument_group(title) for title in (READS, OUTPUT))
    run_help = (
        "output_folder of a training run (recipes/VoxCeleb/train.py, or SpeechBrain's own "
        "script), or a model whose weights are in embedding_model.ckpt alone; for a graph "
        "also what export or convert wrote"
    )
    reads.add_argument("run_folder", metavar="RUN_FOLDER", help=run_help)
    out_help = "folder to write, new or empty; or a file, MODEL.onnx or MODEL.pt2"
    output.add_argument("out", metavar="OUT", help=out_help)
    labels_help = (
        "for a folder: the label_encoder.txt that numbers the training speakers; default: "
        "label_encoder.txt in RUN_FOLDER or its save/"
    )
    reads.add_argument("--labels", metavar="FILE", help=labels_help)
    speeds_help = (
        "for a folder: how many classes each training speaker has, as speed "
        "perturbation does, the speaker as recorded first; default: as the run "
        "records it, or 1 where there are as many classes as speakers"
    )
    reads.add_argument("--speeds", metavar="N", type=int, help=speeds_help)


def _export(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import export_run
    from speechbrain_rev.inference.graph import ENDINGS

    if Path(parsed.out).suffix.lower() in ENDINGS:
        if parsed.labels is not None or parsed.speeds is not None:
            raise ValueError(
                f"--labels and --speeds are of the classifier, and {parsed.out} is a graph, "
                "which has none. Leave them out, or give a folder."
            )
        _export_graph(parsed)
        return
    stem, ending = os.path.splitext(parsed.out)
    if ending.lower() in _FILE_ENDINGS:
        raise ValueError(
            f"{parsed.out} would be a folder, and {ending} is an ending of files. For a "
            f"graph give {stem}.pt2 or {stem}.onnx, for a folder {stem}."
        )
    missing = export_run(
        parsed.run_folder, parsed.out, labels=parsed.labels, speeds=parsed.speeds
    )
    print(f"{parsed.out}: its README.md lists what is in it and how it is loaded.")
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


def _add_convert(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(
        "convert",
        _convert,
        "convert weights that WeSpeaker saved, and back",
        "convert wespeaker makes a folder for embed and verify of the avg_model.pt of a "
        "ResNet or Gemini-DF-ResNet; with --back, avg_model.pt of such a folder. Neither "
        "overwrites anything. Nothing of a file is executed.",
        [
            " wespeaker avg_model.pt my_model",
            " wespeaker my_model avg_model.pt --back",
        ],
    )
    reads, output = (command.add_argument_group(title) for title in (READS, OUTPUT))
    reads.add_argument("kind", choices=["wespeaker"], help="who saved the weights")
    reads.add_argument(
        "source",
        metavar="FROM",
        help="avg_model.pt; with --back a run or a model of ours",
    )
    output.add_argument(
        "target",
        metavar="TO",
        help="a new folder, or with --back a new file",
    )
    output.add_argument(
        "--back",
        action="store_true",
        help="write WeSpeaker's weights, from a run or a model of ours",
    )


def _convert(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import wespeaker

    if parsed.back:
        wespeaker.convert_to_wespeaker(parsed.source, parsed.target)
        print(f"{parsed.target}: weights of {parsed.source}, as WeSpeaker names them")
        return
    encoder = wespeaker.convert_from_wespeaker(parsed.source, parsed.target)
    sizes = f"blocks {list(encoder.blocks)}, widths {list(encoder.widths)}"
    print(
        f"{parsed.target}: {encoder.name}, {sizes}, n_mels {encoder.n_mels}, embedding_dim "
        f"{encoder.embedding_dim}, features of Kaldi"
    )
    if not Path(parsed.source).with_name("config.yaml").exists():
        print(
            "There is no config.yaml beside the weights: TSTP pooling, 16 kHz and "
            "windows of 25 ms each 10 ms are assumed, which weights do not say."
        )
    print(
        f"speechbrain-rev embed {parsed.target} FILE embeds audio; projection, the "
        "classifier of its training, is left out."
    )
