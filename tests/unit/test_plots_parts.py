import pytest

from speechbrain_rev.plots import PartsBar, memory_parts

STORED = PartsBar("revnet57", "store", {"activations": 4e9, "optimizer_states": 4e7})
STAGE = PartsBar("resnet34", "stage 1", {"held": 1e6, "working": 1e5, "weights": 9})
OTHER = PartsBar("resnet34", "store", {"others": 1.0})
WORDS = {"title": "Memory", "source": "Counted."}


@pytest.mark.parametrize(
    ("bars", "unit"), [([STORED], "GB"), ([STORED, STAGE, OTHER], "GiB")]
)
def test_a_picture_is_written(bars, unit, tmp_path):
    memory_parts(bars, tmp_path / "parts.png", unit=unit, **WORDS)
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (None, "There is no bar"),
        (
            {"activation": 1.0},
            "'a' has a part 'activation'; parts are activations, held",
        ),
        ({"weights": -1.0}, r"weights of 'a' has -1\.0 bytes"),
        ({"weights": float("nan")}, "weights of 'a' has nan bytes"),
        ({"weights": float("inf")}, "weights of 'a' has inf bytes"),
        ({"weights": 0}, "'a' has nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused(parts, message, tmp_path):
    bars = [] if parts is None else [PartsBar("a", "b", parts)]
    with pytest.raises(ValueError, match=message):
        memory_parts(bars, tmp_path / "parts.png", **WORDS)
    assert not list(tmp_path.iterdir())
