"""Activations in less memory, with a bound on the error of each value.

Source: "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded
Lossy Compression". The bit stream is another one, for which see
``speechbrain_rev.compression.reference``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from types import ModuleType

import torch
from torch import Tensor

from speechbrain_rev.compression import reference
from speechbrain_rev.compression.bounds import check_positive
from speechbrain_rev.compression.reference import LANES
from speechbrain_rev.kernels import compression as kernels
from speechbrain_rev.torch_private import is_fake


class Form(str, enum.Enum):
    """How the values of a tensor are held."""

    #: A mask of the values that are not zero, and codes of these.
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
        module ``speechbrain_rev.compression.reference`` describes them. Of a tensor
        without data, on the meta device, one as large as was assumed.
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


#: Types that are compressed.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Bits that a value without data is taken to need.
ASSUMED_BITS = 8.0

_INFINITY_BITS = 0x7F800000


@torch.no_grad()
def encode(
    x: Tensor, error_bound: float | Tensor, *, assumed_bits: float = ASSUMED_BITS
) -> Compressed:
    """Hold a tensor in fewer bytes, each value up to a bound.

    Zeros and signs are kept exactly, so that the mask of a ReLU is that of its
    compressed result. What cannot be held within the bound in fewer bytes is kept as it
    is: not copied, so that it must not be written to.

    Parameters
    ----------
    x : torch.Tensor
        Activations of any shape and strides: float32, float16 or bfloat16.
    error_bound : float, or torch.Tensor with one value
        By how much a decoded value may differ, in the unit of x. A tensor on the device
        of x is read together with the statistics of x, in one synchronisation.
    assumed_bits : float
        Bits of a value of which there is no data, on the meta device or of a fake tensor.
        As many as the value has, or more, leave x as it is.

    Returns
    -------
    Compressed
        What ``decode`` takes.

    Raises
    ------
    ValueError
        If x is of another type, or the bound or the assumed bits are not positive and
        finite.

    Examples
    --------
    >>> x = torch.randn(8, 16, 10, 25, generator=torch.manual_seed(0)).relu()
    >>> compressed = encode(x, error_bound=1e-2)
    >>> y = decode(compressed)
    >>> y.shape, bool((y - x).abs().max() <= 1e-2), torch.equal(y > 0, x > 0)
    (torch.Size([8, 16, 10, 25]), True, True)
    >>> round(x.nbytes / compressed.nbytes, 1)
    6.8
    """
    if x.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"Activations to compress are {x.dtype}, but must be one of {allowed}: its "
            "steps are those of float32. Convert them, or keep them as they are."
        )
    if not (isinstance(error_bound, Tensor) and error_bound.device == x.device):
        error_bound = check_positive("error_bound", float(error_bound))
    x = x.detach()
    row = _row(x)
    compressed = functools.partial(
        Compressed,
        shape=tuple(x.shape),
        stride=x.stride(),
        dtype=x.dtype,
        values=len(row),
    )
    raw = functools.partial(compressed, form=Form.RAW, payload=(x,))
    if not has_contents(x):
        bits = check_positive("assumed_bits", assumed_bits)
        limit = math.nan if isinstance(error_bound, Tensor) else error_bound
        size = math.ceil(len(row) * bits / 8)
        if size >= row.nbytes:
            return raw(error_bound=limit, reason=Reason.ASSUMED)
        payload = torch.empty(size, dtype=torch.uint8, device=x.device)
        return compressed(form=Form.DENSE, error_bound=limit, payload=(payload,))
    if not len(row):
        limit = check_positive("error_bound", float(error_bound))
        return raw(error_bound=limit, nonzeros=0, reason=Reason.EMPTY)
    module = _module(row)
    if isinstance(error_bound, Tensor):
        bound = error_bound.detach().double().reshape(())
    else:
        # A number that is filled in, unlike one that is copied, is not waited for.
        bound = torch.full((), error_bound, dtype=torch.float64, device=x.device)
    counted = module.statistics(row)
    scale = reference.scale_of(counted, bound, x.dtype)
    words = module.sizes(row, scale, counted)
    # All at once and in float64, which holds each of them, for one synchronisation.
    numbers = torch.cat([bound[None], counted.double(), scale.double(), words.double()])
    limit, bits, nonzeros, negative, step, _, largest, *sizes = numbers.tolist()
    limit, nonzeros = check_positive("error_bound", limit), int(nonzeros)
    sparse, dense, base = map(int, sizes)
    blocks = _blocks(len(row))
    nbytes = {
        Form.SPARSE: 4 * blocks + _blocks(nonzeros) + 4 * sparse,
        Form.DENSE: blocks + 4 * dense + _blocks(blocks) + 4 * base,
        Form.RAW: row.nbytes,
    }
    form = min(Form.SPARSE, Form.DENSE, key=nbytes.__getitem__)
    reason = None
    if bits >= _INFINITY_BITS:
        reason = Reason.NOT_FINITE
    elif not step:
        reason = Reason.PRECISION
    elif nbytes[form] >= nbytes[Form.RAW]:
        reason = Reason.NO_SMALLER
    if reason is not None:
        return raw(error_bound=limit, nonzeros=nonzeros, reason=reason)
    if form is Form.SPARSE:
        payload = module.pack_sparse(row, scale, counted, nonzeros, sparse)
    else:
        payload = module.pack_dense(row, scale, counted, dense, base)
    packed = compressed(
        form=form,
        error_bound=limit,
        payload=payload,
        nonzeros=nonzeros,
        step=step,
        largest=largest,
        negative=negative > 0,
    )
    assert packed.nbytes == nbytes[form]
    return packed


@torch.no_grad()
def decode(compressed: Compressed) -> Tensor:
    """Make a tensor of what ``encode`` made of one.

    Parameters
    ----------
    compressed : Compressed
        A compressed tensor.

    Returns
    -------
    torch.Tensor
        Of the tensor's shape, strides, type and device, each value within the bound; of
        a tensor that was kept as it is, that tensor.

    Examples
    --------
    >>> x = torch.linspace(-1, 1, 1000).view(10, 100).t()
    >>> y = decode(encode(x, error_bound=0.1))
    >>> y.shape, y.stride(), bool((y - x).abs().max() <= 0.1)
    (torch.Size([100, 10]), (1, 100), True)
    """
    kept = compressed.payload
    shape, stride = compressed.shape, compressed.stride
    if compressed.form is Form.RAW:
        return kept[0]
    device = kept[0].device
    row = torch.empty(compressed.values, dtype=compressed.dtype, device=device)
    if has_contents(kept[0]):
        module, scale = _module(row), (compressed.step, compressed.largest)
        if compressed.form is Form.SPARSE:
            module.unpack_sparse(*kept, *scale, compressed.negative, row)
        else:
            full = compressed.nonzeros == compressed.values
            module.unpack_dense(*kept, *scale, full, row)
    if _span(shape, stride) <= compressed.values:
        return row.as_strided(shape, stride)
    out = torch.empty_strided(shape, stride, dtype=row.dtype, device=device)
    distinct = _distinct(out)
    distinct.copy_(row.view(distinct.shape))
    return out


def has_contents(x: Tensor) -> bool:
    """Whether a tensor has numbers: those on meta and fake ones have a shape only."""
    return not (x.is_meta or is_fake(x))


def _module(row: Tensor) -> ModuleType:
    """Choose the implementation for a device."""
    if row.is_cuda and kernels.usable(row.device, row.dtype):
        return kernels
    return reference


def _row(x: Tensor) -> Tensor:
    """View a tensor's values in the order of memory, or copy those between gaps."""
    span = _span(x.shape, x.stride())
    if span <= x.numel():
        return x.as_strided((span,), (1,), x.storage_offset())
    return _distinct(x).reshape(-1)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of places from a tensor's first value to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _distinct(x: Tensor) -> Tensor:
    """View the first of what an expanded dimension repeats."""
    for dim in range(x.dim()):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return x


def _blocks(values: int) -> int:
    return -(-values // LANES)
