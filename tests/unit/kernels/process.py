"""A process of its own for Triton, which decides at its import whether it interprets.

In the process of the other tests anything may have imported it already.
"""

import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

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
    return pickle.dumps((poisoned(function, *arguments), arguments))


def poisoned(function, *arguments):
    """Call a function while new tensors are filled with the largest int32 or NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        return function(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
