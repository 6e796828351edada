"""A report's parts are what a real step holds, and it survives being written."""

import gc
import json

import pytest
import torch
from torch import nn

from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import build_optimizer, state_bytes
from speechbrain_rev.planner.memory import PARTS, LiveBytes, MemoryReport, breakdown

TINY = {"widths": (16, 16, 32, 32), "n_mels": 16}
BLOCKS = {
    "resnet34": (1, 1, 1, 1),
    "revnet57": (1, 0, 0, 1),
    "df_revnet66": (1, 0, 0, 1),
}
REPORT = MemoryReport(500, 40, 30, 20, 10, "cpu", (8, 200, 80), "float32")


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        MemoryReport(0, 0, 0, 0, 0, "", (), ""),
        MemoryReport(10**15, 0, 1, 2, 3, "cpu, cuda:0", (2,), 'bf16 "autocast" \u00e9'),
    ],
)
def test_a_report_is_read_as_it_was_written(report):
    assert MemoryReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "sizes", [(0,) * 5, (500, 40, 30, 20, 10), (0, 0, 10**15, 0, 7)]
)
def test_parts_make_the_total_and_shares_make_one(sizes):
    report = MemoryReport(*sizes, "cpu", (1,), "float32")
    assert list(report.parts.items()) == list(zip(PARTS, sizes, strict=True))
    assert report.total_bytes == sum(sizes)
    shares = sum(map(report.share, PARTS))
    assert shares == pytest.approx(1 if sum(sizes) else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak": 1}, "has unknown keys: peak. It has activations_bytes, optim"),
        ({"weights_bytes": None}, "lacks keys: weights_bytes"),
        ({"weights_bytes": 3.0}, r"weights_bytes is 3\.0; it is an integer"),
        ({"weights_bytes": True}, "weights_bytes is True; it is an integer"),
        ({"weights_bytes": -1}, "weights_bytes is -1; a part has at least 0"),
        ({"device": 0}, "device is 0; it is text"),
        ({"input_shape": "8x200"}, "input_shape is '8x200'; it is integers"),
        ({"input_shape": [8, "a"]}, "input_shape is .*; it is integers"),
    ],
)
def test_what_is_no_report_is_refused_with_the_key(change, message):
    plain = {**json.loads(REPORT.to_json()), **change}
    plain = {key: value for key, value in plain.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        MemoryReport.from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["[]", "7", "{"])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ValueError, match=r"JSON object|Expecting"):
        MemoryReport.from_json(text)


def tiny_step(device, name="resnet34"):
    with torch.device(device):
        encoder = build_encoder(name, **TINY, blocks=BLOCKS[name])
        feats = torch.randn(4, 40, 16)
    return encoder, feats, lambda: encoder(feats).square().sum().backward()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bits", [8, 32])
def test_states_are_those_of_the_optimizer_and_the_same_on_meta(name, bits):
    counted = []
    for device in ("cpu", "meta"):
        encoder, feats, step = tiny_step(device)
        optimizer = build_optimizer(encoder.parameters(), name=name, bits=bits, lr=0.1)
        report = breakdown(encoder, step, inputs=[feats], optimizer=optimizer)
        assert report.optimizer_states_bytes == state_bytes(optimizer) > 0
        assert report.device == device
        counted.append(report.parts)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("name", ["revnet57", "df_revnet66", "resnet34"])
def test_the_total_is_the_peak_of_a_later_real_step(name):
    # The first 8-bit optimizer of a process imports what has tensors of its own.
    encoder, _, step = tiny_step("cpu", name)
    optimizer = build_optimizer(encoder.parameters(), name="sgd", bits=8, lr=0.1)
    step()
    optimizer.step()
    del encoder, step, optimizer
    gc.collect()
    with LiveBytes() as meter:
        encoder, feats, step = tiny_step("cpu", name)
        optimizer = build_optimizer(encoder.parameters(), name="sgd", bits=8, lr=0.1)
        report = breakdown(encoder, step, inputs=[feats], optimizer=optimizer)
        gc.collect()
        meter.peak = meter.live
        step()
    # Beside the parts live what no tensor of the step is: constants of the encoder.
    assert meter.peak == pytest.approx(report.total_bytes, rel=0.01)
    assert report.input_shape == (4, 40, 16)
    assert report.precision == "float32"


def test_weights_count_buffers_and_shared_ones_once_and_gradients_what_is_trained():
    norm = nn.BatchNorm1d(10)  # two parameters, two buffers of 10, one of 8 bytes
    tied, frozen = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    twice = nn.Linear(10, 10, bias=False)
    twice.weight = tied.weight
    frozen.requires_grad_(False)
    model, x = nn.Sequential(norm, tied, twice, frozen), torch.randn(3, 10)
    report = breakdown(model, lambda: model(x).sum().backward(), inputs=[x, x[:2]])
    assert report.weights_bytes == 4 * (40 + 100 + 100) + 8
    assert report.gradients_bytes == 4 * (20 + 100)
    assert report.others_bytes == 4 * 30
    assert report.optimizer_states_bytes == 0


def test_an_optimizer_with_states_is_not_stepped_again():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def count():
        step = lambda: model(x).sum().backward()  # noqa: E731
        return breakdown(model, step, inputs=[x], optimizer=optimizer)

    first, weight = count(), model.weight.clone()
    assert count() == first
    assert torch.equal(model.weight, weight)


def test_a_step_that_clears_gradients_is_refused():
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def step():
        model.zero_grad()
        model(x).sum().backward()

    with pytest.raises(ValueError, match="Leave zero_grad out of it"):
        breakdown(model, step, inputs=[x])
    with pytest.raises(ValueError, match="inputs is empty"):
        breakdown(model, step, inputs=[])


def test_words_for_the_precision_go_into_the_report():
    model, x = nn.Linear(3, 3, dtype=torch.float64), torch.randn(2, 3).double()

    def step():
        model(x).sum().backward()

    assert breakdown(model, step, inputs=[x]).precision == "float64"
    said = breakdown(model, step, inputs=[x], precision="bf16 autocast")
    assert said.precision == "bf16 autocast"
