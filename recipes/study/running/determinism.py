"""What lets a training give the same weights again: algorithms without chance.

Sums are made in another order by other instructions: those that a processor has, torch,
oneDNN and MKL choose among. With AVX2 alone, which x86 processors have since 2013 or so,
a training on a processor with AVX-512 gave the weights of one without, by the same maker.
What is computed of trainings, as angles between gradients, is not told so: it repeats on
one processor.
"""

from __future__ import annotations

import os

import torch
from torch.backends.cpu import get_cpu_capability

_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    # Strict: where memory begins does not matter either.
    "MKL_CBWR": "AVX2,STRICT",
}


def compute_repeatably() -> None:
    """Have torch sum in one order, on a card as well; before CUDA starts.

    An operation that cannot raises when it is reached.
    """
    # cuBLAS sums in one order only with workspaces of a fixed size, which it reads here.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    # It would write to all memory that is asked for, and no result depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def instructions_of(precision: str) -> dict[str, str]:
    """Give the environment of a training in which unlike x86 processors may compute alike.

    Read when torch is loaded.

    Parameters
    ----------
    precision : str
        "fp32", "bf16" or "fp16".

    Returns
    -------
    dict of str to str
        Empty where there is no AVX2, and for half precision: without instructions of its
        own it takes 8 times as long.
    """
    has_avx2 = get_cpu_capability() in ("AVX2", "AVX512")
    return dict(_AVX2) if has_avx2 and precision == "fp32" else {}


def told_of(precision: str) -> dict[str, str | None]:
    """Give the variables that choose instructions as a training has them.

    Those that the user has set go before ours.
    """
    given = {**instructions_of(precision), **os.environ}
    return {name: given.get(name) for name in _AVX2}
