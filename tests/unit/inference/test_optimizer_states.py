"""Optimizer states of a run become those of other bits, or the run stays as it is."""

import json
import os

import pytest
import torch
from torch import nn

from speechbrain_rev.inference.optimizer_states import convert_states
from speechbrain_rev.inference.run_folder import saved_bytes
from speechbrain_rev.lobes.checkpointer import (
    CHANNELS,
    WholeCheckpointer,
    rewrite_checkpoint,
    verify_checkpoint,
)
from speechbrain_rev.locks import LOCK, locked
from speechbrain_rev.optim import AdamW, convert_checkpoint
from tests.recipes.runs import contents
from tests.unit.inference.conftest import Attack
from tests.unit.optim.steps import assert_identical

ADAMW = "opt_class: !name:speechbrain_rev.optim.AdamW {bits: 8, lr: 0.1}\n"


def with_states(folder, text=ADAMW, **options):
    """Write a run of a checkpoint with an optimizer's states; the optimizer."""
    layers = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 64, 3), nn.Linear(9, 9))
    layers[:2].to(memory_format=torch.channels_last)
    params = list(layers.parameters())
    optimizer = AdamW(params, lr=0.1, **options)
    for param in params[:-1]:  # the last one is frozen
        param.grad = torch.randn_like(param)
    optimizer.step()
    saved = {"model": layers, "optimizer": optimizer}
    checkpointer = WholeCheckpointer(folder / "save", saved)
    checkpointer.add_recoverable(CHANNELS, Layout(), Layout.load, Layout.save)
    checkpointer.save_checkpoint()
    (folder / "hyperparams.yaml").write_text(text)
    return optimizer


class Layout:
    """What KeptArithmetic keeps of an encoder in channels_last."""

    def save(self, path):
        path.write_text(json.dumps({"memory_format": "channels_last"}))

    def load(self, path, end_of_epoch):
        pass


def states_in(run):
    newest = WholeCheckpointer(run / "save").find_checkpoint()
    verify_checkpoint(newest)
    return torch.load(newest.paramfiles["optimizer"], weights_only=True)


@pytest.mark.parametrize("bits", [8, 32])
def test_states_of_the_newest_checkpoint_become_those_of_the_other_bits(tmp_path, bits):
    old = with_states(tmp_path, bits=40 - bits)
    params = old.param_groups[0]["params"]
    done = convert_states(tmp_path, bits)
    assert (done.name, done.were) == ("adamw", 40 - bits)
    new = AdamW(params, lr=0.2, bits=bits)
    new.load_state_dict(states_in(tmp_path))
    expected = AdamW(params, lr=0.2, bits=bits)
    expected.load_state_dict(convert_checkpoint(old.state_dict(), expected))
    assert_identical(new.state_dict(), expected.state_dict())
    if bits == 32:
        moment = new.state[params[2]]["exp_avg"]
        assert moment.is_contiguous(memory_format=torch.channels_last)
    before = states_in(tmp_path)
    assert convert_states(tmp_path, bits).were == bits
    assert_identical(states_in(tmp_path), before)


def test_states_have_the_8_bit_form_that_the_run_s_optimizer_has(tmp_path):
    text = ADAMW.replace("}", ", block: !ref <b>, pack_small: true}") + "b: 2048\n"
    old = with_states(tmp_path, text, bits=32)
    convert_states(tmp_path, 8)
    params = old.param_groups[0]["params"]
    new = AdamW(params, lr=0.1, bits=8, block=2048, pack_small=True)
    new.load_state_dict(states_in(tmp_path))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            ADAMW.replace("}", ", keep_32bit: !ref <b>}"),
            {},
            r"2: keep_32bit names layers",
        ),
        ("lr: 1\n", {}, "describes 0 optimizers of speechbrain_rev.optim, and must"),
        (ADAMW, {"amsgrad": True}, "amsgrad"),
    ],
)
def test_states_that_cannot_have_8_bits_are_refused(tmp_path, text, options, message):
    with_states(tmp_path, "seed: 1\n" + text, bits=32, **options)
    before = contents(tmp_path)
    with pytest.raises(
        ValueError, match=rf"optimizer.ckpt is not converted: .*{message}"
    ):
        convert_states(tmp_path, 8)
    assert contents(tmp_path) == before


def test_states_that_are_no_tensors_or_another_s_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_states(tmp_path, bits=32)
    newest = WholeCheckpointer(tmp_path / "save").find_checkpoint()
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1).state_dict()
    for saved, message in (
        ({"state": Attack(os.mkdir, "executed")}, "more than plain tensors"),
        (foreign, "not written by an optimizer of speechbrain_rev"),
    ):
        rewrite_checkpoint(newest.path, "optimizer.ckpt", saved_bytes(saved))
        with pytest.raises(ValueError, match=message):
            convert_states(tmp_path, 8)
    (newest.path / "optimizer.ckpt").write_bytes(b"1")
    with pytest.raises(
        ValueError, match=r"cannot be trusted: optimizer\.ckpt is damaged"
    ):
        convert_states(tmp_path, 8)
    assert not (tmp_path / "executed").exists()


def test_states_are_not_converted_under_a_run_that_trains(tmp_path):
    with_states(tmp_path, bits=32)
    with (
        locked(tmp_path / LOCK, "it", "writing into"),
        pytest.raises(ValueError, match="Another process is writing into"),
    ):
        convert_states(tmp_path, 8)
