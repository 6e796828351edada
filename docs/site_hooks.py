"""What mkdocs reads beside mkdocs.yml: documents outside docs/, links, the reference.

A document is found on the site where it lies in the repository, but for ``docs/``, which
is the root, and the README, which is the home page. Links are written for the repository;
here they are led to the site. Other files that are linked to are copied there.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
NAMES = ROOT / "tests" / "unit" / "test_public_names.py"

#: Documents of the repository that are pages and lie outside docs/.
OUTSIDE = ("README.md", "recipes/VoxCeleb/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
#: Pages that list rather than explain, as their places on the site begin. A search
#: weighs a title as a thousand words of text: theirs weigh as text does.
LISTS = ("reference/", "CHANGELOG", "CONTRIBUTING")
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^(```\w+) notest$", re.MULTILINE)
_IN_TEXT = re.compile(r"<pre\b.*?</pre>|<code>([^<]*)</code>", re.DOTALL)
#: Longer words do not fit beside each other on a phone, and may break.
_HYPHENATED = re.compile(r"(?<!\S)(?=\S{,30}(?!\S))[^\s-]*-\S+")
_PICTURE = re.compile(r'<img\b[^>]*? src="([^"]+)"[^>]*>')


def place_of(path: str) -> str:
    """Say where a file of the repository is on the site.

    Examples
    --------
    >>> place_of("docs/models.png"), place_of("README.md"), place_of("hparams/train.yaml")
    ('models.png', 'index.md', 'hparams/train.yaml')
    """
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def path_of(place: str) -> str:
    """Say which file of the repository a page of the site is.

    Examples
    --------
    >>> path_of("index.md"), path_of("compression.md"), path_of("CHANGELOG.md")
    ('README.md', 'docs/compression.md', 'CHANGELOG.md')
    """
    if place == "index.md":
        return "README.md"
    return place if place in OUTSIDE else f"docs/{place}"


def linked_files(text: str, path: str) -> set[str]:
    """List the files of the repository that a document links to, from its root."""
    folder = posixpath.dirname(path)
    return {
        posixpath.normpath(posixpath.join(folder, m[2])) for m in _LINK.finditer(text)
    }


def led_to_the_site(text: str, path: str) -> str:
    """Replace links of a document of the repository by those of the site.

    Examples
    --------
    >>> led_to_the_site("[a](../README.md#uses), [b](x.md)", "docs/compression.md")
    '[a](index.md#uses), [b](x.md)'
    """
    folder, here = posixpath.dirname(path), posixpath.dirname(place_of(path))

    def led(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        link = posixpath.relpath(place_of(target), here or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return _LINK.sub(led, text)


def public_modules() -> dict[str, list[str]]:
    """Read which modules have which public names from the test that holds them to it."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(NAMES.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "PUBLIC",
            "MODULES",
        ):
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                names = value.elts if isinstance(value, ast.Set) else []
                found[ast.literal_eval(key)] = sorted(map(ast.literal_eval, names))
    return {module: names for module, names in sorted(found.items()) if names}


def reference_pages() -> dict[str, str]:
    """Write the reference: a page for each public package and the modules below it."""
    modules = public_modules()
    pages: dict[str, list[str]] = {}
    for module, names in modules.items():
        package = module.partition(".")[0]
        lines = pages.setdefault(package, [f"# {package}", ""])
        if module != package:
            lines += [f"# {module}", ""]
        lines += ["Each name is imported from", "", "```python notest"]
        lines += [f"from speechbrain_rev.{module} import {name}" for name in names]
        lines += ["```", ""]
        lines += [f"::: {_definition(module, name)}\n" for name in names]
    return {f"reference/{name}.md": "\n".join(lines) for name, lines in pages.items()}


def _definition(module: str, name: str) -> str:
    """Follow an import, as a file of a package may have the name of what is in it."""
    package = ROOT / "speechbrain_rev" / module.replace(".", "/") / "__init__.py"
    if package.exists():
        for node in ast.parse(package.read_text()).body:
            names = {a.name for a in getattr(node, "names", [])}
            if isinstance(node, ast.ImportFrom) and name in names:
                own = f"speechbrain_rev.{module}." if node.level else ""
                return f"{own}{node.module}.{name}"
    return f"speechbrain_rev.{module}.{name}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the reference in the navigation."""
    for entry in config.nav or []:
        if "Reference" in entry:
            entry["Reference"] = sorted(reference_pages())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add documents that lie outside docs/, files that are linked to, and the reference."""
    documents = [*OUTSIDE, *(path_of(f.src_uri) for f in files.documentation_pages())]
    linked: set[str] = set()
    for path in documents:
        linked |= linked_files((ROOT / path).read_text(), path)
    for path in sorted({*OUTSIDE, *linked}):
        place, source = place_of(path), ROOT / path
        if files.get_file_from_path(place) is None and source.is_file():
            files.append(File.generated(config, place, abs_src_path=str(source)))
    for place, text in reference_pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Lead links to the site, and take the marks off that only the tests read.

    A search finds pages that explain before those that list.
    """
    del config, files
    if page.file.src_uri.startswith(LISTS):
        page.meta["search"] = {"boost": 1e-3}
    markdown = _FENCE.sub(r"\1", markdown)
    if page.file.src_uri.startswith("reference/"):
        return markdown
    return led_to_the_site(markdown, path_of(page.file.src_uri))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep options in one piece, and let pictures be opened in full size."""
    del page, config, files
    return _PICTURE.sub(r'<a href="\1">\g<0></a>', options_whole(html))


def options_whole(html: str) -> str:
    """Mark words with hyphens in the text's code: browsers break lines at hyphens.

    Examples
    --------
    >>> options_whole("<code>plan --card 11GB</code>, <pre><code>--card</code></pre>")
    '<code>plan <span class="word">--card</span> 11GB</code>, <pre><code>--card</code></pre>'
    """

    def marked(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        words = _HYPHENATED.sub(r'<span class="word">\g<0></span>', match[1])
        return f"<code>{words}</code>"

    return _IN_TEXT.sub(marked, html)
