"""Checkpoints of optimizers: refused where they mean something else, or converted.

torch compares the number of parameters only. It loads states of another optimizer, another
precision or another network of as many parameters, and training goes on with wrong momenta.
Checkpoints that bitsandbytes wrote for earlier versions are read, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.optim.arguments import honoured, refuse_what_is_not_honoured
from speechbrain_rev.optim.states import moments_of, stored_moments

# The entry of the parameter groups that says who wrote a checkpoint. It lies in the
# groups because torch saves them whole and leaves entries unknown to it alone.
BUILT_AS = "built_as"
# What groups have beside options: entries of checkpoints, schedulers and the caller.
GROUP_ENTRIES = ("params", "initial_lr", "name", "param_names", BUILT_AS)

# What torch's optimizers call the tensors of a parameter's state.
STATES_OF_TORCH = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
# bitsandbytes wraps its states so that FSDP does not gather them.
WRAPPED = "__bnb_optimizer_quant_state__"
# All values of BUILT_AS.
_WRITERS = {
    f"{name} at {bits} bit": (name, bits)
    for name in STATES_OF_TORCH
    for bits in (8, 32)
}


def read_checkpoint(
    optimizer: Any, state_dict: Any, *, convert: bool = False
) -> dict[str, Any]:
    """Read a checkpoint of an optimizer built like this one, or of its class to convert."""
    own = optimizer.param_groups[0]
    name, bits = _WRITERS[own[BUILT_AS]]
    try:
        # bitsandbytes wraps the tensors of a state.
        states = {
            number: {**state, **state.get(WRAPPED, {})}
            for number, state in state_dict["state"].items()
        }
        saved = [{**g, "params": [*g["params"]]} for g in state_dict["param_groups"]]
        writer = saved[0].get(BUILT_AS)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"The checkpoint is not what state_dict() of an optimizer returned "
            f"({type(error).__name__}: {error}). Give that dict, unchanged, or start "
            f"from the weights alone."
        ) from error
    if convert and writer is None:
        writer = _writer_of_torch(saved[0], name)
    if writer not in _WRITERS:
        raise ValueError(
            f"This optimizer is {own[BUILT_AS]}, but the "
            f"checkpoint was not written by an optimizer of speechbrain_rev.optim, so its "
            f"states are unknown. Resume with the optimizer that wrote it, convert it "
            f"with speechbrain_rev.optim.convert_checkpoint if that is SGD, Adam or AdamW "
            f"of torch, or start from its weights alone."
        )
    groups = [_renamed(group, writer) for group in saved]
    form, other = _form(own), _form(groups[0])
    if _WRITERS[writer][0] != name if convert else other != form:
        raise ValueError(
            f"This optimizer is {form}, but the checkpoint holds the states of "
            f"{other}. Resume with the optimizer, bits, block and pack_small "
            f"(optimizer_name, optimizer_bits, optimizer_block and optimizer_pack_small in "
            f"a recipe) that wrote it, start from its weights alone, or, where the class "
            f"is the same, convert it: a run for other bits by speechbrain-rev convert "
            f"optimizer RUN --bits={bits}, else by "
            f"speechbrain_rev.optim.convert_checkpoint."
        )
    sizes, others = (
        [len(group["params"]) for group in each]
        for each in (optimizer.param_groups, groups)
    )
    if sizes != others:
        raise ValueError(
            f"Groups of this optimizer have {sizes} parameters, but those of the "
            f"checkpoint {others}. Build the network that the checkpoint belongs to."
        )
    read = {"state": states, "param_groups": groups}
    for index, (param, state) in enumerate(by_parameter(optimizer, read).items()):
        for moment in stored_moments(state):
            if moment.shape != param.shape:
                raise ValueError(
                    f"Parameter {index} has shape {list(param.shape)}, but the "
                    f"checkpoint holds states of shape {list(moment.shape)} for it. "
                    f"Build the network that the checkpoint belongs to."
                )
            dtype = moment.dtype if convert else optimizer.state_dtype(param)
            if moment.dtype != dtype:
                raise ValueError(
                    f"The states of parameter {index}, shape {list(param.shape)}, are "
                    f"{dtype} in this optimizer but {moment.dtype} in the checkpoint. "
                    f"Give keep_32bit as in the run that wrote it, or convert the "
                    f"checkpoint with speechbrain_rev.optim.convert_checkpoint."
                )
    return read


def placeholders(
    state_dict: Mapping[str, Any], *, channels_last: bool = False
) -> tuple[str, int, list[list[torch.nn.Parameter]]]:
    """Make parameters of the shapes that a checkpoint has states of, to convert it.

    Parameters
    ----------
    state_dict : mapping
        What ``state_dict()`` of an optimizer of this package gave.
    channels_last : bool
        Whether the network's convolutions have that memory format.

    Returns
    -------
    name : str
        Of the optimizer, see :func:`build_optimizer`.
    bits : int
        Of its states.
    groups : list of list of torch.nn.Parameter
        Those of each parameter group; one without states is empty.

    Raises
    ------
    ValueError
        If it is something else.

    Example
    -------
    >>> from speechbrain_rev.optim import SGD
    >>> weight = torch.nn.Parameter(torch.ones(64, 64))
    >>> optimizer = SGD([weight], bits=8, lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> name, bits, ((parameter,),) = placeholders(optimizer.state_dict())
    >>> name, bits, parameter.shape
    ('sgd', 8, torch.Size([64, 64]))
    """
    try:
        name, bits = _WRITERS[state_dict["param_groups"][0][BUILT_AS]]
        groups: list[list[torch.nn.Parameter]] = []
        for group in state_dict["param_groups"]:
            groups.append([])
            for number in group["params"]:
                state = state_dict["state"].get(number, {})
                moments = stored_moments({**state, **state.get(WRAPPED, {})})
                like = torch.empty(
                    moments[0].shape if moments else 0, dtype=torch.float32
                )
                if channels_last and like.ndim == 4:
                    like = like.to(memory_format=torch.channels_last)
                groups[-1].append(torch.nn.Parameter(like))
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"it was not written by an optimizer of speechbrain_rev.optim "
            f"({type(error).__name__}: {error}). Resume with the optimizer that wrote it, "
            f"or convert it with speechbrain_rev.optim.convert_checkpoint if that is SGD, "
            f"Adam or AdamW of torch."
        ) from error
    return name, bits, groups


def by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Give each parameter its state, empty before its first gradient."""
    numbers = parameters_of(state_dict["param_groups"])
    states = (state_dict["state"].get(number, {}) for number in numbers)
    return dict(zip(parameters_of(optimizer.param_groups), states, strict=True))


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """List the parameters of all groups, or their numbers in a checkpoint."""
    return [param for group in groups for param in group["params"]]


def _writer_of_torch(group: Mapping[str, Any], name: str) -> str | None:
    """Name the writer of a checkpoint of torch's SGD, Adam or AdamW."""
    if {"momentum", "dampening", "nesterov"} <= group.keys():
        return "sgd at 32 bit"
    if {"betas", "eps", "amsgrad"} <= group.keys():
        # Versions of torch that do not distinguish Adam and AdamW have the same states.
        decoupled = group.get("decoupled_weight_decay", name == "adamw")
        return "adamw at 32 bit" if decoupled else "adam at 32 bit"
    return None


def _renamed(group: Mapping[str, Any], writer: str) -> dict[str, Any]:
    """Name a group's options as this package does; bitsandbytes' SGD has betas."""
    name, bits = _WRITERS[writer]
    if bits == 32 or "block_size" in group:
        return {**group, BUILT_AS: writer}
    usual = {"block_size": 256, "pack_small": False}
    if name == "sgd":
        momentum = group["betas"][0]
        usual |= {"momentum": momentum, "nesterov": False, "decoupled_decay": False}
    known = {*honoured(name, 8), *GROUP_ENTRIES} - usual.keys()
    return usual | {key: value for key, value in group.items() if key in known}


def _form(group: Mapping[str, Any]) -> str:
    """Put into words who computes, and how its states are stored."""
    if "block_size" not in group:
        return str(group[BUILT_AS])
    small = "packed" if group["pack_small"] else "at 32 bit"
    blocks = f"blocks of {group['block_size']} values with small tensors {small}"
    return f"{group[BUILT_AS]} in {blocks}"


def convert_checkpoint(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert a checkpoint to the form of an optimizer, which would refuse it else.

    From 8 to 32 bits each value becomes exactly what its code stands for. From 32 to 8
    bits it becomes the nearest code, off by at most 0.0071 of its
    block's largest magnitude (momentum, first moment) or 0.0036 (second moment, whose
    code is none of zero), as after each step at 8 bits. From 8 to 32 bits and back, with
    the same ``block``, it gets its code again. States that have the right form
    already keep their bits, so that checkpoints with another ``keep_32bit`` can be
    converted too.

    Parameters
    ----------
    state_dict : mapping
        What ``state_dict()`` of an optimizer of the same class gave, made for the same
        parameters by this package or by torch. It is not changed.
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
        If the optimizer is not of this package or the checkpoint of neither, if it was
        written by another class, for other parameters or with an option that the
        optimizer cannot honour.

    Example
    -------
    A run that was trained at 8 bits goes on at 32:

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
            f"speechbrain_rev.optim, so its form of states is unknown. Make it by SGD, "
            f"Adam, AdamW or build_optimizer of that."
        )
    name, bits = _WRITERS[wanted]
    read = read_checkpoint(optimizer, state_dict, convert=True)
    groups, block = read["param_groups"], read["param_groups"][0].get("block_size", 0)
    _, saved_bits = _WRITERS[groups[0][BUILT_AS]]
    for i, own in enumerate(optimizer.param_groups):
        refuse_what_is_not_honoured(name, bits, groups[i])
        kept = {
            key: value
            for key, value in groups[i].items()
            if bits == saved_bits or key in own or key in GROUP_ENTRIES
        }
        form = {k: own[k] for k in (BUILT_AS, "block_size", "pack_small") if k in own}
        # 8 bits have no amsgrad, whose states would be missing.
        usual = own | ({"amsgrad": False} if "amsgrad" in own else {})
        groups[i] = usual | kept | form
    if bits == 8:
        converted: Any = copy.copy(optimizer)
        converted.take_up(read, block)
        return dict(converted.state_dict())
    for param, state in by_parameter(optimizer, read).items():
        if "state1" in state:
            # In the memory format of the weight, as torch makes them.
            moments = [
                torch.empty_like(param, device=moment.device).copy_(moment)
                for moment in moments_of(state, block)
            ]
            step = {"step": torch.tensor(float(state["step"]), dtype=torch.float32)}
            state.clear()
            state.update({} if name == "sgd" else step)
            state.update(zip(STATES_OF_TORCH[name], moments, strict=True))
    return read
