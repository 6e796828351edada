"""Checkpoints of optimizers from one precision of their states to another."""

from collections.abc import Mapping
from typing import Any

import torch

from speechbrain_rev.optim.checkpoint import (
    BUILT_AS,
    STATES_OF_TORCH,
    WRAPPED,
    first_state,
    states_by_parameter,
    written_by,
)
from speechbrain_rev.optim.factory import refuse_what_is_not_honoured
from speechbrain_rev.optim.reference import dynamic_tree
from speechbrain_rev.optim.strict import read_moments, write_moments


def convert_checkpoint(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Give a checkpoint the precision of an optimizer that would else refuse it.

    From 8 to 32 bit each value becomes exactly what its code stands for. From 32 to 8
    bit it becomes the nearest code, off by at most 0.0071 of its block's largest
    magnitude (momentum, first moment) or 0.0036 (second moment, whose code is none of
    zero), as after each step at 8 bit. States that have the right precision already keep
    their bits, so that checkpoints with another ``keep_32bit`` can be converted too.

    Parameters
    ----------
    state_dict : mapping
        What ``state_dict()`` of an optimizer of the same class gave, made for the same
        parameters by this package. It is not changed.
    optimizer : torch.optim.Optimizer
        What the checkpoint is for, of this package too. It is not changed.

    Returns
    -------
    dict
        For ``optimizer.load_state_dict``. The learning rate and the other options are
        the checkpoint's, as always when one is loaded.

    Raises
    ------
    ValueError
        If the checkpoint or the optimizer is not of this package, if the checkpoint was
        written by another class, for other parameters or with an option that 8 bit
        cannot honour.

    Example
    -------
    A run that was trained at 8 bit goes on at 32:

    >>> from speechbrain_rev.optim import SGD
    >>> weight = torch.nn.Parameter(torch.ones(4096))
    >>> old, new = (SGD([weight], bits=bits, lr=0.1) for bits in (8, 32))
    >>> weight.sum().backward()
    >>> old.step()
    >>> new.load_state_dict(convert_checkpoint(old.state_dict(), new))
    >>> new.state[weight]["momentum_buffer"][:3]
    tensor([1., 1., 1.])
    """
    wanted = optimizer.param_groups[0].get(BUILT_AS)
    if wanted is None:
        raise ValueError(
            f"optimizer is of class {type(optimizer).__name__}, not of "
            f"speechbrain_rev.optim, so what it asks for cannot be told. Make it by SGD, "
            f"Adam, AdamW or build_optimizer of that."
        )
    saved = written_by(optimizer, state_dict)
    (name, bits), (saved_name, saved_bits) = map(_name_and_bits, (wanted, saved))
    if name != saved_name:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint holds the states of "
            f"{saved}: only the bits can be converted. Take the optimizer "
            f"that wrote it, or start from its weights alone."
        )
    pairs = states_by_parameter(optimizer, state_dict)
    group = state_dict["param_groups"][0]
    if saved_bits != bits:
        if bits == 8:
            refuse_what_is_not_honoured(name, bits, group, group["weight_decay"])
        own = optimizer.state_dict()["param_groups"][0]
        group = own | _options(name, bits, group)
    states = {}
    for index, (param, state) in enumerate(pairs):
        if first_state(state) is None:
            continue
        if bits == saved_bits == 32:
            states[index] = state
        elif bits == 32:
            states[index] = _state_of_torch(name, state, param)
        else:
            stored_bits = optimizer.state_bits(param)  # type: ignore[attr-defined]
            states[index] = _state_of_the_library(name, state, stored_bits)
    return {
        "state": states,
        "param_groups": [{**group, "params": list(range(len(pairs)))}],
    }


def _name_and_bits(built_as: str) -> tuple[str, int]:
    name, _, bits, _ = built_as.split()  # "sgd at 8 bit"
    return name, int(bits)


def _options(name: str, bits: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Name a saved group's options as an optimizer of other bits does."""
    common = ("lr", "initial_lr", "weight_decay")
    options = {key: group[key] for key in common if key in group}
    if name == "sgd" and bits == 8:
        options["betas"] = (group["momentum"], 0.0)
    elif name == "sgd":
        options |= {"momentum": group["betas"][0], "dampening": 0.0, "nesterov": False}
    else:
        options |= {"betas": group["betas"], "eps": group["eps"]}
        if bits == 32:
            options["amsgrad"] = False
    return options


def _state_of_torch(
    name: str, state: Mapping[str, Any], param: torch.Tensor
) -> dict[str, Any]:
    # In the memory format of the weight, as torch makes them.
    moments = [
        torch.empty_like(param, device=moment.device).copy_(moment)
        for moment in read_moments(state)
    ]
    steps = {} if name == "sgd" else {"step": torch.tensor(float(state["step"]))}
    return {**steps, **dict(zip(STATES_OF_TORCH[name], moments, strict=True))}


def _state_of_the_library(
    name: str, state: Mapping[str, Any], bits: int
) -> dict[str, Any]:
    # The library asks of SGD, in which torch counts no steps, only which is the first.
    step = int(state.get("step", 1))
    if bits == 8 and "absmax1" in state:
        return {"step": step, WRAPPED: {k: state[k] for k in state if k != "step"}}
    if "state1" in state:
        moments = read_moments(state)
    else:
        moments = [state[key].float() for key in STATES_OF_TORCH[name]]
    if bits == 32:
        numbered = enumerate(moments, 1)
        return {
            "step": step,
            WRAPPED: {f"state{n}": m.contiguous() for n, m in numbered},
        }
    tensors = write_moments(moments)
    for number, moment in enumerate(moments, 1):
        values = dynamic_tree(signed=number == 1)
        tensors[f"qmap{number}"] = values.to(moment.device)
    return {"step": step, WRAPPED: tensors}
