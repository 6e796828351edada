"""The check of words finds them where people read, and passes over code."""

import pytest

from tests.docs import words

PYTHON = '''
"""Count what a
training takes.

    cards : int
        How many.
    >>> card
"""

cards = {"card": card}  # of all cards
raise ValueError(
    f"No room for {card + rooms} states "
    "of 8 bit; give --card or ``card``, or a training "
    "run"
)
'''
PAGE = """\
# A card

Of a `card`, `--card` and a [GPU](#what-stays) a
training was told.

> this training has diverged

```
speechbrain-rev plan --card 11GB  # a card
```
"""
YAML = "card: rooms  # of rooms\n# A training of\nlr: undo\n"


def found(text, kind):
    return [(line, word) for line, word, _ in words.hits(text, kind)]


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        (
            PYTHON,
            ".py",
            [(2, "a training"), (10, "cards"), (12, "room"), (12, "states of 8 bit")],
        ),
        (PAGE, ".md", [(1, "card"), (3, "a training"), (4, "told")]),
        (YAML, ".yaml", [(1, "rooms"), (2, "A training")]),
    ],
)
def test_a_word_is_found_where_people_read_and_not_in_code(text, kind, expected):
    assert found(text, kind) == expected


@pytest.mark.parametrize(
    "text",
    [
        "A training run, a training step, this training set.",
        "Integers in 8 bits; a GPU of 132 processors.",
        "The model card of a model; they share a room.",
        "room impulse responses",
    ],
)
def test_a_right_word_is_not_found(text):
    assert not found(text, ".md")


def test_each_word_names_the_one_to_use(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("fine\na card\n")
    assert words.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == "page.md:2: 'card': use GPU\n"
    (tmp_path / "page.md").write_text("fine\n")
    assert words.main([str(tmp_path)]) == 0
