"""A trained encoder as a folder that others can load, with SpeechBrain or without."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any

import torch
from speechbrain.dataio.encoder import CategoricalEncoder
from speechbrain.utils.checkpoints import METAFNAME
from torch import Tensor

from speechbrain_rev.architectures import architecture
from speechbrain_rev.data.labels import read_labels
from speechbrain_rev.data.preparation import LABELS
from speechbrain_rev.files import (
    check_sum,
    digest_of,
    folder_whole,
    write_sums,
    write_whole,
)
from speechbrain_rev.filterbanks import FILTERBANKS
from speechbrain_rev.heads import HEAD_OF, HEADS, HeadRow
from speechbrain_rev.inference.runs import (
    HYPERPARAMS,
    WEIGHTS,
    TrainingRecord,
    read_record,
)
from speechbrain_rev.inference.thresholds import (
    RESULTS,
    THRESHOLDS,
    Threshold,
    as_json,
    is_name,
    read_results,
    read_thresholds,
    thresholds_of,
)
from speechbrain_rev.inference.trained import (
    SAFETENSORS,
    Weights,
    new_folder,
    newest_checkpoint,
    read_trained,
    read_weights,
    saved_bytes,
    write_weights,
)
from speechbrain_rev.inference.untrusted import own_file, read_tensors, some_names
from speechbrain_rev.inference.verification import (
    COHORT,
    EMBEDDINGS,
    Cohort,
    check_fresh,
    read_cohort,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.checkpointer import check_known
from speechbrain_rev.lobes.classifier import true_speakers
from speechbrain_rev.lobes.description import EncoderDescription
from speechbrain_rev.scoring import measures_in

CLASSIFIER = "classifier.ckpt"
CARD = "README.md"

#: Settings of the run that the model card lists. None is a path.
DESCRIBED = (
    "features",
    "chunk_samples",
    "loss",
    "scale",
    "optimizer_name",
    "optimizer_bits",
    "weight_decay",
    "batch_size",
    "warmup_epochs",
    "precision",
    "mode",
    "streams",
    "seed",
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

{trained}

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
    weights : Weights
        The encoder's.
    speakers : int
        That the classifier knows.
    record : TrainingRecord or None
        What happened in the run.
    results : mapping or None
        What the recipe's scores/results.json holds.
    cohort : Cohort or None
        For AS-Norm.
    thresholds : sequence of Threshold
        What thresholds.json holds.
    missing : sequence of str
        What the folder lacks, in words.
    """

    weights: Weights
    speakers: int
    record: TrainingRecord | None
    results: Mapping[str, Any] | None
    cohort: Cohort | None
    thresholds: Sequence[Threshold]
    missing: Sequence[str]


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
    """
    encoder, record = facts.weights.description, facts.record
    assert encoder.front_end is not None
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_encoder(**vars(encoder)).parameters())
    return _CARD.format(
        arch=architecture(encoder.name).name,
        millions=parameters / 1e6,
        sample_rate=encoder.front_end.sample_rate,
        embedding_dim=encoder.embedding_dim,
        missing="".join(f"\nIt lacks {words}.\n" for words in facts.missing),
        speakers=facts.speakers,
        thresholds=_thresholds(facts),
        cohort=_cohort(facts),
        measured=_measured(facts),
        trained=_trained(facts),
        loss_paper=_loss_paper(None if record is None else record.settings["loss"]),
        fingerprint=facts.weights.fingerprint,
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
        f"| {each.name} | {each.normalisation} | {each.value:.4f} | "
        f"{' to '.join(map(str, sorted({*each.enrolled})))} |"
        for each in facts.thresholds
    ]
    return "\n".join(lines)


def _cohort(facts: CardFacts) -> str:
    if facts.cohort is None:
        return ""
    subtracts = (facts.results or {}).get("subtract_mean", False)
    return _COHORT.format(
        speakers=len(facts.cohort.means),
        imported=", subtract_mean" * subtracts,
        centred="embeddings = subtract_mean(embeddings, cohort.centre)\n" * subtracts,
    )


def _measured(facts: CardFacts) -> str:
    """Lay out every measure that the results have."""
    results = facts.results
    if results is None:
        return "Error rates were not measured."
    rows = results["results"]
    names = list_names(results, facts.record)
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
    results: Mapping[str, Any] | None, record: TrainingRecord | None
) -> dict[str, str]:
    """Name trial lists by their files; folders are the training machine's.

    The recipe names lists of one file name by their whole paths, joined with "_".

    Parameters
    ----------
    results, record
        As of ``CardFacts``.

    Returns
    -------
    dict of str to str
        The name of each list of the results.
    """
    names = [row["trials"] for row in results["results"]] if results else []
    paths = record.settings["trial_lists"] if record else ()
    lists = [PurePath(path) for path in paths]
    known = {"_".join(path.parts).strip("/_"): path.stem for path in lists}
    known |= {path.stem: path.stem for path in lists}
    # A list that the run does not know is a whole path where it ends like a file.
    short = {n: known.get(n, "trials" if PurePath(n).suffix else n) for n in names}
    short = {n: name if is_name(name) else "trials" for n, name in short.items()}
    alike = Counter(short.values())
    count = dict.fromkeys(alike, 0)
    for name, stem in short.items():
        count[stem] += 1
        short[name] = stem if alike[stem] == 1 else f"{stem} ({count[stem]})"
    return short


def _in_checkpoint(path: Path) -> bool:
    return bool((path.parent / METAFNAME).exists())


def _trained(facts: CardFacts) -> str:
    """Tell how the encoder was trained: the data, and what the run records of itself."""
    record = facts.record
    if record is None:
        return f"{facts.speakers} speakers; the run has no record of its training."
    settings, data = record.settings, record.data
    paths = settings["data_folder"]
    paths = [paths] if isinstance(paths, str) else paths
    folders = [PurePath(path).name for path in paths]
    of = "all speakers that are in no trial list"
    if settings["train_list"]:
        of = f"the list {PurePath(settings['train_list']).name}"
    tested = [PurePath(path).name for path in settings["trial_lists"]]
    used = record.augmentation
    augmentation = (
        f"speeds {', '.join(map(str, used.speeds))}",
        "noise" if used.noise else "no noise",
        "reverberation" if used.reverberation else "no reverberation",
    )
    final = None if _in_checkpoint(facts.weights.path) else record.weights
    end, weights = final or record, "of the newest checkpoint"
    if final is not None:
        weights = f"mean of epochs {', '.join(map(str, final.epochs))}"
    minutes = end.seconds / 60
    rows: dict[str, object] = {
        "epochs": f"{record.epochs} of {settings['number_of_epochs']}",
        "weights": weights,
        "learning rate at their end": None if end.lr is None else f"{end.lr:.3g}",
        "margin at their end": None if end.margin is None else f"{end.margin:.3g}",
        "augmentation": "; ".join(augmentation),
        "time": f"{minutes / 60:.2f} hours"
        if minutes > 60
        else f"{minutes:.2f} minutes",
        "device": record.device,
        "versions": ", ".join(f"{n} {v}" for n, v in record.versions.items()),
    }
    if settings.get("pretrained"):
        rows["started from"] = PurePath(settings["pretrained"]).name
        rows |= {name: settings[name] for name in ("freeze_epochs", "encoder_lr")}
    rows |= {name: settings[name] for name in DESCRIBED if name in settings}
    described = {*DESCRIBED, "lr", "device", *vars(used), *record.versions}
    for earlier in record.earlier:
        values = [f"{n} {v}" for n, v in earlier.values.items() if n in described]
        # An extension alone changes nothing that the card lists.
        if values:
            row = f"otherwise in the first {earlier.epochs:.3g} epochs"
            rows[row] = "; ".join(values)
    shown = ("null" if value is None else value for value in rows.values())
    return (
        f"{data.utterances:,} utterances of {data.speakers:,} speakers, of "
        f"{' and '.join(folders)}: {of}. {data.held_out_speakers:,} more speakers were "
        f"held out for validation; {data.left_out:,} utterances were left out, whose "
        f"speakers are in these trial lists: {', '.join(tested) or 'none'}.\n\n"
        "| what | value |\n|---|---|\n"
        + "\n".join(
            f"| {name} | {value} |" for name, value in zip(rows, shown, strict=True)
        )
    )


_LAYOUT = """\
# A speaker encoder, in the layout of SpeechBrain's models; README.md describes it.
arch: {arch}
widths: {widths}
blocks: {blocks}
n_mels: {n_mels}
embedding_dim: {embedding_dim}
pooling: {pooling}
pooling_variance: {pooling_variance}
sample_rate: {sample_rate}  # Hz
out_n_neurons: {out_n_neurons}  # speakers of the training

compute_features: {filterbanks}
    sample_rate: !ref <sample_rate>
    n_mels: !ref <n_mels>
    win_length: 25  # ms
    hop_length: 10  # ms

mean_var_norm: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
    std_norm: false

embedding_model: !apply:speechbrain_rev.lobes.build_encoder
    name: !ref <arch>
    n_mels: !ref <n_mels>
    embedding_dim: !ref <embedding_dim>
    widths: !ref <widths>
    blocks: !ref <blocks>
    pooling: !ref <pooling>
    pooling_variance: !ref <pooling_variance>
    front_end:
        kind: {kind}
        sample_rate: !ref <sample_rate>
        n_mels: !ref <n_mels>
        normalisation: sentence_mean

classifier: {classifier}
    input_size: !ref <embedding_dim>
    out_neurons: !ref <out_n_neurons>

label_encoder: !new:speechbrain.dataio.encoder.CategoricalEncoder

audio_normalizer: !new:speechbrain.dataio.preprocess.AudioNormalizer
    sample_rate: !ref <sample_rate>

modules:
    compute_features: !ref <compute_features>
    mean_var_norm: !ref <mean_var_norm>
    embedding_model: !ref <embedding_model>
    classifier: !ref <classifier>

# Loads strictly; files without a folder are beside this one.
pretrainer: !new:speechbrain_rev.lobes.pretrained.ModelPretrainer
    loadables:
        embedding_model: !ref <embedding_model>
        classifier: !ref <classifier>
        label_encoder: !ref <label_encoder>
    paths:
        label_encoder: label_encoder.txt
"""


def model_yaml(encoder: EncoderDescription, speakers: int, head: HeadRow) -> str:
    """Write the hyperparams.yaml by which SpeechBrain loads a model.

    Parameters
    ----------
    encoder : EncoderDescription
        The description of the encoder and its features.
    speakers : int
        Classes of the classifier.
    head : HeadRow
        Its kind.

    Returns
    -------
    str
        HyperPyYAML, which this package does not read back.
    """
    assert encoder.front_end is not None
    values = dataclasses.asdict(encoder)
    values |= {name: list(values[name]) for name in ("widths", "blocks")}
    return _LAYOUT.format(
        **values,
        arch=encoder.name,
        filterbanks=FILTERBANKS[encoder.front_end.kind].tag,
        kind=encoder.front_end.kind,
        sample_rate=encoder.front_end.sample_rate,
        out_n_neurons=speakers,
        classifier=head.tag,
    )


def export_run(
    run: str | PathLike[str],
    out: str | PathLike[str],
    *,
    labels: str | PathLike[str] | None = None,
    speeds: int | None = None,
) -> list[str]:
    """Write a trained encoder as a model that SpeechBrain and this package load.

    The folder can be moved. It holds hyperparams.yaml, embedding_model.ckpt,
    embedding_model.safetensors, classifier.ckpt of the true speakers,
    label_encoder.txt, cohort.safetensors for AS-Norm, thresholds.json of scores,
    README.md, settings.json and SHA256SUMS. It appears when it is complete.

    Parameters
    ----------
    run : str or path-like
        The ``output_folder`` of a training run, of recipes/VoxCeleb or of SpeechBrain's
        own script; or a model whose weights are in embedding_model.ckpt alone.
    out : str or path-like
        The folder to write, which is not there yet or empty.
    labels : str or path-like, optional
        The file in which SpeechBrain's CategoricalEncoder numbers the speakers; by default
        label_encoder.txt of the folder or of its save/.
    speeds : int, optional
        How many classes the training made of each speaker, the speaker as recorded first;
        by default what the run records, and 1 where there are as many classes as speakers.

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
        exported model, a file is not what training writes, or embeddings or scores are of
        other weights than the run has now.
    """
    source, path = Path(run), Path(out).resolve()
    if (source / SAFETENSORS).exists():
        raise ValueError(
            f"{run} has {SAFETENSORS} already. Copy the folder as it is; of MODEL.onnx or "
            "MODEL.pt2 as OUT a graph is made."
        )
    if not path.parent.is_dir():
        raise ValueError(f"There is no folder {path.parent} to write {path.name} into.")
    with new_folder(path) as new:
        return _export(source, new, labels_of(source, labels), speeds)


def _export(source: Path, out: Path, listed: Path, speeds: int | None) -> list[str]:
    """Do what ``export_run`` says, while nobody else writes the folder."""
    weights, record = read_weights(source), read_record(source)
    if weights.description.front_end is None:
        raise ValueError(
            f"{source} does not say how the features of its encoder were made, which "
            "SpeechBrain's layout of models names. SpeakerEmbedder.from_run loads the "
            "folder as it is, with encoder=."
        )
    labels = CategoricalEncoder()
    labels.update_from_iterable(read_labels(listed))
    if speeds is None and record is not None:
        speeds = len(record.settings["speeds"])
    head, weight = read_head(source, weights, record)
    classifier = _keep_true_speakers(source, weight, len(labels), speeds)
    cohort, results = _cohort_of(source), read_results(source)
    if results is not None:
        check_fresh(source / RESULTS, results["model"], weights.fingerprint)
        names = list_names(results, record)
        thresholds = thresholds_of(results, names).known
    else:
        thresholds = read_thresholds(source, weights.fingerprint).known
    missing = _missing(source, weights, cohort, thresholds)
    facts = CardFacts(
        weights, len(labels), record, results, cohort, thresholds, missing
    )
    with folder_whole(out) as part:
        text = model_yaml(weights.description, len(labels), head)
        (part / HYPERPARAMS).write_text(text, encoding="utf-8")
        if record is None and (source / CARD).exists():
            (part / CARD).write_bytes(own_file(source, CARD).read_bytes())
        else:
            (part / CARD).write_text(model_card(facts), encoding="utf-8")
        labels.save(part / LABELS)
        write_weights(part, weights.description, weights.state_dict)
        write_whole(part / WEIGHTS, saved_bytes(weights.state_dict))
        write_whole(part / CLASSIFIER, saved_bytes(classifier))
        if cohort is not None:
            cohort.write(part / COHORT)
        if thresholds:
            (part / THRESHOLDS).write_text(as_json(thresholds), encoding="utf-8")
        files = sorted(part.iterdir())
        write_sums(part, {path.name: digest_of(path) for path in files})
        # Nothing is handed out that cannot be loaded.
        read_trained(part)
        if cohort is not None:
            read_cohort(part)
    return missing


def labels_of(source: Path, labels: str | PathLike[str] | None = None) -> Path:
    """Find the file that numbers the training speakers of a model.

    Parameters
    ----------
    source : pathlib.Path
        The folder of a run or of an exported model.
    labels : str or path-like, optional
        The file, if it is not in the folder.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    """
    if labels is not None:
        path = Path(labels)
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no file {labels}. Give the label_encoder.txt that SpeechBrain's "
                "CategoricalEncoder wrote for this run."
            )
        return path
    name = LABELS if (source / LABELS).exists() else f"save/{LABELS}"
    return own_file(
        source,
        name,
        given="the folder of a training run, and the file that numbers its speakers "
        "where it lies elsewhere (--labels FILE)",
    )


def _cohort_of(source: Path) -> Cohort | None:
    try:
        return read_cohort(source)
    except FileNotFoundError:
        return None


def _missing(
    source: Path,
    weights: Weights,
    cohort: Cohort | None,
    thresholds: Sequence[Threshold],
) -> list[str]:
    """Say in words what a model will lack."""
    missing = []
    if weights.standing:
        # README.md names no folder of the machine that it is made on.
        words = weights.standing.replace(str(source), "its run").rstrip(".")
        missing.append(f"the end of its training: {words}")
    recipe = "of runs of recipes/VoxCeleb/train.py"
    if cohort is None:
        missing.append(
            f"{COHORT}, for AS-Norm: {EMBEDDINGS} is not there, which "
            f"recipes/VoxCeleb/extract.py makes {recipe}"
        )
    if not thresholds:
        missing.append(
            f"{THRESHOLDS}, for decisions: {RESULTS} is not there or has none, which "
            f"recipes/VoxCeleb/score.py makes {recipe}"
        )
    return missing


def read_head(
    source: Path, weights: Weights, record: TrainingRecord | None
) -> tuple[HeadRow, Tensor]:
    """Read the weight of the classifier that was trained with an encoder.

    Parameters
    ----------
    source : pathlib.Path
        The folder of a run or of an exported model.
    weights : Weights
        The encoder's weights, read from this folder.
    record : TrainingRecord or None
        The record of the run.

    Returns
    -------
    head : HeadRow
        The kind of classifier.
    weight : torch.Tensor, [classes, ...]
        A run has all its classes, as of the encoder's last epoch. An exported model has
        one class of each speaker, at the speed recorded.

    Raises
    ------
    FileNotFoundError
        If there is no classifier, or none of that epoch.
    ValueError
        If the classifier is damaged, or is none of this package for this embedding size.
    """
    name = Path(CLASSIFIER)
    if (source / name).exists():
        check_sum(source / name)
    else:
        final = None if record is None else record.weights
        epoch = None
        if final is not None and not _in_checkpoint(weights.path):
            epoch = max(final.epochs)
        name = newest_checkpoint(source, CLASSIFIER, epoch=epoch) / CLASSIFIER
        check_known(source / name.parent, [CLASSIFIER])
    path = own_file(source, name)
    tensors = read_tensors(path)
    weight = tensors.get("weight")
    dim = weights.description.embedding_dim
    heads = [
        head
        for head in HEADS.values()
        if weight is not None
        and len(tensors) == 1
        and weight.dim()
        and tuple(weight.shape) == head.weight_shape(len(weight), dim)
    ]
    if weight is None or not heads:
        held = some_names(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(
            f"{path} holds {held}, and a model of this package has a "
            f"classifier of cosines of embeddings of {dim} values, which is one weight "
            f"[classes, {dim}]. SpeakerEmbedder.from_run loads the folder as it is."
        )
    return heads[0], weight


def _keep_true_speakers(
    source: Path, weight: Tensor, speakers: int, speeds: int | None
) -> dict[str, Tensor]:
    """Keep the classes of the speakers at the speed recorded."""
    if (source / CLASSIFIER).exists():
        # An exported model has no other classes.
        speeds = 1
    if speeds is None and len(weight) == speakers:
        speeds = 1
    if speeds is None or speeds < 1 or len(weight) != speakers * speeds:
        times = "" if speeds is None else f" times {speeds} speed(s)"
        raise ValueError(
            f"The classifier of {source} has {len(weight)} classes, which is not {speakers} "
            f"speakers{times}. Give --speeds N, how many classes the training made of each "
            "speaker."
        )
    return {"weight": true_speakers(weight, speeds=speeds).clone()}
