import pickle

from speechbrain_rev.audio.texts import Lookup, Texts

NAMES = ["", "b", "ba", "bb", "ü", "c/d", "\udcff.wav"]


def test_texts_come_back_as_they_were():
    texts = Texts.of(NAMES)
    assert list(texts) == NAMES
    assert texts[1:3] == NAMES[1:3]
    assert list(pickle.loads(pickle.dumps(texts))) == NAMES
    assert list(Texts.of([])) == []


def test_a_name_is_looked_up_among_others():
    lookup, order = Lookup.of([*NAMES, "b"])
    # Of two that are equal, the last.
    assert [order[lookup.find(name)] for name in NAMES] == [0, 7, 2, 3, 4, 5, 6]
    assert lookup.find("a") is None
    nothing, _ = Lookup.of([])
    assert nothing.find("a") is None
