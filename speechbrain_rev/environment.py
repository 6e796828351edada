"""What a bug report needs: versions, devices, memory."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from speechbrain_rev import __version__
from speechbrain_rev.devices import usable_cpus
from speechbrain_rev.sizes import GIB

_PACKAGES = (
    "torch",
    "torchaudio",
    "speechbrain",
    "bitsandbytes",
    "huggingface_hub",
    "hyperpyyaml",
    "soundfile",
    "numpy",
)


def environment() -> Iterator[tuple[str, str]]:
    """Yield what a bug report needs, as names and values.

    A package that is there but cannot be imported is reported with the reason.
    """
    yield "speechbrain_rev", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    for package in _PACKAGES:
        yield package, _version(package)
    yield "processor", _processor()
    yield "cpus", _cpus()
    yield "ram", _ram()
    yield from _cuda()


def _version(package: str) -> str:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    # torch and torchaudio must be built for each other; importing them shows it.
    modules = {"torch": "torch", "torchaudio": "speechbrain_rev.torchaudio_pair"}
    if package in modules:
        try:
            importlib.import_module(modules[package])
        except (ImportError, OSError, RuntimeError) as error:
            return f"{version}, cannot be imported: {' '.join(str(error).split())}"
    return version


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor()) or "unknown on this system"
    # Names as clouds give them are those of several generations.
    kind = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{name} ({', '.join(kind)})" if kind else name


def _cpus() -> str:
    return f"{os.cpu_count()}, {usable_cpus()} of them for this process"


def _ram() -> str:
    try:
        ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return "unknown on this system"
    return f"{ram_bytes / GIB:.1f} GiB"


def _cuda() -> Iterator[tuple[str, str]]:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError):
        yield "cuda", "unknown, as torch cannot be imported"
        return
    built = torch.version.cuda
    if not torch.cuda.is_available():
        yield "cuda", f"no device (torch is built for {built or 'CPU only'})"
        return
    cudnn = torch.backends.cudnn.version()
    yield "cuda", f"{built}, cuDNN {cudnn}, {torch.cuda.device_count()} device(s)"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / GIB:.1f} GiB"
        capability = f"compute capability {device.major}.{device.minor}"
        yield f"cuda:{index}", f"{device.name}, {memory}, {capability}"
