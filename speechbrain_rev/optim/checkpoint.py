"""Checkpoints of optimizers: refused where they mean something else, or converted.

torch compares the number of parameters only. It loads states of another optimizer, another
precision or another network of as many parameters, and training goes on with wrong momenta.
Checkpoints that bitsandbytes wrote for earlier versions are read, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.optim.arguments import honoured, refuse_what_is_not_honoured
from speechbrain_rev.optim.states import Storage, moments_of, stored_moments

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


def read_checkpoint(optimizer: Any, state_dict: Any) -> dict[str, Any]:
    """Read a checkpoint that was written by an optimizer built like this one."""
    wanted = optimizer.param_groups[0][BUILT_AS]
    saved = _written_by(wanted, state_dict)
    if saved != wanted:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint holds the states of "
            f"{saved}. Resume with the optimizer and bits (optimizer_name and "
            f"optimizer_bits in a recipe) that wrote it, start from its weights alone, "
            f"or, where only the bits differ, convert it with "
            f"speechbrain_rev.optim.convert_checkpoint."
        )
    read = _belonging_to(optimizer, state_dict)
    if saved.endswith(" 8 bit"):
        own = Storage.of(optimizer.param_groups[0])
        its = Storage.of(read["param_groups"][0])
        if own != its:
            raise ValueError(
                f"This optimizer stores {own}, the checkpoint {its}. Give block and "
                "pack_small (optimizer_block and optimizer_pack_small in a recipe) as in "
                "the run that wrote it, or convert it with "
                "speechbrain_rev.optim.convert_checkpoint."
            )
    states = (pair for group in by_parameter(optimizer, read) for pair in group.items())
    for index, (param, state) in enumerate(states):
        dtype = optimizer.state_dtype(param)
        for moment in stored_moments(state):
            if moment.dtype != dtype:
                raise ValueError(
                    f"The states of parameter {index}, shape {list(param.shape)}, are "
                    f"{dtype} in this optimizer but {moment.dtype} in the checkpoint. "
                    f"Give keep_32bit as in the run that wrote it, or convert the "
                    f"checkpoint with speechbrain_rev.optim.convert_checkpoint."
                )
    return read


def by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> list[dict[Tensor, dict[str, Any]]]:
    """Give each parameter of each group its state, empty before its first gradient."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    return [
        {
            param: state_dict["state"].get(number, {})
            for param, number in zip(own["params"], saved["params"], strict=True)
        }
        for own, saved in groups
    ]


def _written_by(wanted: str, state_dict: Any) -> str:
    """Return which optimizer of ours wrote a checkpoint, such as "adamw at 8 bit"."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"The checkpoint is a {type(state_dict).__name__}; give the dict that "
            f"state_dict() of an optimizer returned."
        )
    # A file of weights has no groups; it must not fail for want of a key.
    groups, states = (state_dict.get(key) for key in ("param_groups", "state"))
    groups = groups if isinstance(groups, list | tuple) else []
    group = groups[0] if groups else {}
    saved = group.get(BUILT_AS) if isinstance(group, Mapping) else None
    if saved not in _WRITERS:
        raise ValueError(
            f"This optimizer is {wanted}, but the "
            f"checkpoint was not written by an optimizer of speechbrain_rev.optim, so its "
            f"states are unknown. Resume with the optimizer that wrote it, convert it "
            f"with speechbrain_rev.optim.convert_checkpoint if that is SGD, Adam or AdamW "
            f"of torch, or start from its weights alone."
        )
    if (
        not all(isinstance(g.get("params"), list | tuple) for g in groups)
        or not isinstance(states, Mapping)
        or not all(isinstance(state, Mapping) for state in states.values())
    ):
        raise ValueError(
            f"The checkpoint names {saved}, but has no dict of states under "
            f"'state' or no list under 'params' of its groups. Give what state_dict() "
            f"returned, unchanged, or start from the weights alone."
        )
    return str(saved)


def _belonging_to(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Name options and states as this package does; refuse those of other parameters."""
    own, saved = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state_dict["param_groups"])
    )
    if own != saved:
        raise ValueError(
            f"This optimizer has {_counted(own)}, but the checkpoint "
            f"{_counted(saved)}. Build the network that the checkpoint belongs to."
        )
    # bitsandbytes names the values of codes in each state, which are the same.
    states = {
        number: {
            key: value
            for key, value in {**state, **state.get(WRAPPED, {})}.items()
            if key != WRAPPED and not key.startswith("qmap")
        }
        for number, state in state_dict["state"].items()
    }
    groups = [_renamed(group) for group in state_dict["param_groups"]]
    read = {"state": states, "param_groups": groups}
    pairs = (pair for group in by_parameter(optimizer, read) for pair in group.items())
    for index, (param, state) in enumerate(pairs):
        for moment in stored_moments(state):
            if moment.shape != param.shape:
                raise ValueError(
                    f"Parameter {index} has shape {list(param.shape)}, but the "
                    f"checkpoint holds states of shape {list(moment.shape)} for it. "
                    f"Build the network that the checkpoint belongs to."
                )
    return read


def _counted(counts: list[int]) -> str:
    groups = f"{len(counts)} groups" if len(counts) > 1 else "one group"
    return f"{groups} of {' and '.join(map(str, counts))} parameters"


def _renamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Name a group's options as this package does; bitsandbytes' SGD has betas."""
    name, bits = _WRITERS[group[BUILT_AS]]
    if bits == 32 or "block_size" in group:
        return dict(group)
    usual = {"block_size": 256, "pack_small": False}
    if name == "sgd":
        momentum = group["betas"][0]
        usual |= {"momentum": momentum, "nesterov": False, "decoupled_decay": False}
    known = {*honoured(name, 8), *GROUP_ENTRIES} - usual.keys()
    return usual | {key: value for key, value in group.items() if key in known}


def convert_checkpoint(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert a checkpoint to the form of an optimizer, which would refuse it else.

    From 8 to 32 bit each value becomes exactly what its code stands for. From 32 to 8
    bit it becomes the nearest code, off by at most 0.0071 of its
    block's largest magnitude (momentum, first moment) or 0.0036 (second moment, whose
    code is none of zero), as after each step at 8 bit. States that have the right form
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
            f"speechbrain_rev.optim, so its form of states is unknown. Make it by SGD, "
            f"Adam, AdamW or build_optimizer of that."
        )
    name, bits = _WRITERS[wanted]
    state_dict = _with_writer(state_dict, name)
    saved = _written_by(wanted, state_dict)
    saved_name, saved_bits = _WRITERS[saved]
    if name != saved_name:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint holds the states of "
            f"{saved}: only the form of states can be converted. Take the optimizer "
            f"that wrote it, or start from its weights alone."
        )
    read = _belonging_to(optimizer, state_dict)
    groups, block = read["param_groups"], read["param_groups"][0].get("block_size", 0)
    for i, own in enumerate(optimizer.param_groups):
        refuse_what_is_not_honoured(name, bits, groups[i])
        kept = {
            key: value
            for key, value in groups[i].items()
            if bits == saved_bits or key in own or key in GROUP_ENTRIES
        }
        form = {k: own[k] for k in (BUILT_AS, "block_size", "pack_small") if k in own}
        # 8 bit has no amsgrad, whose states would be missing.
        usual = own | ({"amsgrad": False} if "amsgrad" in own else {})
        groups[i] = usual | kept | form
    if bits == 8:
        converted: Any = optimizer
        converted = converted.blank()
        converted.take_up(read, block)
        return dict(converted.state_dict())
    for states in by_parameter(optimizer, read):
        for param, state in states.items():
            if "state1" in state:
                # In the memory format of the weight, as torch makes them.
                moments = [
                    torch.empty_like(param, device=moment.device).copy_(moment)
                    for moment in moments_of(state, block)
                ]
                step = torch.tensor(float(state["step"]))
                state.clear()
                state.update({} if name == "sgd" else {"step": step})
                state.update(zip(STATES_OF_TORCH[name], moments, strict=True))
    return read


def _with_writer(state_dict: Any, name: str) -> Any:
    """Name the writer of a checkpoint of torch's SGD, Adam or AdamW."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(g, Mapping) for g in groups):
        return state_dict
    marked = []
    for group in groups:
        if BUILT_AS in group:
            return state_dict
        if {"momentum", "dampening", "nesterov"} <= group.keys():
            writer = "sgd"
        elif {"betas", "eps", "amsgrad"} <= group.keys():
            # Versions of torch that do not distinguish Adam and AdamW have the same states.
            decoupled = group.get("decoupled_weight_decay", name == "adamw")
            writer = "adamw" if decoupled else "adam"
        else:
            return state_dict
        marked.append({**group, BUILT_AS: f"{writer} at 32 bit"})
    return {**state_dict, "param_groups": marked}
