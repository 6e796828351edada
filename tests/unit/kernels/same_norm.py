"""What kernels of batch normalisation have in common with torch, wherever they run."""

import math

import pytest
import torch

from speechbrain_rev.kernels import norm as kernels
from speechbrain_rev.reversible import norm as reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
NAN, INF = float("nan"), float("inf")
MARGIN = 4099
#: One value, few of them, several groups of channels, samples and rows of tiles.
SHAPES = [(1, 1, 1, 1), (1, 2, 1, 3), (2, 9, 1, 1), (3, 9, 3, 3), (5, 2, 2, 17)]


def guarded(x):
    """The same in the middle of a larger tensor: a write beyond the end would show."""
    around = x.new_full((x.numel() + 2 * MARGIN,), 7)
    return around[MARGIN:-MARGIN].as_strided(x.shape, x.stride(), MARGIN).copy_(x)


def is_guarded(x):
    around = x.as_strided((x.numel() + 2 * MARGIN,), (1,), 0)
    return (around[:MARGIN] == 7).all() and (around[-MARGIN:] == 7).all()


def given(shape, dtype=torch.float32, layout=torch.contiguous_format, seed=0):
    """Input, gradient of the output, and the vectors, of what has any mean."""
    torch.manual_seed(seed)
    x = torch.randn(shape).add_(0.3).to(dtype).contiguous(memory_format=layout)
    grad = torch.randn(shape).to(dtype).contiguous(memory_format=layout)
    weight, bias, mean = torch.randn(3, shape[1]).unbind()
    return x, grad, [weight, bias, mean, torch.rand(shape[1]) + 0.5]


def results(module, x, grad, vectors, relu):
    """Output and gradients: from the input alone, and with the output beside it."""
    y = guarded(torch.full_like(x, NAN))
    module.normalise(y, x, *vectors, relu=relu)
    assert is_guarded(y)
    alone = module.normalise_backward(grad, x, None, *vectors, relu=relu)
    beside = module.normalise_backward(grad, x, y, *vectors, relu=relu)
    return y.clone(), alone, beside


def in_kernels(x, grad, vectors, relu):
    return results(kernels, x, grad, vectors, relu)


def parts_in_kernels(x, grad, vectors, pieces, layout):
    """Results of views of some channels, between whose rows there are gaps.

    Gradients are given without gaps, in the other layout, and with the same ones.
    """
    other = LAYOUTS[layout is torch.contiguous_format]
    return [
        in_kernels(x[:, piece], of_piece, [v[piece] for v in vectors], True)
        for piece in pieces
        for of_piece in (
            grad[:, piece].contiguous(memory_format=layout),
            grad[:, piece].contiguous(memory_format=other),
            grad[:, piece],
        )
    ]


def column(vector):
    return vector.view(-1, 1, 1)


def distance(x, exact):
    return float((x.double() - exact).norm())


class SameNorm:
    """Tests of the kernels on a device, by the way in which a subclass runs them.

    With 8 channels in a tile of 64 elements these shapes are many tiles.
    """

    #: By how much a subclass enlarges freq and time.
    scale = 1

    def run(self, function, *arguments):
        """Call a function, and return what it returns to the CPU."""
        return function(*arguments)

    def given(self, shape, *settings, **options):
        shape = *shape[:2], *(self.scale * size for size in shape[2:])
        return given(shape, *settings, **options)

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize(
        ("dtype", "relu"), [*((dtype, True) for dtype in FLOATS), (torch.float32, False)],
        ids=str,
    )  # fmt: skip
    def test_outputs_have_the_references_bits_and_gradients_its_precision(
        self, dtype, layout, shape, relu
    ):
        x, grad, vectors = self.given(shape, dtype, layout)
        y, alone, beside = self.run(in_kernels, x, grad, vectors, relu)
        expected, plain, _ = results(reference, x, grad, vectors, relu)
        assert torch.equal(y, expected)
        assert y.stride() == alone[0].stride() == torch.empty_like(x).stride()
        assert all(map(torch.equal, alone, beside))
        wide = [v.double() for v in vectors]
        exact = reference.normalise_backward(
            grad.double(), x.double(), y.double(), *wide, relu=relu
        )
        passed = grad.double() * (y > 0) if relu else grad.double()
        spread = (x.double() - column(wide[2])) * column(wide[3])
        # Torch may add up in float64. Allowed is what float32 rounds of summands of any
        # signs: half a unit of their sum's size at each level of pairs.
        levels = max(1, math.log2(x.numel() / x.shape[1])) ** 0.5
        sums = (z.square().sum((0, 2, 3)).sqrt() for z in (passed * spread, passed))
        sizes = exact[0], *(levels * size for size in sums)
        for ours, theirs, best, size in zip(alone, plain, exact, sizes, strict=True):
            assert ours.dtype == theirs.dtype
            rounding = torch.finfo(ours.dtype).eps * float(size.norm())
            assert distance(ours, best) <= max(2 * distance(theirs, best), rounding)

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_pieces_of_the_channels_have_the_bits_of_the_whole(self, layout):
        x, grad, vectors = self.given((3, 9, 1, 33), layout=layout)
        pieces = [slice(0, 1), slice(6, 9)]
        y, whole, _ = self.run(in_kernels, x, grad, vectors, True)
        found = self.run(parts_in_kernels, x, grad, vectors, pieces, layout)
        each = [piece for piece in pieces for _ in range(3)]
        for (part, grads, _), piece in zip(found, each, strict=True):
            assert torch.equal(part, y[:, piece])
            assert torch.equal(grads[0], whole[0][:, piece])
            assert torch.equal(grads[1], whole[1][piece])
            assert torch.equal(grads[2], whole[2][piece])

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_special_numbers_stay_in_their_channel_and_nan_passes_gradients(
        self, dtype, layout
    ):
        x, grad, vectors = self.given((2, 3, 5, 7), dtype, layout)
        limits = torch.finfo(dtype)
        special = [NAN, INF, -INF, limits.max, limits.smallest_normal / 4, -0.0]
        x[0, 1, 0, :6] = torch.tensor(special, dtype=dtype)
        y, alone, beside = self.run(in_kernels, x, grad, vectors, True)
        expected, _, _ = results(reference, x, grad, vectors, True)
        same = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(y, expected, **same)
        torch.testing.assert_close(alone, beside, **same)
        passed = torch.where(y <= 0, 0.0, grad.double())
        levels = max(1, math.log2(x.numel() / x.shape[1])) ** 0.5
        sizes = passed.square().sum((0, 2, 3)).sqrt()
        off = (alone[2] - passed.sum((0, 2, 3))).abs()
        assert (off <= levels * sizes * torch.finfo(alone[2].dtype).eps).all()
        for grads in (alone[0][:, ::2], alone[1][::2]):
            assert grads.isfinite().all()
        assert alone[1][1].isnan()
        assert alone[0][:, 1].isnan().all()

    def test_gradients_in_another_layout_are_the_same(self):
        x, grad, vectors = self.given((2, 3, 5, 7))
        other = grad.contiguous(memory_format=torch.channels_last)
        spread = grad[:1, :, :1].expand(grad.shape)
        for one, twin in ((grad, other), (spread.contiguous(), spread)):
            _, expected, _ = self.run(in_kernels, x, one, vectors, True)
            _, alone, _ = self.run(in_kernels, x, twin, vectors, True)
            assert alone[0].stride() == x.stride()
            assert all(map(torch.equal, alone, expected))
