"""Plain values are read without building anything."""

from speechbrain_rev.hparams import plain_settings


def test_plain_values_are_read_with_their_references_followed():
    found = plain_settings(
        "seed: 3\nrate: 16000\nspeeds: [1.0, 0.9]\nnothing: null\n"
        "folder: !ref results/<seed>\nseconds: !ref <rate> * 2\n"
    )
    assert found == {
        "seed": 3,
        "rate": 16000,
        "speeds": [1.0, 0.9],
        "nothing": None,
        "folder": "results/3",
        "seconds": 32000,
    }


def test_objects_are_neither_built_nor_listed(tmp_path):
    mark = tmp_path / "mark"
    text = f"a: !apply:pathlib.Path.touch ['{mark}']\nb: {{c: 1}}\nd: !name:os.system\n"
    assert plain_settings(text) == {}
    assert not mark.exists()
