"""Figure 4 of "The Reversible Residual Network", redone, with exact streams beside.

At intervals of a training run, gradients of one batch are computed with stored and with
reconstructed activations; the figure is the angle between the two.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .harness import Result, require
from .pictures import gradient_angles
from .ranges import BATCH, FRAMES, N_MELS, WIDTHS, small
from .speech import RECIPE_BATCH, Speech, Training
from .steps import PRECISIONS

NAME = "revnet197"
STEPS, INTERVAL = 300, 10
#: fp16 has no instructions on most CPUs.
ON_CPU = ("float32", "bf16")
FORMATS = ("float", "exact")


def angle_degrees(a: Tensor, b: Tensor) -> float:
    """Measure the angle between two vectors, accurate where it is small, too.

    The arc cosine of the cosine knows nothing below 1e-6 degrees, for there the cosine
    is 1 in float64. Twice the arc tangent of |a - b| / |a + b|, of vectors of length 1,
    loses nothing (Kahan, "How Futile are Mindless Assessments of Roundoff in
    Floating-Point Computation?", 2006, section 12).

    Parameters
    ----------
    a, b : torch.Tensor, [...] of equal shape
        The vectors; taken as float64 in the order of the shape.

    Returns
    -------
    float
        Degrees from 0 to 180; exactly 0 for equal vectors.

    Raises
    ------
    ValueError
        If one of the vectors is zero or not finite.

    Example
    -------
    >>> import torch
    >>> round(angle_degrees(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 3.0])), 12)
    45.0
    """
    directions = []
    for x in (a, b):
        x = x.detach().double()
        length = float(x.norm())
        if not 0 < length < math.inf:
            raise ValueError(
                f"A vector of length {length} has no direction; give finite ones that "
                "are not zero."
            )
        directions.append(x / length)
    a, b = directions
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


def gradients(training: Training, probe: Any, batch: Any, mode: str) -> Tensor:
    """Gradients of a batch at the weights of a run, which goes on undisturbed."""
    probe.load_state_dict(training.encoder.state_dict())
    probe.set_mode(mode)
    probe.zero_grad()
    training.loss_of(batch, probe).backward()
    return torch.cat([p.grad.double().flatten() for p in probe.parameters()])


def train(precision: str, speech: Speech, device: torch.device) -> list[dict[str, Any]]:
    """Train with stored float streams; compare gradients before every tenth step."""
    training = Training(
        small(NAME, streams="float").to(device),
        NAME,
        speech,
        PRECISIONS[precision],
        rate=BATCH / RECIPE_BATCH,
        batch=BATCH,
    )
    training.loss.margin = 0.0  # as the recipe begins
    probes = {
        format: small(NAME, streams=format, verify=None).to(device)
        for format in FORMATS
    }
    points: dict[str, list[tuple[int, float]]] = {format: [] for format in FORMATS}
    losses = []
    for i in range(STEPS + 1):
        batch = training.next_batch()
        if i % INTERVAL == 0:
            for format, probe in probes.items():
                stored, again = (
                    gradients(training, probe, batch, mode)
                    for mode in ("store", "reconstruct")
                )
                require(
                    format != "exact" or torch.equal(stored, again),
                    f"Exact gradients differ in {precision}, step {i}.",
                )
                points[format].append((i, angle_degrees(stored, again)))
            print(precision, i, {f: p[-1][1] for f, p in points.items()}, flush=True)
        losses.append(training.step(batch))
    first, last = (sum(part) / len(part) for part in (losses[:20], losses[-20:]))
    worst = {format: max(a for _, a in points[format]) for format in FORMATS}
    return [
        {
            "precision": precision,
            "streams": format,
            "angle at first": points[format][0][1],
            "angle at last": points[format][-1][1],
            "largest angle": worst[format],
            "baseline": f"{precision}, float streams",
            "times the baseline": worst[format] / worst["float"],
            "mean loss, first and last 20": [round(first, 2), round(last, 2)],
            "steps and angles": points[format],
        }
        for format in FORMATS
    ]


def run(device: torch.device) -> Result:
    """Train once in each precision; the baseline is float streams."""
    speech = Speech(N_MELS, FRAMES)
    rows = []
    for precision in PRECISIONS if device.type == "cuda" else ON_CPU:
        rows += train(precision, speech, device)
    return Result(
        "angles",
        "By how many degrees do reconstructed activations turn the gradient?",
        f"{NAME} with all {sum(small(NAME).architecture.blocks)} blocks, widths "
        f"{WIDTHS}, {N_MELS} mel bands, {FRAMES} frames, batch {BATCH}; {STEPS} steps "
        f"on {speech.source}, AAM without margin, SGD at the recipe's rate "
        "for this batch",
        rows,
        "gradients of exact streams equal to the bit at each comparison",
    )


def draw(result: Result, path: Path) -> None:
    """Draw the result's curves."""
    gradient_angles(
        {
            f"{row['streams']} streams, {row['precision']}": row["steps and angles"]
            for row in result.rows
        },
        path,
        title="Angle between gradients of reconstructed and of stored activations",
        source=f"{result.setting}. {result.where}",
    )
