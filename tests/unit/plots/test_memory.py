import pytest

from speechbrain_rev.plots import PartsBar, memory_parts
from tests.pictures import texts_of

WORDS = {"title": "T", "source": "S"}
STORED = PartsBar("revnet57", "store", {"activations": 4e9, "optimizer_states": 4e7})
STAGE = PartsBar("resnet34", "stage 1", {"held": 1e6, "working": 1e5, "weights": 9})
OTHER = PartsBar("resnet34", "store", {"others": 1.0})


@pytest.mark.parametrize(
    ("bars", "unit"), [([STORED], "GB"), ([STORED, STAGE, OTHER], "GiB")]
)
def test_bars_of_parts_are_drawn_in_both_units(drawn, bars, unit):
    sizes, shares = drawn(memory_parts, bars, unit=unit, **WORDS).axes
    assert sizes.get_xlabel() == unit
    assert texts_of(sizes.get_yticklabels()) == [bar.label for bar in bars]
    assert shares.get_xlim() == (0, 100)
