"""Devices by name, and what is free on a card that is only made up."""

import pytest
import torch

from speechbrain_rev import devices
from speechbrain_rev.catalog.steps import budget_bytes_of

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


def test_what_torch_holds_and_does_not_use_is_free(card):
    assert devices.free_bytes(CARD) == 6600
    assert devices.free_bytes(CPU) is None


def test_an_automatic_budget_holds_the_modules_that_are_on_the_card_already(card):
    assert devices.free_and_held_bytes(CARD) == 7000
    assert budget_bytes_of("auto", CARD) == 7000
    with pytest.raises(ValueError, match=r"runs on cpu\. Give a size, as 11GB"):
        budget_bytes_of("auto", CPU)


def test_devices_are_named(card):
    assert (devices.device_name(CARD), devices.described(CARD)) == ("Fake", "Fake")
    assert devices.device_name(CPU) == "cpu"
    assert devices.described(CPU) == f"cpu, {torch.get_num_threads()} thread(s)"
    assert (devices.random_devices(CARD), devices.random_devices(CPU)) == ([CARD], [])
    assert devices.timed_device("cuda:0") == CARD


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "meta", ""])
def test_what_nothing_can_be_timed_on_is_refused(name, card):
    with pytest.raises(ValueError, match=f"takes cpu, cuda, .* not {name}. Give cpu"):
        devices.timed_device(name)


def test_a_card_that_is_not_there_is_refused(card):
    with pytest.raises(ValueError, match="cuda:1 is not there: torch sees 1 card"):
        devices.timed_device("cuda:1")
