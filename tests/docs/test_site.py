"""The site builds without a warning, without other hosts, and forgets no public name."""

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.unit.test_public_names import MODULES, PUBLIC

from .documents import PAGES, ROOT

spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
site_hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_hooks)


def test_the_reference_has_every_public_name_once():
    text = "\n".join(site_hooks.reference_pages().values())
    shown = re.findall(
        r"^from speechbrain_rev\.(\S+) import (\S+)$", text, re.MULTILINE
    )
    expected = [(m, n) for m, names in {**PUBLIC, **MODULES}.items() for n in names]
    assert sorted(shown) == sorted(expected)
    assert len(re.findall(r"^::: ", text, re.MULTILINE)) == len(expected)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [p.name for p in PAGES if f": {p.name}\n" not in navigation] == []


def test_links_are_led_to_where_documents_are_on_the_site():
    text = "[a](docs/x.md#b) ![c](docs/d.png) [e](hparams/train.yaml) [f](#g) [h](http://i)"
    assert site_hooks.led_to_the_site(text, "README.md") == (
        "[a](x.md#b) ![c](d.png) [e](hparams/train.yaml) [f](#g) [h](http://i)"
    )
    assert site_hooks.led_to_the_site(
        "[a](../../docs/x.md)", "recipes/VoxCeleb/README.md"
    ) == ("[a](../../x.md)")
    assert (
        site_hooks.led_to_the_site("[a](../README.md)", "docs/x.md") == "[a](index.md)"
    )


ASKED = (
    r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>'
)


@pytest.mark.slow
def test_the_site_builds_renders_everything_and_asks_no_other_host(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    made = subprocess.run(
        [*command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    built = {path.name for path in tmp_path.glob("*.html")}
    assert {"index.html", *(f"{page.stem}.html" for page in PAGES)} <= built
    for path in tmp_path.rglob("*.html"):
        html = path.read_text()
        asked = [tag for tag in re.findall(ASKED, html) if "canonical" not in tag]
        assert asked == [], path.name
        # What markdown does not understand is left in a paragraph as it was written.
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
        assert not re.search(r"```|<p>\||:func:", text), path.name
