"""What is held of an activation in place of it."""

from __future__ import annotations

import dataclasses
import enum

import torch
from torch import Tensor


class Form(str, enum.Enum):
    """How the values of a tensor are held."""

    #: Which values are not zero, and codes of those.
    SPARSE = "sparse"
    #: Codes of all values.
    DENSE = "dense"
    #: The tensor itself.
    RAW = "raw"


class Reason(str, enum.Enum):
    """Why a tensor is held as it is."""

    #: There are no values.
    EMPTY = "empty"
    #: A value is NaN or infinite.
    NOT_FINITE = "NaN or inf"
    #: Values of the tensor's type are further apart than the bound.
    PRECISION = "bound below precision"
    #: No form takes fewer bytes.
    NO_SMALLER = "no smaller"
    #: None was assumed to, of a tensor without data.
    ASSUMED = "assumed to be no smaller"


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """A tensor in fewer bytes, as ``encode`` makes it and ``decode`` takes it.

    Parameters
    ----------
    form : Form
        How the values are held.
    shape, stride : tuple of int
        Those of the tensor.
    dtype : torch.dtype
        That of the tensor.
    error_bound : float
        By how much a decoded value may differ, in the tensor's unit.
    values : int
        Number of values in the stream; of an expanded tensor each is counted once.
    payload : tuple of torch.Tensor
        Of the sparse form ``mask, words, widths``; of the dense form ``words, widths,
        base_words, base_widths``; of the raw form the tensor, which is no copy. The
        module ``speechbrain_rev.compression.reference`` tells what is in them. Of a
        tensor without data, on the meta device, one as large as was assumed.
    nonzeros : int or None
        Number of values that are not zero; None where nothing was counted.
    reason : Reason or None
        Why the tensor is kept as it is; None of the other forms.
    step : float
        Half the distance of two decoded values.
    largest : float
        What no decoded magnitude exceeds: the largest one of the tensor.
    negative : bool
        Whether there is a value below zero.

    Examples
    --------
    >>> import torch
    >>> from speechbrain_rev.compression import encode
    >>> x = torch.randn(4096, generator=torch.manual_seed(0)).relu()
    >>> compressed = encode(x, error_bound=0.05)
    >>> compressed.form.value, compressed.values, compressed.nonzeros
    ('sparse', 4096, 2016)
    >>> compressed.nbytes, x.nbytes
    (1847, 16384)
    """

    form: Form
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    error_bound: float
    values: int
    payload: tuple[Tensor, ...]
    nonzeros: int | None = None
    reason: Reason | None = None
    step: float = 0.0
    largest: float = 0.0
    negative: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, of which a raw tensor's are those that it spans."""
        if self.form is Form.RAW:
            return self.values * self.dtype.itemsize
        return sum(x.nbytes for x in self.payload)
