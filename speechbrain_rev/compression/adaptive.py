"""Error bounds of convolutions' inputs that follow the training.

The error that compression puts into a weight's gradient is a sum of many small ones. Its
deviation follows from the bound, the number of values that are not zero and the gradient
of the loss at the convolution's output (section 3 of the paper), so that a bound can be
chosen for a wanted deviation: a hundredth of the weight's average momentum (section 4).
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from speechbrain_rev.compression.bounds import (
    Bound,
    FixedBound,
    RangeBound,
    Rule,
    check_positive,
)
from speechbrain_rev.compression.momentum import mean_momentum

Form = Literal["derived", "paper-mean", "paper-max"]
_FORMS = ("derived", "paper-mean", "paper-max")
#: The paper's empirical coefficient, in section 5.2.
_A = 0.32


@dataclass
class _Sums:
    """What was seen of a layer since the last step of the optimizer."""

    #: Of squares of the loss's gradient where the input is not zero, by output channel.
    squares: Tensor | float = 0.0
    #: Of magnitudes, of each utterance's largest one, and how many there are of each.
    magnitudes: Tensor | float = 0.0
    largest: Tensor | float = 0.0
    values: int = 0
    utterances: int = 0
    #: Of the fraction of the input that is not zero, weighted by utterances.
    nonzero: Tensor | float = 0.0
    #: Of the weight's gradient when the backward pass has ended.
    raw_norm: Tensor | float = 0.0
    #: How much of it the optimizer sees: loss scaling undone, gradients clipped.
    share: float | None = None


class GradientBound(Rule):
    """Bounds under which the error of a weight's gradient is a part of its momentum.

    Parameters
    ----------
    target : float
        Deviation of the error, as a fraction of the mean magnitude of the weight's
        momentum (equation 8; 0.01 there).
    form : {"derived", "paper-mean", "paper-max"}
        How a deviation sigma becomes a bound. With L the gradient of the mean loss at the
        convolution's output, N utterances, R the part of the input that is not zero and
        Ho x Wo the output's size: "derived" takes the error as uniform and each value's
        as independent, sigma * sqrt(3) / (rms(L) * sqrt(N * Ho * Wo * R)). The paper's
        equation 9, sigma / (0.32 * L * sqrt(N * R)), is read with the mean of abs(L), or
        as its equation 5 has it with the mean over utterances of the largest abs(L).
    every : int
        Steps of the optimizer between two looks (W in section 4.1); there are earlier
        ones after 1, 10, 100, ... steps.
    before : Rule or None
        Bounds until there is a momentum; None for 1e-3 of the range.

    Raises
    ------
    ValueError
        If the target is not positive and finite, there is no such form, or ``every`` is
        no positive whole number.

    Examples
    --------
    >>> from speechbrain_rev.compression import ActivationCompression
    >>> conv = torch.nn.Conv2d(1, 4, 3, bias=False)
    >>> optimizer = torch.optim.SGD(conv.parameters(), lr=0.01, momentum=0.9)
    >>> bound = GradientBound(0.01)
    >>> bound.follow(optimizer)
    >>> compression = ActivationCompression(convolutions=bound)
    >>> for _ in range(2):
    ...     with compression.during(conv):
    ...         loss = conv(torch.randn(4, 1, 20, 30)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> list(bound.bounds)
    ['']
    """

    def __init__(
        self,
        target: float = 0.01,
        *,
        form: Form = "derived",
        every: int = 1000,
        before: Rule | None = None,
    ) -> None:
        check_positive("target", target)
        if form not in _FORMS:
            raise ValueError(
                f"form is {form!r}; it must be one of {', '.join(map(repr, _FORMS))}."
            )
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; it must be a whole number above 0.")
        self.target, self.form, self.every = target, form, every
        self.before: Rule = before or RangeBound(1e-3)
        #: Steps of the optimizer that were followed.
        self.steps = 0
        #: Absolute bounds by layer, as they were last computed.
        self.bounds: dict[str, float] = {}
        self._due = self._warned = False
        self._sums: dict[str, _Sums] = {}
        self._layers: dict[int, str] = {}
        self._parameters: list[weakref.ref[Tensor]] = []
        self._weights: dict[int, weakref.ref[Tensor]] = {}
        #: The step of the optimizer before which the weights were found.
        self._found_at = -1
        self._followed: list[weakref.ref[torch.optim.Optimizer]] = []

    def bound_for(self, layer: str) -> Bound:
        """Give the bound of a layer's input as it is now."""
        if layer in self.bounds:
            return FixedBound(self.bounds[layer])
        return self.before.bound_for(layer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the momentum of an optimizer's weights from now on.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            That trains the network. Loss scaling, clipping and the accumulation of
            gradients are seen in what it is given.
        """
        if any(own() is optimizer for own in self._followed):
            return
        self._followed.append(weakref.ref(optimizer))
        for weight in _weights_of(optimizer):
            self._parameters.append(weakref.ref(weight))
            if weight.dim() > 2 and weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._accumulated)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def called(self, layer: str, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
        """Look at a convolution's input, and at the gradient of its output to come."""
        if not self._followed and not self._warned:
            self._warned = True
            warnings.warn(
                "Error bounds are to follow momentum, but no optimizer: they stay as they "
                f"are before there is one ({self.before}). Call follow(optimizer) before "
                "the first step.",
                stacklevel=2,
            )
        if not self._due or weight is None or not y.requires_grad:
            return
        if self._found_at != self.steps:
            # Where weights lie may have changed since: on another device, in a new layout.
            known = [p for ref in self._parameters if (p := ref()) is not None]
            self._weights = {_key(p): weakref.ref(p) for p in known}
            self._found_at = self.steps
        key = _key(weight)
        own = self._weights.get(key)
        whole = None if own is None else own()
        if whole is None:
            return
        self._layers[key] = layer
        nonzero = x.detach().count_nonzero() / max(1, x.numel())
        channels = whole.shape[0]

        def look(grad: Tensor) -> None:
            sums = self._sums.setdefault(layer, _Sums())
            magnitude = grad.detach().float().abs()
            sums.squares = sums.squares + nonzero * magnitude.square().sum() / channels
            sums.magnitudes = sums.magnitudes + magnitude.sum()
            sums.largest = sums.largest + magnitude.flatten(1).amax(1).sum()
            sums.values += magnitude.numel()
            sums.utterances += len(magnitude)
            sums.nonzero = sums.nonzero + nonzero * len(magnitude)

        y.register_hook(look)

    def __getstate__(self) -> dict[str, Any]:
        # A copy follows no optimizer until it is told to.
        fresh = vars(GradientBound())
        here = [
            "_due", "_warned", "_sums", "_layers", "_weights", "_followed",
            "_parameters", "_found_at",
        ]  # fmt: skip
        return dict(vars(self)) | {name: fresh[name] for name in here}

    def state_dict(self) -> dict[str, Any]:
        """Give steps and bounds, to be saved with a run."""
        return {"steps": self.steps, "bounds": dict(self.bounds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved."""
        self.steps = int(state.get("steps", 0))
        self.bounds = {str(k): float(v) for k, v in state.get("bounds", {}).items()}

    def _accumulated(self, weight: Tensor) -> None:
        layer = self._layers.get(_key(weight))
        if self._due and layer in self._sums and weight.grad is not None:
            self._sums[layer].raw_norm = weight.grad.detach().float().norm()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for _unused, layer, weight in self._seen(optimizer):
            self._sums[layer].share = _share(self._sums[layer], weight, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Of several optimizers the first one counts the steps of the training.
        first = self._followed[0]() is optimizer
        self.steps += first
        spoiled = False
        for key, layer, weight in self._seen(optimizer):
            sums = self._sums.pop(layer)
            # By an overflow, in a step before this one that the loss scaler skipped.
            spoiled |= not math.isfinite(float(sums.squares))
            del self._layers[key]
            if sums.share is None:
                # A closure ran the backward pass within the step.
                sums.share = _share(sums, weight, optimizer)
            momentum = mean_momentum(optimizer, weight, self.steps)
            if momentum:
                bound = self._bound(sums, self.target * momentum)
                if 0 < bound < math.inf:
                    self.bounds[layer] = bound
        if first:
            self._due = spoiled or self._is_due()

    def _seen(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, str, Tensor]]:
        """List an optimizer's weights whose layers were looked at since its last step."""
        own = {id(weight) for weight in _weights_of(optimizer)}
        return [
            (key, layer, weight)
            for key, layer in self._layers.items()
            if layer in self._sums
            and (weight := self._weights[key]()) is not None
            and id(weight) in own
            and weight.grad is not None
        ]

    def _is_due(self) -> bool:
        early = self.steps < self.every and math.log10(self.steps).is_integer()
        return early or self.steps % self.every == 0

    def _bound(self, sums: _Sums, sigma: float) -> float:
        """Turn a deviation of the weight gradient's error into a bound."""
        if not sums.values or not sums.utterances or sums.share is None:
            return math.nan
        if self.form == "derived":
            squares = float(sums.squares) * sums.share**2
            return sigma * math.sqrt(3 / squares) if squares > 0 else math.nan
        nonzero = float(sums.nonzero) / sums.utterances
        seen = (
            float(sums.magnitudes) / sums.values
            if self.form == "paper-mean"
            else float(sums.largest) / sums.utterances
        )
        per_bound = _A * seen * sums.share * math.sqrt(sums.utterances * nonzero)
        return sigma / per_bound if per_bound > 0 else math.nan


def _weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _key(weight: Tensor) -> int:
    """Tell a weight by its storage, in which slices of it lie as well."""
    return weight.untyped_storage()._cdata


def _share(
    sums: _Sums, weight: Tensor, optimizer: torch.optim.Optimizer
) -> float | None:
    """Compare the gradient that the optimizer sees with that of the backward pass."""
    raw = float(sums.raw_norm)
    if weight.grad is None or not raw > 0:
        return None
    # An optimizer that undoes the loss scale by itself was given the scale.
    scale = float(getattr(optimizer, "grad_scale", None) or 1.0)
    return float(weight.grad.detach().float().norm()) / scale / raw
