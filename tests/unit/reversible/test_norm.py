"""Batch normalisation that can be run twice, against torch's own."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from speechbrain_rev.reversible.norm import BatchNorm, normalise, updated_together

from .processes import run_in_processes

each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
MASK = (torch.arange(100) < 60).float().view(1, 1, 1, -1)


def both(relu=True, channels=6, dtype=torch.float64):
    torch.manual_seed(0)
    ours = BatchNorm(channels, relu=relu)
    nn.init.uniform_(ours.weight)
    nn.init.uniform_(ours.bias)
    norm = nn.BatchNorm2d(channels)
    norm.load_state_dict(ours.state_dict())
    theirs = nn.Sequential(norm, nn.ReLU()) if relu else norm
    return ours.to(dtype), theirs.to(dtype)


def assert_equal_steps(ours, y, x, theirs, expected, other):
    """Take a step each, and compare what it gives of the frames that both have."""
    frames = expected.shape[3]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    (y * weights).sum().backward()
    (expected * weights[..., :frames]).sum().backward()
    torch.testing.assert_close(y[..., :frames], expected)
    torch.testing.assert_close(x.grad[..., :frames], other.grad)
    for name in ("parameters", "buffers"):
        pairs = zip(getattr(ours, name)(), getattr(theirs, name)(), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_output_gradients_and_buffers_equal_torchs(relu, training, layout):
    ours, theirs = both(relu)
    x = torch.randn(4, 6, 5, 7, dtype=torch.float64) * 3 + 1
    x = x.to(memory_format=layout).requires_grad_()
    other = x.detach().clone().requires_grad_()
    y, expected = ours.train(training)(x), theirs.train(training)(other)
    assert y.is_contiguous(memory_format=layout)
    assert_equal_steps(ours, y, x, theirs, expected, other)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_some_channels_of_a_map_are_normalised_as_by_themselves(layout):
    whole, (ours, theirs) = torch.randn(2, 9, 5, 7).double(), both(relu=True)
    x = whole.to(memory_format=layout)[:, 3:].requires_grad_()
    other = x.detach().clone(memory_format=layout).requires_grad_()
    y, expected = ours(x), theirs(other)
    assert y.is_contiguous(memory_format=layout)
    assert_equal_steps(ours, y, x, theirs, expected, other)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("width", [1, 6, 200])
def test_the_bits_are_those_of_a_product_and_a_sum_in_any_layout(dtype, width):
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    weight, bias, mean, inverse_std = torch.randn(4, 6, dtype=wide)
    scale = weight * inverse_std
    shift = bias - mean * scale
    whole = (10 * torch.randn(3, 9, 5, width)).to(dtype)
    x = whole[:, 3:]
    expected = torch.addcmul(shift.view(-1, 1, 1), x, scale.view(-1, 1, 1))
    for each in (x, x.contiguous(), x.contiguous(memory_format=torch.channels_last)):
        y = torch.empty_like(each)
        normalise(y, each, weight, bias, mean, inverse_std, relu=False)
        assert torch.equal(y, expected.to(dtype))


@pytest.mark.parametrize("relu", [False, True])
def test_masked_frames_do_not_count(relu):
    ours, theirs = both(relu)
    x = torch.randn(1, 6, 5, 9, dtype=torch.float64)
    mask = (torch.arange(9) < 6).double().view(1, 1, 1, 9)
    padded, short = x.clone().requires_grad_(), x[..., :6].clone().requires_grad_()
    y, expected = ours(padded, mask), theirs(short)
    assert not y[..., 6:].any()
    assert_equal_steps(ours, y, padded, theirs, expected, short)
    assert not padded.grad[..., 6:].any()


def test_no_valid_frame_leaves_the_running_statistics_as_they_were():
    norm = BatchNorm(4, relu=True)
    x = torch.randn(2, 4, 3, 5, requires_grad=True)
    before = norm.running_mean.clone(), norm.running_var.clone()
    y = norm(x, torch.zeros(2, 1, 1, 5))
    y.sum().backward()
    assert all(map(torch.equal, (norm.running_mean, norm.running_var), before))
    assert not y.any()
    assert not x.grad.any()


@each_half
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_sums_over_half_precision_are_float32s(dtype, mask):
    # Sums, squares and scaled gradients here are far above fp16's 65,504, and a mean in
    # bf16 would have steps of 2.
    torch.manual_seed(1)
    x = (torch.randn(8, 2, 40, 100) + 300).to(dtype)
    grad = (1024 * torch.rand(x.shape)).to(dtype)
    results = []
    for wide in (torch.float32, torch.float64):
        norm, _ = both(channels=2, dtype=wide)
        copied = x.clone() if wide is torch.float32 else x.double()
        y = norm(copied.requires_grad_(), mask if mask is None else mask.to(wide))
        y.backward(grad.to(y.dtype))
        maps = [y, copied.grad]
        assert [each.dtype for each in maps] == [copied.dtype] * 2
        sums = [norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
        assert all(each.dtype == wide for each in sums)
        results.append((maps, [each.double() for each in sums]))
    (maps, sums), (exact_maps, exact_sums) = results
    # float32 rounding of 32,000 summands, for the weight of differences to 300.
    torch.testing.assert_close(sums, exact_sums, rtol=1e-3, atol=0)
    for a, b in zip(maps, exact_maps, strict=True):
        assert (a.double() - b).abs().max() <= torch.finfo(dtype).eps * b.abs().max()


@each_half
def test_a_backward_pass_under_autocast_adds_up_in_float32(dtype):
    # 32,000 gradients of 1, above fp16's 65,504 once they are scaled.
    grads = []
    for inside in (False, True):
        norm = BatchNorm(2)
        x = torch.linspace(-1, 1, 8 * 2 * 40 * 100).view(8, 2, 40, 100).to(dtype)
        y = norm(x, MASK)
        with torch.autocast("cpu", dtype, enabled=inside):
            (1001 * y.float().sum()).backward()
        grads.append(norm.bias.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_batch_that_overflowed_changes_no_running_statistics(value, masks):
    norms = BatchNorm(2, relu=True), BatchNorm(2)
    mask = torch.ones(2, 1, 1, 10) if masks else None
    x = torch.randn(2, 2, 4, 10)
    for overflows in (False, True):
        before = [b.clone() for norm in norms for b in norm.buffers()]
        with updated_together():
            fine = norms[0](x, mask)
            x[0, 1, 2, 3] = value
            # It is not hidden: the loss is not finite and the step will be skipped.
            assert norms[1](x if overflows else fine, mask).isnan().any() == overflows
            x[0, 1, 2, 3] = 1
        after = [b for norm in norms for b in norm.buffers()]
        same = list(map(torch.equal, before, after))
        # Batches are counted, whatever they hold.
        assert same == [overflows, overflows, False] * 2


def test_updates_wait_for_the_end_and_follow_the_order_of_calls():
    norm, x = BatchNorm(2), torch.randn(3, 2, 2, 4, 10)
    alone = copy.deepcopy(norm)
    with updated_together():
        for batch in x:
            norm(batch)
        assert int(norm.num_batches_tracked) == 0
    for batch in x:
        alone(batch)
    assert all(map(torch.equal, norm.buffers(), alone.buffers()))


def test_a_forward_pass_that_raises_updates_nothing():
    norm = BatchNorm(2)
    network = nn.Sequential(norm, nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="shapes"), updated_together():
        network(torch.randn(2, 2, 4, 10))
    norm(torch.randn(2, 2, 4, 10))
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("masks", [False, True])
def test_gradient_passes_gradcheck_and_gradgradcheck(masks):
    ours, _ = both()
    x = torch.randn(3, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1.0, 1, 0], dtype=torch.float64).view(1, 1, 1, 3)
    given = [mask] if masks else []
    assert torch.autograd.gradcheck(ours, (x, *given))
    assert torch.autograd.gradgradcheck(ours, (x, *given))


def test_conversion_to_sync_batchnorm_leaves_it_alone():
    module = nn.Sequential(BatchNorm(4, relu=True), nn.BatchNorm2d(4))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    assert isinstance(converted[0], BatchNorm)
    assert isinstance(converted[1], nn.SyncBatchNorm)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 1, 1), "more than one value per channel"),
        ((2, 4), r"\[batch, channel, freq, time\]"),
    ],
)
def test_inputs_that_have_no_statistics_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        BatchNorm(4)(torch.randn(shape))


#: Unequal shares of a batch.
SHARES = [slice(0, 2), slice(2, 6)]


def sync_step(share, *, sync=False):
    """Output and gradients of a step with some utterances, and the layer."""
    norm, _ = both()
    norm.sync = sync
    torch.manual_seed(1)
    x = torch.randn(6, 6, 3, 4, dtype=torch.float64)[share].requires_grad_()
    y = norm(x * 2 - 1)
    y.sin().sum().backward()
    return [y.detach(), x.grad], [p.grad for p in norm.parameters()], norm.state_dict()


def sync_process(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    results = sync_step(SHARES[rank], sync=True)
    for grad in results[1]:
        dist.all_reduce(grad)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_statistics_over_processes_are_those_of_the_whole_batch(tmp_path):
    run_in_processes(sync_process, (str(tmp_path),), 2)
    whole, *others = sync_step(slice(None))
    for rank, share in enumerate(SHARES):
        expected = [x[share] for x in whole], *others
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)
