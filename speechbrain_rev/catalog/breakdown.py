"""Where the memory of an encoder's training step goes, by parts and by stages, without a GPU."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import architecture
from speechbrain_rev.catalog.counts import BATCHES, counted_peaks
from speechbrain_rev.catalog.steps import head_modules, training_step
from speechbrain_rev.catalog.table import (
    INPUT_BYTES_PER_FRAME,
    stage_of,
)
from speechbrain_rev.heads import HEAD, Head
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.memory import (
    MemoryReport,
    live_bytes_peak,
    make_gradients,
    storage_bytes,
)
from speechbrain_rev.planner.trace import Trace, trace_bytes
from speechbrain_rev.torch_private import storage_key, tree_leaves

_JUST_NOW = "counted just now"


@dataclass(frozen=True)
class StageMemory:
    """What one part of an encoder takes in a training step.

    Attributes
    ----------
    name : str
        "input", "stem", "stage 1" to "stage 4", each with the transition into it,
        "pooling, embedding", or "classifier".
    blocks : mapping of str to int
        How many of its blocks have each mode; empty where there are no blocks.
    held_bytes : int
        What its forward pass adds to what is alive when it ends. Where a stage keeps its
        output only, this can be what the stage before no longer needs to keep.
    working_bytes : int
        The most in one of its passes, above what it and all before it hold.
    peak_bytes : int
        The same with what they hold: the most that is alive in its passes.
    weights_bytes, gradients_bytes, optimizer_states_bytes : int
        Of its parameters; buffers are among the weights. What several parts share is
        counted for the first of them.
    """

    name: str
    blocks: Mapping[str, int]
    held_bytes: int
    working_bytes: int
    peak_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_states_bytes: int


def stage_memory(
    encoder: SpeakerEncoder,
    trace: Trace,
    optimizer: torch.optim.Optimizer,
    classifier: nn.Module | None = None,
) -> list[StageMemory]:
    """Measure what each part of an encoder takes in a training step that was watched.

    Parameters
    ----------
    encoder : SpeakerEncoder
        With gradients.
    trace : Trace
        What was alive in a step of it, block by block.
    optimizer : torch.optim.Optimizer
        With states of all parameters.
    classifier : nn.Module or None
        Trained with the encoder; it has no part in the step.

    Returns
    -------
    list of StageMemory
        In the order of execution. What they hold adds up to what is alive when the last
        block's forward pass ends; the largest of their peaks is that of the step;
        weights, gradients and states add up to those of encoder and classifier.

    Examples
    --------
    >>> encoder, step = training_step("resnet34", frames=200, batch=64)
    >>> optimizer = build_optimizer(encoder.parameters(), name="sgd", bits=8, lr=0)
    >>> optimizer.step()
    >>> stages = stage_memory(encoder, trace_bytes(encoder, step), optimizer)
    >>> [stage.name for stage in stages][:3], max(stage.peak_bytes for stage in stages)
    (['input', 'stem', 'stage 1'], 4036560136)
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for block, mode in encoder.block_modes().items():
        counts[stage_of(block)][mode.value] += 1
    modules: dict[str, nn.Module | None] = {"input": None, "stem": encoder.stem}
    modules |= {f"stage {i + 1}": stage for i, stage in enumerate(encoder.stages)}
    modules["pooling, embedding"] = nn.ModuleList([encoder.pooling, encoder.fc])
    if classifier is not None:
        modules["classifier"] = classifier
    weights, gradients, states = _Growing(), _Growing(), _Growing()
    measured, held = [], 0
    for name, (end, peak) in _activations(trace, list(modules)).items():
        module = modules[name] or nn.Module()
        parameters = list(module.parameters())
        values = tree_leaves([dict(optimizer.state[p]) for p in parameters])
        measured.append(
            StageMemory(
                name,
                dict(counts[name]),
                held_bytes=end - held,
                working_bytes=peak - end,
                peak_bytes=peak,
                weights_bytes=weights.add([*parameters, *module.buffers()]),
                gradients_bytes=gradients.add(p.grad for p in parameters),
                optimizer_states_bytes=states.add(values),
            )
        )
        held = end
    counted = {p for module in modules.values() if module for p in module.parameters()}
    if counted >= optimizer.state.keys():
        # A few bytes of the buffers of 8-bit states belong to no parameter.
        rest = state_bytes(optimizer) - states.bytes
        last_bytes = measured[-1].optimizer_states_bytes + rest
        measured[-1] = replace(measured[-1], optimizer_states_bytes=last_bytes)
    return measured


class _Growing:
    """Tensors that are counted once, part by part; several may share a storage."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], int] = {}

    def add(self, values: Iterable[Any]) -> int:
        """Add those that are tensors; give what they add in memory."""
        before = self.bytes
        for x in values:
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = (x.device, storage_key(storage), x.storage_offset(), x.numel())
                self._seen[key] = x.nbytes
        return self.bytes - before

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(self._seen.values())


def _activations(trace: Trace, names: list[str]) -> dict[str, tuple[int, int]]:
    """Give for each part what is alive after its forward pass, and the most in both."""
    blocks = list(trace.blocks.items())
    stages_of = {name: stage_of(name) for name, _ in blocks}
    base = blocks[0][1].before_bytes
    last = blocks[-1][1].held_bytes
    # A transition between two blocks belongs to the second of them.
    ends = {stages_of[name]: seen.before_bytes for name, seen in blocks[::-1]}
    ends_and_peaks = {"input": (base, base)}
    stages = list(dict.fromkeys(stages_of.values()))
    for stage, after in zip(stages, [*stages[1:], None], strict=True):
        end = last if after is None else ends[after]
        peaks = [
            max(seen.forward_peak_bytes, seen.backward_peak_bytes or 0)
            for name, seen in blocks
            if stages_of[name] == stage
        ]
        ends_and_peaks[stage] = (end, max(peaks))
    ends_and_peaks["pooling, embedding"] = (last, trace.between_peak_bytes)
    # A stage without blocks or a classifier holds nothing of the encoder's step.
    held = base
    for name in names:
        held, _ = ends_and_peaks.setdefault(name, (held, held))
    return {name: ends_and_peaks[name] for name in names}


@dataclass(frozen=True)
class EncoderBreakdown:
    """A training step of an encoder, and what it holds.

    Attributes
    ----------
    name : str
        The encoder.
    mode : str
        What its blocks keep.
    blocks : mapping of str to int
        How many blocks have each mode. In mode "reconstruct" those that cannot be
        reconstructed, stem and transitions, recompute.
    optimizer_name : str
        That of the encoder's family: "sgd" or "adamw".
    optimizer_bits : int
        Of the optimizer's states: 8 or 32.
    classes : int
        Of the classifier; 0 if there is none.
    how : str
        How activations came about: words to go on after "activations were".
    report : MemoryReport
        The parts. Activations are the peak of the encoder's forward and backward pass.
        Weights, gradients and optimizer states are those of encoder and classifier.
        Others are the batch, as waveforms and as filterbanks, and the peak of the
        classifier's and the loss's own step. The two steps do not peak at once, so that
        the total is an upper bound.
    stages : tuple of StageMemory
        The same by parts of the encoder, if that was asked for.
    """

    name: str
    mode: str
    blocks: Mapping[str, int]
    optimizer_name: str
    optimizer_bits: int
    classes: int
    how: str
    report: MemoryReport
    stages: tuple[StageMemory, ...] = ()


#: A step before and after.
Cases = Sequence[EncoderBreakdown]


def encoder_breakdown(
    name: str,
    *,
    mode: str | None = None,
    batch: int,
    frames: int,
    optimizer_bits: int = 8,
    head: Head = HEAD,
    stages: bool = False,
) -> EncoderBreakdown:
    """Count what a training step of an encoder holds.

    Parameters
    ----------
    name : str
        One of ``speechbrain_rev.architectures.ENCODERS``.
    mode : str or None
        What its blocks keep: "store", "recompute" or "reconstruct". None for the
        default: reconstruct if it is reversible, else store.
    batch : int
        Utterances.
    frames : int
        Of each; 200 are two seconds.
    optimizer_bits : {8, 32}
        Of the states of the optimizer that the encoder's family is trained with.
    head : Head
        Shape of the recipe's classifier, by default for VoxCeleb2 at three speeds; of no
        classes to leave it out.
    stages : bool
        Whether to trace the step, for what each stage takes; this needs some seconds.

    Returns
    -------
    EncoderBreakdown
        The parts, in float32.

    Raises
    ------
    ValueError
        If there is no such encoder, or it has no such mode.

    Examples
    --------
    >>> stored = encoder_breakdown("revnet46", mode="store", batch=128, frames=200)
    >>> reconstructed = encoder_breakdown("revnet46", batch=128, frames=200)
    >>> reconstructed.mode, stored.report.share("activations") > 0.97
    ('reconstruct', True)
    >>> reconstructed.report.total_bytes < 0.25 * stored.report.total_bytes
    True
    """
    mode = mode or architecture(name).default_mode
    encoder, run = training_step(name, mode=mode, batch=batch, frames=frames)
    with torch.device("meta"):
        classifier = head_modules(head)[0] if head.classes else None
    model = nn.ModuleList([encoder, *([classifier] if classifier else [])])
    optimizer_name = encoder.architecture.optimizer_name
    optimizer = build_optimizer(
        model.parameters(), name=optimizer_name, bits=optimizer_bits, lr=0.0
    )
    gradients = make_gradients(model)
    optimizer.step()
    parts: tuple[StageMemory, ...] = ()
    if stages:
        trace = trace_bytes(encoder, run)
        activations, how = trace.peak_bytes, _JUST_NOW
        parts = tuple(stage_memory(encoder, trace, optimizer, classifier))
    else:
        activations, how = _step_peak(run, name, mode, batch, frames)
    report = MemoryReport(
        activations_bytes=activations,
        optimizer_states_bytes=state_bytes(optimizer),
        weights_bytes=storage_bytes([*model.parameters(), *model.buffers()]),
        gradients_bytes=storage_bytes(gradients),
        others_bytes=batch * frames * INPUT_BYTES_PER_FRAME
        + _head_step_bytes(head, batch),
        device="meta",
        input_shape=(batch, frames, encoder.n_mels),
        precision="float32",
    )
    return EncoderBreakdown(
        name,
        mode,
        dict(Counter(mode.value for mode in encoder.block_modes().values())),
        optimizer_name,
        optimizer_bits,
        head.classes,
        how,
        report,
        parts,
    )


def _step_peak(
    run: Callable[[], None], name: str, mode: str, batch: int, frames: int
) -> tuple[int, str]:
    """Give the peak of a step from committed counts, or count it, and how."""
    peak = counted_peaks().get((name, mode, frames))
    if peak is None:
        return live_bytes_peak(run, device=torch.device("meta")), _JUST_NOW
    how = "counted"
    if batch not in BATCHES:
        right = min(bisect.bisect(BATCHES, batch), len(BATCHES) - 1)
        few, many = BATCHES[right - 1 : right + 1]
        how = (
            "bounded from above by the line through their counts at batches of "
            f"{few} and {many}"
        )
    return peak(batch), how


def before_and_after(
    name: str,
    *,
    mode: str | None = None,
    batch: int,
    frames: int,
    optimizer_bits: int = 8,
    head: Head = HEAD,
    stages: bool = False,
) -> list[EncoderBreakdown]:
    """Count a step as it is without this package, and as it is with it.

    Parameters
    ----------
    name, mode, batch, frames, optimizer_bits, head, stages
        As :func:`encoder_breakdown` takes them, for the step with this package.

    Returns
    -------
    list of EncoderBreakdown
        Stored activations and 32-bit states; then as asked.

    Raises
    ------
    ValueError
        As :func:`encoder_breakdown` does.

    Examples
    --------
    >>> pair = before_and_after("resnet34", batch=64, frames=200)
    >>> [(case.mode, case.optimizer_bits) for case in pair]
    [('store', 32), ('store', 8)]
    """
    return [
        encoder_breakdown(
            name,
            mode=each,
            batch=batch,
            frames=frames,
            optimizer_bits=bits,
            head=head,
            stages=stages,
        )
        for each, bits in (("store", 32), (mode, optimizer_bits))
    ]


def _head_step_bytes(head: Head, batch: int) -> int:
    """Count what ``Head.step_bytes`` bounds."""
    if not head.classes:
        return 0
    with torch.device("meta"):
        classifier, loss = head_modules(head)
        embeddings = torch.empty(
            batch, 1, head.embedding_dim, requires_grad=True, dtype=torch.float32
        )
        targets = torch.zeros(batch, 1, dtype=torch.long)
    make_gradients(classifier)
    embeddings.grad = torch.zeros_like(embeddings)
    return live_bytes_peak(lambda: loss(classifier(embeddings), targets).backward())
