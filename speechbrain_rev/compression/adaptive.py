"""Error bounds of convolutions' inputs that follow the training run.

The error that compression puts into a weight's gradient is a sum of many small ones. Its
deviation follows from the bound, the number of values that are not zero and the gradient
of the loss at the convolution's output (section 3 of the paper), so that a bound can be
chosen for a wanted deviation: a hundredth of the weight's average momentum (section 4).
"""

from __future__ import annotations

import functools
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
    RangeBound,
    Rule,
    check_positive,
)
from speechbrain_rev.torch_private import storage_key

#: Values of a block of 8-bit states of bitsandbytes.
_BLOCK = 256
#: Optimizers of bitsandbytes whose first state is Adam's first moment.
_MOMENTS = ("adam", "lamb")


def mean_momentum(
    optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int
) -> float | None:
    """Average the magnitude of a parameter's momentum.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        SGD with momentum or one of Adam's kind, of torch or of bitsandbytes, at 32 or at
        8 bit. Others have no momentum on the scale of a gradient: RMSprop's is divided.
    parameter : torch.Tensor
        One of its parameters.
    steps : int
        How many steps the momentum has gathered, where the optimizer does not count them.

    Returns
    -------
    float or None
        On the scale of a gradient: Adam's first moment without its bias, SGD's buffer
        times one minus its momentum, likewise. None if there is no such momentum, or none
        yet.

    Examples
    --------
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    >>> weight.grad = torch.tensor([1.0, -3.0])
    >>> sgd.step()
    >>> round(mean_momentum(sgd, weight, steps=1), 6)
    2.0
    """
    state = optimizer.state.get(parameter)
    if not state:
        return None
    group = next(
        group
        for group in optimizer.param_groups
        if any(parameter is own for own in group["params"])
    )
    # bitsandbytes' word for the arithmetic.
    kind = getattr(optimizer, "optimizer_name", None)
    damped = float(group.get("dampening", 0.0))
    # This package's optimizers with 8-bit states have it.
    read_momentum = getattr(optimizer, "read_momentum", None)
    if read_momentum is not None:
        momentum, part = read_momentum(parameter)
        found, kept, scale = _mean(momentum), float(part), 1.0
    elif "exp_avg" in state and state.keys() & {"exp_avg_sq", "exp_inf"}:
        found, kept, scale = _mean(state["exp_avg"]), float(group["betas"][0]), 1.0
    elif "state1" in state and kind in _MOMENTS:
        found, kept, scale = _mean_of_state(state), float(group["betas"][0]), 1.0
    elif "state1" in state and kind == "momentum":
        kept = float(group["betas"][0])
        found, scale = _mean_of_state(state), 1 - kept
    elif (
        state.get("momentum_buffer") is not None and "nesterov" in group and damped < 1
    ):
        kept = float(group["momentum"])
        found, scale = _mean(state["momentum_buffer"]), (1 - kept) / (1 - damped)
    else:
        return None
    steps = int(state.get("step", steps)) or steps
    return found * scale / (1 - kept ** max(1, steps))


def _mean(moment: Tensor) -> float:
    return float(moment.float().abs().mean())


def _mean_of_state(state: Mapping[str, Any]) -> float:
    moment = state["state1"]
    if moment.dtype is not torch.uint8:
        return _mean(moment)
    values = state["qmap1"].abs()[moment.flatten().int()]
    scales = state["absmax1"].repeat_interleave(_BLOCK)[: values.numel()]
    return float((values * scales).mean())


Form = Literal["derived", "paper-mean", "paper-max"]
_FORMS = ("derived", "paper-mean", "paper-max")
#: The paper's empirical coefficient, in section 5.2.
_A = 0.32


@dataclass
class _Sums:
    """What was seen of a weight since the last step of the optimizer.

    A layer may be called once for each part of its weight: then each counts as its part.
    """

    #: The layer that was called last, and the weight.
    layer: str
    weight: weakref.ref[Tensor]
    #: Sum of squares of the loss's gradient where the input is not zero, by output channel.
    squares: Tensor | float = 0.0
    #: Sums of magnitudes, of each utterance's largest one, and how many there are of each.
    magnitudes: Tensor | float = 0.0
    largest: Tensor | float = 0.0
    values: float = 0.0
    utterances: float = 0.0
    #: Sum of the fractions of inputs that are not zero, weighted by utterances.
    nonzero: Tensor | float = 0.0
    #: Norm of the weight's gradient when the backward pass has ended; None before.
    raw_norm: Tensor | None = None
    #: The part of it that the optimizer sees, without loss scale and after clipping.
    share: float | None = None

    def add(self, grad: Tensor, nonzero: Tensor, part: float) -> None:
        """Count the gradient of an output, [batch, channels, ...], of a weight's part."""
        norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
        squares = norm(grad).square() / grad.shape[1]
        self.squares = self.squares + part * nonzero * squares
        self.magnitudes = self.magnitudes + part * norm(grad, 1)
        largest = norm(grad.flatten(1), math.inf, dim=1)
        self.largest = self.largest + part * largest.sum()
        self.values += part * grad.numel()
        self.utterances += part * len(grad)
        self.nonzero = self.nonzero + part * nonzero * len(grad)


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
    limit : float
        Part of a tensor's range that no bound exceeds: one batch with hardly a gradient
        would give bounds that leave nothing of the activations until the next look.

    Raises
    ------
    ValueError
        If the target or the limit is not positive and finite, there is no such form, or
        ``every`` is no positive whole number.

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
        limit: float = 0.1,
    ) -> None:
        check_positive("target", target)
        self.limit = RangeBound(check_positive("limit", limit))
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
        self._due = self._warned = self._warned_of_momentum = False
        # By storage: what was seen of a weight, and the weight itself.
        self._sums: dict[int, _Sums] = {}
        self._weights: dict[int, weakref.ref[Tensor]] = {}
        #: The step of the optimizer before which the weights were looked up.
        self._found_at = -1
        #: Weights whose gradients are noticed, by identity.
        self._noticed: dict[int, weakref.ref[Tensor]] = {}
        self._followed: list[weakref.ref[torch.optim.Optimizer]] = []

    def __repr__(self) -> str:
        """Name what chooses the bounds, not their present values."""
        return (
            f"GradientBound({self.target:g}, form={self.form!r}, every={self.every}, "
            f"before={self.before}, limit={self.limit.fraction:g})"
        )

    def bound_for(self, layer: str) -> Bound:
        """Give the bound of a layer's input as it is now."""
        if layer in self.bounds:
            return _AtMost(self.bounds[layer], self.limit)
        return self.before.bound_for(layer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the momentum of an optimizer's weights from now on.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            That trains the network. Loss scaling, clipping and the accumulation of
            gradients are seen in what it is given. Of several the first one that is
            still there counts the steps.
        """
        if any(own is optimizer for own in self._living()):
            return
        self._followed.append(weakref.ref(optimizer))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def called(self, layer: str, x: Tensor, weight: Tensor | None, y: Tensor) -> None:
        """Look at a convolution's input, and at the gradient of its output to come."""
        if not self._warned and not self._living():
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
            self._find_weights()
        # Slices of a weight lie in its storage as well.
        key = storage_key(weight)
        reference = self._weights.get(key)
        whole = None if reference is None else reference()
        if reference is None or whole is None or not whole.requires_grad:
            return
        self._notice(whole)
        nonzero = x.detach().count_nonzero() / max(1, x.numel())
        part = weight.numel() / whole.numel()

        def look(grad: Tensor) -> None:
            sums = self._sums.get(key)
            # Sums of a backward pass whose gradients were thrown away start anew.
            if sums is None or (sums.raw_norm is not None and _is_zero(whole.grad)):
                sums = self._sums[key] = _Sums(layer, reference)
            sums.add(grad.detach(), nonzero, part)

        y.register_hook(look)

    def __getstate__(self) -> dict[str, Any]:
        # A copy follows no optimizer until ``follow`` is called.
        fresh = vars(GradientBound())
        here = [
            "_due", "_warned", "_warned_of_momentum", "_sums", "_weights",
            "_followed", "_noticed", "_found_at",
        ]  # fmt: skip
        return dict(vars(self)) | {name: fresh[name] for name in here}

    def state_dict(self) -> dict[str, Any]:
        """Give steps and bounds, and whether to look next, to be saved with a run."""
        return {
            "steps": self.steps,
            "bounds": dict(self.bounds),
            "due": self._due,
            "target": self.target,
            "form": self.form,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved; bounds for another target are scaled to this one.

        Raises
        ------
        ValueError
            If it is no state of such a rule.
        """
        names = list(self.state_dict())
        if not {*names} <= state.keys():
            raise ValueError(
                f"The state of a GradientBound has {', '.join(names)}; given is one with "
                f"{sorted(map(str, state)) or 'nothing'}. Give what state_dict() of a "
                "compression with such a rule gave."
            )
        self.steps = int(state["steps"])
        self._due = bool(state["due"])
        # A bound is in proportion to the target; of another form it is another one.
        scale = self.target / float(state["target"])
        if state["form"] != self.form:
            state = {**state, "bounds": {}}
            self._due = True
        self.bounds = {str(k): scale * float(v) for k, v in state["bounds"].items()}

    def _find_weights(self) -> None:
        """Find where weights lie now: on another device, in a new layout, or new ones."""
        known = [p for optimizer in self._living() for p in _weights_of(optimizer)]
        self._weights = {storage_key(p): weakref.ref(p) for p in known}
        self._found_at = self.steps
        self._sums.clear()

    def _notice(self, weight: Tensor) -> None:
        """Hear of a weight's gradient from now on."""
        known = self._noticed.get(id(weight))
        if known is None or known() is not weight:
            self._noticed[id(weight)] = weakref.ref(weight)
            weight.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, weight: Tensor) -> None:
        if (
            self._due
            and weight.grad is not None
            and (key := storage_key(weight)) in self._sums
        ):
            norm = torch.linalg.vector_norm(weight.grad.detach(), dtype=torch.float32)
            self._sums[key].raw_norm = norm

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for key, weight in self._seen(optimizer):
            self._sums[key].share = _share(self._sums[key], weight, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The first of several optimizers counts the steps of the training.
        first = self._living()[0] is optimizer
        self.steps += first
        spoiled = False
        bounds: dict[str, float] = {}
        seen, known = self._seen(optimizer), False
        for key, weight in seen:
            sums = self._sums.pop(key)
            # By an overflow, for which an optimizer may skip a step by itself.
            spoiled |= not math.isfinite(float(sums.squares))
            if sums.share is None:
                # A closure ran the backward pass inside the step.
                sums.share = _share(sums, weight, optimizer)
            momentum = mean_momentum(optimizer, weight, self.steps)
            known |= momentum is not None
            if momentum:
                bound = self._bound(sums, self.target * momentum)
                if 0 < bound < math.inf:
                    # Layers without a name of their own may share one.
                    bounds[sums.layer] = min(bound, bounds.get(sums.layer, math.inf))
        self.bounds.update(bounds)
        if seen and not known and not self._warned_of_momentum:
            self._warned_of_momentum = True
            warnings.warn(
                f"{type(optimizer).__name__} has no momentum on the scale of a gradient, "
                f"which error bounds are to follow: they stay {self.before}. Train with "
                "SGD with momentum or one of Adam's kind, or choose another rule.",
                stacklevel=3,
            )
        if first:
            self._due = spoiled or self._is_due()

    def _living(self) -> list[torch.optim.Optimizer]:
        """List the optimizers that are followed and have not been replaced."""
        return [own for ref in self._followed if (own := ref()) is not None]

    def _seen(self, optimizer: torch.optim.Optimizer) -> list[tuple[int, Tensor]]:
        """List an optimizer's weights whose layers were looked at since its last step."""
        own = {id(weight) for weight in _weights_of(optimizer)}
        return [
            (key, weight)
            for key, sums in self._sums.items()
            if (weight := sums.weight()) is not None
            and id(weight) in own
            and weight.grad is not None
        ]

    def _is_due(self) -> bool:
        early = self.steps < self.every and math.log10(self.steps).is_integer()
        return early or self.steps % self.every == 0

    def _bound(self, sums: _Sums, sigma: float) -> float:
        """Turn a deviation of the weight gradient's error into a bound."""
        if not sums.values or sums.share is None:
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


@dataclass(frozen=True)
class _AtMost:
    """An absolute bound, or a part of the range where that is smaller."""

    error_bound: float
    limit: RangeBound

    def __call__(self, x: Tensor) -> Tensor:
        return self.limit(x).clamp_max(self.error_bound)


def _weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _is_zero(grad: Tensor | None) -> bool:
    return grad is None or not bool(grad.any())


def _share(
    sums: _Sums, weight: Tensor, optimizer: torch.optim.Optimizer
) -> float | None:
    """Compare the gradient that the optimizer sees with that of the backward pass."""
    if weight.grad is None or sums.raw_norm is None:
        return None
    raw = float(sums.raw_norm)
    if not raw > 0:
        return None
    # An optimizer that divides by the loss scale itself was given the scale.
    scale = float(getattr(optimizer, "grad_scale", None) or 1.0)
    return float(weight.grad.detach().float().norm()) / scale / raw
