"""A process of its own for Triton, which decides at its import whether it interprets.

In the process of the other tests anything may have imported it already.
"""

import os
import pickle
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from unittest import mock

import torch


class Process:
    """Calls functions in another process, with copies of their arguments."""

    def __init__(self, **environment):
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), _set_environment, [environment]
        )

    def __call__(self, function, *arguments):
        """Return what the function returns, and its arguments as it left them."""
        # Not as torch sends tensors between processes, which moves them.
        sent = pickle.dumps((function, arguments))
        return pickle.loads(self._pool.submit(_call, sent).result())

    def close(self):
        self._pool.shutdown()


def _set_environment(environment):
    os.environ.update(environment)


def _call(sent):
    function, arguments = pickle.loads(sent)
    return pickle.dumps((with_nan(function, *arguments), arguments))


def with_nan(function, *arguments):
    """Call a function while new tensors are filled with the largest int32 or NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        return function(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)


def compiled(name, launch, capability):
    """Compile kernels of a named module as a function launches them, to PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    code, module = {}, import_module(name)
    jit = module._compiled

    def compile_only(kernel, *arguments, **constants):
        options = {n: constants.pop(n) for n in constants.keys() - {*kernel.arg_names}}
        signature = {}
        for name, x in zip(kernel.arg_names, arguments, strict=False):
            # Of no tensor and of one element Triton makes constants.
            one = type(x) is int and x == 1 and name not in kernel.do_not_specialize
            if x is None or one:
                constants[name] = x
            signature[name] = type_of(x)
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in kernel.arg_names}
        kind = repr((kernel, signature, constants))
        if kind not in code:
            source = ASTSource(kernel, signature, constants)
            target = GPUTarget("cuda", capability, 32)
            binary = triton.compile(source, target=target, options=options)
            code[kind] = binary.asm["ptx"]

    def launchable(kernel):
        return defaultdict(lambda: partial(compile_only, jit(kernel)))

    with mock.patch.object(module, "_compiled", launchable):
        launch()
    return list(code.values())


TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.uint32: "*u32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def type_of(x):
    """Name an argument's type as Triton does."""
    if isinstance(x, torch.Tensor):
        return TYPES[x.dtype]
    if isinstance(x, float):
        return "fp32"
    return "i64" if isinstance(x, int) and x >= 2**31 else "i32"
