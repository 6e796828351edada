"""Refusing optimizer checkpoints that would load but mean something else.

torch and bitsandbytes compare the number of parameters only. States of another
optimizer, another precision or another network of as many parameters are taken without
a word, and training goes on with wrong momenta.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

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
# What an optimizer of this package can say of itself.
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

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        What the checkpoint is about to be loaded into.
    state_dict : mapping
        The checkpoint, as ``optimizer.state_dict()`` gives it.
    state_dtypes : iterable of torch.dtype, [parameters]
        How this optimizer stores the states of each parameter.

    Raises
    ------
    ValueError
        If the checkpoint is of another optimizer or precision, of other parameters, or
        keeps other parameters at 32 bit.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([{"params": [weight], "built_as": "sgd at 32 bit"}])
    >>> refuse_other_checkpoint(optimizer, optimizer.state_dict(), [torch.float32])
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
    """Read which optimizer of ours wrote a checkpoint.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        What the checkpoint is meant for.
    state_dict : object
        The checkpoint, whose form is checked.

    Returns
    -------
    str
        As the optimizers of this package note it, "adamw at 8 bit" for instance.

    Raises
    ------
    ValueError
        If the checkpoint is none of an optimizer, says nothing of it, or lacks states
        or parameters.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([{"params": [weight], "built_as": "sgd at 32 bit"}])
    >>> written_by(optimizer, optimizer.state_dict())
    'sgd at 32 bit'
    """
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
            f"states cannot be told. Resume with the optimizer that wrote it, or start "
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
    """Find the state that a checkpoint holds for each parameter of an optimizer.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        With one parameter group.
    state_dict : mapping
        The checkpoint.

    Returns
    -------
    list of (torch.Tensor, dict)
        Each parameter and its state, unwrapped; empty where no gradient came yet.

    Raises
    ------
    ValueError
        If the checkpoint belongs to other parameters.

    Example
    -------
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> (_, state), = states_by_parameter(optimizer, optimizer.state_dict())
    >>> state
    {'momentum_buffer': tensor([1., 1.])}
    """
    params, saved_groups = (
        optimizer.param_groups[0]["params"],
        state_dict["param_groups"],
    )
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
    """Find the first state tensor of a parameter, whoever computed it.

    Parameters
    ----------
    state : mapping
        Of one parameter, as :func:`states_by_parameter` gives it.

    Returns
    -------
    torch.Tensor or None
        None where no gradient came yet, and where SGD has no momentum.

    Example
    -------
    >>> first_state({"step": 3, "state1": torch.ones(1)})
    tensor([1.])
    """
    return next((state[name] for name in _FIRST_STATES if name in state), None)
