"""Which blocks of a network that somebody else wrote can be planned.

Deep networks repeat a block: ``encoder.layers.0``, ``encoder.layers.1`` and so on. These are
found by their classes, and what runs beside them is taken as a block of its own. A step then
shows which of them run once and one after the other. Blocks may be made of blocks: a layer of
attention and feed-forward part, a dense block of layers. These are a level down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from speechbrain_rev.planner.network import NamedBlocks
from speechbrain_rev.planner.trace import Run, moments_of
from speechbrain_rev.reversible.hooks import Moment
from speechbrain_rev.reversible.wrapping import mode_refusal


def repeated_blocks(module: nn.Module) -> list[str]:
    """Find the blocks that a network repeats, and what else it runs beside them.

    Parameters
    ----------
    module : nn.Module
        Any network.

    Returns
    -------
    list of str
        Names as in ``named_modules()``, none within another; empty if nothing of more than
        one operation is repeated. A module that stands in two places is named once.

    Examples
    --------
    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> head = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> network = nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "head": head})
    >>> repeated_blocks(network)
    ['layers.0', 'layers.1', 'head']
    >>> repeated_blocks(head)
    []
    """
    names = list(_blocks_of(module, "")) if _repeats(module) else []
    chosen: dict[int, str] = {}
    for name in names:
        part = module.get_submodule(name)
        if mode_refusal(name, part) is None:
            chosen.setdefault(id(part), name)
    return list(chosen.values())


def _blocks_of(module: nn.Module, prefix: str) -> Iterator[str]:
    """List blocks of a module that repeats some; those that it repeats are not opened."""
    repeated = _repeated_classes(module)
    for name, child in module.named_children():
        name = f"{prefix}{name}"
        # Stages, of which each is a list of blocks, are opened.
        is_stage = isinstance(child, nn.Sequential) and bool(_repeated_classes(child))
        if _is_block(child) and type(child) in repeated and not is_stage:
            yield name
        elif (
            _repeats(child)
            or not _is_called(child)
            or any(map(_is_block, child.children()))
        ):
            # Modules outside of smaller blocks store, but less works at a time.
            yield from _blocks_of(child, f"{name}.")
        elif _is_block(child):
            yield name


def finer_blocks(module: nn.Module, names: Sequence[str]) -> list[str]:
    """Name the blocks within blocks, a level down.

    Parameters
    ----------
    module : nn.Module
        Any network.
    names : sequence of str
        Of its blocks.

    Returns
    -------
    list of str
        In the place of each block those that it is made of; itself if these are fewer
        than two.

    Examples
    --------
    >>> part = lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> layer = nn.ModuleDict({"attention": part(), "norm": nn.LayerNorm(4), "ff": part()})
    >>> finer_blocks(nn.ModuleList([layer, part()]), ["0", "1"])
    ['0.attention', '0.ff', '1']
    """
    finer: list[str] = []
    for name in names:
        within = [*_blocks_within(module.get_submodule(name), f"{name}.")]
        finer += within if len(within) > 1 else [name]
    return finer


def _blocks_within(module: nn.Module, prefix: str) -> Iterator[str]:
    """List blocks of a module; containers that are not called are opened."""
    for name, child in module.named_children():
        if _is_block(child):
            yield f"{prefix}{name}"
        elif not _is_called(child):
            yield from _blocks_within(child, f"{prefix}{name}.")


def _repeats(module: nn.Module) -> bool:
    """Whether a module, or one within it, repeats a block."""
    return any(_repeated_classes(part) for part in module.modules())


def _repeated_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Give the classes of blocks that stand in a list of modules more than once."""
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return set()
    counts = Counter(type(child) for child in module.children() if _is_block(child))
    return {kind for kind, count in counts.items() if count > 1}


def _is_called(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _is_block(module: nn.Module) -> bool:
    """Whether a module is called, has weights and does more than one operation."""
    operations = [part for part in module.modules() if not any(part.children())]
    return (
        _is_called(module)
        and len(operations) > 1
        and any(True for _ in module.parameters())
    )


def in_turn(
    module: nn.Module, names: Sequence[str], run: Run
) -> tuple[list[str], dict[str, str]]:
    """Choose the blocks that run once in a step, one after the other.

    Parameters
    ----------
    module : nn.Module
        The network.
    names : sequence of str
        Of its blocks.
    run : callable
        Runs forward and backward pass of it.

    Returns
    -------
    list of str
        Blocks that can be planned, in the order of the forward pass.
    dict of str to str
        Why each of the others cannot.

    Examples
    --------
    >>> import torch
    >>> network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    >>> x = torch.randn(2, 4)
    >>> step = lambda: (network[1](network[0](network[0](x)))).sum().backward()
    >>> in_turn(network, ["0", "1", "2"], step)
    (['1'], {'0': 'it runs 2 times in a step', '2': 'it does not run'})
    """
    if not names:
        return [], {}
    reasons: dict[str, str] = {}
    seen = moments_of(NamedBlocks(module, *names), run)
    begun = Counter(name for name, moment in seen if moment is Moment.FORWARD_BEGINS)
    for name in names:
        if begun[name] != 1:
            times = f"runs {begun[name]} times in a step"
            reasons[name] = f"it {times if begun[name] else 'does not run'}"
    reasons |= _within_others(seen, reasons)
    forward = [
        name
        for name, moment in seen
        if moment is Moment.FORWARD_BEGINS and name not in reasons
    ]
    backward = [
        name
        for name, moment in seen
        if moment is Moment.BACKWARD_BEGINS and name not in reasons
    ]
    trained = [name for name in forward if name in backward]
    if not trained:
        return [], dict.fromkeys(names, "nothing of it is trained") | reasons
    first = forward.index(trained[0])
    for name in forward[first:]:
        if name not in backward:
            reasons[name] = "nothing of it is trained, but of a block before it"
    wanted = {name: i for i, name in enumerate(reversed(forward))}
    kept = _longest_rising([wanted[name] for name in dict.fromkeys(backward)])
    in_order = {name for name in backward if wanted[name] in kept}
    for name in trained:
        if name not in in_order:
            reasons[name] = "its backward pass is not in the order of the forward pass"
    return [name for name in forward if name not in reasons], reasons


def _within_others(
    seen: Sequence[tuple[str, Moment | None]], left_out: Mapping[str, str]
) -> dict[str, str]:
    """Name blocks that run while another one runs."""
    reasons: dict[str, str] = {}
    running: list[str] = []
    for name, moment in seen:
        if name in left_out:
            continue
        if moment is Moment.FORWARD_BEGINS:
            if running:
                reasons[name] = f"it runs within {running[-1]}"
            running.append(name)
        elif moment is Moment.FORWARD_ENDS and name in running:
            running.remove(name)
    return reasons


def _longest_rising(numbers: Sequence[int]) -> set[int]:
    """Give the longest rising part of a sequence."""
    best: list[list[int]] = []
    for i, number in enumerate(numbers):
        before = [best[j] for j in range(i) if numbers[j] < number]
        longest: list[int] = max(before, key=len, default=[])
        best.append([*longest, number])
    whole: list[int] = max(best, key=len, default=[])
    return set(whole)
