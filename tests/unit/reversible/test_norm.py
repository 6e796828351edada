"""Batch normalisation that can be run twice, against torch's own."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from speechbrain_rev.reversible.norm import BatchNorm


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
    mp.spawn(sync_process, (str(tmp_path), slices), nprocs=2)
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
