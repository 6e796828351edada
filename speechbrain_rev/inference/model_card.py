"""The README.md of an exported model: what it is, how to use it, what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from speechbrain_rev.architectures import architecture
from speechbrain_rev.inference.thresholds import Threshold, is_name
from speechbrain_rev.scoring import measures_in

#: Settings of the run that a card tells, where the run says them. None is a path.
DESCRIBED = (
    "speeds",
    "augment_prob",
    "chunk_samples",
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
- Deng et al.: "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", 2019

Fingerprint of its embeddings: `{fingerprint}`
"""

_COHORT = """
AS-Norm with the cohort that travels with the model, of {speakers} training speakers:

```python
from speechbrain_rev.inference import read_cohort
from speechbrain_rev.scoring import cohort_statistics

cohort = read_cohort("FOLDER")
verified = embedder.verify("a.wav", "b.wav", cohort=cohort)  # one trial
# Many:
{centred}mean, std = cohort_statistics(embeddings, cohort.means, top_n=cohort.top_n)
```
"""


@dataclass(frozen=True)
class CardFacts:
    """What a card tells.

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
        What it tells.

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
    shown = ("widths", "blocks", "n_mels", *DESCRIBED)
    rows = [
        f"| {name} | {_shown(settings[name])} |" for name in shown if name in settings
    ]
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
        fingerprint=facts.fingerprint,
    )


def _thresholds(facts: CardFacts) -> str:
    if not facts.thresholds:
        return (
            "Its scores come without a decision: no threshold was measured. Give\n"
            "`threshold=SCORE`, chosen on trials of your own speech."
        )
    rows = [
        f"| {one.name} | {one.normalisation} | {one.value:.4f} |"
        for one in facts.thresholds
    ]
    return "\n".join(
        [
            "`threshold=NAME` takes one of these; they are of that list's kind of speech.",
            "",
            "| name | score | threshold |",
            "|---|---|---|",
            *rows,
        ]
    )


def _cohort(facts: CardFacts) -> str:
    if facts.cohort is None:
        return ""
    centred = "embeddings = subtract_mean(embeddings, cohort.centre)\n"
    subtracts = (facts.results or {}).get("subtract_mean", False)
    return _COHORT.format(
        speakers=facts.cohort[0], centred=centred * subtracts
    ).replace(
        "import cohort_statistics",
        "import cohort_statistics" + ", subtract_mean" * subtracts,
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
    """Tell the training data by name and number; folders are the training machine's."""
    if facts.prepared is None:
        return f"{facts.speakers} speakers; the run has no record of its data."
    settings, counts = facts.prepared["settings"], facts.prepared["prepared"]
    lists = [PurePath(path).name for path in settings["train_list"]]
    of = f"the list {lists[0]}" if lists else "all speakers that are in no trial list"
    left_out = [PurePath(path).name for path in settings["trial_lists"]]
    return (
        f"{counts['utterances']:,} utterances of {counts['speakers']:,} speakers, of "
        f"{PurePath(settings['data_folder']).name}: {of}. Left out were the speakers of "
        f"these trial lists: {', '.join(left_out) or 'none'}."
    )


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
