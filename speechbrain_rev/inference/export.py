"""A trained run as a folder that others can load, with SpeechBrain or without."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.utils.checkpoints import Checkpoint
from torch import Tensor

from speechbrain_rev.inference.cohort import (
    COHORT,
    EMBEDDINGS,
    Cohort,
    check_fresh,
    read_cohort,
    run_cohort,
)
from speechbrain_rev.inference.encoder_settings import (
    ASSUMED,
    ENCODER_SETTINGS,
    encoder_of,
    run_settings,
)
from speechbrain_rev.inference.model_card import (
    DESCRIBED,
    CardFacts,
    list_names,
    model_card,
)
from speechbrain_rev.inference.model_folder import SAFETENSORS, SUMS, read_model
from speechbrain_rev.inference.model_yaml import model_yaml
from speechbrain_rev.inference.own_files import own_file
from speechbrain_rev.inference.results import RESULTS, read_results
from speechbrain_rev.inference.run_folder import (
    CLASSIFIER,
    HYPERPARAMS,
    WEIGHTS,
    Weights,
    read_classifier,
    read_settings,
    read_weights,
    saved_bytes,
)
from speechbrain_rev.inference.thresholds import (
    THRESHOLDS,
    Threshold,
    as_json,
    read_thresholds,
    thresholds_of,
)
from speechbrain_rev.lobes.checkpointer import verify_checkpoint
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.speech.labels import read_labels
from speechbrain_rev.whole_files import check_sum, folder_whole, write_whole

LABELS = "label_encoder.txt"
CARD = "README.md"

# What recipes/VoxCeleb leaves in a run's folder.
_PREPARED = "save/prepared.json"


def export_run(run: str | PathLike[str], out: str | PathLike[str]) -> list[str]:
    """Write a trained run as a model that SpeechBrain and this package load.

    The folder can be moved. It holds hyperparams.yaml, embedding_model.ckpt,
    embedding_model.safetensors, classifier.ckpt of the true speakers,
    label_encoder.txt, cohort.safetensors for AS-Norm, thresholds.json of scores,
    README.md and SHA256SUMS. It appears when it is complete.

    Parameters
    ----------
    run : str or path-like
        The ``output_folder`` of a training run.
    out : str or path-like
        The folder to write, which is not there yet or empty.

    Returns
    -------
    list of str
        What is missing in it, in words; empty if nothing is.

    Raises
    ------
    FileNotFoundError
        If the run has no weights, checkpoints or labels.
    OSError
        If ``out`` cannot be written; then nothing of it stays.
    ValueError
        If ``out`` is there and not empty or another process writes it, a file of the run
        is not what training writes, or embeddings or scores are of other weights than the
        run has now.
    """
    # "." and ".." have no name that one beside them could begin with.
    run, out = Path(run), Path(out).resolve()
    if not out.parent.is_dir():
        raise ValueError(f"There is no folder {out.parent} to write {out.name} into.")
    with writing_alone(out):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(
                f"{out} is there already and not empty: nothing is overwritten. Give "
                "another folder, or remove it."
            )
        return _export(run, out)


def _export(run: Path, out: Path) -> list[str]:
    """Do what ``export_run`` says, while nobody else writes the folder."""
    settings = read_settings(run, ENCODER_SETTINGS, optional=DESCRIBED)
    encoder = _usual_encoder(run)
    weights = read_weights(run)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in encoder_of(encoder).parameters())
    labels = CategoricalEncoder()
    labels.update_from_iterable(read_labels(own_file(run, f"save/{LABELS}")))
    classifier = _narrowed(run, len(labels), settings)
    cohort, results = run_cohort(run, weights.fingerprint), _results(run, weights)
    prepared = _json(run, _PREPARED)
    names = list_names(results, prepared)
    thresholds = thresholds_of(results, names).known if results else ()
    missing = _missing(run, cohort, results, thresholds)
    card = model_card(
        CardFacts(
            settings=settings,
            parameters=parameters,
            speakers=len(labels),
            prepared=prepared,
            results=results,
            cohort=None if cohort is None else (len(cohort.means), cohort.top_n),
            thresholds=thresholds,
            missing=missing,
            fingerprint=weights.fingerprint,
        )
    )
    with folder_whole(out) as part:
        text = model_yaml({**encoder, "out_n_neurons": len(labels)})
        (part / HYPERPARAMS).write_text(text, encoding="utf-8")
        (part / CARD).write_text(card, encoding="utf-8")
        labels.save(part / LABELS)
        _write_tensors(part, weights, classifier, cohort)
        if thresholds:
            (part / THRESHOLDS).write_text(as_json(thresholds), encoding="utf-8")
        _write_sums(part)
        # What cannot be loaded is not handed out.
        read_model(part)
        read_thresholds(part)
        if cohort is not None:
            read_cohort(part)
    return missing


def _usual_encoder(run: Path) -> dict[str, Any]:
    """Read the encoder's settings; refuse what the layout of models cannot say."""
    encoder = run_settings(run)
    others = [
        f"{n}: {encoder[n]}" for n, usual in ASSUMED.items() if encoder[n] != usual
    ]
    if others:
        raise ValueError(
            f"{run} has {', '.join(others)}, which SpeechBrain's layout of models does "
            "not. SpeakerEmbedder.from_run loads the folder as it is."
        )
    return encoder


def _missing(
    run: Path,
    cohort: Cohort | None,
    results: dict[str, Any] | None,
    thresholds: Sequence[Threshold],
) -> list[str]:
    """Say in words what a model of this run will lack."""
    missing = []
    if not (run / WEIGHTS).exists():
        missing.append(
            "the end of its training: the weights are of a checkpoint before"
        )
    if cohort is None:
        missing.append(
            f"{COHORT}, for AS-Norm: the run has no {EMBEDDINGS}, which "
            "recipes/VoxCeleb/extract.py makes"
        )
    if not results:
        missing.append(
            f"measured error rates: the run has no {RESULTS}, which "
            "recipes/VoxCeleb/score.py makes"
        )
    if results and not thresholds:
        missing.append(
            f"{THRESHOLDS}, for decisions: {RESULTS} has none, which "
            "recipes/VoxCeleb/score.py of today writes"
        )
    return missing


def _write_tensors(
    folder: Path,
    weights: Weights,
    classifier: dict[str, Tensor],
    cohort: Cohort | None,
) -> None:
    tensors = {n: t.contiguous().clone() for n, t in weights.state_dict.items()}
    write_whole(folder / WEIGHTS, saved_bytes(tensors))
    write_whole(folder / SAFETENSORS, safetensors.torch.save(tensors))
    write_whole(folder / CLASSIFIER, saved_bytes(classifier))
    if cohort is not None:
        cohort.write(folder / COHORT)


def _narrowed(run: Path, speakers: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Give the newest classifier's weights of the true speakers."""
    found = read_classifier(run)
    folder = found.path.parent
    verify_checkpoint(Checkpoint(folder, {}, {"classifier": found.path}))
    if not isinstance(settings.get("speeds"), list):
        raise ValueError(
            f"{run / HYPERPARAMS} does not say the speeds of the training, so that the "
            "classes of the true speakers are unknown. Give the folder of a run of "
            "recipes/VoxCeleb/train.py."
        )
    if list(found.state_dict) != ["weight"] or found.state_dict["weight"].dim() != 2:
        raise ValueError(
            f"{found.path}: a classifier's one weight is [classes, input_size], but this "
            f"has {', '.join(found.state_dict) or 'none'}."
        )
    weight, speeds = found.state_dict["weight"], len(settings["speeds"])
    if weight.shape[1] != settings["embedding_dim"]:
        raise ValueError(
            f"{found.path}: the classifier takes embeddings of {weight.shape[1]} numbers, "
            f"but embedding_dim is {settings['embedding_dim']} in {run / HYPERPARAMS}. "
            "Are both of one training?"
        )
    if len(weight) != speakers * speeds:
        raise ValueError(
            f"{found.path}: the classifier has {len(weight)} classes, which is not "
            f"{speakers} speakers times {speeds} speed(s)."
        )
    return {"weight": true_speakers(weight, speeds=speeds).clone()}


def _results(run: Path, weights: Weights) -> dict[str, Any] | None:
    report = read_results(run)
    if report is not None:
        check_fresh(run / RESULTS, report["model"], weights.fingerprint)
    return report


def _json(run: Path, name: str) -> dict[str, Any] | None:
    path = run / name
    if not path.exists():
        return None
    check_sum(path)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write_sums(folder: Path) -> None:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
    ]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
