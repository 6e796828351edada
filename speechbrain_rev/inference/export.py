"""A trained run as a folder that others can load, with SpeechBrain or without."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.utils.checkpoints import Checkpoint
from torch import Tensor

from speechbrain_rev.architectures import Head
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
    encoder_of,
    run_settings,
)
from speechbrain_rev.inference.model_card import (
    DESCRIBED,
    CardFacts,
    list_names,
    model_card,
)
from speechbrain_rev.inference.model_folder import (
    SAFETENSORS,
    is_exported,
    listed_file,
    load_listed,
    read_checkpoint_model,
    read_model,
)
from speechbrain_rev.inference.model_yaml import model_yaml
from speechbrain_rev.inference.own_files import own_file
from speechbrain_rev.inference.results import RESULTS, read_results
from speechbrain_rev.inference.run_folder import (
    HYPERPARAMS,
    PREPARED,
    WEIGHTS,
    Weights,
    by_our_recipe,
    read_classifier,
    read_objects,
    read_weights,
    saved_bytes,
    trained_epochs,
)
from speechbrain_rev.inference.run_objects import CLASSIFIERS, RunObjects
from speechbrain_rev.inference.state_dicts import check_tensors
from speechbrain_rev.inference.thresholds import (
    THRESHOLDS,
    Threshold,
    as_json,
    read_thresholds,
    thresholds_of,
)
from speechbrain_rev.lobes.checkpointer import CHECKSUMS, verify_checkpoint
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.locks import writing_alone
from speechbrain_rev.speech.labels import read_labels
from speechbrain_rev.whole_files import (
    check_path,
    check_sum,
    digest_of,
    folder_whole,
    write_sums,
    write_whole,
)

LABELS = "label_encoder.txt"
CLASSIFIER = "classifier.ckpt"
CARD = "README.md"


def export_run(
    run: str | PathLike[str],
    out: str | PathLike[str],
    *,
    labels: str | PathLike[str] | None = None,
    speeds: int | None = None,
) -> list[str]:
    """Write a trained run as a model that SpeechBrain and this package load.

    The folder can be moved. It holds hyperparams.yaml, embedding_model.ckpt,
    embedding_model.safetensors, classifier.ckpt of the true speakers,
    label_encoder.txt, cohort.safetensors for AS-Norm, thresholds.json of scores,
    README.md and SHA256SUMS. It appears when it is complete.

    Parameters
    ----------
    run : str or path-like
        The ``output_folder`` of a training run, of recipes/VoxCeleb or of SpeechBrain's
        own script.
    out : str or path-like
        The folder to write, which is not there yet or empty.
    labels : str or path-like, optional
        The file in which SpeechBrain's CategoricalEncoder numbers the speakers; by default
        save/label_encoder.txt of the run.
    speeds : int, optional
        How many classes the training made of each speaker, the speaker as recorded first;
        by default what hyperparams.yaml says, and 1 where there are as many classes as
        speakers.

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
        If ``out`` is there and not empty or another process writes it, ``run`` is an
        exported model, a file of the run
        is not what training writes, or embeddings or scores are of other weights than the
        run has now.
    """
    if speeds is not None and speeds < 1:
        raise ValueError(
            f"speeds is {speeds}: a training makes at least 1 class of each speaker. Leave "
            "it out to go by hyperparams.yaml."
        )
    if is_exported(run):
        raise ValueError(
            f"{run} is an exported model already. Copy the folder as it is; of MODEL.onnx "
            "or MODEL.pt2 as OUT a graph is made."
        )
    with _new_folder(out) as new:
        return _export(Path(run), new, _labels(Path(run), labels), speeds)


def convert_from_speechbrain(
    source: str | PathLike[str], out: str | PathLike[str]
) -> list[str]:
    """Write a model whose weights are in a .ckpt alone as ``export_run`` writes it.

    ``SpeakerEmbedder.from_hparams`` reads safetensors; a folder that was handed on with
    ``embedding_model.ckpt`` alone is read here, and nothing in it is executed.

    Parameters
    ----------
    source : str or path-like
        The model's folder, or a file of weights in it. Its hyperparams.yaml is as
        ``export_run`` writes it.
    out : str or path-like
        The folder to write, which is not there yet or empty.

    Returns
    -------
    list of str
        The files of an exported model that the folder did not have, and this lacks too.

    Raises
    ------
    FileNotFoundError
        If the folder, its hyperparams.yaml or its weights are missing.
    OSError
        If ``out`` cannot be written; then nothing of it stays.
    ValueError
        If a file is anything else than what an exported model has, the folder has
        ``embedding_model.safetensors`` already, or ``out`` is there and not empty.
    """
    check_path(source, "a model", "Give its folder.")
    settings, weights = read_checkpoint_model(source)
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    copied = (CARD, LABELS, COHORT, THRESHOLDS)
    others = [listed_file(folder, name) for name in copied if (folder / name).exists()]
    classifier = None
    if (folder / CLASSIFIER).exists():
        classifier = load_listed(folder, CLASSIFIER)
        head = Head(settings["out_n_neurons"], settings["embedding_dim"])
        expected = {"weight": torch.empty(head.weight_shape, device="meta")}
        check_tensors(classifier, expected, folder / CLASSIFIER)
    with _new_folder(out) as new, folder_whole(new) as part:
        (part / HYPERPARAMS).write_text(model_yaml(settings), encoding="utf-8")
        for path in others:
            write_whole(part / path.name, path.read_bytes())
        _write_tensors(part, weights, classifier, None)
        _finish(part)
        return [n for n in (CLASSIFIER, *copied) if not (part / n).exists()]


@contextlib.contextmanager
def _new_folder(out: str | PathLike[str]) -> Iterator[Path]:
    """Give the whole path of a folder that is to be written, by this process alone."""
    # "." and ".." have no name that one beside them could begin with.
    out = Path(out).resolve()
    if not out.parent.is_dir():
        raise ValueError(f"There is no folder {out.parent} to write {out.name} into.")
    with writing_alone(out):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(
                f"{out} is there already and not empty: nothing is overwritten. Give "
                "another folder, or remove it."
            )
        yield out


def _export(run: Path, out: Path, listed: Path, speeds: int | None) -> list[str]:
    """Do what ``export_run`` says, while nobody else writes the folder."""
    encoder, objects = _usual_encoder(run), read_objects(run)
    # Of the names that a card shows, another recipe may have some for objects.
    settings = objects.plain_values(DESCRIBED) | encoder
    weights = read_weights(run)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in encoder_of(encoder).parameters())
    labels = CategoricalEncoder()
    labels.update_from_iterable(read_labels(listed))
    classifier = _narrowed(run, objects, len(labels), settings, speeds)
    cohort, results = run_cohort(run, weights.fingerprint), _results(run, weights)
    prepared = _json(run, PREPARED)
    names = list_names(results, prepared)
    thresholds = thresholds_of(results, names).known if results else ()
    missing = _missing(run, objects, weights, cohort, results, thresholds)
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
        _write_tensors(part, weights.state_dict, classifier, cohort)
        if thresholds:
            (part / THRESHOLDS).write_text(as_json(thresholds), encoding="utf-8")
        _finish(part)
    return missing


def _finish(folder: Path) -> None:
    """Write the checksums, and refuse to hand out what cannot be loaded."""
    files = sorted(folder.iterdir())
    write_sums(folder, {path.name: digest_of(path, "sha256") for path in files})
    read_model(folder)
    read_thresholds(folder)
    if (folder / COHORT).exists():
        read_cohort(folder)


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


def _labels(run: Path, labels: str | PathLike[str] | None) -> Path:
    """Find the numbers of the speakers."""
    if labels is None:
        return own_file(
            run,
            f"save/{LABELS}",
            given="the folder of a training run, and the file that numbers its speakers "
            "where it lies elsewhere (--labels FILE)",
        )
    if not Path(labels).is_file():
        raise FileNotFoundError(
            f"There is no file {labels}. Give the label_encoder.txt that SpeechBrain's "
            "CategoricalEncoder wrote for this training."
        )
    return Path(labels)


def _missing(
    run: Path,
    objects: RunObjects,
    weights: Weights,
    cohort: Cohort | None,
    results: dict[str, Any] | None,
    thresholds: Sequence[Threshold],
) -> list[str]:
    """Say in words what a model of this run will lack."""
    missing = []
    if not (run / WEIGHTS).exists() and not _ended(run, objects, weights):
        missing.append(
            "the end of its training: the weights are of a checkpoint before"
        )
    ours = by_our_recipe(run)
    if cohort is None:
        makes = "makes" if ours else "makes of runs of recipes/VoxCeleb/train.py alone"
        missing.append(
            f"{COHORT}, for AS-Norm: the run has no {EMBEDDINGS}, which "
            f"recipes/VoxCeleb/extract.py {makes}"
        )
    if not results:
        other = (
            "makes of runs of recipes/VoxCeleb/train.py alone; "
            "speaker_verification_cosine.py of SpeechBrain scores the exported model with "
            "hparams/speechbrain/verification.yaml"
        )
        missing.append(
            f"measured error rates: the run has no {RESULTS}, which "
            f"recipes/VoxCeleb/score.py {'makes' if ours else other}"
        )
    if results and not thresholds:
        missing.append(
            f"{THRESHOLDS}, for decisions: {RESULTS} has none, which "
            "recipes/VoxCeleb/score.py of today writes"
        )
    return missing


def _ended(run: Path, objects: RunObjects, weights: Weights) -> bool:
    """Tell whether a checkpoint is the end of a training by SpeechBrain's own script."""
    epochs = objects.epochs()
    trained = trained_epochs(run, weights.path.parent)
    # Our recipe averages checkpoints after the last epoch, and writes WEIGHTS.
    if epochs is None or trained is None or by_our_recipe(run):
        return False
    return trained >= epochs


def _write_tensors(
    folder: Path,
    weights: Mapping[str, Tensor],
    classifier: Mapping[str, Tensor] | None,
    cohort: Cohort | None,
) -> None:
    tensors = {n: t.contiguous().clone() for n, t in weights.items()}
    write_whole(folder / WEIGHTS, saved_bytes(tensors))
    write_whole(folder / SAFETENSORS, safetensors.torch.save(tensors))
    if classifier is not None:
        write_whole(folder / CLASSIFIER, saved_bytes(classifier))
    if cohort is not None:
        cohort.write(folder / COHORT)


def _narrowed(
    run: Path,
    objects: RunObjects,
    speakers: int,
    settings: dict[str, Any],
    given: int | None,
) -> dict[str, Tensor]:
    """Give the newest classifier's weights of the true speakers."""
    if objects.encoders() and not objects.has_cosines():
        raise ValueError(
            f"{run / HYPERPARAMS} describes no classifier of cosines ({CLASSIFIERS[0]} or "
            f"{CLASSIFIERS[1]}), and an exported model has one. SpeakerEmbedder.from_run "
            "loads the folder as it is."
        )
    found = read_classifier(run)
    folder = found.path.parent
    # SpeechBrain's own Checkpointer writes no checksums.
    if (folder / CHECKSUMS).exists() or not objects.by_speechbrain():
        verify_checkpoint(Checkpoint(folder, {}, {"classifier": found.path}))
    if list(found.state_dict) != ["weight"] or found.state_dict["weight"].dim() != 2:
        raise ValueError(
            f"{found.path}: a classifier's one weight is [classes, input_size], but this "
            f"has {', '.join(found.state_dict) or 'none'}."
        )
    weight = found.state_dict["weight"]
    if weight.shape[1] != settings["embedding_dim"]:
        raise ValueError(
            f"{found.path}: the classifier takes embeddings of {weight.shape[1]} numbers, "
            f"but embedding_dim is {settings['embedding_dim']} in {run / HYPERPARAMS}. "
            "Are both of one training?"
        )
    speeds = _speeds(objects, settings) if given is None else given
    if speeds is None and len(weight) == speakers:
        speeds = 1
    if speeds is None:
        raise ValueError(
            f"{run / HYPERPARAMS} does not say the speeds of the training, and the "
            f"classifier {found.path} has {len(weight)} classes for {speakers} speakers. "
            "Give --speeds N, how many classes the training made of each speaker."
        )
    if len(weight) != speakers * speeds:
        raise ValueError(
            f"{found.path}: the classifier has {len(weight)} classes, which is not "
            f"{speakers} speakers times {speeds} speed(s)."
        )
    return {"weight": true_speakers(weight, speeds=speeds).clone()}


def _speeds(objects: RunObjects, settings: dict[str, Any]) -> int | None:
    """Tell how many classes augmentation made of a speaker, by its object or setting."""
    speeds = settings.get("speeds")
    found = objects.speeds()
    return len(speeds) if found is None and isinstance(speeds, list) else found


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
