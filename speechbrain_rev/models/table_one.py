"""Table I of the paper, and the same two training steps counted here."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass

from speechbrain_rev.architectures import architecture
from speechbrain_rev.memory.report import PARTS
from speechbrain_rev.models.breakdown import EncoderBreakdown, encoder_breakdown
from speechbrain_rev.models.counts import counted_with
from speechbrain_rev.models.render import PAPER
from speechbrain_rev.sizes import GB

#: What both sides name and understand alike.
SHARED_PARTS = ("activations", "optimizer_states", "weights")

_NOTES = (
    'Published: Table I of "{paper}", measured there on a 2080 Ti. Its weights are 4 bytes '
    "for each parameter of the encoder with GB = 1e9 bytes. It has no row of gradients. "
    "Its others are what the framework takes for itself, which no count can see.",
    "Counted: a step that stores all activations, with states of 32 bit, in float32, on "
    "meta (torch {torch}). The length that Table I had is not stated; 200 frames are those "
    "of the paper's training. The encoder alone, as the published weights have no room for "
    "a classifier. Others are the batch, as waveforms and filterbanks. Workspaces of cuDNN "
    "and what the allocator rounds up and keeps are not counted. Those or longer "
    "utterances may be what activations lack; no card was tried.",
    "Share of activations: of activations, optimizer states and weights together, which "
    "both sides understand alike; gradients and others are left out.",
    "The last line is what the paper's own Tables V and VI say, in GB per utterance, times "
    "the batch: less activations than Table I for one encoder, more for the other.",
)


@dataclass(frozen=True)
class PublishedBreakdown:
    """One column of Table I.

    Attributes
    ----------
    name : str
        The encoder.
    batch : int
        Utterances of 200 frames.
    activations_gb, optimizer_states_gb, weights_gb, others_gb : float
        As printed.
    """

    name: str
    batch: int
    activations_gb: float
    optimizer_states_gb: float
    weights_gb: float
    others_gb: float

    @property
    def parts_gb(self) -> dict[str, float]:
        """The published parts, in the order of ``PARTS``."""
        values = dataclasses.asdict(self)
        return {p: values[f"{p}_gb"] for p in PARTS if f"{p}_gb" in values}


TABLE_ONE = (
    PublishedBreakdown("resnet34", 64, 5.14, 0.032, 0.027, 0.455),
    PublishedBreakdown("df_resnet56", 16, 5.244, 0.041, 0.018, 0.389),
)


def reproduced() -> list[tuple[PublishedBreakdown, EncoderBreakdown]]:
    """Count the steps of Table I.

    Returns
    -------
    list of (PublishedBreakdown, EncoderBreakdown)
        The published column and ours: stored, 32 bit, without a classifier.

    Examples
    --------
    >>> published, ours = reproduced()[0]
    >>> published.weights_gb, round(ours.report.weights_bytes / GB, 3)
    (0.027, 0.027)
    """
    return [
        (
            column,
            encoder_breakdown(
                column.name,
                mode="store",
                batch=column.batch,
                frames=200,
                optimizer_bits=32,
                classes=0,
            ),
        )
        for column in TABLE_ONE
    ]


def as_text() -> str:
    """Print Table I beside what is counted here.

    Returns
    -------
    str
        Lines, the last one ended too.

    Examples
    --------
    >>> print(as_text().splitlines()[2])
    activations                5.140  90.9 %   4.037  97.6 %    0.79
    """
    blocks = []
    for column, ours in reproduced():
        batch = f"batch {column.batch}, {ours.optimizer_name}"
        blocks.append("\n".join([f"{column.name}, {batch}", *_lines(column, ours)]))
    words = {"paper": PAPER, "torch": counted_with()["torch"]}
    notes = [textwrap.fill(note.format(**words), 100) for note in _NOTES]
    return "\n\n".join([*blocks, *notes]) + "\n"


def as_json() -> str:
    """Print Table I and what is counted here as JSON, units in the names.

    Returns
    -------
    str
        A JSON document.

    Examples
    --------
    >>> json.loads(as_json())["table_one"][0]["published"]["activations_gb"]
    5.14
    """
    table = [
        {"published": dataclasses.asdict(column), "counted": dataclasses.asdict(ours)}
        for column, ours in reproduced()
    ]
    document = {"paper": PAPER, "counted_with": counted_with(), "table_one": table}
    return json.dumps(document, indent=1) + "\n"


def _lines(column: PublishedBreakdown, ours: EncoderBreakdown) -> list[str]:
    published = column.parts_gb
    counted = {part: size / GB for part, size in ours.report.parts.items()}
    published_sum, counted_sum = sum(published.values()), sum(counted.values())
    lines = [f"{'GB':<22} {'published':>14}  {'counted here':>15}  {'ratio':>6}"]
    for part in PARTS:
        theirs, own = published.get(part), counted[part]
        left = "-" if theirs is None else _cell(theirs, published_sum)
        # Theirs are the software's, ours the batch: two different things.
        ratio = f"{own / theirs:.2f}" if theirs and part != "others" else "-"
        lines.append(
            _line(part.replace("_", " "), left, _cell(own, counted_sum), ratio)
        )
    shared = [
        f"{100 * parts['activations'] / sum(parts[p] for p in SHARED_PARTS):.1f} %"
        for parts in (published, counted)
    ]
    per_utterance = architecture(column.name).published_memory_gb
    return [
        *lines,
        _line(
            "total",
            _cell(published_sum, published_sum),
            _cell(counted_sum, counted_sum),
            "-",
        ),
        _line("share of activations", shared[0], shared[1], ""),
        _line(
            "Tables V, VI x batch", f"{per_utterance * column.batch:.3f}{'':8}", "", ""
        ),
    ]


def _cell(size_gb: float, total_gb: float) -> str:
    return f"{size_gb:.3f} {100 * size_gb / total_gb:5.1f} %"


def _line(head: str, published: str, counted: str, ratio: str) -> str:
    return f"{head:<22} {published:>14}  {counted:>15}  {ratio:>6}".rstrip()
