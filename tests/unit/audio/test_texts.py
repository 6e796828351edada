import pickle

from speechbrain_rev.audio.texts import Lookup, Texts

NAMES = ["", "b", "ba", "bb", "ü", "c/d", "\udcff.wav"]


def test_texts_are_found_among_sorted_ones():
    names = sorted(NAMES, key=lambda name: name.encode(errors="surrogateescape"))
    texts = Texts.of(names)
    assert list(texts) == names
    assert [texts.first_from(name) for name in names] == list(range(len(names)))
    assert texts.first_from("bab") == 3
    assert texts.first_from("\udcff.x") == len(names)
    assert texts[1:3] == names[1:3]
    assert list(pickle.loads(pickle.dumps(texts))) == names
    assert Texts.of([]).first_from("") == 0


def test_a_name_is_looked_up_among_others():
    lookup = Lookup.of([*NAMES, "b"])
    # Of two that are equal, the last.
    assert [lookup.find(name) for name in NAMES] == [0, 7, 2, 3, 4, 5, 6]
    assert lookup.find("a") is None
    assert Lookup.of([]).find("a") is None
