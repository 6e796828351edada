"""Files that people and services read: citation, security, issue forms, versions."""

import configparser
import re
from pathlib import Path

import pytest
import yaml
from cffconvert.cli.create_citation import create_citation

import speechbrain_rev
from speechbrain_rev.cli import main
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.torchaudio_pair import torchaudio_for

ROOT = Path(__file__).parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
PAPERS = {
    "Memory-Efficient Training for Deep Speaker Embedding Learning in Speaker "
    "Verification": ["Liu", "Qian"],
    "The Reversible Residual Network: Backpropagation Without Storing Activations": [
        "Gomez", "Ren", "Urtasun", "Grosse",
    ],
    "An Efficient Training Framework for Reversible Neural Architectures": [
        "Jiang", "Zhu", "Liu", "Gu", "Pan",
    ],
    "A Novel Memory-Efficient Deep Learning Training Framework via Error-Bounded Lossy "
    "Compression": ["Jin", "Li", "Song", "Tao"],
    "8-bit Optimizers via Block-wise Quantization": [
        "Dettmers", "Lewis", "Shleifer", "Zettlemoyer",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def setup_cfg():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings


def requirements():
    """Lower bounds of what is installed, and of what reads audio, by package."""
    settings = setup_cfg()
    lines = settings["options"]["install_requires"].split("\n")
    lines += settings["options.extras_require"]["m4a"].split("\n")
    return dict(
        re.match(r"([\w.]+)>=([\d.]+)", line).groups() for line in lines if line
    )


def pinned(name):
    lines = (ROOT / "tests" / "release" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


class TestCitation:
    def test_it_is_valid_by_the_schema_of_its_version(self):
        create_citation(str(ROOT / "CITATION.cff"), None).validate()

    def test_the_papers_and_their_authors_are_named_before_those_of_the_software(
        self, citation
    ):
        papers = [
            (paper["title"], [author["family-names"] for author in paper["authors"]])
            for paper in citation["references"]
        ]
        assert papers == list(PAPERS.items())
        preferred = citation["preferred-citation"]
        assert preferred["title"] == next(iter(PAPERS))
        assert preferred["authors"] == citation["references"][0]["authors"]
        keys = list(citation)
        last = max(keys.index("preferred-citation"), keys.index("references"))
        assert last < keys.index("authors")
        assert "papers first" in citation["message"]

    def test_version_and_licence_are_those_of_the_package(self, citation):
        assert citation["version"] == speechbrain_rev.__version__
        assert citation["license"] == setup_cfg()["metadata"]["license"]


class TestIssueForms:
    @pytest.mark.parametrize("name", ["bug_report.yml", "feature_request.yml"])
    def test_a_form_has_what_forms_need(self, name):
        form = yaml.safe_load((FORMS / name).read_text())
        assert {"name", "description", "body"} <= form.keys()
        asked = [item for item in form["body"] if item["type"] != "markdown"]
        assert len({item["id"] for item in asked}) == len(asked) > 1
        assert {item["type"] for item in asked} == {"textarea"}
        assert all(item["attributes"]["label"] for item in asked)

    def test_a_bug_report_asks_for_the_environment_and_all_that_describes_it(self):
        form = yaml.safe_load((FORMS / "bug_report.yml").read_text())
        asked = {item["id"]: item for item in form["body"] if "id" in item}
        assert next(iter(asked)) == "environment"
        assert "`speechbrain-rev env`" in asked["environment"]["attributes"]["label"]
        required = {name for name, item in asked.items() if "validations" in item}
        assert {"environment", "command", "traceback"} <= required
        assert "whole traceback" in asked["traceback"]["attributes"]["label"]
        assert "yaml" in asked

    def test_every_command_that_the_files_name_exists(self, capsys):
        files = [*FORMS.glob("*.yml"), ROOT / "SECURITY.md"]
        text = " ".join(file.read_text() for file in files)
        named = set(re.findall(r"`speechbrain-rev (\w+)", text))
        assert {"env", "resolve"} <= named
        for command in named:
            with pytest.raises(SystemExit) as ended:
                main([command, "--help"])
            assert ended.value.code == 0
        capsys.readouterr()

    def test_blank_issues_do_not_go_around_the_form(self):
        config = yaml.safe_load((FORMS / "config.yml").read_text())
        assert config["blank_issues_enabled"] is False


class TestSecurity:
    def test_what_is_called_safe_and_what_is_not_exists(self):
        text = (ROOT / "SECURITY.md").read_text()
        for name in set(re.findall(r"SpeakerEmbedder\.(\w+)", text)):
            assert callable(getattr(SpeakerEmbedder, name))
        assert "Report a" in text
        assert "@" not in text, "no address was ever given out"


class TestVersions:
    def test_the_oldest_versions_tested_are_the_lower_bounds(self):
        lower, oldest = requirements(), pinned("oldest.txt")
        assert oldest.keys() == lower.keys()
        for package, version in oldest.items():
            parts, bound = version.split("."), lower[package].split(".")
            assert parts[: len(bound)] == bound, package
            assert set(parts[len(bound) :]) <= {"0"}, package

    def test_the_pages_name_the_torch_that_is_allowed(self):
        options = setup_cfg()["options"]["install_requires"]
        oldest, above = re.findall(r"torch>=2\.(\d+)\.0,<2\.(\d+)$", options, re.M)[0]
        readme = (ROOT / "README.md").read_text()
        allowed = rf"torch from 2\.{oldest}\s+to 2\.{int(above) - 1}\b"
        assert re.search(allowed, readme)
        page = (ROOT / "docs" / "troubleshooting.md").read_text()
        for minor in range(int(oldest), int(above)):
            (fitting,) = re.findall(rf"^\| .*2\.{minor}\b.* \| (.*) \|$", page, re.M)
            assert torchaudio_for(f"2.{minor}.0") in fitting

    def test_the_changelog_has_the_form_of_keep_a_changelog(self):
        text = (ROOT / "CHANGELOG.md").read_text()
        titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert titles[0] == "[Unreleased]"
        released = [
            re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", t)
            for t in titles[1:]
        ]
        assert all(released)
        kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
        for section in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
            headings = re.findall(r"^### (.*)$", section, re.MULTILINE)
            assert headings, "a release lists what changed"
            assert len(headings) == len(set(headings))
            assert set(headings) <= kinds
