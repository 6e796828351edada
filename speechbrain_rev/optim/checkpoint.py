"""Checkpoints of optimizers: refused where they mean something else, or converted.

torch compares the number of parameters only. It loads states of another optimizer, another
precision or another network of as many parameters, and training goes on with wrong momenta.
Checkpoints that bitsandbytes wrote for earlier versions are read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from speechbrain_rev.optim.arguments import (
    Storage,
    honoured,
    refuse_what_is_not_honoured,
)
from speechbrain_rev.optim.reference import moments_of, quantise

if TYPE_CHECKING:
    from speechbrain_rev.optim.states import Arena

# The entry of the parameter groups that says who wrote a checkpoint. It lies in the
# groups because torch saves them whole and leaves entries unknown to it alone.
BUILT_AS = "built_as"
# The entry of converted ones: float32 moments become codes when they are loaded.
_CONVERTED = "converted"

# What torch's optimizers call the tensors of a parameter's state.
STATES_OF_TORCH = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
# bitsandbytes wraps its states so that FSDP does not gather them.
WRAPPED = "__bnb_optimizer_quant_state__"
# All values of BUILT_AS.
_WRITERS = tuple(
    f"{name} at {bits} bit" for name in STATES_OF_TORCH for bits in (8, 32)
)
_FIRST_STATES = ("state1", *{names[0] for names in STATES_OF_TORCH.values()})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that belongs to the parameters of an optimizer.

    Attributes
    ----------
    groups : list of dict
        Options, without parameters.
    states : list of dict
        Of each group: the state of each parameter, empty before its first gradient.
    """

    groups: list[dict[str, Any]]
    states: list[dict[Tensor, dict[str, Any]]]

    @property
    def storage(self) -> Storage:
        """The form of 8-bit states; bitsandbytes has blocks of 256."""
        first = self.groups[0]
        return Storage(first.get("block_size", 256), first.get("pack_small", False))

    def as_state_dict(self) -> dict[str, Any]:
        """Write it as torch's optimizers load it."""
        groups, count = [], 0
        states: dict[int, dict[str, Any]] = {}
        for group, own in zip(self.groups, self.states, strict=True):
            numbers = list(range(count, count + len(own)))
            groups.append({**group, "params": numbers})
            states |= {
                number: state
                for number, state in zip(numbers, own.values(), strict=True)
                if state
            }
            count += len(own)
        return {"state": states, "param_groups": groups}


def read_checkpoint(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    dtype_of: Callable[[Tensor], torch.dtype],
) -> Checkpoint:
    """Read a checkpoint that was written by an optimizer built like this one.

    ``dtype_of`` says how this optimizer stores the states of a parameter.
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
    checkpoint = _belonging_to(optimizer, state_dict)
    own = Storage.of(optimizer)
    if saved.endswith(" 8 bit") and checkpoint.storage != own:
        raise ValueError(
            f"This optimizer stores {own}, the checkpoint {checkpoint.storage}. Give "
            "block and pack_small (optimizer_block and optimizer_pack_small in a recipe) "
            "as in the run that wrote it, or convert it with "
            "speechbrain_rev.optim.convert_checkpoint."
        )
    pairs = [pair for states in checkpoint.states for pair in states.items()]
    converted = checkpoint.groups[0].pop(_CONVERTED, False)
    for index, (param, state) in enumerate(pairs):
        first, dtype = first_state(state), dtype_of(param)
        quantised = converted and dtype == torch.uint8
        if first is not None and first.dtype != dtype and not quantised:
            raise ValueError(
                f"The states of parameter {index}, shape {list(param.shape)}, are "
                f"{dtype} in this optimizer but {first.dtype} in the checkpoint. Give "
                f"keep_32bit as in the run that wrote it, or convert the checkpoint "
                f"with speechbrain_rev.optim.convert_checkpoint."
            )
    return checkpoint


def written_by(optimizer: torch.optim.Optimizer, state_dict: Any) -> str:
    """Return which optimizer of ours wrote a checkpoint, such as "adamw at 8 bit"."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"The checkpoint is a {type(state_dict).__name__}; give the dict that "
            f"state_dict() of an optimizer returned."
        )
    # A file of weights has no groups; it must not fail for want of a key.
    groups = state_dict.get("param_groups")
    groups = groups if isinstance(groups, list | tuple) else []
    group = groups[0] if groups else {}
    saved = group.get(BUILT_AS) if isinstance(group, Mapping) else None
    if saved not in _WRITERS:
        raise ValueError(
            f"This optimizer is {optimizer.param_groups[0][BUILT_AS]}, but the "
            f"checkpoint was not written by an optimizer of speechbrain_rev.optim, so its "
            f"states are unknown. Resume with the optimizer that wrote it, convert it "
            f"with speechbrain_rev.optim.convert_checkpoint if that is SGD, Adam or AdamW "
            f"of torch, or start from its weights alone."
        )
    states = state_dict.get("state")
    if (
        not all(isinstance(g.get("params"), list | tuple) for g in groups)
        or not isinstance(states, Mapping)
        or not all(isinstance(state, Mapping) for state in states.values())
    ):
        raise ValueError(
            f"The checkpoint says it is of {saved}, but has no dict of states under "
            f"'state' or no list under 'params' of its groups. Give what state_dict() "
            f"returned, unchanged, or start from the weights alone."
        )
    return str(saved)


def _belonging_to(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> Checkpoint:
    """Give each parameter its state; the options as this package names them."""
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    counts, saved_counts = (
        [len(group["params"]) for group in each] for each in (groups, saved_groups)
    )
    if counts != saved_counts:
        raise ValueError(
            f"This optimizer has {_counted(counts)}, but the checkpoint "
            f"{_counted(saved_counts)}. Build the network that the checkpoint belongs to."
        )
    read, index = Checkpoint([], []), 0
    for group, saved in zip(groups, saved_groups, strict=True):
        read.groups.append(_renamed(saved))
        states: dict[Tensor, dict[str, Any]] = {}
        for param, number in zip(group["params"], saved["params"], strict=True):
            state = dict(state_dict["state"].get(number, {}))
            state |= state.pop(WRAPPED, {})
            # Each state of the library names the values of codes, which are the same.
            states[param] = {k: v for k, v in state.items() if not k.startswith("qmap")}
            first = first_state(state)
            if first is not None and first.shape != param.shape:
                raise ValueError(
                    f"Parameter {index} has shape {list(param.shape)}, but the "
                    f"checkpoint holds states of shape {list(first.shape)} for it. Build "
                    f"the network that the checkpoint belongs to."
                )
            index += 1
        read.states.append(states)
    return read


def _counted(counts: Sequence[int]) -> str:
    groups = f"{len(counts)} groups" if len(counts) > 1 else "one group"
    return f"{groups} of {' and '.join(map(str, counts))} parameters"


def _renamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Name a group's options as this package does; bitsandbytes' SGD has betas."""
    own = {key: value for key, value in group.items() if key != "params"}
    if own[BUILT_AS] == "sgd at 8 bit" and "momentum" not in own:
        own = {key: own[key] for key in own if key in _COMMON}
        own |= {"momentum": group["betas"][0], "nesterov": False}
    if own[BUILT_AS].endswith(" 8 bit"):
        usual = {"decoupled_decay": False} if own[BUILT_AS][:3] == "sgd" else {}
        known = (*_COMMON, *honoured(own[BUILT_AS].split()[0], 8))
        own = {**usual, **{key: own[key] for key in own if key in known}}
        own = {"block_size": 256, "pack_small": False, **own}
    return own


_COMMON = (
    "lr", "initial_lr", "weight_decay", "name", "block_size", "pack_small", BUILT_AS,
    _CONVERTED,
)  # fmt: skip


def first_state(state: Mapping[str, Any]) -> Tensor | None:
    """Return the first state tensor; None before a gradient came, and for plain SGD."""
    return next((state[name] for name in _FIRST_STATES if name in state), None)


def fill(
    arena: Arena,
    targets: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, Mapping[str, Any]],
    block_size: int,
) -> None:
    """Copy states of a checkpoint to where an arena has them; quantise converted ones."""
    for param, target in zip(arena.params, targets, strict=True):
        state = states[param]
        target["step"].copy_(torch.as_tensor(state.get("step", 1)))
        for key, own in target.items():
            if not key.startswith("state"):
                continue
            value, number = state[key], key[-1]
            if value.dtype == own.dtype:
                own.copy_(value)
                if own.dtype == torch.uint8:
                    target[f"absmax{number}"].copy_(state[f"absmax{number}"])
    for pack in arena.packs:
        if pack.block is not None:
            _quantise_floats(arena, pack, states, block_size)


def _quantise_floats(
    arena: Arena,
    pack: Any,
    states: Mapping[Tensor, Mapping[str, Any]],
    block_size: int,
) -> None:
    """Store moments of converted checkpoints as codes."""
    for i in range(len(pack.moments)):
        key, signed = f"state{i + 1}", i == 0
        runs = [range(t, t + 1) for t in range(pack.first, pack.last)]
        for run in [range(pack.first, pack.last)] if pack.shared else runs:
            values = [states[arena.params[t]][key] for t in run]
            if values[0].dtype == torch.uint8:
                continue
            base = arena.table.starts[pack.first]
            low = arena.table.starts[run.start] - base
            high = arena.table.starts[run.stop] - base
            first = 0 if pack.shared else pack.first_blocks[run.start - pack.first]
            flat = torch.cat([v.reshape(-1) for v in values])
            codes, absmax = quantise(flat, block_size=block_size, signed=signed)
            pack.moments[i][low:high] = codes if signed else codes.clamp_(min=1)
            pack.scales[i][first : first + len(absmax)] = absmax


def convert_checkpoint(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert a checkpoint to the form of an optimizer, which would refuse it else.

    From 8 to 32 bit each value becomes exactly what its code stands for. From 32 to 8
    bit it becomes, when it is loaded, the nearest code, off by at most 0.0071 of its
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
    state_dict = _with_writer(state_dict, _name_and_bits(wanted)[0])
    saved = written_by(optimizer, state_dict)
    (name, bits), (saved_name, saved_bits) = map(_name_and_bits, (wanted, saved))
    if name != saved_name:
        raise ValueError(
            f"This optimizer is {wanted}, but the checkpoint holds the states of "
            f"{saved}: only the form of states can be converted. Take the optimizer "
            f"that wrote it, or start from its weights alone."
        )
    read = _belonging_to(optimizer, state_dict)
    for group, own in zip(read.groups, optimizer.param_groups, strict=True):
        if saved_bits != bits:
            if bits == 8:
                refuse_what_is_not_honoured(name, bits, group)
            kept = {k: v for k, v in group.items() if k in honoured(name, bits)}
            kept |= {k: group[k] for k in ("initial_lr", "name") if k in group}
            usual = {k: v for k, v in own.items() if k != "params"}
            if name != "sgd" and bits == 32:
                usual["amsgrad"] = False
            group.clear()
            group.update(usual | kept)
    converted = Checkpoint(read.groups, [])
    same = bits == 8 and saved_bits == 8 and read.storage == Storage.of(optimizer)
    whole = same and all(
        _alike(optimizer, param, state)
        for states in read.states
        for param, state in states.items()
    )
    for states in read.states:
        converted.states.append(
            {
                param: dict(state)
                if whole
                or (same and _alike(optimizer, param, state) and "offset" not in state)
                else _converted(name, bits, param, state, read)
                for param, state in states.items()
            }
        )
    if bits == 8:
        form = Storage.of(optimizer)
        for group in converted.groups:
            group |= {"block_size": form.block, "pack_small": form.pack_small}
        converted.groups[0][_CONVERTED] = True
    return converted.as_state_dict()


def _alike(optimizer: Any, param: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether an optimizer with 8-bit states stores a state in the same bits."""
    first = first_state(state)
    eight = optimizer.state_bits(param) == 8
    return first is None or (first.dtype == torch.uint8) == eight


def _converted(
    name: str, bits: int, param: Tensor, state: Mapping[str, Any], read: Checkpoint
) -> dict[str, Any]:
    """Convert the state of a parameter."""
    first = first_state(state)
    if first is None or (bits == 32 and "state1" not in state):
        return dict(state)
    step = torch.tensor(float(state.get("step", 1)))
    if "state1" in state:
        moments = moments_of(state, read.storage.block)
    else:
        moments = [state[key].float() for key in STATES_OF_TORCH[name]]
    if bits == 8:
        numbered = {f"state{n}": moment for n, moment in enumerate(moments, 1)}
        return {"step": step, **numbered}
    # In the memory format of the weight, as torch makes them.
    laid = [torch.empty_like(param, device=m.device).copy_(m) for m in moments]
    steps = {} if name == "sgd" else {"step": step}
    return {**steps, **dict(zip(STATES_OF_TORCH[name], laid, strict=True))}


def _with_writer(state_dict: Any, name: str) -> Any:
    """Name the writer of a checkpoint of torch's SGD, Adam or AdamW."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(g, Mapping) for g in groups):
        return state_dict
    marked = []
    for group in groups:
        writer = None
        if {"momentum", "dampening", "nesterov"} <= group.keys():
            writer = "sgd"
        elif {"betas", "eps", "amsgrad"} <= group.keys():
            # Versions of torch that do not tell Adam from AdamW have the same states.
            decoupled = group.get("decoupled_weight_decay", name == "adamw")
            writer = "adamw" if decoupled else "adam"
        if writer is None or BUILT_AS in group:
            return state_dict
        marked.append({**group, BUILT_AS: f"{writer} at 32 bit"})
    return {**state_dict, "param_groups": marked}


def _name_and_bits(built_as: str) -> tuple[str, int]:
    name, _, bits, _ = built_as.split()  # "sgd at 8 bit"
    return name, int(bits)
