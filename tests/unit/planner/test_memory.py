"""What a step holds, what a machine has left, and what fits into it."""

import functools
import gc
import json
import os

import pytest
import torch
from torch import nn

from speechbrain_rev import devices
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner import memory
from speechbrain_rev.planner.memory import (
    PARTS,
    SHARE,
    LiveBytes,
    MemoryReport,
    batch_that_fits,
    breakdown,
    fits_device,
    is_out_of_memory,
    live_bytes_peak,
)


def changed_in_place():
    x = torch.zeros(100)
    return x.add_(1).view(10, 10).t()[2:]


def freed():
    kept = torch.zeros(100)
    for _ in range(5):
        torch.zeros(1000)
    return kept


def trained():
    """Hold the output and its gradient of one number, then the weight's gradient."""
    nn.Linear(32, 64, bias=False)(torch.zeros(8, 32)).sum().backward()


GIVEN = torch.zeros(1000)


@pytest.mark.parametrize(
    ("step", "least", "most"),
    [
        (changed_in_place, 400, 400),
        (freed, 4400, 4400),
        (lambda: GIVEN.mul_(2).view(10, 100), 0, 0),
        (trained, 4 * 64 * 32 * 2, 4 * (64 * 32 * 3 + 8 * 32 + 8 * 64) + 12),
    ],
)
def test_each_storage_of_a_step_counts_once_until_it_is_freed(step, least, most):
    assert least <= live_bytes_peak(step) <= most


def meta(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


RECALLED = {
    "new": lambda: [meta(2, 3) + meta(3), meta(2, 3) @ meta(3, 4)],
    "number": lambda: [meta(3, dtype=torch.int32) + n for n in (1, 1.0)],
    "strides": lambda: [meta(4, 3, 2).transpose(0, 2) * 2, meta(2, 3, 4) * 2],
    "view": lambda: [meta(4, 6).view(3, 8), meta(4, 6).t(), meta(4)[1:]],
    "in place": lambda: [meta(5).add_(1), meta(4, 1).squeeze_(1).unsqueeze_(0)],
    "resized": lambda: [meta(0).resize_(7), meta(3).resize_(3)],
    "several": lambda: [*meta(2, 6).split(2, 1), *torch.var_mean(meta(2, 6), 1)],
    "maybe itself": lambda: [meta(3).contiguous(), meta(3).to(torch.float32)],
    "convolution": lambda: [torch.conv2d(meta(2, 3, 8, 8), meta(5, 3, 3, 3))],
}


@pytest.mark.parametrize("case", RECALLED.values(), ids=RECALLED)
def test_what_is_recalled_of_meta_tensors_looks_like_what_was_computed(
    case, monkeypatch
):
    def looks(tensors):
        kinds = [(x.shape, x.stride(), x.dtype, x.storage_offset()) for x in tensors]
        return kinds, [x.untyped_storage().nbytes() for x in tensors]

    plain, counts = looks(case()), set()
    monkeypatch.setattr(memory, "_RESULTS", {})
    for _ in range(3):
        with LiveBytes() as meter:
            made = case()
            assert looks(made) == plain
        counts.add((meter.live, meter.peak))
        del made
    assert len(counts) == 1


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write the files of a machine; those that are not written do not exist."""
    for name in ("_MEMINFO", "_LIMIT", "_TAKEN", "_TAKEN_BY"):
        monkeypatch.setattr(memory, name, tmp_path / name)

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / name).write_text(text)

    return write


MEMINFO = "MemTotal:       16000 kB\nMemAvailable:    9000 kB\nMemFree: 10 kB\n"


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (None, 9000 * 1024),
        ("max", 9000 * 1024),
        ("5000000", 3_500_000),
        ("1000000", 0),
        ("10" * 6, 9000 * 1024),
    ],
)
def test_what_linux_has_available_is_read_and_a_container_may_have_less(
    files, limit, left
):
    files(_MEMINFO=MEMINFO)
    if limit is not None:
        files(_LIMIT=f"{limit}\n", _TAKEN="2000000\n")
        files(_TAKEN_BY="active_file 7\ninactive_file 500000\n")
    assert memory.available_ram_bytes() == left


def test_of_other_systems_what_is_free_is_read_or_nothing(files, monkeypatch):
    sizes = {"SC_AVPHYS_PAGES": 30, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert memory.available_ram_bytes() == 30 * 4096
    monkeypatch.delattr(os, "sysconf")
    assert memory.available_ram_bytes() is None
    assert fits_device(10**15, torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "free_bytes", "tried"),
    [
        ("cuda", 10**6, [64]),
        ("cuda", 64_000 / SHARE, [64]),
        ("cuda", 64_000, [64, 32]),
        ("cpu", 64_000, [64, 32]),
        ("cuda", 1250, [7, 3, 1]),
        ("cuda", None, [64]),
    ],
)
def test_a_batch_is_halved_until_storing_everything_fits(
    monkeypatch, device, free_bytes, tried
):
    monkeypatch.setattr(devices, "free_bytes", lambda device: free_bytes)
    monkeypatch.setattr(memory, "available_ram_bytes", lambda: free_bytes)
    asked, device = [], torch.device(device)

    def stored_bytes(count):
        asked.append(count)
        return 1000 * count

    assert batch_that_fits(stored_bytes, tried[0], device) == tried[-1]
    assert fits_device(1000 * tried[-1], device)
    assert len(tried) == 1 or not fits_device(1000 * tried[0], device)
    assert asked == (tried if free_bytes else [])


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("Expected 4 channels"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_memory_that_ran_out_is_not_taken_for_another_error(error, is_one):
    assert is_out_of_memory(error) is is_one


SIZES = 500, 40, 30, 20, 10
REPORT = MemoryReport(*SIZES, "cpu, cuda:0", (8, 200, 80), 'bf16 "autocast" \u00e9')


def test_a_report_is_read_as_it_was_written_and_its_parts_make_the_total():
    assert MemoryReport.from_json(REPORT.to_json()) == REPORT
    assert list(REPORT.parts.items()) == list(zip(PARTS, SIZES, strict=True))
    assert REPORT.total_bytes == sum(SIZES)
    assert sum(map(REPORT.share, PARTS)) == pytest.approx(1)
    assert MemoryReport(0, 0, 0, 0, 0, "", (), "").share("weights") == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "The text is no memory report .*not a mapping"),
        ("{", "Expecting"),
        ({"peak": 1}, "unexpected keyword argument 'peak'"),
        ({"weights_bytes": None}, "missing .*'weights_bytes'"),
        ({"weights_bytes": 3.0}, r"weights_bytes is 3\.0 and takes int"),
        ({"weights_bytes": True}, "weights_bytes is True and takes int"),
        ({"weights_bytes": -1}, "weights_bytes is -1 and takes int of 0 to"),
        ({"device": 0}, "device is 0 and takes str"),
        ({"input_shape": "8x200"}, r"input_shape is .* and takes tuple\[int, \.\.\.\]"),
        ({"input_shape": [8, "a"]}, r"input_shape is \[8, 'a'\] and takes tuple"),
    ],
)
def test_what_is_no_report_is_refused_with_the_key(text, message):
    if isinstance(text, dict):
        plain = {**json.loads(REPORT.to_json()), **text}
        text = json.dumps({k: v for k, v in plain.items() if v is not None})
    with pytest.raises(ValueError, match=message):
        MemoryReport.from_json(text)


def two_layers():
    layers = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("optimizer_name", "bits"),
    [("sgd", 8), pytest.param("adamw", 32, marks=pytest.mark.slow)],
)
def test_the_total_is_the_peak_of_a_later_real_step_and_the_same_on_meta(
    optimizer_name, bits
):
    # A process's first step and first optimizer import what has tensors of its own.
    for device in ("cpu", "meta", "cpu"):
        gc.collect()
        with LiveBytes() as meter:
            with torch.device(device):
                network, x = two_layers(), torch.randn(500, 64)
            optimizer = build_optimizer(
                network.parameters(), name=optimizer_name, bits=bits, lr=0.1
            )

            def step(network=network, x=x):
                network(x).square().sum().backward()

            report = breakdown(network, step, inputs=[x], optimizer=optimizer)
            if device == "meta":
                on_meta = report
                continue
            gc.collect()
            meter.peak = meter.live
            step()
    assert meter.peak == pytest.approx(report.total_bytes, rel=0.01)
    assert report.optimizer_states_bytes == state_bytes(optimizer) > 0
    assert report.parts == on_meta.parts
    assert (report.device, on_meta.device) == ("cpu", "meta")
    assert (report.input_shape, report.precision) == ((500, 64), "float32")


def test_weights_count_buffers_and_shared_ones_once_and_gradients_what_is_trained():
    norm = nn.BatchNorm1d(10)  # two parameters, two buffers of 10, one of 8 bytes
    tied, twice, frozen = (nn.Linear(10, 10, bias=False) for _ in range(3))
    twice.weight = tied.weight
    frozen.requires_grad_(False)
    model, x = nn.Sequential(norm, tied, twice, frozen), torch.randn(3, 10)
    report = breakdown(model, lambda: model(x).sum().backward(), inputs=[x, x[:2]])
    assert report.weights_bytes == 4 * (40 + 100 + 100) + 8
    assert report.gradients_bytes == 4 * (20 + 100)
    assert report.others_bytes == 4 * 30
    assert report.optimizer_states_bytes == 0


def test_an_optimizer_with_states_is_not_stepped_again():
    model, x = nn.Linear(3, 3, dtype=torch.float64), torch.randn(2, 3).double()
    count = functools.partial(
        breakdown,
        model,
        lambda: model(x).sum().backward(),
        inputs=[x],
        optimizer=torch.optim.Adam(model.parameters()),
    )
    first, weight = count(), model.weight.clone()
    assert first.precision == "float64"
    assert count() == first
    assert torch.equal(model.weight, weight)
    assert count(precision="bf16 autocast").precision == "bf16 autocast"


def test_a_step_that_clears_gradients_is_refused_and_so_are_no_inputs():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def step():
        model.zero_grad()
        model(x).sum().backward()

    for inputs, message in ([x], "Leave zero_grad out of it"), ([], "inputs is empty"):
        with pytest.raises(ValueError, match=message):
            breakdown(model, step, inputs=inputs)
