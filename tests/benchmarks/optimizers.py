"""What 8-bit states save, what a step with them costs, and how far it is off.

Bytes and kernels are counted on meta tensors, of every encoder. Two of them train on real
speech with 32-bit states; beside them all forms of 8-bit states see the same gradients and
weights, so that their updates can be compared step by step.

On a GPU steps alone are timed, of whole encoders; there torch has a fused step, too.

python -m tests.benchmarks --only optimizers --results tests/benchmarks/results
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speechbrain_rev.architectures import ARCHITECTURES
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.sizes import MIB

from .compressed_ways import N_MELS, RATE
from .harness import CPU, Result, interleaved_seconds, require
from .launches import counted
from .peers import version_of
from .pictures import loss_curves
from .speech import Speech, Training, real_speech

#: Forms of states, by what pages call them.
FORMS: dict[str, dict[str, Any]] = {
    "blocks of 256": {"block": 256},
    "blocks of 256, small packed": {"block": 256, "pack_small": True},
    "blocks of 2048": {"block": 2048},
    "blocks of 2048, small packed": {"block": 2048, "pack_small": True},
}
PLAIN, LIBRARY, TORCHAO = "torch, 32 bit", "bitsandbytes", "torchao"
FUSED = f"{PLAIN}, fused"
#: A classifier of VoxCeleb2's speakers at three speeds has this many weights more.
CLASSIFIER = (17_982, 256)
#: How far the state kept at 32 bit may be from torch's: roundings of some values.
ROUNDED = 1e-5


@dataclass(frozen=True)
class Setting:
    """What is counted and trained; ``row`` has widths and blocks of another encoder."""

    counted: tuple[str, ...] = tuple(ARCHITECTURES)
    trained: tuple[str, ...] = ("revnet57", "df_revnet89")
    #: On a GPU.
    timed: tuple[str, ...] = ("revnet57", "df_revnet377")
    batch: int = 8
    frames: int = 200
    steps: int = 60
    repeats: int = 15
    row: Mapping[str, Any] = field(default_factory=dict)


def on_meta(name: str, way: str) -> dict[str, Any]:
    """Count bytes of states, and kernels of a step, of an encoder and its classifier."""
    row = ARCHITECTURES[name]
    with torch.device("meta"):
        encoder = build_encoder(name)
        weights = [*encoder.parameters(), nn.Parameter(torch.empty(CLASSIFIER))]
    given: dict[str, Any] = {"name": row.training.optimizer_name, "lr": 0.1}
    given["weight_decay"] = row.training.weight_decay
    if way == PLAIN:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[given.pop("name")]
        momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer: Any = kind(weights, foreach=True, **given, **momentum)
    else:
        optimizer = build_optimizer(weights, bits=8, **given, **FORMS[way])
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        step = counted(optimizer.step)
    # On a device the addresses of gradients are sent, too, where they have changed.
    sent = 0 if way == PLAIN else 1
    return {"MiB": state_bytes(optimizer) / MIB, "kernels": step.launches + sent}


def ways_of(
    weights: list[Tensor], name: str, *, lr: float, weight_decay: float
) -> dict[str, Any]:
    """Build an optimizer of each way around copies of the weights."""
    given: dict[str, Any] = {"name": name, "lr": lr, "weight_decay": weight_decay}
    forms = {**FORMS, LIBRARY: {"backend": "bitsandbytes"}}
    ways: dict[str, Any] = {}
    for way, form in forms.items():
        own = [nn.Parameter(w.detach().clone()) for w in weights]
        ways[way] = build_optimizer(own, bits=8, **given, **form)
    if name == "adamw":
        own = [nn.Parameter(w.detach().clone()) for w in weights]
        options = {k: given[k] for k in ("lr", "weight_decay")}
        try:
            torchao = importlib.import_module("torchao.optim")
            ways[TORCHAO] = torchao.AdamW8bit(own, **options)
        except ImportError:
            print(f"{TORCHAO} is not installed: it has no row", flush=True)
    return ways


def kinds_of(training: Training) -> list[str]:
    """Tell what each weight is of."""
    modules = {
        id(p): module
        for module in training.encoder.modules()
        for p in module.parameters(recurse=False)
    }
    kinds = []
    for p in training.parameters:
        module = modules.get(id(p))
        kind = "classifier" if module is None else "normalisation"
        if isinstance(module, nn.Conv2d | nn.Linear):
            depthwise = getattr(module, "groups", 1) > 1
            kind = "depthwise convolution" if depthwise else "convolution or linear"
        kinds.append(kind if p.dim() > 1 else "normalisation or bias")
    return kinds


def off_by(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Give the distance of updates over the length of the wanted ones."""
    error, length = (
        sum(float(x.double().square().sum()) for x in each)
        for each in ([a - b for a, b in zip(got, wanted, strict=True)], wanted)
    )
    return (error / length) ** 0.5 if length else 0.0


def trained(name: str, speech: Speech, setting: Setting) -> dict[str, dict[str, Any]]:
    """Train an encoder, and compare the updates of all ways with its own."""
    torch.manual_seed(0)
    encoder = build_encoder(name, **setting.row)
    training = Training(encoder, name, speech, rate=RATE, batch=setting.batch)
    training.let_fall(setting.steps)
    weights, kinds = training.parameters, kinds_of(training)
    (group,) = training.optimizer.param_groups
    kind = "sgd" if "momentum" in group else "adamw"
    given = {key: group[key] for key in ("lr", "weight_decay")}
    ways = ways_of(weights, kind, **given)
    series: dict[str, list[float]] = {way: [] for way in ways}
    layers: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ways}
    seconds = []
    for number in range(setting.steps):
        before = [w.detach().clone() for w in weights]
        start = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - start)
        wanted = [w.detach() - b for w, b in zip(weights, before, strict=True)]
        for way, optimizer in ways.items():
            own = optimizer.param_groups[0]["params"]
            with torch.no_grad():
                for p, b, w in zip(own, before, weights, strict=True):
                    p.copy_(b)
                    p.grad = w.grad.clone()
            set_rate(optimizer, training.optimizer.param_groups[0]["lr"])
            optimizer.step()
            got = [p.detach() - b for p, b in zip(own, before, strict=True)]
            series[way].append(off_by(got, wanted))
            # The first steps of a moment have little to lose.
            if number >= setting.steps // 2:
                for kind, a, b in zip(kinds, got, wanted, strict=True):
                    layers[way][kind].append(off_by([a], [b]))
        if number % 25 == 24:
            print(name, number + 1, flush=True)
    kept = [i for i, w in enumerate(weights) if w.numel() < 4096]
    unequal = off_by(
        [own_of(ways, i) for i in kept], [weights[i].detach() for i in kept]
    )
    require(
        unequal <= ROUNDED,
        f"{name}: small tensors, which have 32-bit states, are {unequal:.1e} from torch's.",
    )
    timed: dict[str, Callable[[], Any]] = {
        way: functools.partial(step_of, optimizer) for way, optimizer in ways.items()
    }
    group["foreach"] = True
    timed[PLAIN] = training.optimizer.step
    spreads = interleaved_seconds(timed, CPU, repeats=setting.repeats)
    whole = statistics.median(seconds)
    rows = {}
    for way, spread in spreads.items():
        rows[way] = {
            "error": statistics.median(series[way]) if way in series else 0.0,
            "errors": {"of each step": [round(e, 5) for e in series.get(way, [])]},
            **{
                f"error, {kind}": statistics.median(layers[way][kind])
                if way in layers and kind in layers[way]
                else ""
                for kind in KINDS
            },
            "ms": 1e3 * spread.median,
            "times the baseline": spread.median / spreads[PLAIN].median,
            "of the training step": spread.median / whole,
        }
    return rows


KINDS = (
    "convolution or linear",
    "depthwise convolution",
    "normalisation or bias",
    "classifier",
)


def own_of(ways: Mapping[str, Any], index: int) -> Tensor:
    """Give a weight of the usual form."""
    weight: Tensor = next(iter(ways.values())).param_groups[0]["params"][index]
    return weight.detach()


def set_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate, which torchao has in a tensor."""
    (group,) = optimizer.param_groups
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def step_of(optimizer: Any) -> None:
    """Take a step whose gradients are there already."""
    optimizer.step()


def on_gpu(name: str, device: torch.device, setting: Setting) -> list[dict[str, Any]]:
    """Time the steps of an encoder and its classifier; the baseline is torch's foreach.

    Raises
    ------
    NotEqual
        If some steps have other bits than on the CPU.
    """
    training = ARCHITECTURES[name].training
    torch.manual_seed(0)
    weights = [*build_encoder(name).parameters(), nn.Parameter(torch.randn(CLASSIFIER))]
    draws = [1e-3 * torch.randn_like(weight) for weight in weights]
    kind, lr = training.optimizer_name, 1e-3
    given = {"lr": lr, "weight_decay": training.weight_decay}
    ways = ways_of([w.detach().to(device) for w in weights], kind, **given)
    # Compiling its step takes minutes there.
    ways.pop(TORCHAO, None)
    own = [nn.Parameter(w.detach().clone().to(device)) for w in weights]
    others = [nn.Parameter(w.detach().clone().to(device)) for w in weights]
    torchs = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind]
    momentum = {"momentum": 0.9} if kind == "sgd" else {}
    ways[PLAIN] = torchs(own, foreach=True, **given, **momentum)
    ways[FUSED] = torchs(others, fused=True, **given, **momentum)
    here = build_optimizer(weights, name=kind, bits=8, **given)
    for optimizer in (here, *ways.values()):
        for p, draw in zip(optimizer.param_groups[0]["params"], draws, strict=True):
            p.grad = draw.to(p.device)
        for _ in range(3):
            optimizer.step()
    there = next(iter(ways.values())).param_groups[0]["params"]
    require(
        all(torch.equal(a.cpu(), b) for a, b in zip(there, weights, strict=True)),
        f"Weights of {name} after three steps on {device} are not those of the CPU.",
    )
    steps = {
        way: functools.partial(step_of, optimizer) for way, optimizer in ways.items()
    }
    spreads = interleaved_seconds(steps, device, repeats=4 * setting.repeats)
    bytes_of = {
        way: state_bytes(optimizer) for way, optimizer in ways.items() if way != LIBRARY
    }
    return [
        {
            "encoder": name,
            "optimizer": kind,
            "way": way,
            "baseline": PLAIN,
            "MiB": bytes_of[way] / MIB if way in bytes_of else "",
            "saved": 1 - bytes_of[way] / bytes_of[PLAIN] if way in bytes_of else "",
            "ms": 1e3 * spread.median,
            "times the baseline": spread.median / spreads[PLAIN].median,
        }
        for way, spread in spreads.items()
    ]


def run(device: torch.device, setting: Setting | None = None) -> Result:
    """Count all encoders and train two; the baseline is torch's step with 32-bit states."""
    setting = setting or Setting()
    if device.type == "cuda":
        return Result(
            "optimizers",
            "What does a step with 8-bit states take on a GPU?",
            f"encoder and a classifier of {CLASSIFIER[0]:,}; median of {4 * setting.repeats} "
            f"interleaved steps, gradients there already; {_versions()}",
            [row for name in setting.timed for row in on_gpu(name, device, setting)],
            "after three steps weights have the bits of the CPU's",
        )
    speech = real_speech(N_MELS, setting.frames)
    steps = {name: trained(name, speech, setting) for name in setting.trained}
    rows: list[dict[str, Any]] = []
    for name in setting.counted:
        plain = on_meta(name, PLAIN)
        own = steps.get(name, {})
        for way in (PLAIN, *FORMS, *(w for w in own if w in (LIBRARY, TORCHAO))):
            counts = {"MiB": "", "kernels": ""}
            if way in (PLAIN, *FORMS):
                counts = plain if way == PLAIN else on_meta(name, way)
            saved = "" if counts["MiB"] == "" else 1 - counts["MiB"] / plain["MiB"]
            kernels = counts["kernels"]
            empty: dict[str, Any] = dict.fromkeys(_STEP_COLUMNS, "") | {"errors": {}}
            rows.append(
                {
                    "encoder": name,
                    "optimizer": ARCHITECTURES[name].training.optimizer_name,
                    "way": way,
                    "baseline": PLAIN,
                    **counts,
                    "saved": saved,
                    "times its kernels": kernels and kernels / plain["kernels"],
                    **(own.get(way) or empty),
                }
            )
        print(name, flush=True)
    return Result(
        "optimizers",
        "What do 8-bit states save, cost and change?",
        "MiB, kernels: states of encoder and a classifier of "
        f"{CLASSIFIER[0]:,}, and a step's launches, counted on meta tensors, torch's with "
        f"foreach; error: of the update beside torch's at 32 bit from the same weights and "
        f"gradients, median of {setting.steps} steps of training, batch {setting.batch} of "
        f"{setting.frames} frames, {speech.source}, AAM softmax, clipped gradients; of "
        "layers: median over their second half; ms: median of "
        f"{setting.repeats} interleaved steps of the trained encoder, whose training step "
        f"has the rest of the time; {_versions()}",
        rows,
        "small tensors, which keep 32-bit states, follow torch's to "
        f"{ROUNDED:g}; the kernel has the bits of the CPU's step (tests)",
    )


_STEP_COLUMNS = (
    "error",
    "errors",
    *(f"error, {kind}" for kind in KINDS),
    "ms",
    "times the baseline",
    "of the training step",
)


def _versions() -> str:
    return ", ".join(
        f"{package} {version_of(package)}" for package in (LIBRARY, TORCHAO)
    )


#: Forms that a picture shows.
DRAWN = tuple(FORMS)[:3]


def draw(result: Result, path: Path) -> None:
    """Draw the error of updates over the training, where it was measured."""
    if "errors" not in result.rows[0]:
        return
    curves = {
        f"{row['encoder']}, {row['way'].removeprefix('blocks of ')}": row["errors"][
            "of each step"
        ]
        for row in result.rows
        if row["way"] in DRAWN and row["errors"].get("of each step")
    }
    loss_curves(
        curves,
        path,
        title="How far updates with 8-bit states are off, by the values of a block",
        source=f"Distance from torch's update at 32 bit over its length; {speech_of(result)}. "
        f"{result.where}",
        quantity="error of the update",
        mean_of=5,
    )


def speech_of(result: Result) -> str:
    """Give what was trained on, of a result's setting."""
    return next(
        part for part in result.setting.split("; ") if "steps of training" in part
    )
