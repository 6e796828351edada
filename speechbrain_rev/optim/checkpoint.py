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

# The first state tensor of SGD and Adam, as torch and as bitsandbytes call it.
_FIRST_STATES = ("momentum_buffer", "exp_avg", "state1")
# bitsandbytes wraps its states so that FSDP does not gather them.
_WRAPPED = "__bnb_optimizer_quant_state__"


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
    group = optimizer.param_groups[0]
    # A file of weights has no groups; it must not fail for want of a key.
    saved_groups = state_dict.get("param_groups") or [{}]
    wanted, saved = group[BUILT_AS], saved_groups[0].get(BUILT_AS)
    if saved is None:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint was not written by an "
            f"optimizer of build_optimizer, so its states cannot be told. Resume with "
            f"the optimizer that wrote it, or start from its weights alone."
        )
    if saved != wanted:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint holds the states of "
            f"{saved}. Resume with the optimizer and bits (optimizer_name and "
            f"optimizer_bits in a recipe) that wrote it, or start from its weights "
            f"alone."
        )
    params, saved_params = group["params"], saved_groups[0]["params"]
    if len(saved_groups) != 1 or len(params) != len(saved_params):
        raise ValueError(
            f"This optimizer has one group of {len(params)} parameters, but the "
            f"checkpoint {len(saved_groups)} of which the first has "
            f"{len(saved_params)}. Build the network that the checkpoint belongs to."
        )
    for index, (param, saved_id, dtype) in enumerate(
        zip(params, saved_params, state_dtypes, strict=True)
    ):
        state = _first_state(state_dict["state"].get(saved_id, {}))
        if state is None:
            continue
        if state.shape != param.shape:
            raise ValueError(
                f"Parameter {index} has shape {list(param.shape)}, but the checkpoint "
                f"holds states of shape {list(state.shape)} for it. Build the network "
                f"that the checkpoint belongs to."
            )
        if state.dtype != dtype:
            raise ValueError(
                f"The states of parameter {index}, shape {list(param.shape)}, are "
                f"{dtype} in this optimizer but {state.dtype} in the checkpoint. Give "
                f"keep_32bit as in the run that wrote it."
            )


def _first_state(state: Mapping[str, Any]) -> torch.Tensor | None:
    tensors = {**state, **state.get(_WRAPPED, {})}
    # Missing where no gradient came yet, None where SGD has no momentum.
    return next((tensors[name] for name in _FIRST_STATES if name in tensors), None)
