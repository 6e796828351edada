"""The additive coupling in plain autograd: the definition that the engine must meet.

Equations 7 and 8 of the memory-efficient speaker embedding paper, after Gomez et al.,
"The Reversible Residual Network", 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AdditiveCoupling(nn.Module):
    """Two residual functions that update two streams in turn.

    y1 = x1 + F(x2), y2 = x2 + G(y1).

    Parameters
    ----------
    f, g : nn.Module
        The residual functions: any modules that keep a tensor's shape. Where frames
        are masked, they are called with the mask as second argument.

    Examples
    --------
    >>> coupling = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> x = torch.randn(2, 4), torch.randn(2, 4)
    >>> x1, x2 = coupling.inverse(*coupling(*x))
    >>> torch.allclose(x1, x[0], atol=1e-5), x2.shape
    (True, torch.Size([2, 4]))
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(
        self, x1: Tensor, x2: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Couple the streams.

        Parameters
        ----------
        x1, x2 : torch.Tensor, [batch, channel, freq, time] or any one shape
            The streams.
        mask : torch.Tensor or None
            Handed on to F and G.

        Returns
        -------
        tuple of torch.Tensor
            y1 and y2, of the same shape.
        """
        y1 = x1 + residual(self.f, x2, mask)
        return y1, x2 + residual(self.g, y1, mask)

    @torch.no_grad()
    def inverse(
        self, y1: Tensor, y2: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reconstruct the inputs from the outputs, without a graph.

        Parameters
        ----------
        y1, y2 : torch.Tensor
            What ``forward`` returned.
        mask : torch.Tensor or None
            The mask given to ``forward``.

        Returns
        -------
        tuple of torch.Tensor
            x1 and x2.
        """
        x2 = y2 - residual(self.g, y1, mask)
        return y1 - residual(self.f, x2, mask), x2


def arguments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """List a residual function's arguments: a mask only where there is one."""
    return (x,) if mask is None else (x, mask)


def residual(f: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """Call a residual function and check that it is one.

    Raises
    ------
    RuntimeError
        If it wrote into its input.
    ValueError
        If it changed the shape.
    """
    version = version_of(x)
    y = f(*arguments(x, mask))
    check_residual(f, x, y, version)
    return y


def version_of(x: Tensor) -> int:
    """Count the writes into a tensor; inference tensors do not keep count."""
    return 0 if x.is_inference() else x._version


def check_residual(f: nn.Module, x: Tensor, y: Tensor, version: int) -> None:
    """Check that a residual function kept its input's shape and left it alone."""
    if version_of(x) != version:
        raise RuntimeError(
            f"{type(f).__name__} wrote into its input, which is the other stream of "
            "the coupling, or the tensor given to the first one: do not use that again. "
            "Use inplace=False in its first layer."
        )
    check_shape(f, x, y)


def check_shape(f: nn.Module, x: Tensor, y: Tensor) -> None:
    """Check that a residual function kept its input's shape."""
    shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
    if shape != list(x.shape):
        raise ValueError(
            f"A residual function must keep the shape of its input, but "
            f"{type(f).__name__} turned {list(x.shape)} into {shape}."
        )
