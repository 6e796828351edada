"""The kernels of compressed activations: interpreted on the CPU, and compiled."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speechbrain_rev.compression import codec, reference
from speechbrain_rev.compression.reference import scale_of
from speechbrain_rev.kernels import compression as kernels
from tests.unit.kernels.process import compiled, with_nan
from tests.unit.kernels.same_as_reference import FLOATS, assert_same

BLOCK = kernels.BLOCK
MARGIN = 64
ALONE = [0.0, -0.0, -3.0, 3.0]


def guarded(function, *arguments):
    """Call a function and assert that it wrote into its new tensors only."""
    margins, plain = [], torch.Tensor.new_empty

    def new_empty(x, size, **options):
        whole = plain(x, size + 2 * MARGIN, **options)
        whole[:MARGIN] = whole[MARGIN + size :] = 7
        margins.extend((whole[:MARGIN], whole[MARGIN + size :]))
        return whole[MARGIN : MARGIN + size]

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        result = function(*arguments)
    assert all((margin == 7).all() for margin in margins)
    return tuple(x.clone() for x in result)


def all_of(module, x, bound):
    """Both forms of a row of values, all that comes on the way, and back again."""
    counted = module.statistics(x)
    scale = scale_of(counted, torch.tensor(bound, dtype=torch.float64), x.dtype)
    assert scale[0] > 0
    words = module.sizes(x, scale, counted)
    sparse, dense, base = words.tolist()
    _, nonzeros, negative = counted.tolist()
    sparse = module.pack_sparse(x, scale, counted, nonzeros, sparse)
    dense = module.pack_dense(x, scale, counted, dense, base)
    step, _, largest = scale.tolist()
    outs = torch.full((2, len(x) + 2 * MARGIN), 7, dtype=x.dtype)
    out = outs[:, MARGIN : MARGIN + len(x)]
    module.unpack_sparse(*sparse, step, largest, negative > 0, out[0])
    module.unpack_dense(*dense, step, largest, nonzeros == len(x), out[1])
    return counted, words, *sparse, *dense, outs


def kernels_of(x, bound, slice_size):
    with mock.patch.object(kernels, "SLICE", slice_size):
        return guarded(all_of, kernels, x, bound)


@pytest.fixture
def check(interpreter):
    def check(x, bound, slice_size=BLOCK):
        expected = with_nan(all_of, reference, x, bound)
        results, _ = interpreter(kernels_of, x, bound, slice_size)
        for one, other in zip(results, expected, strict=True):
            assert_same(one, other)
            # In all bits, and not merely in value: of zeros there are two.
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return expected

    return check


def values(kind, size, dtype=torch.float32):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    kinds = {
        "relu": x.relu(),
        "zeros and signs": x * (x.abs() > 0.7),
        "full": x + 0.5 * x.sign(),
        "few": x * (x > 2),
    }
    return kinds[kind].to(dtype)


def special(dtype):
    """Zeros, infinitesimal and largest values: all that a type has at its ends."""
    limits = torch.finfo(dtype)
    x = torch.tensor([0.0, -0.0, limits.tiny, -limits.tiny, limits.max, -limits.max,
                      limits.smallest_normal / 2, 1e-45, -1e-45, 1.0, -1.0])  # fmt: skip
    return x.to(dtype), 0.01 * limits.max


def subnormal(dtype):
    limits = torch.finfo(dtype)
    return (limits.tiny * limits.eps * torch.arange(-9.0, 9.0)).to(dtype), 2.0**-22


def any_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (BLOCK + 9,), generator=generator).int()
    single = dtype is torch.float32
    x = bits.view(dtype) if single else (bits >> 16).short().view(dtype)
    x = x[x.isfinite()]
    return x, 0.02 * float(x.abs().max())


@pytest.mark.parametrize(
    "make",
    [
        special,
        subnormal,
        any_bits,
        # One value alone.
        *(lambda dtype, x=x: (torch.full((40,), x, dtype=dtype), 1e30) for x in ALONE),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_at_the_ends_of_a_type(check, make, dtype):
    check(*make(dtype))


@pytest.mark.parametrize("sign", [1, -1])
def test_codes_of_any_width(check, sign):
    # Of 22 bits and of all below, and with a sign.
    x = torch.logspace(-7, 0, BLOCK + 5)
    check(torch.where(torch.arange(len(x)) % 3 == 0, sign * x, x), 2.0**-21)


# One value, a part of a block, one block, one more, a program, several and a part.
@pytest.mark.parametrize("size", [1, 31, 32, 33, BLOCK, BLOCK + 77])
@pytest.mark.parametrize("kind", ["relu", "zeros and signs", "full", "few"])
def test_any_size(check, kind, size):
    check(values(kind, size, FLOATS[size % 3]), 0.1)


@pytest.mark.parametrize("slice_size", [2 * BLOCK, 2**22])
@pytest.mark.parametrize("kind", ["zeros and signs", "full"])
def test_slices_change_no_bits(check, kind, slice_size):
    # A block may begin in a slice and end in a full one.
    x = values(kind, 3 * BLOCK + 5)
    x[5] = 0
    check(x, 0.1, slice_size)


def encoded_and_decoded(x, bound):
    """Take the kernels for tensors on the CPU, without a look at any number."""
    looks = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                looks.append(function)
            return function(*arguments, **(options or {}))

    with mock.patch.object(codec, "_module", return_value=kernels):
        with Looks():
            compressed = codec.encode(x, bound)
        decoded = codec.decode(compressed)
    return vars(compressed), decoded, len(looks)


@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("kind", ["relu", "full"])
def test_codec_takes_them_and_synchronises_once(interpreter, kind, special):
    x = values(kind, 2000).view(4, 5, 10, 10)
    if special is not None:
        x[2, 3, 4, 5] = special
    x = x.contiguous(memory_format=torch.channels_last)
    (fields, decoded, looks), _ = interpreter(encoded_and_decoded, x, 0.01)
    assert looks == 0  # and one list of all numbers
    expected = codec.encode(x, 0.01)
    assert_same(decoded, codec.decode(expected))
    for one, other in zip(fields.pop("payload"), expected.payload, strict=True):
        assert_same(one, other)
    assert fields == {n: v for n, v in vars(expected).items() if n != "payload"}


def launch():
    """Launch all kernels for all kinds of arguments."""
    x, scale = torch.zeros(5), torch.zeros(3)
    counted = kernels.statistics(x)
    sparse = kernels.pack_sparse(x, scale, counted, 0, 0)
    dense = kernels.pack_dense(x, scale, counted, 0, 0)
    for dtype in FLOATS:
        x = x.to(dtype)
        kernels.statistics(x)
        for flag in (False, True):
            kernels.unpack_sparse(*sparse, 1.0, 1.0, flag, x)
            kernels.unpack_dense(*dense, 1.0, 1.0, flag, x)


@pytest.mark.slow
def test_kernels_compile_without_a_device(compiler):
    code, _ = compiler(compiled, kernels.__name__, launch, 80)
    # Two of each but for one that counts, and what depends on the type for halves too.
    assert len(code) == 2 * 6 + 1 + 2 * 5
    for ptx in code:
        # Both would give other bits than the reference. That the ceiling of a subnormal
        # number is zero does not matter, for |q| is at least one.
        assert ".ftz" not in ptx.replace("cvt.rpi.ftz", "")
        assert "fma.rn.f32" not in ptx
