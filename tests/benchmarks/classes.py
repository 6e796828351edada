"""A loss over some classes at a time, against the scores of all classes at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from speechbrain_rev.heads import HEAD, HEADS
from speechbrain_rev.lobes.classifier import build_classifier, build_loss
from speechbrain_rev.planner.memory import live_bytes_peak
from speechbrain_rev.sizes import MIB

from .harness import Result, interleaved_seconds, require

#: Classes, and utterances of a batch.
SIZES = ((60_000, 320), (333_000, 256))
ALL, PARTS = "all classes at once", "some classes at a time"
#: Relative: sums over classes are rounded in another order.
ROUNDED = 1e-5


def step(
    loss_name: str, classes: int, batch: int, in_parts: bool, device: torch.device
) -> tuple[Callable[[], Tensor], nn.Module]:
    """Make a step of the loss, which leaves gradients in a classifier."""
    with torch.device(device):
        torch.manual_seed(0)
        classifier = build_classifier(
            loss_name, input_size=HEAD.embedding_dim, out_neurons=classes
        )
        embeddings = torch.randn(batch, 1, HEAD.embedding_dim, requires_grad=True)
        targets = torch.arange(batch).unsqueeze(1) * (classes // batch)
    classifier.in_parts = in_parts
    loss = build_loss(loss_name)

    def run() -> Tensor:
        # Gradients are there already, as from the second step on.
        classifier.zero_grad(set_to_none=False)
        value: Tensor = loss(classifier(embeddings), targets)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    run()
    return run, classifier


def run(
    device: torch.device, sizes: tuple[tuple[int, int], ...] = SIZES, repeats: int = 5
) -> Result:
    """Count and time a step of each head; the baseline makes all scores at once."""
    rows, worst = [], 0.0
    for name in (next(iter(row.losses)) for row in HEADS.values()):
        for classes, batch in sizes:
            size = name, classes, batch
            made = {ALL: step(*size, False, device), PARTS: step(*size, True, device)}
            ways = {way: taken for way, (taken, _) in made.items()}
            gradients = [classifier.weight.grad for _, classifier in made.values()]
            losses = [taken() for taken in ways.values()]
            for one, other in (gradients, losses):
                error = float((other - one).norm() / one.norm())
                worst = max(worst, error)
                require(
                    error <= ROUNDED, f"{size}: {error:.1e} from all classes at once."
                )
            meta = torch.device("meta")
            counted = {
                way: live_bytes_peak(step(*size, way == PARTS, meta)[0]) for way in ways
            }
            seconds = interleaved_seconds(ways, device, repeats=repeats)
            rows.append(
                {
                    "loss": name,
                    "classes": classes,
                    "batch": batch,
                    "baseline": ALL,
                    "MiB": counted[PARTS] / MIB,
                    "baseline MiB": counted[ALL] / MIB,
                    "times its bytes": counted[PARTS] / counted[ALL],
                    "s": seconds[PARTS].median,
                    "times its time": seconds[PARTS].median / seconds[ALL].median,
                }
            )
            print(*rows[-1].values(), flush=True)
    return Result(
        "classes",
        "What does a loss over some classes at a time take?",
        f"float32, embeddings of {HEAD.embedding_dim}; bytes alive beside "
        f"weight and gradient, counted on meta tensors; median of {repeats} interleaved steps",
        rows,
        f"loss and gradients within {worst:.1e} of those with all classes at once",
    )
