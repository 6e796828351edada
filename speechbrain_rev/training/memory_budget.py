"""Train any SpeechBrain recipe within a memory budget.

``class SpeakerBrain(MemoryBudget, sb.Brain)`` and ``memory_budget: 11GB`` among the hparams
are all that a recipe needs. The blocks that its modules repeat are found, a copy of the Brain
runs some steps of the first batch, and a plan says which blocks store and which recompute.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
import random
import sys
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import speechbrain as sb
import torch
from speechbrain.dataio.batch import PaddedBatch, PaddedData
from speechbrain.utils.distributed import is_distributed_initialized
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from speechbrain_rev import planner
from speechbrain_rev.devices import random_devices
from speechbrain_rev.optim import state_bytes
from speechbrain_rev.planner import Plan, Step, plan_step
from speechbrain_rev.planner.memory import (
    is_out_of_memory,
    live_bytes_peak,
    storage_bytes,
    unless_memory_runs_out,
)
from speechbrain_rev.planner.network import as_network, give
from speechbrain_rev.planner.plan import SHARES, shares
from speechbrain_rev.planner.step import Alternative, trainable, with_blocks
from speechbrain_rev.processes import process_rank
from speechbrain_rev.reversible.monitor import Verify, check_verify
from speechbrain_rev.reversible.wrapping import store_blocks
from speechbrain_rev.sizes import size_text, whole_bytes
from speechbrain_rev.torch_private import (
    AnyBatchNorm,
    AnyDataLoaderIterator,
    tree_map,
)
from speechbrain_rev.training.memory_plan import PLAN, read_plans, write_plans

#: Entries of a plan's ``about``: shapes of the batches that it is for and, if memory ran out
#: in spite of it, what the next plan may take.
_SHAPES, _NEXT = "shapes", "next_budget_bytes"

#: Share of the budget that the next start leaves free after memory ran out.
LIGHTER = 0.1

#: Seeds that are tried for the step that is planned.
_SEEDS = 4

#: Blocks without a plan that the log names, at most.
_SHOWN = 8

logger = logging.getLogger(__name__)

#: Shapes of the tensors of a batch, in their order.
Shapes = tuple[tuple[int, ...], ...]


class MemoryBudget:
    """Lets a Brain train within ``memory_budget``; stands before ``sb.Brain`` in its bases.

    At the first training batch, the blocks that ``modules`` repeat are found, or those that
    ``memory_blocks`` names. A copy of the Brain runs some steps of that batch, which count
    bytes and take times. Then each block stores its activations or recomputes them, so that
    a step is as fast as the budget allows. Gradients stay what they were. The plan is for
    the longest batch so far, and is made anew before a longer one runs. It is kept in the
    run's folder, from which a run that is resumed reads it. Several processes (DDP) take
    the plan of the first.

    Its hparams may have:

    memory_budget : str or int or None
        What training may take: weights, gradients, optimizer states and the step, as
        "11GB" (2**30 bytes each). On a GPU, 1 GiB and 8 % of it are reserved. None changes
        nothing.
    memory_blocks : list of str
        Names of submodules of ``modules``, or patterns of them, as
        ``"Transformer.encoder.layers.*"``.
    memory_verify : {"first", "raise", "warn"} or None
        What follows where a block computes something else in its second run, as for
        ``recompute_blocks``; "first" without it. In steps that plan, a difference is found
        whatever kernels may do, and the block stores, which a warning names.
    output_folder : str
        Where the plan is kept; without it, each start plans.

    Raises
    ------
    ValueError
        If the budget is no size, nothing fits it, a name matches no module,
        memory_verify is something else, or the Brain has a ``fit_batch`` of its own.
    SystemExit
        If memory runs out in spite of the plan: with one line. The next start plans for
        10 % less.

    Notes
    -----
    The step that is planned is one call of ``compute_forward`` and ``compute_objectives``
    and one backward pass, as ``sb.Brain.fit_batch`` does them.

    Examples
    --------
    >>> class Classifier(MemoryBudget, sb.Brain):
    ...     def compute_forward(self, batch, stage):
    ...         return self.modules.model(batch)
    ...
    ...     def compute_objectives(self, predictions, batch, stage):
    ...         return predictions.square().mean()
    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    >>> model = nn.Sequential(*(block() for _ in range(6)))
    >>> brain = Classifier(
    ...     {"model": model},
    ...     lambda parameters: torch.optim.SGD(parameters, 0.1),
    ...     hparams={"memory_budget": "2MB"},
    ...     run_opts={"device": "cpu"},
    ... )
    >>> brain.fit([1], [torch.randn(512, 64)], progressbar=False)
    >>> sorted(set(brain.memory_plan.modes.values()))
    ['join', 'recompute', 'store']
    """

    #: The plan of the blocks now; None before the first batch, and without a budget.
    memory_plan: Plan | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        order = cls.__mro__
        if sb.Brain in order and order.index(sb.Brain) < order.index(MemoryBudget):
            raise TypeError(
                f"{cls.__name__} has MemoryBudget after sb.Brain, where it does nothing. "
                f"Write class {cls.__name__}(MemoryBudget, sb.Brain)."
            )

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        brain = cast(sb.Brain, self)
        hparams = getattr(brain, "hparams", SimpleNamespace())
        budget = getattr(hparams, "memory_budget", None)
        if budget is None:
            return
        budget_bytes = whole_bytes("memory_budget", budget)
        if budget_bytes <= 0:
            raise ValueError(
                f"memory_budget is {budget}; give a size, as 11GB, or null."
            )
        if type(brain).fit_batch is not sb.Brain.fit_batch:
            raise ValueError(
                f"{type(brain).__name__} has a fit_batch of its own, whose step cannot be "
                "planned: move what it does more to on_fit_batch_start and "
                "on_fit_batch_end, or leave memory_budget out and choose blocks by "
                "speechbrain_rev.reversible.recompute_blocks."
            )
        verify: Verify | None = getattr(hparams, "memory_verify", "first")
        check_verify(verify)
        options = ("compile", "compile_module_keys", "jit", "jit_module_keys")
        if given := [name for name in options if getattr(brain, name, None)]:
            raise ValueError(
                f"{' and '.join(given)} and memory_budget are given: blocks that recompute "
                "run as Python does. Leave one of them out."
            )
        self._planner = BrainPlanner(
            brain,
            budget_bytes,
            getattr(hparams, "memory_blocks", None) or (),
            verify,
        )
        # A recipe's own methods come before any method of this class.
        brain.compute_forward = functools.partial(
            _planned_forward, brain.compute_forward, self
        )

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """Train; if no plan fits, or memory runs out in spite of one, end with one line."""
        if not hasattr(self, "_planner"):
            return super().fit(*arguments, **keywords)  # type: ignore[misc]
        try:
            return super().fit(*arguments, **keywords)  # type: ignore[misc]
        except ValueError as error:
            if not _is_refusal(error):
                raise
            refusal = str(error)
        except (MemoryError, RuntimeError) as error:
            if self.memory_plan is None or not is_out_of_memory(error):
                raise
            refusal = self._planner.ran_out()
        sys.exit(refusal)


def _planned_forward(
    compute_forward: Any, brain: MemoryBudget, batch: Any, *more: Any, **keywords: Any
) -> Any:
    stage = more[0] if more else keywords.get("stage")
    if stage is sb.Stage.TRAIN:
        brain.memory_plan = brain._planner.plan_for(batch)
    return compute_forward(batch, *more, **keywords)


class BrainPlanner:
    """Plans what the blocks of a Brain keep, batch after batch.

    Parameters
    ----------
    brain : speechbrain.Brain
        Before its first step.
    budget_bytes : int
        What training may take.
    patterns : sequence of str
        Names of blocks, or patterns; empty to find those that are repeated.
    verify : {"first", "raise", "warn"} or None
        Of blocks that run twice.
    """

    def __init__(
        self,
        brain: sb.Brain,
        budget_bytes: int,
        patterns: str | Sequence[str],
        verify: Verify | None,
    ) -> None:
        self.brain, self.budget_bytes, self.verify = brain, budget_bytes, verify
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        folder = getattr(brain.hparams, "output_folder", None)
        self._file = None if folder is None else Path(folder, PLAN)
        plans = [] if self._file is None else read_plans(self._file)
        self._about = self._describe_run()
        self._plans = [plan for plan in plans if not plan.differences(self._about)]
        if plans and not self._plans:
            logger.info("%s is for other settings: planned anew.", self._file)
        #: Bytes that plans may take: fewer after memory ran out.
        self.allowed_bytes = min(
            [self.budget_bytes, *map(_next_budget_bytes, self._plans)]
        )
        self._current: Plan | None = None
        self._trained: list[bool] = []

    def _describe_run(self) -> dict[str, str]:
        """Name the settings that a kept plan has to be for."""
        return {
            "memory_budget": str(self.budget_bytes),
            "memory_blocks": ", ".join(self.patterns),
            "precision": self.brain.precision,
            "device": torch.device(self.brain.device).type,
            "parameters_crc32": str(self._parameters_crc32()),
        }

    def _parameters_crc32(self) -> int:
        """Give a number that changes with names, shapes and what is trained."""
        listed = [
            (name, tuple(p.shape), p.requires_grad)
            for name, p in BrainStep(self.brain).named_parameters()
        ]
        return zlib.crc32(repr(listed).encode())

    def plan_for(self, batch: Any) -> Plan:
        """Give the blocks a plan that holds for a batch; make one if none does."""
        shapes = _gather_largest(shapes_of(batch))
        trained = [p.requires_grad for p in self.brain.modules.parameters()]
        if trained != self._trained:
            if self._trained:  # frozen or unfrozen since the plan was made
                self._plans, self._about = [], self._describe_run()
            self._trained = trained
        plan = next((p for p in self._plans if _is_made_for(p, shapes)), None)
        if plan is None:
            self._store_all()  # parts of what recomputes would run twice in a step
            plan = self._make(batch, shapes)
        if plan is not self._current:
            self._apply(plan)
        return plan

    def ran_out(self) -> str:
        """Note that memory ran out, and say what happens next."""
        plan = self._current
        assert plan is not None
        lighter = int(self.allowed_bytes * (1 - LIGHTER))
        if self._file is not None:  # whichever process it is
            write_plans(self._file, [plan.with_about(**{_NEXT: str(lighter)})])
            following = f"The next start plans for {size_text(lighter)}"
        else:
            following = "Lower memory_budget"
        return (
            f"Memory ran out, although a step was planned to take "
            f"{size_text(plan.measured_bytes)} beside weights and optimizer states, of "
            f"memory_budget: {size_text(self.budget_bytes)}. {following}; what else runs "
            "on this device takes memory, too."
        )

    def _store_all(self) -> None:
        if self._current is not None and self._current.modes:
            store_blocks(BrainStep(self.brain), *self._current.modes)

    def _apply(self, plan: Plan) -> None:
        self._store_all()
        if plan.modes:
            network = as_network(BrainStep(self.brain), list(plan.modes), self.verify)
            give(network, plan.modes, plan.channels)
        self._current = plan

    def _make(self, batch: Any, shapes: Shapes) -> Plan:
        """Plan in the first process, and take its plan in all."""
        made: list[Any] = [None, None]
        if process_rank() == 0:
            try:
                made[0] = self._plan_batch(batch).to_json()
            except Exception as error:
                if not is_distributed_initialized():
                    raise
                made[1] = f"{type(error).__name__}: {error}"
        if is_distributed_initialized():
            torch.distributed.broadcast_object_list(made)
        text, refused = made
        if refused is not None:  # in every process, for none may wait for another
            raise ValueError(f"No memory plan was made. {refused}")
        plan = Plan.from_json(text).with_about(
            **self._about, **{_SHAPES: json.dumps(shapes)}
        )
        others = [p for p in self._plans if not _covers(shapes, _read_shapes(p))]
        self._plans = [*others, plan]
        if self._file is not None and process_rank() == 0:
            write_plans(self._file, self._plans)
        return plan

    def _plan_batch(self, batch: Any) -> Plan:
        with _restored_random_states(torch.device(self.brain.device)):
            return self._choose_plan(*self._build_step(batch))

    def _choose_plan(self, step: Step, reasons: Mapping[str, str]) -> Plan:
        names = [f"{name}: {why}" for name, why in reasons.items()]
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            logger.info("Stored, not planned: %s%s", "; ".join(names[:_SHOWN]), more)
        if step.blocks:
            plan = plan_step(step, self.allowed_bytes)
            logger.info(
                "Memory plan for %s: %s; %s; if all blocks stored: %s.",
                step.samples,
                plan,
                plan.budget_text(),
                size_text(int(plan.about["stored_bytes"])),
            )
            return plan
        plan = _plan_all_stored(step, self.allowed_bytes)
        logger.info(
            "Everything is stored, for no block that is repeated was found: peak %s of %s; "
            "%s.",
            size_text(plan.measured_bytes),
            size_text(plan.budget_bytes),
            plan.budget_text(),
        )
        return plan

    def _build_step(self, batch: Any) -> tuple[Step, dict[str, str]]:
        """Make the Brain's training step, with the blocks that can be planned."""
        module = BrainStep(self.brain)
        copied = _copy_batch(batch)
        device = torch.device(self.brain.device)
        count = rows_of(batch)

        def inputs(rows: int, device: torch.device) -> Any:
            if device.type == "meta":
                raise ValueError("a Brain's step needs the numbers of its batch")
            return (copied if rows == count else first_rows(copied, rows),)

        module.choose_seed(copied)
        inputs_there = [x for x in _list_tensors(batch) if x.device.type == device.type]
        fixed = module.fixed_bytes() + storage_bytes(inputs_there)
        step = Step(
            module,
            inputs,
            count,
            device,
            loss=lambda batch, device, copied: lambda value: value,
            samples=f"a batch of {'; '.join(str(list(s)) for s in shapes_of(batch))}",
            fixed_bytes=lambda batch: fixed,
            verify=self.verify,
            is_card=device.type == "cuda",
            about={
                "network": type(self.brain).__name__,
                "inputs": str([list(shape) for shape in shapes_of(batch)]),
                "precision": self.brain.precision,
            },
            alternatives=lambda step: [
                Alternative("fewer or shorter utterances in a batch", of_modes=True),
                Alternative("memory_blocks that name more of its modules"),
                Alternative("an optimizer with 8-bit states"),
                Alternative("memory_budget: {needed}"),
            ],
        )
        return with_blocks(step, self.patterns)


class BrainStep(nn.ModuleDict):
    """The modules of a Brain as one network, whose output is the loss of a batch.

    Parameters
    ----------
    brain : speechbrain.Brain
        A copy of this network has a copy of it, which leaves it as it is.
    """

    def __init__(self, brain: sb.Brain) -> None:
        modules = {name: _unwrap(module) for name, module in brain.modules.items()}
        super().__init__(modules)
        self._brain = [brain]  # in a list, the Brain's modules are no submodules
        self.training = True
        #: Each step draws its random numbers from this seed.
        self.seed = 0

    def forward(self, batch: Any) -> Tensor:
        """Compute the loss of a batch, with the same random numbers each time."""
        (brain,) = self._brain
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)  # noqa: NPY002
        torch.clear_autocast_cache()  # of copies that ran before
        copied = _copy_batch(batch)  # compute_forward may move it to a GPU
        with brain.training_ctx:
            outputs = brain.compute_forward(copied, sb.Stage.TRAIN)
            loss: Tensor = brain.compute_objectives(outputs, copied, sb.Stage.TRAIN)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"compute_objectives returns {type(loss).__name__}; a step can be planned "
                "where it returns the loss alone."
            )
        # fit_batch holds both until the backward pass is over.
        loss.outputs = outputs, copied  # type: ignore[attr-defined]
        return loss

    def __deepcopy__(self, memo: dict[int, Any]) -> BrainStep:
        step = BrainStep(_copy_brain(self._brain[0], memo))
        step.seed = self.seed
        return step

    def choose_seed(self, batch: Any) -> None:
        """Take the seed, of a few, whose forward pass needs most memory.

        Augmentation may lengthen a batch, or concatenate copies of it, at random.
        """
        step = copy.deepcopy(self)
        peaks = {}
        for seed in range(_SEEDS):
            step.seed = seed
            with torch.no_grad():
                peak = unless_memory_runs_out(
                    lambda: live_bytes_peak(lambda: step(batch))
                )
            peaks[seed] = math.inf if peak is None else peak
        self.seed = max(peaks, key=lambda seed: peaks[seed])

    def fixed_bytes(self) -> int:
        """Count weights, their gradients, buffers and the states of optimizers."""
        (brain,) = self._brain
        others = [m for m in vars(brain.hparams).values() if isinstance(m, nn.Module)]
        whole = nn.ModuleList([self, *others])
        weights = list(whole.parameters())
        trained = [p for p in weights if p.requires_grad]
        live_bytes = storage_bytes([*weights, *whole.buffers()]) + storage_bytes(
            trained
        )
        optimizers = _list_optimizers(brain)
        if all(optimizer.state for optimizer in optimizers):
            return live_bytes + sum(map(state_bytes, optimizers))
        # States come into being at the first step: a copy takes one.
        step = copy.deepcopy(self)
        for parameter in step.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        copies = _list_optimizers(step._brain[0])
        for optimizer in copies:
            optimizer.step()
        return live_bytes + sum(map(state_bytes, copies))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    earlier = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if earlier is None:
            delattr(owner, name)
        else:
            setattr(owner, name, earlier)


def _list_optimizers(brain: sb.Brain) -> list[torch.optim.Optimizer]:
    several = getattr(brain, "optimizers_dict", None) or {}
    optimizers = [*several.values(), getattr(brain, "optimizer", None)]
    return list({id(o): o for o in optimizers if o is not None}.values())


#: Classes of values that a copy of a Brain shares with it.
_SHARED = (sb.utils.checkpoints.Checkpointer, Dataset, DataLoader, Sampler)


class _Silent:
    """Stands for a logger in a copy, whose steps nobody shall read of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **keywords: None


def _copy_brain(brain: sb.Brain, memo: dict[int, Any]) -> sb.Brain:
    """Copy a Brain with its modules, optimizers and what else its steps may change."""
    shared = [*vars(brain).values(), *vars(brain.hparams).values()]
    memo |= {id(value): value for value in shared if isinstance(value, _SHARED)}
    loggers = [v for v in shared if isinstance(v, sb.utils.train_logger.TrainLogger)]
    memo |= {id(logger): _Silent() for logger in loggers}
    copied = copy.copy(brain)
    # The methods of its class do not plan.
    for name in ("compute_forward", "_planner"):
        vars(copied).pop(name, None)
    modules = {
        name: copy.deepcopy(_unwrap(module), memo)
        for name, module in brain.modules.items()
    }
    copied.modules = nn.ModuleDict(modules)
    memo[id(brain.modules)] = copied.modules
    for name, module in brain.modules.items():
        memo[id(module)] = modules[name]
    for module in copied.modules.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = _LocalBatchNorm  # type: ignore[assignment]
        if hasattr(module, "sync"):  # our own normalisation
            module.sync = False
        _run_all_layers(module)
    anew = _replaced(AnyDataLoaderIterator, "__deepcopy__", _restart_iterator)
    with _gradients_aside(brain), anew:
        copied.hparams = SimpleNamespace(
            **{k: _copy_value(k, v, memo) for k, v in vars(brain.hparams).items()}
        )
        for name, value in vars(copied).items():
            if name not in ("modules", "hparams"):
                setattr(copied, name, _copy_value(name, value, memo))
    copied.raw_modules = copied.modules
    return copied


def _restart_iterator(batches: AnyDataLoaderIterator, memo: dict[int, Any]) -> Any:
    """Copy an iterator of batches, as augmentation has one of its noise, from the start."""
    memo[id(batches._dataset)] = batches._dataset
    sampler: dict[str, Any] = {"sampler": copy.deepcopy(batches._index_sampler, memo)}
    if batches._auto_collation:
        sampler = {"batch_sampler": sampler["sampler"]}
    else:
        sampler["batch_size"] = None
    return iter(DataLoader(batches._dataset, collate_fn=batches._collate_fn, **sampler))


#: Names in transformers and SpeechBrain of the probability that a layer is left out.
_LAYERDROPS = ("layerdrop", "layerdrop_prob", "encoder_layerdrop", "decoder_layerdrop")


def _run_all_layers(module: nn.Module) -> None:
    """Let a copy leave out no layer at random: plans are for steps that have all."""
    for owner in (module, getattr(module, "config", None)):
        for name in _LAYERDROPS:
            if isinstance(getattr(owner, name, None), float):
                setattr(owner, name, 0.0)


class _LocalBatchNorm(AnyBatchNorm):
    """What SyncBatchNorm is in one process."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


#: Values that were shared with a copy, and warned of.
_shared_values: set[tuple[str, type]] = set()


def _copy_value(name: str, value: Any, memo: dict[int, Any]) -> Any:
    """Copy a value; warn of one that cannot be copied, and share it."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach().clone()
    if type(value) in (list, tuple, set):
        return type(value)(_copy_value(name, item, memo) for item in value)
    if type(value) is dict:
        return {
            key: _copy_value(f"{name}.{key}", item, memo) for key, item in value.items()
        }
    # A memo of what fails names parts that are gone, whose ids others may have.
    attempt = dict(memo)
    try:
        copied = copy.deepcopy(value, attempt)
    except Exception as error:  # whatever a class does about being copied
        if (name, type(value)) in _shared_values:
            return value
        _shared_values.add((name, type(value)))
        logger.warning(
            "%s (%s) cannot be copied (%s): steps that plan memory use it itself, so that "
            "what it counts or keeps may change.",
            name,
            type(value).__name__,
            error,
        )
        return value
    memo.setdefault(id(memo), []).extend(attempt.pop(id(attempt), []))
    memo.update(attempt)
    return copied


@contextlib.contextmanager
def _gradients_aside(brain: sb.Brain) -> Iterator[None]:
    """Set gradients aside, so that copies of what holds parameters copy none."""
    gradients = [(p, p.grad) for p in brain.modules.parameters() if p.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in gradients:
            parameter.grad = grad


@contextlib.contextmanager
def _restored_random_states(device: torch.device) -> Iterator[None]:
    """Put the random states back."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(random_devices(device)):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def _is_refusal(error: ValueError) -> bool:
    """Return whether the planner refuses a step, and not the recipe's own code."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    planners = (Path(__file__), Path(planner.__file__).parent)
    return any(map(raised_in.is_relative_to, planners))


def _plan_all_stored(step: Step, budget_bytes: int) -> Plan:
    """Hold a network without blocks to its budget: there is nothing to be planned."""
    module = trainable(copy.deepcopy(step.module))
    inputs = step.inputs(step.batch, step.device)
    with step.training():
        module(*inputs).backward()  # what a first step makes is not counted
        peak = live_bytes_peak(lambda: module(*inputs).backward(), device=step.device)
    left = step.left_bytes(budget_bytes)
    if peak > left:
        raise ValueError(
            f"A step of {step.about['network']} takes {size_text(peak)} beside "
            f"{size_text(step.fixed_bytes(step.batch))} of weights, gradients and optimizer "
            f"states, more than memory_budget: {size_text(budget_bytes)} leaves, and no "
            "repeated blocks were found that could recompute. Name modules that run one "
            "after the other in memory_blocks, as 'encoder.layers.*', give fewer or shorter "
            f"utterances, or memory_budget: {size_text(budget_bytes - left + peak)}."
        )
    about = {**step.about, **shares(budget_bytes, step.fixed_bytes(step.batch), left)}
    return Plan({}, None, left, peak, peak, 0.0, about)


def shapes_of(batch: Any) -> Shapes:
    """List the shapes of a batch's tensors.

    Parameters
    ----------
    batch : PaddedBatch, tensor, or tuple, list or dict of such
        What a data loader gives.

    Returns
    -------
    tuple of tuple of int
        Of tensors with more than one number.

    Examples
    --------
    >>> shapes_of({"sig": torch.zeros(2, 16000), "rate": torch.tensor(16000)})
    ((2, 16000),)
    """
    return tuple(tuple(x.shape) for x in _list_tensors(batch) if x.numel() > 1)


def _list_tensors(batch: Any) -> list[Tensor]:
    tensors: list[Tensor] = []

    def noted(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    _map_tensors(batch, noted)
    return tensors


def rows_of(batch: Any) -> int:
    """Count the samples of a batch: the rows that most of its tensors have."""
    rows = [len(x) for x in _list_tensors(batch) if x.dim()]
    return max(set(rows), key=rows.count, default=1)


def first_rows(batch: Any, count: int) -> Any:
    """Take the first samples of a batch.

    Examples
    --------
    >>> first_rows({"sig": torch.zeros(8, 5), "id": ["a", "b", "c"]}, 2)["sig"].shape
    torch.Size([2, 5])
    """
    rows = rows_of(batch)

    def taken(x: Any) -> Any:
        return x[:count] if isinstance(x, Tensor) and x.dim() and len(x) == rows else x

    if isinstance(batch, PaddedBatch):
        copied = copy.copy(batch)
        for name, value in vars(batch).items():
            if isinstance(value, PaddedData):
                setattr(copied, name, PaddedData(*map(taken, value)))
            elif isinstance(value, list) and len(value) == rows:
                setattr(copied, name, value[:count])
            else:
                setattr(copied, name, taken(value))
        vars(copied)["_PaddedBatch__length"] = count
        return copied
    return _map_tensors(batch, taken)


def _copy_batch(batch: Any) -> Any:
    """Copy a batch, so that a step may write to it; its tensors are shared."""
    return _map_tensors(batch, lambda x: x)


def _map_tensors(batch: Any, change: Any) -> Any:
    """Change each tensor of a batch, in a batch of the same kind."""

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            return change(x)
        # A PaddedBatch, or a batch of the recipe's own class.
        if not hasattr(x, "__dict__") or isinstance(x, type | nn.Module):
            return x
        copied = copy.copy(x)
        for name, value in vars(x).items():
            object.__setattr__(copied, name, _map_tensors(value, change))
        return copied

    return tree_map(leaf, batch)


def _gather_largest(shapes: Shapes) -> Shapes:
    """Take the largest of the batches that the processes have, dimension by dimension."""
    if not is_distributed_initialized():
        return shapes
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, shapes)
    if len({tuple(map(len, s)) for s in every}) > 1:
        return shapes
    return tuple(
        tuple(max(sizes) for sizes in zip(*same, strict=True))
        for same in zip(*every, strict=True)
    )


def _covers(larger: Shapes, smaller: Shapes) -> bool:
    """Whether no dimension of a batch is larger than that of another."""
    return [*map(len, larger)] == [*map(len, smaller)] and all(
        a >= b
        for ours, theirs in zip(larger, smaller, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


def _read_shapes(plan: Plan) -> Shapes:
    return tuple(map(tuple, json.loads(plan.about[_SHAPES])))


def _is_made_for(plan: Plan, shapes: Shapes) -> bool:
    """Whether a plan is for batches as large, and memory did not run out with it."""
    return _NEXT not in plan.about and _covers(_read_shapes(plan), shapes)


def _next_budget_bytes(plan: Plan) -> int:
    """Give what the plan after one may take."""
    return int(plan.about.get(_NEXT, plan.about[SHARES[0]]))
