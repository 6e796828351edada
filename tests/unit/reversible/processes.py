"""Functions in processes of their own, which share what takes seconds to import."""

from multiprocessing import get_context

import torch.multiprocessing as mp

#: Imported once, in the process that the others are forked from.
PRELOADED = ["tests.unit.reversible.chains", "torch.nn.parallel", "torch._dynamo"]


def run_in_processes(function, arguments, processes):
    """Call a function with its rank and the arguments, in each of some processes."""
    get_context("forkserver").set_forkserver_preload(PRELOADED)
    mp.start_processes(function, arguments, processes, start_method="forkserver")
