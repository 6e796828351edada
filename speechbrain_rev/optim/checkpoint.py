"""Checkpoints of optimizers: refused where they mean something else, or converted.

torch and bitsandbytes compare the number of parameters only. They load states of another
optimizer, another precision or another network of as many parameters, and training goes
on with wrong momenta.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from speechbrain_rev.optim.arguments import refuse_what_is_not_honoured
from speechbrain_rev.optim.reference import dynamic_tree, read_moments, write_moments

# The entry of the parameter group that says who wrote a checkpoint. It lies in the
# group because torch saves groups whole and leaves entries unknown to it alone.
BUILT_AS = "built_as"

# What torch's optimizers call the tensors of a parameter's state.
STATES_OF_TORCH = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
# bitsandbytes wraps its states so that FSDP does not gather them.
WRAPPED = "__bnb_optimizer_quant_state__"
# All values of that entry.
_WRITERS = tuple(
    f"{name} at {bits} bit" for name in STATES_OF_TORCH for bits in (8, 32)
)
_FIRST_STATES = ("state1", *{names[0] for names in STATES_OF_TORCH.values()})


def refuse_other_checkpoint(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    state_dtypes: Iterable[torch.dtype],
) -> None:
    """Raise unless a checkpoint was written by an optimizer built like this one.

    ``state_dtypes`` says how this optimizer stores the states of each parameter.
    """
    wanted = optimizer.param_groups[0][BUILT_AS]
    saved = written_by(optimizer, state_dict)
    if saved != wanted:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint holds the states of "
            f"{saved}. Resume with the optimizer and bits (optimizer_name and "
            f"optimizer_bits in a recipe) that wrote it, start from its weights alone, "
            f"or, where only the bits differ, convert it with "
            f"speechbrain_rev.optim.convert_checkpoint."
        )
    pairs = states_by_parameter(optimizer, state_dict)
    for index, ((param, state), dtype) in enumerate(
        zip(pairs, state_dtypes, strict=True)
    ):
        first = first_state(state)
        if first is not None and first.dtype != dtype:
            raise ValueError(
                f"The states of parameter {index}, shape {list(param.shape)}, are "
                f"{dtype} in this optimizer but {first.dtype} in the checkpoint. Give "
                f"keep_32bit as in the run that wrote it, or convert the checkpoint "
                f"with speechbrain_rev.optim.convert_checkpoint."
            )


def written_by(optimizer: torch.optim.Optimizer, state_dict: Any) -> str:
    """Return which optimizer of ours wrote a checkpoint, such as "adamw at 8 bit"."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"The checkpoint is a {type(state_dict).__name__}; give the dict that "
            f"state_dict() of an optimizer returned."
        )
    # A file of weights has no groups; it must not fail for want of a key.
    groups = state_dict.get("param_groups")
    group = groups[0] if isinstance(groups, list | tuple) and groups else {}
    saved = group.get(BUILT_AS) if isinstance(group, Mapping) else None
    if saved not in _WRITERS:
        raise ValueError(
            f"This optimizer is {optimizer.param_groups[0][BUILT_AS]}, but the "
            f"checkpoint was not written by an optimizer of speechbrain_rev.optim, so its "
            f"states are unknown. Resume with the optimizer that wrote it, or start "
            f"from its weights alone."
        )
    states = state_dict.get("state")
    if (
        not isinstance(group.get("params"), list | tuple)
        or not isinstance(states, Mapping)
        or not all(isinstance(state, Mapping) for state in states.values())
    ):
        raise ValueError(
            f"The checkpoint says it is of {saved}, but has no dict of states under "
            f"'state' or no list under 'params' of its group. Give what state_dict() "
            f"returned, unchanged, or start from the weights alone."
        )
    return str(saved)


def states_by_parameter(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Return each parameter and its state, unwrapped; empty where no gradient came yet."""
    params = optimizer.param_groups[0]["params"]
    saved_groups = state_dict["param_groups"]
    saved_params = saved_groups[0]["params"]
    if len(saved_groups) != 1 or len(params) != len(saved_params):
        raise ValueError(
            f"This optimizer has one group of {len(params)} parameters, but the "
            f"checkpoint {len(saved_groups)} of which the first has "
            f"{len(saved_params)}. Build the network that the checkpoint belongs to."
        )
    pairs = []
    for index, (param, saved_id) in enumerate(zip(params, saved_params, strict=True)):
        state = dict(state_dict["state"].get(saved_id, {}))
        state |= state.pop(WRAPPED, {})
        first = first_state(state)
        if first is not None and first.shape != param.shape:
            raise ValueError(
                f"Parameter {index} has shape {list(param.shape)}, but the checkpoint "
                f"holds states of shape {list(first.shape)} for it. Build the network "
                f"that the checkpoint belongs to."
            )
        pairs.append((param, state))
    return pairs


def first_state(state: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first state tensor; None before a gradient came, and for plain SGD."""
    return next((state[name] for name in _FIRST_STATES if name in state), None)


def convert_checkpoint(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert a checkpoint to the precision of an optimizer, which would refuse it else.

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
            f"speechbrain_rev.optim, so its form of states is unknown. Make it by SGD, "
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
            refuse_what_is_not_honoured(name, bits, group)
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
