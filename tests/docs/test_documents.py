"""What documents name, link to and show exists, and was measured."""

import re

import pytest

from speechbrain_rev import hparams
from speechbrain_rev.catalog import Training, select
from speechbrain_rev.cli import main
from speechbrain_rev.cli.command import _parser
from speechbrain_rev.devices import parse_card
from speechbrain_rev.hparams.arguments import RUN_OPTIONS
from tests.benchmarks.readme import TABLES, rendered
from tests.docs import published, study

from .documents import DOCUMENTS, PAGES, README, ROOT, anchors, commands, links, name_of

TEXT = README.read_text()
#: Those of SpeechBrain's recipe, which pages speak of too.
FOREIGN = ("recipes/VoxCeleb/SpeakerRec/", "hparams/train_")

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


#: All pages with tables, and the names of these.
WRITTEN = {**TABLES, published.PAGE: published.TABLES, study.PAGE: study.TABLES}
#: Of those whose tables are not of benchmarks.
RENDERED = {published.PAGE: published.rendered, study.PAGE: study.rendered}


@pytest.mark.parametrize("document", WRITTEN, ids=name_of)
def test_tables_are_those_of_the_committed_results(document):
    text = document.read_text()
    written = RENDERED[document]() if document in RENDERED else rendered(document)
    assert written == text
    places = re.findall(r"<!-- table: (\w+) -->\n\|", text)
    assert sorted(places) == sorted(WRITTEN[document])


#: Of no run; a part of a table that names its sources elsewhere.
UNFOLDED = "modes", "few_models"
_FOLD = re.compile(
    r'<details markdown="1"><summary>[\w ]+</summary>\n\n.*?\n\n</details>\n', re.DOTALL
)


@pytest.mark.parametrize("document", TABLES, ids=name_of)
def test_captions_have_two_lines_and_the_rest_is_folded(document):
    tables = re.findall(
        r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", document.read_text(), re.DOTALL
    )
    for name, table in tables:
        lines = _FOLD.sub("", table).splitlines()
        caption = [line for line in lines if line and not line.startswith(("|", "!["))]
        assert len(caption) <= 2, name
        assert all(len(line) <= 120 for line in caption), name
        assert len(_FOLD.findall(table)) == (name not in UNFOLDED), name


def test_every_table_has_one_place():
    names = [name for tables in WRITTEN.values() for name in tables]
    assert len(names) == len(set(names))
    marked = {d for d in DOCUMENTS if "\n<!-- table: " in d.read_text()}
    assert marked == set(WRITTEN)


def test_readme_is_read_in_five_minutes():
    assert len(TEXT.splitlines()) <= 150
    assert TEXT.index("](docs/depth.png)") < TEXT.index("\n## ")
    assert (ROOT / "docs/depth.png").stat().st_size < 300_000
    assert TEXT.index("\nmake demo") < TEXT.index("\nmake test")


@each_document
def test_links_lead_to_files_and_headings(document):
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchors(target).count(anchor) == 1, link


def test_readme_or_another_page_links_to_every_page():
    linked = {
        (document, (document.parent / link.partition("#")[0]).resolve())
        for document in DOCUMENTS
        for link in links(document)
    }
    for page in PAGES:
        assert {d for d, target in linked if target == page} - {page}, page.name


@each_document
def test_files_that_documents_name_exist(document):
    text = document.read_text()
    tops = r"\b(?:hparams|recipes|tests|docs|speechbrain_rev)"
    files = set(re.findall(rf"(?<![\w/.-]){tops}/[\w/.-]*\.\w+\b", text))
    modules = re.findall(r"python3? -m (tests(?:\.\w+)*)", text)
    # CONTRIBUTING names modules by their place in the package.
    folders = [ROOT, ROOT / "speechbrain_rev"]
    for name in files:
        there = any((folder / name).exists() for folder in folders)
        assert there or name.startswith(FOREIGN), name
    for name in modules:
        path = ROOT / name.replace(".", "/")
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), name


def test_the_table_of_contributing_names_files_as_they_are():
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text().partition("touch Y\n")
    rows = re.findall(r"^\|.*", table.partition("\n## ")[0], re.MULTILINE)
    file = r"`([\w./-]+(?:/|\.(?:py|ya?ml|md)))`"
    names = {name for row in rows for name in re.findall(file, row)}
    assert {"data/folders.py", "hparams/train.yaml"} <= names
    for name in names:
        # Of the package, or of the repository: which one is meant is certain.
        places = [ROOT / "speechbrain_rev" / name, ROOT / name]
        assert [place.exists() for place in places].count(True) == 1, name


@each_document
def test_targets_subcommands_and_options_that_documents_name_exist(document):
    text, rules = document.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)(?:\.\./)?make ([a-z]+)\b", text, re.MULTILINE):
        assert f"\n{target}:" in rules, target
    choices = _parser()._subparsers._group_actions[0].choices
    assert set(re.findall(r"speechbrain-rev ([a-z]+)", text)) <= set(choices)
    for words in commands(document):
        if words[0] == "speechbrain-rev":
            _parser().parse_args(words[1:])


@each_document
def test_recipes_are_given_settings_that_there_are(document):
    for words in commands(document):
        scripts = [w for w in words if re.search(r"(train|prepare)\.py$", w)]
        if not scripts or "--pack" in words:
            continue
        file, *options = words[words.index(scripts[0]) + 1 :]
        if not file.startswith("hparams/"):
            continue  # another recipe's
        options = [o for o in options if o != "--dry_run" and not o.startswith("$")]
        keys = hparams.top_level_keys(ROOT / file)
        # An option that is neither is refused.
        hparams.parse_arguments(options, keys=keys, run_options=RUN_OPTIONS)


#: Those that take a moment.
QUICK = sorted(
    {
        tuple(words[1:])
        for document in DOCUMENTS
        for words in commands(document)
        if words[:2] == ["speechbrain-rev", "models"]
    }
)


@pytest.mark.parametrize("command", QUICK, ids=" ".join)
def test_commands_of_the_table_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
    assert capsys.readouterr().out


def test_the_page_that_chooses_goes_on_with_what_its_first_command_chooses():
    choose, plan, train = commands(ROOT / "docs/choosing_an_encoder.md")[:3]
    card, batch = (choose[choose.index(o) + 1] for o in ("--card", "--batch"))
    training = Training(parse_card(card).memory_bytes, batch=int(batch), frames=200)
    assert "--fits" in choose
    first = select(training, fitting=True, sort=choose[choose.index("--sort") + 1])[0]
    assert plan[2] == first.row.name
    assert plan[3:7] == ["--card", card, "--batch", batch]
    assert plan[7] == "--save"
    assert f"--plan_file={plan[8]}" in train
    assert f"hparams/{first.row.name}.yaml" in train
