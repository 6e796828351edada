"""What a training step asks of a GPU, counted without one: kernels, bytes and FLOPs.

Each operation that reaches torch's dispatcher is a kernel, views and allocations are none,
and what has a Triton kernel of this package is one. Tensors have shapes and no contents,
so that a step of the deepest encoder takes seconds. ``count_step`` counts one encoder.

python -m tests.benchmarks --only launches --results tests/benchmarks/results
python -m tests.benchmarks.readme
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from speechbrain_rev import kernels
from speechbrain_rev.architectures import ARCHITECTURES, Architecture, architecture
from speechbrain_rev.devices import Speed, parse_card
from speechbrain_rev.lobes import SpeakerEncoder
from speechbrain_rev.lobes.geometry import channels_by_level
from speechbrain_rev.planner.step import cpu_fakes
from speechbrain_rev.planner.trace import _bytes, _Work, accessed
from speechbrain_rev.reversible.convolution import Geometry
from speechbrain_rev.reversible.monitor import has_values

from .counts import modes_of
from .harness import CPU, Result, Spread, distance, interleaved_seconds, require
from .peers import in_plain_layers
from .steps import FRAMES, PRECISIONS, TOLERANCE, Way, encoder_by, train_step

BATCH = 128
#: A kernel that touches no larger tensor takes less time than its launch.
TINY_ELEMENTS = 2**16
#: Encoders that are counted in bf16 and without chunks too, and timed.
DETAILED = (
    "resnet34",
    "resnet152",
    "df_resnet56",
    "df_resnet233",
    "revnet57",
    "revnet137",
    "df_revnet89",
    "df_revnet377",
)
PLAIN = "plain torch layers"
CARDS = ("RTX 2080 Ti", "RTX 4090", "H100 80GB")

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.convolution,
    _aten.convolution_backward,
    _aten.addmm,
    _aten.mm,
    _aten.bmm,
    _aten.baddbmm,
    _aten.baddbmm_,
}
#: What launches more than one kernel on a CUDA device: torch's operation measures statistics
#: in one and updates running ones, here those that are thrown away, in another.
#: Normalisations of torch's own layers are cuDNN's: one forward and one backward, as
#: ``native_batch_norm_backward`` is of ours.
_SEVERAL_KERNELS = {
    "aten::batch_norm_update_stats": 2,
    "speechbrain_rev::moments": 2,
}
#: Tensors that one kernel of an operation on lists takes, by the number of lists
#: (``depth_to_max_tensors`` of torch's MultiTensorApply).
_TENSORS_OF_LISTS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


@dataclass(frozen=True)
class StepCount:
    """What one forward and backward pass asks of a GPU.

    Attributes
    ----------
    operations : Counter of str
        Kernels by operation.
    tiny : int
        Kernels that touch no tensor of ``TINY_ELEMENTS`` or more.
    convolutions : int
        Kernels of convolutions and matrix products.
    convolution_bytes, other_bytes : int
        Read and written by convolutions and matrix products, and by all others.
    work : Counter of (int, int)
        How many operations compute so many FLOPs and move so many bytes. FLOPs are of
        convolutions and matrix products, a multiplication and an addition being two.
    """

    operations: Counter[str] = field(default_factory=Counter)
    tiny: int = 0
    convolutions: int = 0
    convolution_bytes: int = 0
    other_bytes: int = 0
    work: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """Kernels."""
        return self.operations.total()

    @property
    def flops(self) -> int:
        """FLOPs of convolutions and matrix products."""
        return sum(count * flops for (flops, _), count in self.work.items())

    def modelled_seconds(self, speed: Speed) -> float:
        """Model the time of the step; no clock is read.

        An operation takes what its FLOPs or its bytes take, whichever is more, one after
        the other. Meanwhile the host launches kernels, and the slower of both decides.
        """
        device = sum(
            count * max(flops / speed.flops_per_second, moved / speed.bytes_per_second)
            for (flops, moved), count in self.work.items()
        )
        return max(device, self.launches / speed.operations_per_second)


class _Launches(_Work):
    """Counts the kernels that operations launch."""

    def __init__(self) -> None:
        super().__init__(None)
        self.operations: Counter[str] = Counter()
        self.work: Counter[tuple[int, int]] = Counter()
        self.tiny = self.convolutions = self.convolution_bytes = self.other_bytes = 0
        self._seen: tuple[list[Tensor], list[Tensor]] = [], []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count its kernels."""
        if func is torch.ops.prim.device.default:  # asked of each fake tensor
            return func(*args)
        flops = self._flops
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        # Autograd copies a gradient that somebody else still has: nothing is kept here.
        taken, made = self._seen
        self._seen = [], []
        if not func.is_view:
            flops = self._flops - flops
            self._note(func, args, kwargs or {}, taken, made, flops)
        return outputs

    def _run(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        outputs, taken, made = super()._run(func, args, kwargs)
        self._seen = taken, made
        return outputs, taken, made

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        taken: list[Tensor],
        made: list[Tensor],
        flops: int,
    ) -> None:
        packet = func._overloadpacket
        # Tensors with contents are on the host, as a random state that is compared.
        on_host = all(map(has_values, (*taken, *made)))
        launches = _kernels_of(func, args)
        access = accessed(func, args, kwargs, taken, made)
        if access is None or on_host or not launches:
            return
        moved = self.add(func._schema.name, *access, launches, flops)
        if packet in _PRODUCTS:
            self.convolutions += launches
            self.convolution_bytes += moved
        else:
            self.other_bytes += moved

    def add(
        self,
        name: str,
        read: list[Tensor],
        written: list[Tensor],
        launches: int = 1,
        flops: int = 0,
    ) -> int:
        """Count an operation's kernels; give the bytes that it moves."""
        self.operations[name.removeprefix("aten::")] += launches
        largest = max((x.numel() for x in (*read, *written)), default=0)
        self.tiny += launches * (largest < TINY_ELEMENTS)
        moved = sum(map(_bytes, [*read, *written]))
        self.work[flops, moved] += 1
        return moved

    def compiled(self, kernel: Callable[..., Any]) -> Mapping[Any, Callable[..., None]]:
        """Give what counts a Triton kernel where it would be launched."""

        def launch(*args: Any, **kwargs: Any) -> None:
            # What a kernel takes it reads or writes, once.
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.other_bytes += self.add(f"triton::{kernel.__name__}", tensors, [])

        return defaultdict(lambda: launch)

    def count(self) -> StepCount:
        """Give what was counted."""
        return StepCount(
            self.operations,
            self.tiny,
            self.convolutions,
            self.convolution_bytes,
            self.other_bytes,
            self.work,
        )


def _kernels_of(func: Any, args: Any) -> int:
    """Count the kernels of an operation."""
    name = func._schema.name
    if func is _aten.convolution_backward.default:
        return sum(args[-1])
    if name.startswith("aten::_foreach_"):
        lists = [x for x in args if isinstance(x, list | tuple)]
        lists = [x for x in lists if x and isinstance(x[0], Tensor)]
        # What is not in place has its outputs in a list of their own.
        depth = len(lists) + (not name.endswith("_"))
        return -(-len(lists[0]) // _TENSORS_OF_LISTS[depth])
    return _SEVERAL_KERNELS.get(name, 1)


@contextlib.contextmanager
def _as_on_a_gpu(meter: _Launches) -> Iterator[None]:
    """Let tensors without contents take the ways of those on a CUDA device."""
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        patch(Tensor, "is_cuda", property(lambda x: not has_values(x)))
        patch(torch.cuda, "device_of", contextlib.nullcontext)
        # A convolution is a matrix product on a CPU alone.
        patch(Geometry, "_is_product", lambda *_: False)
        for found in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
            module = importlib.import_module(found.name)
            patch(module, "_compiled", meter.compiled)
            patch(module, "usable", lambda *_: True)
        for name, module in list(sys.modules.items()):
            # Who chooses a kernel refuses fake tensors, which are those under autocast.
            is_ours = name.startswith("speechbrain_rev.")
            if is_ours and {"kernels", "is_fake"} <= vars(module).keys():
                patch(module, "is_fake", lambda x: False)
        yield


def counted(run: Callable[[], Any]) -> StepCount:
    """Count the kernels of anything that runs on tensors without contents.

    Parameters
    ----------
    run : callable
        Runs on meta or fake tensors.

    Returns
    -------
    StepCount
        Of what it would launch on a GPU.

    Examples
    --------
    >>> x = torch.empty(4, 8, device="meta")
    >>> counted(lambda: (2 * x).t() + 1).operations
    Counter({'mul': 1, 'add': 1})
    """
    meter = _Launches()
    with _as_on_a_gpu(meter), meter:
        run()
    return meter.count()


def count_step(
    name: str,
    *,
    mode: str | None = None,
    precision: str = "float32",
    chunk: int | str | None = "auto",
    batch: int = BATCH,
    frames: int = FRAMES,
    **row: Any,
) -> StepCount:
    """Count the kernels of an encoder's training step: forward and backward pass.

    Parameters
    ----------
    name : str
        Encoder.
    mode : str or None
        Of all blocks; ``PLAIN`` for the same encoder in torch's own layers, which stores;
        None for the encoder's usual one.
    precision : {"float32", "bf16", "fp16"}
        Of autocast.
    chunk : int, "auto" or None
        As ``SpeakerEncoder`` takes it.
    batch, frames : int
        Of the features, [batch, frames, n_mels].
    **row
        Other widths and blocks.

    Returns
    -------
    StepCount
        Of a step that compares no streams, as all but every 100th. Gradients of weights
        are None before it, as after ``zero_grad``.

    Examples
    --------
    >>> tiny = {"widths": (8, 16, 16, 16), "blocks": (1, 1, 1, 1), "batch": 2}
    >>> ours, torchs = (count_step("revnet57", mode=m, **tiny) for m in (None, PLAIN))
    >>> ours.launches > torchs.launches
    True
    """
    # Tensors on meta are the quicker ones, but autocast passes them by.
    with cpu_fakes() if PRECISIONS[precision].half else torch.device("meta"):
        encoder = _encoder(name, mode, precision, chunk, **row)
        feats = torch.randn(batch, frames, 80)

        def step() -> None:
            with PRECISIONS[precision].autocast(feats.device):
                y = encoder(feats)
            y.backward(torch.empty_like(y))

        return counted(step)


def _encoder(
    name: str, mode: str | None, precision: str, chunk: Any, **row: Any
) -> nn.Module:
    """Build an encoder in a mode or in plain layers, without gradients."""
    kept = architecture(name).default_mode if mode is None else mode
    kept = "store" if mode == PLAIN else kept
    way = Way(name, kept, "exact", precision, chunk=chunk)
    encoder = encoder_by(way, name, **row)
    module = in_plain_layers(encoder) if mode == PLAIN else encoder
    module.zero_grad()
    return module


def check_plain_layers(row: Architecture) -> float:
    """Compare an encoder with the same one in plain layers, in float64.

    Returns
    -------
    float
        The largest relative distance of embeddings and gradients.

    Raises
    ------
    NotEqual
        If it is more than rounding.
    """
    way = Way(row.name, "store", "float", chunk=None)
    sizes = {"widths": (8, 16, 16, 32), "blocks": (1, 2, 1, 1)}
    ours = encoder_by(way, row.name, **sizes).double()
    theirs = in_plain_layers(ours).double()
    torch.manual_seed(1)
    feats = torch.randn(2, 40, 80, dtype=torch.float64)
    gradients = []
    for encoder in (ours, theirs):
        ours.zero_grad()
        train_step(encoder, feats, way)
        gradients.append([p.grad for p in ours.parameters()])
    worst = max(distance(*gradients), distance(theirs(feats), ours(feats)))
    require(
        worst <= TOLERANCE,
        f"{row.name} in plain layers is {worst:.1e} from ours.",
    )
    return worst


@dataclass(frozen=True)
class Setting:
    """What is counted, and timed on a CPU.

    Attributes
    ----------
    names, detailed : tuple of str
        Encoders; those that are counted in bf16 and without chunks too, and timed.
    batch, frames : int
        Of what is counted.
    timed_batch, timed_frames, timed_mels : int
        Of what is timed: so few that the time is the host's.
    repeats : int
        Steps of each kind that are timed.
    row : mapping
        Other widths and blocks.
    """

    names: tuple[str, ...] = tuple(ARCHITECTURES)
    detailed: tuple[str, ...] = DETAILED
    batch: int = BATCH
    frames: int = FRAMES
    timed_batch: int = 2
    timed_frames: int = 16
    timed_mels: int = 8
    repeats: int = 5
    row: Mapping[str, Any] = field(default_factory=dict)


#: Mode, precision and chunk.
Kind = tuple[str, str, "str | None"]


def kinds_of(name: str, *, detailed: bool) -> list[Kind]:
    """List in what ways an encoder is counted, plain layers first of each precision."""
    is_chunked = ARCHITECTURES[name].reversible
    usual = "auto" if is_chunked else None
    kinds: list[Kind] = []
    for precision in ("float32", "bf16") if detailed else ("float32",):
        # Fake tensors, which autocast takes, are slow: chunks are compared in float32.
        also = detailed and is_chunked and precision == "float32"
        chunks = (usual, None) if also else (usual,)
        kinds.append((PLAIN, precision, None))
        kinds += [(m, precision, c) for m in modes_of(name) for c in chunks]
    return kinds


def host_seconds(name: str, kinds: list[Kind], setting: Setting) -> dict[Kind, Spread]:
    """Time steps in float32 on inputs so small that the host decides.

    Chunks are those of the usual number of mel bands, so that operations are, too.
    """
    torch.manual_seed(1)
    feats = torch.randn(setting.timed_batch, setting.timed_frames, setting.timed_mels)
    sizes = {"n_mels": setting.timed_mels, **setting.row}
    steps = {}
    for mode, precision, chunk in kinds:
        if precision != "float32":
            continue
        module = _encoder(name, mode, precision, None, **sizes)
        if isinstance(module, SpeakerEncoder) and chunk is not None:
            own = module.architecture
            module.set_channels(channels_by_level(chunk, own, own.geometry()))
        steps[mode, precision, chunk] = functools.partial(
            _step_from_no_gradients, module, feats
        )
    return interleaved_seconds(steps, CPU, repeats=setting.repeats)


def _step_from_no_gradients(module: nn.Module, feats: Tensor) -> None:
    module.zero_grad()
    y = module(feats)
    y.backward(torch.ones_like(y))


def rows_of(name: str, setting: Setting) -> list[dict[str, Any]]:
    """Count and time an encoder in all its ways; each ratio is to its plain layers."""
    detailed = name in setting.detailed
    kinds = kinds_of(name, detailed=detailed)
    seconds = host_seconds(name, kinds, setting) if detailed else {}
    sizes = {"batch": setting.batch, "frames": setting.frames, **setting.row}
    rows = []
    plain, plain_seconds = StepCount(), None
    for kind in kinds:
        mode, precision, chunk = kind
        step = count_step(name, mode=mode, precision=precision, chunk=chunk, **sizes)
        taken = seconds.get(kind)
        if mode == PLAIN:
            plain, plain_seconds = step, taken
        row = {
            "encoder": name,
            "mode": mode,
            "precision": precision,
            "chunk": "null" if chunk is None else chunk,
            "baseline": f"{name}, {PLAIN}, {precision}",
            "launches": step.launches,
            "times its launches": step.launches / plain.launches,
            "tiny": step.tiny,
            "of convolutions": step.convolutions,
            "GB of convolutions": step.convolution_bytes / 1e9,
            "times its GB of convolutions": step.convolution_bytes
            / plain.convolution_bytes,
            "GB beside": step.other_bytes / 1e9,
            "times its GB beside": step.other_bytes / plain.other_bytes,
            "TFLOP": step.flops / 1e12,
            "times its FLOPs": step.flops / plain.flops,
            "times its host time": taken.median / plain_seconds.median
            if taken and plain_seconds
            else "",
        }
        for card in CARDS:
            # Peak figures are of float32.
            speed = parse_card(card).speed
            modelled = [each.modelled_seconds(speed) for each in (step, plain)]
            is_known = precision == "float32"
            row[f"modelled ms, {card}"] = 1e3 * modelled[0] if is_known else ""
            row[f"modelled times, {card}"] = (
                modelled[0] / modelled[1] if is_known else ""
            )
        rows.append(row)
    return rows


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Count all encoders; the baseline is the same encoder in plain torch layers."""
    assert device.type == "cpu"
    setting = setting or Setting()
    alike = {ARCHITECTURES[n].block + ARCHITECTURES[n].type: n for n in setting.names}
    worst = max(check_plain_layers(ARCHITECTURES[name]) for name in alike.values())
    rows: list[dict[str, Any]] = []
    for name in setting.names:
        rows += rows_of(name, setting)
        print(name, flush=True)
    speeds = "; ".join(f"{card} {parse_card(card).speed.rates}" for card in CARDS)
    return Result(
        "launches",
        "What does a training step ask of a GPU, beside the same encoder in plain torch "
        "layers?",
        f"forward and backward pass of the encoder at batch {setting.batch} and "
        f"{setting.frames} frames of 80 mel bands, counted without a GPU; launches: "
        "kernels, one for each operation but views and allocations, one for each Triton "
        "kernel; GB beside: read and "
        "written by all but convolutions and matrix products; host time: median of "
        f"{setting.repeats} interleaved steps in float32 on the CPU at batch "
        f"{setting.timed_batch} and {setting.timed_frames} frames of "
        f"{setting.timed_mels} mel bands, where a batch has at most two parts and exact streams are added by several "
        "operations instead of one kernel; modelled: no clock is read, each operation "
        "takes what its FLOPs or bytes take, whichever is more, unless launching takes "
        f"longer: {speeds}",
        rows,
        f"float64, reduced widths and blocks: gradients and embeddings of plain layers "
        f"within {worst:.1e} of ours",
    )
