"""Batch normalisation that can be run twice, against torch's own."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from speechbrain_rev.reversible.norm import BatchNorm

from .processes import run_in_processes


@pytest.fixture(autouse=True)
def stream_format():
    """These have no streams."""


def both(relu, channels=6, dtype=torch.float64):
    torch.manual_seed(0)
    ours = BatchNorm(channels, relu=relu)
    nn.init.uniform_(ours.weight)
    nn.init.uniform_(ours.bias)
    norm = nn.BatchNorm2d(channels)
    norm.load_state_dict(ours.state_dict())
    theirs = nn.Sequential(norm, nn.ReLU()) if relu else norm
    return ours.to(dtype), theirs.to(dtype)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_output_gradients_and_buffers_equal_torchs(relu, training, layout):
    ours, theirs = both(relu)
    results = []
    for module in (ours.train(training), theirs.train(training)):
        torch.manual_seed(1)
        x = torch.randn(4, 6, 5, 7, dtype=torch.float64) * 3 + 1
        x = x.to(memory_format=layout).requires_grad_()
        y = module(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append((y, x.grad, *(p.grad for p in module.parameters())))
        assert y.is_contiguous(memory_format=layout)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_with_float32_statistics(dtype):
    ours, theirs = both(True, dtype=torch.float32)
    torch.manual_seed(1)
    x = torch.randn(4, 6, 5, 7) * 3 + 1
    y = ours(x.to(dtype))
    expected = theirs(x.to(dtype).float())
    assert y.dtype == dtype
    assert ours.running_mean.dtype == torch.float32
    step = torch.finfo(dtype).eps * expected.abs().max()
    assert (y.float() - expected).abs().max() <= step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", [False, True])
def test_sums_over_half_precision_are_float32s(dtype, masks):
    # Sums, squares and scaled gradients here are far above fp16's 65,504, and a mean in
    # bf16 would have steps of 2.
    ours, _ = both(True, channels=2, dtype=torch.float32)
    exact, _ = both(True, channels=2)
    torch.manual_seed(1)
    x = (torch.randn(8, 2, 40, 100) + 300).to(dtype)
    mask = (torch.arange(100) < 60).float().view(1, 1, 1, -1) if masks else None
    grad = (1024 * torch.rand(x.shape)).to(dtype)
    results = []
    for module, copied in ((ours, x), (exact, x.double())):
        copied.requires_grad_()
        y = module(copied, mask if mask is None else mask.to(module.weight.dtype))
        y.backward(grad.to(y.dtype))
        results.append([copied.grad, module.weight.grad, module.bias.grad])
        results[-1] += [module.running_mean, module.running_var]
    (x_grad, *found), (exact_x_grad, *expected) = results
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        # float32 rounding of 32,000 summands, for the weight of differences to 300.
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=0)
    assert x_grad.dtype == dtype
    step = torch.finfo(dtype).eps * exact_x_grad.abs().max()
    assert (x_grad.double() - exact_x_grad).abs().max() <= step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backward_pass_under_autocast_adds_up_in_float32(dtype):
    # 32,000 gradients of 1, above fp16's 65,504 once they are scaled.
    mask = (torch.arange(100) < 60).float().view(1, 1, 1, -1)
    grads = []
    for inside in (False, True):
        norm = BatchNorm(2)
        x = torch.linspace(-1, 1, 8 * 2 * 40 * 100).view(8, 2, 40, 100).to(dtype)
        y = norm(x, mask)
        with torch.autocast("cpu", dtype, enabled=inside):
            (1001 * y.float().sum()).backward()
        grads.append(norm.bias.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_batch_that_overflowed_leaves_the_running_statistics_finite(value, masks):
    norm = BatchNorm(2, relu=True)
    x = torch.randn(2, 2, 4, 10)
    norm(x)
    before = norm.running_mean.clone(), norm.running_var.clone()
    mask = torch.ones(2, 1, 1, 10) if masks else None
    x[0, 1, 2, 3] = value
    # It is not hidden: the loss is not finite and the step will be skipped.
    assert norm(x, mask)[:, 1].isnan().all()
    for buffer, old in zip((norm.running_mean, norm.running_var), before, strict=True):
        assert buffer[0] != old[0]
        assert buffer[1] == old[1]


def test_gradient_passes_gradcheck_and_gradgradcheck():
    ours, _ = both(True)
    x = torch.randn(3, 6, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, x)
    assert torch.autograd.gradgradcheck(ours, x)


@pytest.mark.parametrize("relu", [False, True])
def test_masked_frames_do_not_count(relu):
    ours, theirs = both(relu)
    torch.manual_seed(1)
    x = torch.randn(1, 6, 5, 9, dtype=torch.float64)
    mask = (torch.arange(9) < 6).double().view(1, 1, 1, 9)
    padded, short = x.clone().requires_grad_(), x[..., :6].clone().requires_grad_()
    y, expected = ours(padded, mask), theirs(short)
    torch.testing.assert_close(y[..., :6], expected)
    assert not y[..., 6:].any()
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
    (y * weights).sum().backward()
    (expected * weights[..., :6]).sum().backward()
    torch.testing.assert_close(padded.grad[..., :6], short.grad)
    assert not padded.grad[..., 6:].any()
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    for found, wanted in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_conversion_to_sync_batchnorm_leaves_it_alone():
    module = nn.Sequential(BatchNorm(4, relu=True), nn.BatchNorm2d(4))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    assert isinstance(converted[0], BatchNorm)
    assert isinstance(converted[1], nn.SyncBatchNorm)


def test_one_value_per_channel_has_no_statistics():
    with pytest.raises(ValueError, match="more than one value per channel"):
        BatchNorm(4)(torch.randn(1, 4, 1, 1))


def batch():
    torch.manual_seed(1)
    return torch.randn(6, 6, 3, 4, dtype=torch.float64) * 2 - 1


def sync_process(rank, folder, slices):
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    norm, _ = both(True)
    norm.sync = True
    x = batch()[slices[rank]].requires_grad_()
    y = norm(x)
    y.sin().sum().backward()
    for p in norm.parameters():
        dist.all_reduce(p.grad)
    torch.save(
        [y.detach(), x.grad, [p.grad for p in norm.parameters()], norm.state_dict()],
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


def test_statistics_over_processes_are_those_of_the_whole_batch(tmp_path):
    slices = [slice(0, 2), slice(2, 6)]  # unequal shares
    run_in_processes(sync_process, (str(tmp_path), slices), 2)
    norm, _ = both(True)
    x = batch().requires_grad_()
    y = norm(x)
    y.sin().sum().backward()
    for rank, share in enumerate(slices):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found[0], y[share].detach())
        torch.testing.assert_close(found[1], x.grad[share])
        torch.testing.assert_close(found[2], [p.grad for p in norm.parameters()])
        torch.testing.assert_close(found[3], copy.deepcopy(norm.state_dict()))
