"""What storing the states of an optimizer in 8 bits costs, over a training."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import Checkpoint
from torch import Tensor, nn

from measurements.rebuilt import Batch, Rebuilt, place_of, read_state
from speechbrain_rev.optim import convert_checkpoint
from speechbrain_rev.optim.checkpoint import STATES_OF_TORCH
from speechbrain_rev.optim.strict import MIN_8BIT_ELEMENTS, read_moments

Row = dict[str, Any]
#: What the states of an optimizer are, in the order in which it has them.
MOMENTS = {"sgd": ("momentum",), "adam": ("first moment", "second moment")}
MOMENTS["adamw"] = MOMENTS["adam"]


def quantisation_errors(
    folder: str | Path, *, device: torch.device | str = "cpu"
) -> list[Row]:
    """Measure the error that optimizer states of 8 bits would make at each epoch.

    States of 32 bit are stored in 8 bits and read back, as one step of an 8-bit
    optimizer does; an error is the norm of the difference over the norm of what was
    stored, over all tensors that are stored so. Beside each state are told

    - of Adam and AdamW "update": the update that the moments stand for, m / (sqrt(v) +
      eps) with both corrected for their bias, as it is without another gradient;
    - "next step": what the next step adds to the weights, with 8-bit states against
      32-bit ones, the gradient of one batch being the same. This is what an error costs.

    Parameters
    ----------
    folder : str or Path
        A run with states of 32 bit.
    device : torch.device or str
        Where it is computed.

    Returns
    -------
    list of dict
        ``epoch``, ``step``, ``state``, ``layers`` ("all", "convolutions", "linear" or
        "classifier"), ``relative_error``, ``largest_relative_error`` of a tensor and
        that ``tensor``, ``values`` that are stored in 8 bits, ``share_of_values`` of the
        layers' values, and ``share_read_as_zero`` of those that were not.

    Raises
    ------
    ValueError
        If the run's states have 8 bits, or none of its tensors would be stored so.
    """
    run = Rebuilt.of(folder, device)
    if run.hparams["optimizer_bits"] != 32:
        raise ValueError(
            f"{folder} was trained with states of {run.hparams['optimizer_bits']} bit, "
            "whose error is in them already. Give a run with optimizer_bits: 32."
        )
    names = {p: name for name, p in run.modules.named_parameters()}
    if not _stored_in_8_bits(names):
        raise ValueError(
            f"No tensor of {folder} has {MIN_8BIT_ELEMENTS} values, from which on states "
            "are stored in 8 bits. Give a run of a larger encoder."
        )
    kinds = _by_layers(names)
    (batch,) = run.batches(1)
    rows = []
    for checkpoint in run.epochs():
        run.restore(checkpoint)
        stored, read = _states(run, checkpoint, batch)
        for state, layers in itertools.product(stored, kinds):
            if not stored[state].keys() & set(kinds[layers]):
                continue
            told = _error_row(stored[state], read[state], names, kinds[layers])
            rows.append(
                place_of(checkpoint) | {"state": state, "layers": layers} | told
            )
    return rows


_States = dict[str, dict[nn.Parameter, Tensor]]


def _states(
    run: Rebuilt, checkpoint: Checkpoint, batch: Batch
) -> tuple[_States, _States]:
    """Give the states of a checkpoint and what is read back of them, by what they are."""
    optimizers = [
        run.hparams["opt_class"](run.modules.parameters(), bits=bits)
        for bits in (32, 8)
    ]
    kept = read_state(checkpoint, "optimizer")
    for optimizer in optimizers:
        optimizer.load_state_dict(convert_checkpoint(kept, optimizer))
    stored, read = (_read(optimizer, run) for optimizer in optimizers)
    run.modules.zero_grad(set_to_none=True)
    run.loss(batch, precision=run.hparams["precision"]).backward()
    parameters = list(run.modules.parameters())
    nn.utils.clip_grad_norm_(parameters, run.hparams["max_grad_norm"])
    before = [p.detach().clone() for p in parameters]
    for optimizer, states in zip(optimizers, (stored, read), strict=True):
        # The step is in proportion to the rate; a small one drowns in the weights' digits.
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        with torch.no_grad():
            moved = {p: p - old for p, old in zip(parameters, before, strict=True)}
            for p, old in zip(parameters, before, strict=True):
                p.copy_(old)
        states["next step"] = {p: moved[p] for p in _stored_in_8_bits(parameters)}
    return stored, read


def _stored_in_8_bits(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.numel() >= MIN_8BIT_ELEMENTS]


def _read(optimizer: torch.optim.Optimizer, run: Rebuilt) -> _States:
    """Read the moments of an optimizer, and the update that Adam makes of them."""
    name, states = run.hparams["optimizer_name"], defaultdict(dict)
    (group,) = optimizer.param_groups
    for p in _stored_in_8_bits(run.modules.parameters()):
        state = optimizer.state[p]
        keys = STATES_OF_TORCH[name]
        of_torch = keys[0] in state
        moments = [state[key] for key in keys] if of_torch else read_moments(state)
        # The next step writes to torch's own.
        for moment, values in zip(MOMENTS[name], moments, strict=True):
            states[moment][p] = values.clone()
        if len(moments) == 2:
            states["update"][p] = _adam_update(*moments, float(state["step"]), group)
    return states


def _adam_update(
    first: Tensor, second: Tensor, step: float, group: dict[str, Any]
) -> Tensor:
    """Divide m by sqrt(v) + eps, both corrected for their bias (Kingma and Ba, algorithm 1)."""
    beta1, beta2 = group["betas"]
    mean, square = first / (1 - beta1**step), second / (1 - beta2**step)
    return mean / (square.sqrt() + group["eps"])


def _by_layers(names: dict[nn.Parameter, str]) -> dict[str, list[nn.Parameter]]:
    """Sort parameters by the kind of layer: of an encoder only these have many values."""
    kinds: dict[str, list[nn.Parameter]] = {"all": list(names)}
    for p, name in names.items():
        by_dimensions = {4: "convolutions", 2: "linear"}
        kind = (
            "classifier"
            if name.startswith("classifier.")
            else by_dimensions.get(p.dim())
        )
        if kind is not None:
            kinds.setdefault(kind, []).append(p)
    return kinds


def _error_row(
    stored: dict[nn.Parameter, Tensor],
    read: dict[nn.Parameter, Tensor],
    names: dict[nn.Parameter, str],
    chosen: list[nn.Parameter],
) -> Row:
    """Compare what was stored of some parameters with what is read back."""
    inside = [p for p in chosen if p in stored]
    off = {p: float((read[p] - stored[p]).double().norm()) for p in inside}
    size = {p: float(stored[p].double().norm()) for p in inside}
    relative = {p: off[p] / size[p] if off[p] else 0.0 for p in inside}
    worst = max(inside, key=relative.__getitem__)
    values = sum(p.numel() for p in inside)
    lost = sum(int(((read[p] == 0) & (stored[p] != 0)).sum()) for p in inside)
    return {
        "relative_error": math.hypot(*off.values()) / math.hypot(*size.values()),
        "largest_relative_error": relative[worst],
        "tensor": names[worst],
        "values": values,
        "share_of_values": values / sum(p.numel() for p in chosen),
        "share_read_as_zero": lost / values,
    }
