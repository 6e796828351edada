"""Devices by name, GPUs that are listed, and what is free on one that is only made up."""

from dataclasses import fields, replace

import pytest
import torch

from speechbrain_rev import devices
from speechbrain_rev.devices import (
    ASSUMED,
    GPUS,
    GpuAtHand,
    Speed,
    gpu_at_hand,
    parse_card,
)
from speechbrain_rev.sizes import GIB
from speechbrain_rev.training.recipe_step import budget_bytes_of

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """10,000 bytes, of which others have 3,000; torch holds 500 and uses 400 of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6500, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 400)


def test_what_is_free_on_a_gpu_is_what_torch_can_have(card):
    # What torch holds and does not use is free.
    assert devices.free_bytes(CARD) == 6600
    assert devices.free_bytes(CPU) is None
    # Modules that are on the GPU already are in an automatic budget.
    assert budget_bytes_of("auto", CARD) == devices.free_and_held_bytes(CARD) == 7000
    with pytest.raises(ValueError, match=r"run is on cpu\. Give a size, as 11GB"):
        budget_bytes_of("auto", CPU)
    assert gpu_at_hand("cuda") == GpuAtHand("Fake", 10_000, 6500)


def test_devices_are_named(card):
    assert (devices.device_name(CARD), devices.described(CARD)) == ("Fake", "Fake")
    assert devices.device_name(CPU) == "cpu"
    assert devices.described(CPU) == f"cpu, {torch.get_num_threads()} thread(s)"
    assert (devices.random_devices(CARD), devices.random_devices(CPU)) == ([CARD], [])
    assert devices.timed_device("cuda:0") == CARD


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", r"cuda:N .* not gpu\."),
        ("cuda:", r"cuda:N .* not cuda:\."),
        ("cuda:-1", r"cuda:N .* not cuda:-1\."),
        ("", r"cuda:N .* not \."),
        ("cuda:1", "cuda:1 is not there: torch sees 1 GPU"),
    ],
)
@pytest.mark.parametrize("take", [devices.timed_device, gpu_at_hand])
def test_what_is_no_device_is_refused(take, name, message, card):
    with pytest.raises(ValueError, match=message):
        take(name)


def test_where_there_is_no_gpu_its_memory_can_be_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"sees 0 GPU.* --card=11GB"):
        gpu_at_hand("cuda")


@pytest.mark.parametrize(
    ("text", "shown", "gib"),
    [
        ("11GB", "RTX 2080 Ti, listed nearest to 11 GiB (or name GTX 1080 Ti)", 11),
        ("4GB", "RTX 2060, listed nearest to 4 GiB", 4),
        (
            "24GB",
            "RTX 3090, listed nearest to 24 GiB (or name RTX 4090, A10, L4)",
            24,
        ),
        ("70GB", "A100 80GB, listed nearest to 70 GiB", 70),
        ("rtx_2080-ti", "RTX 2080 Ti", 11),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
        (
            "8GB",
            "RTX 3070, listed nearest to 8 GiB (or name RTX 2080, RTX 4060, GTX 1080)",
            8,
        ),
        ("10GB", "RTX 3080, listed nearest to 10 GiB", 10),
        ("3080", "RTX 3080", 10),
        ("2080", "RTX 2080", 8),
        ("2080 Ti", "RTX 2080 Ti", 11),
        ("2080ti", "RTX 2080 Ti", 11),
        ("GTX 1080 Ti", "GTX 1080 Ti", 11),
        ("geforce gtx1080-ti 11GB", "GTX 1080 Ti", 11),
        ("A6000", "RTX A6000", 48),
        ("Tesla T4", "T4", 16),
        ("NVIDIA H100", "H100 80GB", 80),
        ("A100 40GB", "A100 40GB", 40),
        ("a100-80gb", "A100 80GB", 80),
    ],
)
def test_a_gpu_is_read_by_its_name_or_by_the_nearest_memory(text, shown, gib):
    gpu = parse_card(text)
    assert (str(gpu), gpu.memory_bytes) == (shown, gib * GIB)


def test_rates_that_were_measured_replace_half_of_a_gpu_s_peak_figures():
    assert replace(parse_card("11GB").speed, device=ASSUMED.device) == ASSUMED
    assert (ASSUMED.flops_per_second, ASSUMED.bytes_per_second) == (6.7e12, 0.4e12)
    fast = parse_card("RTX 3090").speed
    assert (fast.device, fast.measured) == ("an assumed RTX 3090", ())
    assert fast.flops_per_second / 35.6e12 == pytest.approx(0.5)
    assert fast.bytes_per_second / 936e9 == pytest.approx(0.4 / 0.616)
    names = {field.name for field in fields(Speed)}
    for gpu in GPUS:
        assert set(gpu.measured) <= names
        for name, rate in gpu.measured.items():
            assert getattr(gpu.speed, name) == rate


def test_gpus_are_listed_by_memory_and_what_is_none_of_them_is_refused():
    assert [gpu.memory_bytes for gpu in GPUS] == sorted(g.memory_bytes for g in GPUS)
    assert [parse_card(gpu.name) for gpu in GPUS] == list(GPUS)
    for text in ("11", "-1GB", "RTX 3090 Ti", "A100", ""):
        with pytest.raises(
            ValueError, match=r"--card takes .*11GB or .*; or one of RT"
        ):
            parse_card(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("RTX 3090 Ti", ""),
        ("A100", " Is it A100 40GB or A100 80GB?"),
    ],
)
def test_a_gpu_that_is_not_listed_or_is_two_is_refused_with_all_names(text, near):
    with pytest.raises(ValueError, match="; or one of ") as error:
        parse_card(text)
    end = f"{GPUS[-1].name}.{near} For any other GPU give its memory."
    assert str(error.value).endswith(end)


@pytest.mark.parametrize(
    ("name", "gib", "listed"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "A100 80GB"),
        ("NVIDIA GeForce RTX 2080 Ti", 10, "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 2080 Ti", 9, "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 2080", 7, "RTX 2080"),
        ("NVIDIA GeForce GTX 1060 6GB", 5, "GTX 1060"),
        ("NVIDIA L4", 22, "L4"),
        ("NVIDIA GeForce RTX 3090 Laptop GPU", 11, "RTX 2080 Ti"),
        ("Fake", 23, "RTX 3090"),
    ],
)
def test_a_gpu_at_hand_is_the_listed_one_of_its_name_or_memory(name, gib, listed):
    assert GpuAtHand(name, gib * GIB, GIB).listed().name == listed
