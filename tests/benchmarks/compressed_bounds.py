"""What error bounds of compressed activations give, of both kinds of layers.

Of convolutions' inputs it is compared how far the deviation of the weight gradient's
error is from what was aimed at, by the form that turns one into the other. Of batch
normalisations' inputs the table shows what a bound does to the gradient that is handed down,
layer by layer and at the features, to choose one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.compression import (
    ActivationCompression,
    DeviationBound,
    GradientBound,
    RangeBound,
)
from speechbrain_rev.compression.adaptive import mean_momentum
from speechbrain_rev.compression.bounds import Rule
from speechbrain_rev.reversible.norm import BatchNorm

from .compressed_ways import (
    AS_IT_IS,
    STATE,
    TARGET,
    Trained,
    check_audit,
    compressed,
    ratio_of,
    stored,
    trained,
)
from .harness import Result, distance
from .speech import MAX_GRAD_NORM, Training

FORMS = ("derived", "paper-mean", "paper-max")
RULES: dict[str, Rule] = {
    **{f"deviation {f:g}": DeviationBound(f) for f in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)},
    **{f"range {f:g}": RangeBound(f) for f in (1e-3, 1e-2)},
}
#: From this size of a layer's output on, the derived form is to hold.
LARGE = (10, 25)
#: What the derived form is to give there, as a part of the deviation aimed at.
WITHIN = 0.15
#: What is measured of either kind; the other kind's cells are empty.
HEADS = (
    "deviation / sigma", "least", "largest", "handed down", "at the features",
    "both kinds smaller", "both kinds' gradient error",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is measured; ``state`` is what ``compressed_training`` left."""

    name: str = "resnet34"
    state: Path = STATE
    batch: int = 8
    frames: int = 200
    row: Mapping[str, Any] = field(default_factory=dict)


def gradients_of(
    training: Training, state: Trained
) -> tuple[dict[str, Tensor], Tensor]:
    """Take gradients of weights, by their names, and of the features."""
    feats, speakers = state.batch
    feats = feats.clone().requires_grad_()
    training.optimizer.zero_grad()
    training.loss_of((feats, speakers)).backward()
    named = training.encoder.named_parameters()
    return {name: p.grad.clone() for name, p in named}, feats.grad


class Exact:
    """A step that stored everything.

    Attributes
    ----------
    gradients : dict of str to torch.Tensor
        Of weights, by their names.
    at_features : torch.Tensor
        The gradient of the features.
    share : float
        How much of a gradient is left when all are clipped.
    maps : dict of str to tuple
        Size of each convolution's output.
    layers : dict of str to tuple
        Each normalisation, its input, and the gradient of its output.
    """

    def __init__(self, state: Trained) -> None:
        training = state.build(stored(state.name))
        self.maps: dict[str, tuple[int, int]] = {}
        self.layers: dict[str, tuple[BatchNorm, Tensor, Tensor]] = {}
        names = {module: name for name, module in training.encoder.named_modules()}

        def note(module: nn.Module, given: Any, y: Tensor) -> None:
            name = names[module]
            if isinstance(module, nn.Conv2d):
                self.maps[name] = y.shape[2], y.shape[3]
                return
            x = given[0].detach().clone()

            def note_gradient(grad: Tensor) -> None:
                self.layers[name] = module, x, grad.clone()

            y.register_hook(note_gradient)

        hooks = [
            module.register_forward_hook(note)
            for module in names
            if isinstance(module, nn.Conv2d | BatchNorm)
        ]
        self.gradients, self.at_features = gradients_of(training, state)
        for hook in hooks:
            hook.remove()
        norm = torch.stack([p.grad.norm() for p in training.parameters]).norm()
        self.share = min(1.0, MAX_GRAD_NORM / float(norm))

    def error_of(self, gradients: Mapping[str, Tensor]) -> float:
        """Tell how far gradients are from these, as a part of them."""
        return distance(gradients.values(), self.gradients.values())


def of_a_form(form: str, state: Trained, exact: Exact) -> dict[str, Any]:
    """Compare errors of weight gradients with the deviation that is aimed at."""
    training = state.build(stored(state.name))
    training.encoder.set_mode("compress")
    bound = state.followed(training, GradientBound(TARGET, form=form, every=1))
    gradients, _ = gradients_of(training, state)
    check_audit(training)
    large, everywhere = [], []
    for name, size in exact.maps.items():
        # What shares its input with another layer may have that one's bound.
        record = training.encoder.compression.records.get(name)
        weight = training.encoder.get_submodule(name).weight
        momentum = mean_momentum(training.optimizer, weight, bound.steps)
        if record is None or not momentum or name not in bound.bounds:
            continue
        off = gradients[f"{name}.weight"] - exact.gradients[f"{name}.weight"]
        error = float(off.square().mean().sqrt()) * exact.share
        everywhere.append(error / (TARGET * momentum))
        if size[0] >= LARGE[0] and size[1] >= LARGE[1]:
            large.append(everywhere[-1])
    shown = large or everywhere
    return {
        "inputs of": "convolutions",
        "rule": f"GradientBound({TARGET:g}), {form}",
        "inputs smaller": ratio_of(training, exact.maps),
        "gradient error": exact.error_of(gradients),
        "deviation / sigma": statistics.median(shown),
        "least": min(shown),
        "largest": max(shown),
    }


def of_a_rule(words: str, rule: Rule, state: Trained, exact: Exact) -> dict[str, Any]:
    """Measure what a bound of normalisations' inputs does to gradients."""
    alone = state.build(compressed(state.name, words, AS_IT_IS, rule))
    gradients, at_features = gradients_of(alone, state)
    ratio = ratio_of(alone, exact.layers)
    check_audit(alone)
    both = state.build(compressed(state.name, words, "derived", rule))
    together, _ = gradients_of(both, state)
    handed = [handed_down(rule, *layer) for layer in exact.layers.values()]
    return {
        "inputs of": "normalisations",
        "rule": words,
        "inputs smaller": ratio,
        "gradient error": exact.error_of(gradients),
        "handed down": statistics.median(handed),
        "at the features": distance(at_features, exact.at_features),
        "both kinds smaller": ratio_of(both),
        "both kinds' gradient error": exact.error_of(together),
    }


def handed_down(rule: Rule, norm: BatchNorm, x: Tensor, grad: Tensor) -> float:
    """Tell how far the gradient that one layer hands down is off, as a part of it."""
    handed = []
    for wanted in (True, False):
        leaf = x.clone().requires_grad_()
        with ActivationCompression(normalisations=rule).during(norm, wanted=wanted):
            y = norm(leaf)
        y.backward(grad)
        handed.append(leaf.grad)
    return distance(*handed)


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Measure all forms and rules; the baseline is the stored step's gradient."""
    setting = setting or Setting()
    state = trained(
        setting.name,
        batch=setting.batch,
        frames=setting.frames,
        state=setting.state,
        row=setting.row,
    )
    exact = Exact(state)
    rows = [of_a_form(form, state, exact) for form in FORMS]
    rows += [of_a_rule(words, rule, state, exact) for words, rule in RULES.items()]
    return Result(
        "compressed_bounds",
        "What does a bound of an activation's error do to gradients?",
        f"{setting.name} after 300 steps of compressed_training, float32, batch "
        f"{setting.batch} of {setting.frames} frames of minivox; one kind of layers "
        "compressed, where not both; deviation / sigma: of the error of a "
        f"convolution's weight gradient and the one aimed at, {TARGET:g} of the momentum, "
        f"median, least and largest of layers with maps of {LARGE[0]}x{LARGE[1]} and "
        "larger; handed down: error of the gradient that one normalisation hands down, "
        "median of all, and at the features after all; both kinds: with the "
        "derived form",
        [dict.fromkeys(HEADS, "") | {"baseline": "stored"} | row for row in rows],
        "tensors of a step of 2 utterances decoded: errors within bounds, zeros and signs "
        f"kept. {verdict(rows)}",
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """State whether the derived form gives the deviation that it aims at."""
    least, largest = rows[0]["least"], rows[0]["largest"]
    held = least >= 1 - WITHIN and largest <= 1 + WITHIN
    return (
        f"The derived form gives {least:.2f} to {largest:.2f} of the deviation aimed at, "
        f"which is {'' if held else 'NOT '}within {100 * WITHIN:.0f} %"
    )
