"""The benchmark of plans on a capped GPU, on what a CPU can tell."""

import pytest
import torch

from speechbrain_rev.sizes import GIB
from tests.benchmarks import capped
from tests.benchmarks.harness import NotEqual

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_plan_peaks_where_it_says_and_every_mode_has_a_time():
    result = capped.run(CPU, ["resnet34"], card_bytes=3 * GIB, batch=2, repeats=2)
    (row,) = result.rows
    # Beside the step there is the loss, some scalars.
    assert row["peak / planned"] == pytest.approx(1, abs=1e-5)
    assert row["store / plan"] > 0
    assert row["recompute / plan"] > 0
    assert row["reconstruct / plan"] == "-"


@pytest.mark.parametrize("name", ["revnet57", "df_revnet66"])
def test_a_small_step_has_equal_bits_in_all_modes_and_leaves_no_trace(name):
    encoder = capped.build_encoder(name, widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1))
    state = {key: value.clone() for key, value in encoder.state_dict().items()}
    modes = dict.fromkeys(encoder.named_blocks(), "store")
    plan = capped.Plan(modes, None, 1, 1, 1, 1.0, {})
    assert "reconstruct" in capped.modes_by_name(encoder, plan)
    capped.check_bits(encoder, plan, CPU)
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_other_bits_print_no_figures(monkeypatch):
    def noisy(encoder, device):
        return [torch.randn(3)]

    monkeypatch.setattr(capped, "gradients", noisy)
    encoder = capped.build_encoder("resnet34", widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1))
    modes = dict.fromkeys(encoder.named_blocks(), "store")
    plan = capped.Plan(modes, None, 1, 1, 1, 1.0, {})
    with pytest.raises(NotEqual, match="other bits"):
        capped.check_bits(encoder, plan, CPU)
