"""The 256 values that 8-bit codes stand for, and how the nearest one is found."""

import functools
import math

import torch

from speechbrain_rev.kernels.optimizer import Map


def dynamic_tree(*, signed: bool) -> torch.Tensor:
    """Return the values that the 256 codes stand for.

    The bits of a code are a sign, where there is one, then e zeros, a one, and f further
    bits. They stand for 10^-e times the middle of one of 2^f even intervals of [0.1, 1]:
    the smaller the value, the fewer bits locate it. Zeros alone are 0, and the
    one pattern without a use (minus zero; without a sign, zeros and a last one) is 1.

    Parameters
    ----------
    signed : bool
        With a sign, for momentum and the first moment of Adam, or without, for the
        second moment.

    Returns
    -------
    torch.Tensor, [256], float32
        In ascending order: codes are numbered by their values.

    Notes
    -----
    The arithmetic is float32, in the order in which bitsandbytes does it, so that both
    have the same bits.

    Example
    -------
    >>> dynamic_tree(signed=True)[[0, 126, 127, 128, 255]]
    tensor([-9.9297e-01, -5.5000e-07,  0.0000e+00,  5.5000e-07,  1.0000e+00])
    >>> dynamic_tree(signed=False)[[0, 1, 255]]
    tensor([0.0000e+00, 3.2500e-07, 1.0000e+00])
    """
    values = [torch.tensor([0.0, 1.0], device="cpu", dtype=torch.float32)]
    for zeros in range(7):
        intervals = 2 ** ((6 if signed else 7) - zeros)
        edges = torch.linspace(0.1, 1, intervals + 1, dtype=torch.float32, device="cpu")
        middles = 10**-zeros * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


@functools.cache
def map_of(signed: bool, device: torch.device) -> Map:
    """Make the map of a device once.

    Example
    -------
    >>> tree = map_of(True, torch.device("cpu"))
    >>> tree.values.shape, tree.midpoints.shape
    (torch.Size([256]), torch.Size([255]))
    """
    values = dynamic_tree(signed=signed)
    exact = (values[:-1].double() + values[1:].double()) / 2
    # The largest float32 that is not above the exact midpoint has the floats above the
    # midpoint above it too.
    midpoints = exact.float()
    below = midpoints.nextafter(
        torch.tensor(-math.inf, device="cpu", dtype=torch.float32)
    )
    midpoints = torch.where(midpoints.double() > exact, below, midpoints)
    first = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu") * 2**16
    limits = torch.stack([first, first + (2**16 - 1)]).view(torch.float32)
    lower, upper = torch.bucketize(limits.sort(dim=0).values, midpoints)
    midpoint = midpoints[lower.clamp(max=254)].masked_fill(lower == upper, math.inf)
    tables = values, midpoints, lower.to(torch.uint8), midpoint
    return Map(*(table.to(device) for table in tables))
