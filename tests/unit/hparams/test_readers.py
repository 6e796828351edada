"""A complete file's text stays, so all readers have to agree on it."""

import pytest
import yaml
from hyperpyyaml import load_hyperpyyaml
from hypothesis import given, settings
from hypothesis import strategies as st

from speechbrain_rev.hparams import resolve
from speechbrain_rev.hparams.document import Document
from speechbrain_rev.hparams.readers import refuse_disagreement
from tests.unit.hparams.files import TRAIN


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("1e-4", "a number for some YAML readers and a text for others. Write 1.0e-4."),
        ("1E6", r"Write 1\.0e\+6\."),
        ("1.0e4", r"Write 1\.0e\+4\."),
        ("+.5", "Write 0.5."),
        ("0o12", "an integer .* and a text for others. Write it as a decimal number."),
        ("012", "leave the zero in front out"),
        ("-08", "leave the zero in front out"),
        ("no", 'a text .* and true or false for others. Write false, or "no".'),
        ("On", 'Write true, or "On".'),
        ("1:30", 'an integer for others. Write it in quotes: "1:30".'),
        ("1:30.5", 'a number for others. Write it in quotes: "1:30.5".'),
        ("=", 'Write it in quotes: "=".'),
        ("<<", 'Write it in quotes: "<<".'),
    ],
)
def test_what_they_read_differently_is_refused_with_what_to_write(
    tmp_path, written, instead
):
    for content in (f"seed: 3\nlr: {written}\n", f"seed: 3\nx: [{written}]\n"):
        (tmp_path / "mine.yaml").write_text(content)
        with pytest.raises(ValueError, match=rf"mine\.yaml, line 2: .*{instead}"):
            resolve(tmp_path / "mine.yaml")


def test_in_quotes_or_in_an_override_file_it_may_stand(write):
    folder = write(mine="x: 'no'\nlr: 1.0e-4\n", near="base: mine.yaml\nlr: 1e-4\n")
    assert resolve(folder / "mine.yaml") == "x: 'no'\nlr: 1.0e-4\n"
    assert resolve(folder / "near.yaml") == "x: 'no'\nlr: 0.0001\n"


def test_our_own_file_is_read_alike():
    refuse_disagreement(Document(str(TRAIN), TRAIN.read_text()))


@settings(max_examples=150, deadline=None)
@given(
    st.from_regex(r"[-+]?[0-9a-foxENO_.:]{1,7}(e[-+]?[0-9]{1,3})?", fullmatch=True)
    | st.sampled_from(["yes", "No", "ON", "off", "y", "true", "~", "null", ".inf"])
)
def test_what_passes_is_one_value_for_pyyaml_and_hyperpyyaml(written):
    document = Document("x.yaml", f"x: {written}\n")
    try:
        refuse_disagreement(document)
    except ValueError:
        return
    try:
        ours = load_hyperpyyaml(document.text)
    except (IndexError, ValueError):
        return  # ruamel.yaml fails to write -0.e-0 and its like.
    assert repr(yaml.safe_load(document.text)) == repr(ours)
