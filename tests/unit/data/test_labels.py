import pytest
from speechbrain.dataio.encoder import CategoricalEncoder

from speechbrain_rev.data.labels import read_labels, write_labels

NUMBERS = {f"id0000{number}": number for number in range(6)}


@pytest.fixture
def path(tmp_path):
    write_labels(tmp_path / "label_encoder.txt", NUMBERS)
    return tmp_path / "label_encoder.txt"


def test_labels_are_in_speechbrains_format(path):
    encoder = CategoricalEncoder()
    encoder.load(path)
    assert encoder.lab2ind == NUMBERS == read_labels(path)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda text: text.replace("=> 2", "=> 99999999999999999999"), 3),
        (lambda text: text.replace("=> 2", "=> 1"), 3),
        (lambda text: text.replace("'id00001'", "'id00000'"), 2),
        (lambda text: text.replace("'id00001'", "id00001"), 2),
        (lambda text: "\n" + text, 1),
    ],
)
def test_labels_that_number_no_speakers_are_refused_with_their_line(path, edit, line):
    text = path.read_text()
    path.write_bytes(("\ufeff" + text).replace("\n", "\r\n").encode())
    assert read_labels(path) == NUMBERS
    path.write_text(edit(text))
    with pytest.raises(ValueError, match=rf"label_encoder\.txt, line {line}: "):
        read_labels(path)
