"""Subcommands that use a trained encoder: ``embed``, ``enrol`` and ``verify``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from speechbrain_rev.cli.options import (
    COMPUTES,
    OUTPUT,
    READS,
    add_encoder,
    on_terminal,
)

if TYPE_CHECKING:
    from speechbrain_rev.inference import SpeakerEmbedder
    from speechbrain_rev.inference.extraction import Listing


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the subcommands.

    Parameters
    ----------
    add : callable
        Takes a name, what runs it, a summary and details; gives the parser.
    """
    command = add(
        "embed",
        _embed,
        "compute speaker embeddings of audio files and folders",
        "Files may have any sample rate, and any length with --window. What --out has "
        "already from the same model and audio is kept, so that an interrupted command "
        "goes on where it was.",
        [
            " results/df_revnet281/1986 a.wav b.flac",
            " my_model speech --out=embeddings.npz --bad_files=drop --window=10",
        ],
    )
    reads, _ = _add_model(command)
    reads.add_argument(
        "audio",
        metavar="AUDIO",
        nargs="+",
        help="audio files, and folders with such at any depth",
    )
    reads.add_argument(
        "--bad_files",
        choices=("refuse", "drop"),
        default="refuse",
        help="with --out, files that cannot be embedded: refuse (the default) makes the "
        "command fail once all others are written; drop only lists them",
    )
    output = command.add_argument_group(OUTPUT)
    output.add_argument(
        "--out",
        metavar="EMBEDDINGS.npz",
        help="write names, embeddings, sources and the model's fingerprint; names are "
        "relative to the folder if one is given (default: print a summary)",
    )
    output.add_argument(
        "--dry_run",
        action="store_true",
        help="read headers only: print how much audio there is and which files are bad",
    )

    command = add(
        "enrol",
        _enrol,
        "keep a speaker, known by one or more audio files, for verify",
        "The embeddings are written to NAME.safetensors in the folder --speakers, as "
        "EnrolledSpeaker.save does in Python. A speaker of that name is replaced.",
        [" my_model ann a.wav b.flac --speakers=speakers"],
    )
    reads, _ = _add_model(command)
    reads.add_argument("name", metavar="NAME", help="what the speaker is called")
    reads.add_argument(
        "audio", metavar="FILE", nargs="+", help="audio files of this speaker alone"
    )
    _add_speakers(command.add_argument_group(OUTPUT))

    command = add(
        "verify",
        _verify,
        "score whether two audio files, or a file and a speaker, have the same speaker",
        "The score is the cosine of the two embeddings, from -1 to 1, or AS-Norm's.",
        [
            " my_model a.wav b.flac",
            " my_model a.wav b.flac --as_norm --threshold='veri_test2 minDCF(0.01)'",
            " my_model c.wav --speaker=ann --speakers=speakers",
        ],
    )
    reads, computes = _add_model(command)
    reads.add_argument("first", metavar="A", help="audio file")
    other = reads.add_mutually_exclusive_group(required=True)
    other.add_argument(
        "second", metavar="B", nargs="?", help="audio file, unless --speaker is given"
    )
    other.add_argument(
        "--speaker",
        metavar="NAME",
        help="in the place of B, a speaker whom enrol wrote",
    )
    _add_speakers(reads)
    computes.add_argument(
        "--as_norm",
        action="store_true",
        help="normalise the score with the model's cohort",
    )
    computes.add_argument(
        "--threshold",
        metavar="SCORE|NAME",
        help="the score from which on they are one speaker's, or the name of one that "
        "the model has (default: the model's own, if it has one list of trials)",
    )


def _add_model(
    command: argparse.ArgumentParser,
) -> tuple[argparse._ArgumentGroup, argparse._ArgumentGroup]:
    """Let a subcommand name a model, and how it embeds; give its groups of options."""
    reads, computes = (command.add_argument_group(t) for t in (READS, COMPUTES))
    reads.add_argument(
        "run_folder",
        metavar="MODEL",
        help="output_folder of a training run (recipes/VoxCeleb/train.py), what export or "
        "convert wrote, or OWNER/MODEL on the Hugging Face Hub, unless a folder is called "
        "that; a file of weights",
    )
    add_encoder(reads)
    reads.add_argument(
        "--revision",
        metavar="COMMIT",
        help="of a model on the Hub: a commit, a branch or a tag (default: main); with a "
        "whole commit hash and the model in the cache, nothing is asked of the Hub",
    )
    reads.add_argument(
        "--channel",
        metavar="NUMBER|mix",
        type=_channel,
        help="what is read of several channels: the one of this number, counted from 0, "
        "or the mean of all (default: such files are refused)",
    )
    computes.add_argument(
        "--window",
        metavar="SECONDS",
        type=float,
        help="average the embeddings of windows of this length where a file is longer",
    )
    computes.add_argument(
        "--precision",
        default="fp32",
        help="fp32 (the default), bf16, or fp16 on a GPU",
    )
    computes.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)"
    )
    command.set_defaults(less_memory="Give --window, --device=cpu or shorter files.")
    return reads, computes


def _add_speakers(group: argparse._ArgumentGroup) -> None:
    """Let a subcommand name the folder of enrolled speakers."""
    group.add_argument(
        "--speakers",
        metavar="FOLDER",
        default="speakers",
        help="folder of enrolled speakers (default: %(default)s)",
    )


def _channel(text: str) -> str | int:
    # argparse reports what is neither, and names the option.
    return text if text == "mix" else int(text)


def _embed(parsed: argparse.Namespace) -> None:
    if parsed.out is None and parsed.bad_files != "refuse":
        raise ValueError(
            "--bad_files goes with --out, which names the file of the others."
        )
    from speechbrain_rev.inference.extraction import list_audio

    listing = list_audio(parsed.audio[0] if len(parsed.audio) == 1 else parsed.audio)
    if parsed.dry_run:
        _look(listing, parsed)
        return
    _pin(parsed)
    embedder = _embedder(parsed)
    if parsed.out is None:
        _print_rows(embedder, listing, parsed)
        return
    from speechbrain_rev.inference.extraction import describe_bad, embed_folder

    result = embed_folder(
        listing,
        parsed.out,
        embedder,
        channel=parsed.channel,
        window=parsed.window,
        bad_files=parsed.bad_files,
    )
    if result.bad:
        print(describe_bad(result.bad))
    if result.others:
        print(listing.passed_over())
    shape = list(result.archive.embeddings.shape)
    print(f"{parsed.out}: embeddings {shape}, names, sources")


def _look(listing: Listing, parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference.extraction import describe_bad, look_through

    seconds, bad = look_through(listing, channel=parsed.channel, window=parsed.window)
    good = len(listing.files) - len(bad)
    print(f"{good} files can be embedded by their headers, {seconds / 3600:.2f} h.")
    if bad:
        print(describe_bad(bad))
    if listing.others:
        print(listing.passed_over())


def _print_rows(
    embedder: SpeakerEmbedder, listing: Listing, parsed: argparse.Namespace
) -> None:
    import numpy as np

    from speechbrain_rev.lists import printable

    paths = list(listing.files.values())
    rows = embedder.embed(paths, channel=parsed.channel, window=parsed.window)
    for name, embedding in zip(listing.files, rows, strict=True):
        start = " ".join(f"{value:.3f}" for value in embedding[:4])
        norm = np.linalg.norm(embedding)
        shown = printable(name)
        print(f"{shown}: {len(embedding)} values, norm {norm:.3f}: {start} ...")
    if listing.others:
        print(listing.passed_over())
    print("--out=embeddings.npz writes them to a file.")


def _speaker_file(folder: str, name: str) -> Path:
    # A name with a slash, "../ann" for one, would be written outside of the folder.
    if name.startswith(".") or set(name) & set("/\\"):
        raise ValueError(
            f"NAME is the name of a file in --speakers and takes no slash and no dot at "
            f"its beginning, not {name!r}."
        )
    return Path(folder, f"{name}.safetensors")


def _enrol(parsed: argparse.Namespace) -> None:
    path = _speaker_file(parsed.speakers, parsed.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    replaced = ", in the place of an earlier one" if path.exists() else ""
    _pin(parsed)
    speaker = _embedder(parsed).enrol(
        parsed.audio, channel=parsed.channel, window=parsed.window
    )
    speaker.save(path)
    count = speaker.utterances
    print(
        f"{path}: {parsed.name}, known by {count} utterance{'s' * (count > 1)}{replaced}"
    )
    options = [f"--speaker={parsed.name}", f"--speakers={parsed.speakers}"]
    command = shlex.join(["verify", parsed.run_folder, "FILE", *options])
    print(f"speechbrain-rev {command} compares a file with this speaker.")


def _verify(parsed: argparse.Namespace) -> None:
    from speechbrain_rev.inference import EnrolledSpeaker, read_cohort

    other = parsed.second
    if parsed.speaker is not None:
        other = EnrolledSpeaker.load(_speaker_file(parsed.speakers, parsed.speaker))
    _pin(parsed)
    cohort = None
    if parsed.as_norm:
        cohort = read_cohort(parsed.run_folder, revision=parsed.revision)
    embedder = _embedder(parsed)
    verdict = embedder.verify(
        parsed.first,
        other,
        channel=parsed.channel,
        window=parsed.window,
        threshold=_threshold(parsed.threshold, embedder),
        cohort=cohort,
    )
    unit = {"cosine": "cosine, from -1 to 1", "as_norm": "AS-Norm, in deviations"}
    print(
        f"{verdict.score:.4f}  {unit[verdict.normalisation]}; higher means more alike"
    )
    if verdict.threshold is None:
        print(on_terminal(verdict.origin))
        return
    answer = "the same speaker" if verdict.same_speaker else "different speakers"
    print(f"{answer}, by the threshold {verdict.threshold:.4f}: {verdict.origin}")
    if verdict.remark:
        print(verdict.remark, file=sys.stderr)


def _threshold(text: str | None, embedder: SpeakerEmbedder) -> float | str | None:
    """Take what is no name that the model knows as a score, if it is a number."""
    if text is None or text in {one.name for one in embedder.thresholds.known}:
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _pin(parsed: argparse.Namespace) -> None:
    """Fetch a model on the Hub; replace its revision by the commit, and print that."""
    from speechbrain_rev.inference.trained import is_hub_id, model_folder

    folder = model_folder(parsed.run_folder, parsed.revision)
    if not folder.exists():
        raise FileNotFoundError(
            f"There is no folder {parsed.run_folder}. Give the output_folder of a training "
            "run (recipes/VoxCeleb/train.py, or SpeechBrain's own script), a folder that "
            "export or convert wrote, a file of weights, or the id of a model on the Hugging "
            "Face Hub, owner/model."
        )
    if is_hub_id(parsed.run_folder) and parsed.revision != folder.name:
        print(
            f"{parsed.run_folder}: {parsed.revision or 'main'} is commit {folder.name}. "
            f"Use the same again by --revision={folder.name}",
            file=sys.stderr,
        )
        parsed.revision = folder.name


def _embedder(parsed: argparse.Namespace) -> SpeakerEmbedder:
    """Load a trained encoder."""
    from speechbrain_rev.inference import SpeakerEmbedder

    return SpeakerEmbedder.from_hparams(
        parsed.run_folder,
        revision=parsed.revision,
        encoder=parsed.encoder,
        device=parsed.device,
        precision=parsed.precision,
    )
