"""A training step whose streams are added by kernels, though it is on the CPU."""

import torch

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import streams
from tests.unit.reversible import chains


def train(mode, precision, arithmetic):
    """One step of a chain: what it gives and how many kernels it launched."""
    launches = 0
    launch, plain = kernels._launch, streams.reference

    def counted(*arguments, **settings):
        nonlocal launches
        launches += 1
        return launch(*arguments, **settings)

    kernels._launch, streams.reference = counted, arithmetic or kernels
    try:
        chain = chains.chain_of("basic", 3, mode=mode, dtype=torch.float32)
        outputs, grads, _ = chains.step(chain, chains.streams(torch.float32), precision)
        chain.check_streams()
    finally:
        kernels._launch, streams.reference = launch, plain
    outputs = {f"y{i}": y.detach() for i, y in enumerate(outputs, 1)}
    largest = {"largest": torch.tensor(chain.largest_stream())}
    return grads | outputs | largest, launches
