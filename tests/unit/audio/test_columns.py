import numpy as np
import pytest

from speechbrain_rev.audio.columns import TextColumn, map_columns, save_columns


def test_texts_are_found_among_sorted_ones():
    texts = sorted(["", "b", "ba", "bb", "ü", "c/d"], key=str.encode)
    column = TextColumn.of(texts)
    assert [column.first_from(text) for text in texts] == list(range(6))
    assert column.first_from("bab") == 3
    assert column.first_from("üü") == 6
    assert column[1:3] == texts[1:3]
    assert list(column.encoded()) == [text.encode() for text in texts]
    assert TextColumn.of([]).first_from("") == 0


@pytest.mark.parametrize(
    "ends",
    [
        # Differences of 64 bits that wrap around are above 0.
        np.array([2**63 - 1, -2, 5]),
        np.array([-1, 5]),
        np.array([3, 2, 5]),
        np.array([3, 6]),
        np.array([5.0]),
        np.array([[5]]),
    ],
)
def test_ends_that_are_not_those_of_the_texts_are_refused(ends, tmp_path):
    data = np.zeros(5, np.uint8)
    assert list(TextColumn(data, np.array([2, 5]))) == ["\0" * 2, "\0" * 3]
    with pytest.raises(ValueError, match="ends"):
        TextColumn(data, ends)
    save_columns(tmp_path / "x", {"t.bytes": data, "t.ends": ends}, {})
    with pytest.raises(ValueError, match="is damaged"):
        map_columns(tmp_path / "x")
