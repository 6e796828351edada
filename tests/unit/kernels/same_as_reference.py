"""What kernels must have in common with their plain references, wherever they run."""

import copy
import itertools

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from speechbrain_rev.kernels import fixed_point as kernels
from speechbrain_rev.reversible import fixed_point as reference
from speechbrain_rev.reversible.streams import FORMATS
from tests.unit.kernels.process import with_nan

STEPS, LIMIT = FORMATS["exact"].steps, FORMATS["exact"].limit
BLOCK = kernels.BLOCK
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")
#: Floats by what is special about them.
SPECIAL = {
    "halfway": [(k + 0.5) / STEPS for k in (0, -1, 1, -2, 2, 3, 4, 2**21, 2**22 - 1)],
    "without a fraction": [
        s * x / STEPS
        for x in (2**22 - 0.25, 2**22, 2**23, 2**23 - 0.5)
        for s in (1, -1)
    ],
    "near the limit": [LIMIT - 1 / STEPS, -LIMIT],
    "wrapping around": [s * 2 * LIMIT - d for s in (1, -1) for d in (1, 0.5, 0)],
    "beyond an int32": [6.4e4, -6.4e4, 1e30, -3e38],
    "infinite": [1.0, INF],
    "minus infinite": [1.0, -INF],
    "not a number": [NAN, INF, 1.0],
    "minus not a number": [1.0, -INF, -NAN],
    "zero": [0.0, -0.0],
    "below a step": [1e-45, -1e-40, 1e-8, 0.5 / STEPS, -0.5 / STEPS],
}


def steps(*shape):
    """Values of a stream, anywhere in its range."""
    return torch.randint(1 - 2**30, 2**30, shape, dtype=torch.int32)


def notes(first=0.0, second=0.0):
    """A row among others, for what is noted."""
    table = torch.full((3, 2), -5.0)
    table[1] = torch.tensor([first, second])
    return table[1]


def slack(x):
    """The same in the middle of a larger tensor: a write beyond the end would show."""
    around = torch.full((x.numel() + 2 * BLOCK,), 7, dtype=x.dtype)
    middle = around[BLOCK:-BLOCK].as_strided(x.shape, x.stride(), BLOCK)
    return middle.copy_(x)


def assert_same(result, expected):
    """Assert that two results are alike in all their bits, but for those of a NaN."""
    assert type(result) is type(expected)
    if isinstance(result, torch.Tensor):
        assert result.stride() == expected.stride()
        for x, y in ((result, expected), (memory(result), memory(expected))):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def memory(x):
    """All that is in a tensor's storage, seen by it or not."""
    return x.detach().as_strided((x.untyped_storage().size() // x.itemsize,), (1,), 0)


class SameAsReference:
    """Tests of the kernels on a device, by the way in which a subclass runs them."""

    device = "cpu"

    @pytest.fixture(autouse=True)
    def _seed(self):
        torch.manual_seed(0)

    def run(self, function, *arguments):
        """Call a function; return its result, and its arguments as it left them."""
        return with_nan(function, *arguments), arguments

    def check(self, name, *arguments):
        """Run a kernel and its reference on the same tensors and compare them all."""
        memo = {}
        for x in tree_leaves(arguments):
            if isinstance(x, torch.Tensor) and id(x) not in memo:
                whole = memory(x).to(self.device)
                twin = whole.as_strided(x.shape, x.stride(), x.storage_offset())
                memo[id(x)] = twin.requires_grad_(x.requires_grad)
        arguments = tree_map(lambda x: memo.get(id(x), x), arguments)
        twins = copy.deepcopy(arguments)
        result, left = self.run(getattr(kernels, name), *arguments)
        assert_same(result, with_nan(getattr(reference, name), *twins))
        for x, y in zip(tree_leaves(left), tree_leaves(twins), strict=True):
            assert_same(x, y)

    def check_all(self, value, f):
        """Compare what is made of a value and of a residual, in place and not."""
        self.check("encode", f, STEPS, None)
        self.check("encode", f, STEPS, notes())
        for largest, in_place in itertools.product((None, notes()), (False, True)):
            x = slack(value)
            out = x if in_place else None
            self.check("add", x, [f], STEPS, largest, out)
            if largest is None:
                self.check("subtract", x, f, STEPS, out)

    # One element, less than a program, one program, one more, several and a part.
    @pytest.mark.parametrize("size", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_any_size(self, dtype, size):
        self.check_all(steps(size), slack(torch.randn(size).to(dtype)))

    @pytest.mark.parametrize("special", SPECIAL)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_special_floats_first_and_last(self, dtype, special):
        few = torch.tensor(SPECIAL[special])
        f = torch.cat([few, torch.zeros(BLOCK), few.flip(0)]).to(dtype)
        self.check_all(steps(len(f)), f)
        self.check_all(torch.zeros(len(f), dtype=torch.int32), f)

    @pytest.mark.parametrize("below", [LIMIT, INF, None])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_any_bits(self, dtype, below):
        """All numbers that a half can be, and some of the others."""
        if dtype is torch.float32:
            f = torch.randint(-(2**31), 2**31, (2**14,)).int().view(dtype)
        else:
            f = torch.arange(-(2**15), 2**15).short().view(dtype)
        if below is not None:
            f = f[f.abs() < below]
        self.check("add", steps(len(f)), [f], STEPS, notes(), None)

    @pytest.mark.parametrize("before", [0.0, 2.0, 1e4, INF, NAN, -NAN])
    @pytest.mark.parametrize("now", [0.0, -3.0, INF, NAN])
    def test_what_was_noted_is_kept_if_it_is_larger(self, before, now):
        f = torch.tensor([now, 0.0])
        for largest in (notes(before, 0.0), notes(0.0, before)):
            self.check("add", steps(2), [f], STEPS, largest, None)
            self.check("encode", f, STEPS, largest)

    @pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (0, 3, 4, 5), (2, 3, 0, 1)])
    def test_any_number_of_dimensions_and_nothing_at_all(self, shape):
        self.check_all(steps(*shape), torch.randn(shape, requires_grad=True))

    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 3, 5, 7), (2, 1, 5, 7),
                                       (2, 3, 1, 7), (2, 3, 1, 1), (1, 1, 1, 1)])  # fmt: skip
    def test_any_layouts(self, shape, last):
        f = torch.randn(shape)
        wide = torch.randn(shape[0], 2 * shape[1], *shape[2:]).bfloat16()
        channels_last = {"memory_format": torch.channels_last}
        value = steps(*shape)
        if last:
            value = value.contiguous(**channels_last)
        for residual in (
            f,
            f.contiguous(**channels_last),
            wide.chunk(2, dim=1)[1],
            wide.contiguous(**channels_last).chunk(2, dim=1)[1],
            f.transpose(2, 3).contiguous().transpose(2, 3),
            f[:1, :1].expand(shape),
        ):
            self.check("encode", residual, STEPS, notes())
            self.check("add", value, [residual], STEPS, notes(), None)
            self.check("subtract", value, residual, STEPS, value)

    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("count", range(1, kernels.AT_ONCE + 1))
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_several_residuals_and_the_sum_as_floats(self, dtype, count, last):
        """Each sum on the way is noted, and residuals may lie in different ways."""
        shape, layout = (2, 6, 23, 29), torch.channels_last
        value = steps(*shape)
        f = [torch.randn(shape).to(dtype) for _ in range(count)]
        # The first two take the sum out of the range and back.
        f[0] = f[0] + LIMIT
        f[1:2] = [x - LIMIT for x in f[1:2]]
        f[2:] = [x.contiguous(memory_format=layout) for x in f[2:]]
        if last:
            value = value.contiguous(memory_format=layout)
        for in_place in (False, True):
            x = slack(value)
            floats = slack(torch.full_like(value, NAN, dtype=torch.float32))
            self.check("add", x, f, STEPS, notes(), x if in_place else None, floats)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_decoding(self, dtype):
        full = torch.randint(-(2**31), 2**31, (2, 3, 5, 7)).int()
        for value in (full, full.contiguous(memory_format=torch.channels_last)):
            self.check("decode", value, STEPS, dtype, None)
            for joined in (
                torch.full((2, 6, 5, 7), NAN, dtype=dtype),
                torch.full((2, 5, 7, 6), NAN, dtype=dtype).permute(0, 3, 1, 2),
            ):
                self.check("decode", value, STEPS, dtype, joined.chunk(2, dim=1)[1])

    def test_writing_is_seen_by_autograd(self):
        tensors = steps(5), torch.randn(5), notes(), torch.zeros(5)
        arguments = (x.to(self.device) for x in tensors)
        (of_value, of_f, of_largest, of_floats), _ = self.run(versions, *arguments)
        assert min(of_value, of_largest, of_floats) > 0
        assert of_f == 0


def versions(value, f, largest, floats):
    """How often each was written to, by autograd's count."""
    tensors = value, f, largest, floats
    before = [x._version for x in tensors]
    kernels.add(value, [f], STEPS, largest, value, floats)
    return [x._version - v for x, v in zip(tensors, before, strict=True)]
