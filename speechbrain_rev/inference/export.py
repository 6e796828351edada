"""A trained run as a folder that others can load, with SpeechBrain or without."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any

import safetensors.torch
import torch
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.utils.checkpoints import Checkpoint
from torch import Tensor

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.files import (
    SUMS,
    check_sum,
    digest_of,
    folder_whole,
    read_json,
    write_sums,
    write_whole,
)
from speechbrain_rev.heads import HEAD_OF, HEADS
from speechbrain_rev.inference.model_folder import (
    ASSUMED,
    SAFETENSORS,
    USUAL_HEAD,
    WRITTEN_IF_UNUSUAL,
    encoder_of,
    is_exported,
    listed_file,
    load_listed,
    model_yaml,
    read_checkpoint_model,
    read_model,
    run_settings,
)
from speechbrain_rev.inference.run_folder import (
    CLASSIFIERS,
    HYPERPARAMS,
    PREPARED,
    RESULTS,
    WEIGHTS,
    RunObjects,
    Weights,
    by_our_recipe,
    new_folder,
    read_classifier,
    read_objects,
    read_results,
    read_weights,
    saved_bytes,
    trained_epochs,
)
from speechbrain_rev.inference.thresholds import (
    THRESHOLDS,
    Threshold,
    as_json,
    is_name,
    read_thresholds,
    thresholds_of,
)
from speechbrain_rev.inference.untrusted import check_tensors, own_file
from speechbrain_rev.inference.verification import (
    COHORT,
    EMBEDDINGS,
    Cohort,
    check_fresh,
    read_cohort,
    run_cohort,
)
from speechbrain_rev.lobes.checkpointer import verify_checkpoint
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.scoring import measures_in

#: Settings of the run that the model card lists, where the run has them. None is a path.
DESCRIBED = (
    "speeds",
    "augment_prob",
    "chunk_samples",
    "loss",
    "margin",
    "scale",
    "optimizer_name",
    "optimizer_bits",
    "lr",
    "final_lr",
    "weight_decay",
    "batch_size",
    "number_of_epochs",
    "warmup_epochs",
    "average_checkpoints",
    "precision",
    "mode",
    "streams",
    "seed",
    "cohort_top_n",
)

_CARD = """\
---
library_name: speechbrain
pipeline_tag: audio-classification
tags:
- speaker-verification
- speaker-embeddings
- speechbrain
- speechbrain_rev
---

# {arch}: speaker embeddings

A speaker encoder of {millions:.2f} million parameters, trained with
[SpeechBrain](https://speechbrain.github.io) and speechbrain_rev. It maps speech at
{sample_rate} Hz to embeddings of {embedding_dim} numbers; a higher cosine of two means
that their speakers are more alike.
{missing}
## Use

Both ways need the package speechbrain_rev. Without running anything of this folder, with
checksums, names and shapes compared:

```python
from speechbrain_rev.inference import SpeakerEmbedder

embedder = SpeakerEmbedder.from_hparams("FOLDER")  # or OWNER/MODEL on the Hub
embeddings = embedder.embed(["a.wav", "b.wav"])  # [2, {embedding_dim}]
verified = embedder.verify("a.wav", "b.wav")
verified.score, verified.same_speaker, verified.origin
```

{thresholds}

With SpeechBrain, which runs what hyperparams.yaml names:

```python
from speechbrain.inference.classifiers import EncoderClassifier
from speechbrain.inference.speaker import SpeakerRecognition

classifier = EncoderClassifier.from_hparams(source="FOLDER")
verification = SpeakerRecognition.from_hparams(source="FOLDER")
score, same = verification.verify_files("a.wav", "b.wav")
```

`same` is SpeechBrain's fixed threshold of 0.25; choose one on trials of your own speech.
The classifier knows the {speakers} training speakers at the speed recorded; its
"probabilities" are cosines.
{cohort}
## Measured

{measured}

## Trained

{data}

| setting | value |
|---|---|
{settings}

Settings that are null are the defaults of the encoder's family.

## Papers

- Liu and Qian: "Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker
  Verification", arXiv 2412.01195: the encoders and their reversible training
- Ravanelli et al.: "SpeechBrain: A General-Purpose Speech Toolkit", arXiv 2106.04624
{loss_paper}
Fingerprint of its embeddings: `{fingerprint}`
"""

_COHORT = """
AS-Norm with the cohort that travels with the model, of {speakers} training speakers:

```python
from speechbrain_rev.inference import read_cohort
from speechbrain_rev.scoring import cohort_statistics{imported}

cohort = read_cohort("FOLDER")
verified = embedder.verify("a.wav", "b.wav", cohort=cohort)  # one trial
# Many:
{centred}mean, std = cohort_statistics(embeddings, cohort.means, top_n=cohort.top_n)
```
"""


@dataclass(frozen=True)
class CardFacts:
    """What a card lists.

    Attributes
    ----------
    settings : mapping of str to object
        Of the encoder, and those of ``DESCRIBED`` that are known.
    parameters : int
        Of the encoder.
    speakers : int
        Of the training.
    prepared : mapping or None
        What the recipe's save/prepared.json holds.
    results : mapping or None
        What the recipe's scores/results.json holds.
    cohort : tuple of int, or None
        Speakers in AS-Norm's cohort, and how many of them it looks at.
    thresholds : sequence of Threshold
        What thresholds.json holds.
    missing : sequence of str
        What the folder lacks, in words.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    """

    settings: Mapping[str, Any]
    parameters: int
    speakers: int
    prepared: Mapping[str, Any] | None
    results: Mapping[str, Any] | None
    cohort: tuple[int, int] | None
    thresholds: Sequence[Threshold]
    missing: Sequence[str]
    fingerprint: str


def model_card(facts: CardFacts) -> str:
    """Write the card of a model.

    Parameters
    ----------
    facts : CardFacts
        What it lists.

    Returns
    -------
    str
        Markdown, with the metadata that model hubs read.

    Example
    -------
    >>> settings = dict(arch="revnet57", embedding_dim=256, sample_rate=16000)
    >>> card = model_card(CardFacts(settings, 10, 2, None, None, None, [], [], "f00d"))
    >>> "# revnet57: speaker embeddings" in card, "not measured" in card
    (True, True)
    """
    settings = facts.settings
    shown = ("widths", "blocks", "n_mels", "pooling", "head", *DESCRIBED)
    words = {n: "null" if v is None else v for n, v in settings.items()}
    rows = [f"| {name} | {words[name]} |" for name in shown if name in words]
    row = architecture(settings["arch"])
    return _CARD.format(
        arch=row.name,
        millions=facts.parameters / 1e6,
        sample_rate=settings["sample_rate"],
        embedding_dim=settings["embedding_dim"],
        missing="".join(f"\nIt lacks {words}.\n" for words in facts.missing),
        speakers=facts.speakers,
        thresholds=_thresholds(facts),
        cohort=_cohort(facts),
        measured=_measured(facts),
        data=_data(facts),
        settings="\n".join(rows),
        loss_paper=_loss_paper(settings.get("loss")),
        fingerprint=facts.fingerprint,
    )


def _loss_paper(loss: object) -> str:
    """Cite the paper of a loss, as a line of a list, where its class has one."""
    if not isinstance(loss, str) or loss not in HEAD_OF:
        return ""
    citation = resolve_name(HEAD_OF[loss].losses[loss]).citation
    return f"- {citation}\n" if citation else ""


def _thresholds(facts: CardFacts) -> str:
    if not facts.thresholds:
        return (
            "Its scores come without a decision: no threshold was measured. Give\n"
            "`threshold=SCORE`, chosen on trials of your own speech."
        )
    lines = [
        "`threshold=NAME` takes one of these; they are of that list's kind of speech.",
        "",
        "| name | score | threshold |",
        "|---|---|---|",
    ]
    lines += [
        f"| {one.name} | {one.normalisation} | {one.value:.4f} |"
        for one in facts.thresholds
    ]
    return "\n".join(lines)


def _cohort(facts: CardFacts) -> str:
    if facts.cohort is None:
        return ""
    subtracts = (facts.results or {}).get("subtract_mean", False)
    return _COHORT.format(
        speakers=facts.cohort[0],
        imported=", subtract_mean" * subtracts,
        centred="embeddings = subtract_mean(embeddings, cohort.centre)\n" * subtracts,
    )


def _measured(facts: CardFacts) -> str:
    """Lay out every measure that the results have."""
    results = facts.results
    if results is None:
        return "Error rates were not measured."
    rows = results["results"]
    names = list_names(results, facts.prepared)
    shown = measures_in(rows)
    columns = [measure.column for measure in shown]
    cells = [["trials", "score", *columns, "target trials", "impostor trials"]]
    cells.append(["---"] * len(cells[0]))
    for row in rows:
        figures = [measure.shown(row) for measure in shown]
        counts = [f"{row[name]:,}" for name in ("targets", "impostors")]
        cells.append([names[row["trials"]], row["method"], *figures, *counts])
    lines = [f"| {' | '.join(line)} |" for line in cells]
    cohort = results["cohort"]
    lines += [
        "",
        "In brackets: the 95 % interval, of speakers drawn with replacement.",
        "",
        f"as_norm: against the nearest {cohort['top_n']} of {cohort['speakers']} "
        "training speakers' mean embeddings"
        + (", after subtracting the training set's mean."
           if results["subtract_mean"] else "."),
    ]  # fmt: skip
    return "\n".join(lines)


def list_names(
    results: Mapping[str, Any] | None, prepared: Mapping[str, Any] | None
) -> dict[str, str]:
    """Name trial lists by their files; folders are the training machine's.

    The recipe names lists of one file name by their whole paths, joined with "_".

    Parameters
    ----------
    results, prepared : mapping or None
        As of ``CardFacts``.

    Returns
    -------
    dict of str to str
        The name of each list of the results.
    """
    names = [row["trials"] for row in results["results"]] if results else []
    paths = prepared["settings"]["trial_lists"] if prepared else ()
    lists = [PurePath(path) for path in paths]
    known = {"_".join(path.parts).strip("/_"): path.stem for path in lists}
    known |= {path.stem: path.stem for path in lists}
    # Of a list unknown here, only a whole path has the ending of a file.
    short = {n: known.get(n, "trials" if PurePath(n).suffix else n) for n in names}
    short = {n: name if is_name(name) else "trials" for n, name in short.items()}
    alike = Counter(short.values())
    count = dict.fromkeys(alike, 0)
    for name, stem in short.items():
        count[stem] += 1
        short[name] = stem if alike[stem] == 1 else f"{stem} ({count[stem]})"
    return short


def _data(facts: CardFacts) -> str:
    """Name and count the training data; folders are the training machine's."""
    if facts.prepared is None:
        return f"{facts.speakers} speakers; the run has no record of its data."
    settings, counts = facts.prepared["settings"], facts.prepared["prepared"]
    lists = [PurePath(path).name for path in settings["train_list"]]
    of = f"the list {lists[0]}" if lists else "all speakers that are in no trial list"
    left_out = [PurePath(path).name for path in settings["trial_lists"]]
    given = settings["data_folder"]
    folders = [PurePath(f).name for f in ([given] if isinstance(given, str) else given)]
    return (
        f"{counts['utterances']:,} utterances of {counts['speakers']:,} speakers, of "
        f"{' and '.join(folders)}: {of}. Left out were the speakers of "
        f"these trial lists: {', '.join(left_out) or 'none'}."
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
            f"speeds is {speeds}: training makes at least 1 class of each speaker. Leave "
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
    settings, weights = read_checkpoint_model(source)
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    copied = (CARD, LABELS, COHORT, THRESHOLDS)
    others = [listed_file(folder, name) for name in copied if (folder / name).exists()]
    classifier = None
    if (folder / CLASSIFIER).exists():
        classifier = load_listed(folder, CLASSIFIER)
        head = HEADS[settings.get("head", USUAL_HEAD)]
        shape = head.weight_shape(settings["out_n_neurons"], settings["embedding_dim"])
        expected = {"weight": torch.empty(shape, device="meta", dtype=torch.float32)}
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
    """Give a folder that is to be written, in one that is there."""
    path = Path(out).resolve()
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} to write {path.name} into.")
    with new_folder(path) as new:
        yield new


def _export(run: Path, out: Path, listed: Path, speeds: int | None) -> list[str]:
    """Do what ``export_run`` says, while nobody else writes the folder."""
    encoder, objects = _usual_encoder(run), read_objects(run)
    # Of the names that the model card shows, another recipe may have some for objects.
    if (head := objects.head()) is not None:
        encoder["head"] = head
    settings = objects.plain_values(DESCRIBED) | encoder
    if (loss := objects.loss()) is not None:
        settings["loss"] = loss
    weights = read_weights(run)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in encoder_of(encoder).parameters())
    labels = CategoricalEncoder()
    labels.update_from_iterable(read_labels(listed))
    classifier = _narrowed(run, objects, len(labels), settings, speeds)
    cohort, results = run_cohort(run, weights.fingerprint), read_results(run)
    if results is not None:
        check_fresh(run / RESULTS, results["model"], weights.fingerprint)
    prepared = None
    if by_our_recipe(run):
        check_sum(run / PREPARED)
        prepared = read_json(run / PREPARED)
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
    write_sums(folder, {path.name: digest_of(path) for path in files})
    read_model(folder)
    read_thresholds(folder)
    if (folder / COHORT).exists():
        read_cohort(folder)


def _usual_encoder(run: Path) -> dict[str, Any]:
    """Read the encoder's settings; refuse what the layout of models cannot say."""
    encoder = run_settings(run)
    others = [
        f"{n}: {encoder[n]}"
        for n, usual in ASSUMED.items()
        if encoder[n] != usual and n not in WRITTEN_IF_UNUSUAL
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
            "CategoricalEncoder wrote for this run."
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
        missing.append(f"{THRESHOLDS}, for decisions: {RESULTS} has none")
    return missing


def _ended(run: Path, objects: RunObjects, weights: Weights) -> bool:
    """Return whether SpeechBrain's own script ended with a checkpoint."""
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
    if objects.encoders() and objects.head() is None:
        raise ValueError(
            f"{run / HYPERPARAMS} describes no classifier of cosines or several "
            f"({' or '.join(CLASSIFIERS)}), and an exported model has one. "
            "SpeakerEmbedder.from_run loads the folder as it is."
        )
    saved = read_classifier(run)
    folder = saved.path.parent
    # SpeechBrain's own Checkpointer writes no checksums.
    if (folder / SUMS).exists() or not objects.by_speechbrain():
        verify_checkpoint(Checkpoint(folder, {}, {"classifier": saved.path}))
    head = HEADS[settings.get("head", USUAL_HEAD)]
    weight = saved.state_dict.get("weight")
    classes = len(weight) if weight is not None and weight.dim() else 0
    shape = head.weight_shape(classes, settings["embedding_dim"])
    if weight is None or len(saved.state_dict) > 1 or tuple(weight.shape) != shape:
        held = {name: list(tensor.shape) for name, tensor in saved.state_dict.items()}
        raise ValueError(
            f"{saved.path} holds {held or 'nothing'}, but a classifier of head {head.name} "
            f"for the embedding_dim {settings['embedding_dim']} of {run / HYPERPARAMS} is "
            f"one weight, {['classes', *shape[1:]]}. Are both of one run?"
        )
    listed, speeds = settings.get("speeds"), given
    if speeds is None:
        speeds = objects.speeds()
    if speeds is None and isinstance(listed, list):
        speeds = len(listed)
    if speeds is None and len(weight) == speakers:
        speeds = 1
    if speeds is None:
        raise ValueError(
            f"{run / HYPERPARAMS} does not say the speeds of the training, and the "
            f"classifier {saved.path} has {len(weight)} classes for {speakers} speakers. "
            "Give --speeds N, how many classes the training made of each speaker."
        )
    if len(weight) != speakers * speeds:
        raise ValueError(
            f"{saved.path}: the classifier has {len(weight)} classes, which is not "
            f"{speakers} speakers times {speeds} speed(s)."
        )
    return {"weight": true_speakers(weight, speeds=speeds).clone()}
