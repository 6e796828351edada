"""List words that readers had to decode, and the word to use, in pages and sources.

``python -m tests.docs.words [PATH ...]`` prints file, line, word and the word to use; its
status is 1 if there are any. Pages are read but for code and quoted messages, Python files
for their comments and texts, YAML files for their comments. Names in code are not read.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "recipes",
    "hparams",
    "speechbrain_rev",
)

#: What may follow "a training" that is no noun of its own.
_OF_TRAINING = (
    "batch|corpus|data|folder|knob|list|loop|loss|process|recipe|runs?|script|set|settings?|"
    "speakers?|speech|steps?|subcommand|time|utterances?"
)
#: What to look for, in any case and over ends of lines, and the word to use.
WORDS = {
    rf"(?:a|another|each|every|one|this) training(?! (?:{_OF_TRAINING}))": "training run",
    r"trainings": "runs, training runs",
    r"\w+s of \d+ bits?": "8-bit states, 16-bit samples",
    r"GPUs? of \d+ ?Gi?B": "an 11 GB GPU",
    r"cards?": "GPU",
    r"tells?|told|telling": "report, list, print, return; name who does",
    r"says? (?:so|it)|(?:is|are|was|were|be) said": "report, list, print; name who does",
    r"rooms?(?! impulse)": "memory, headroom, space; room impulse responses",
    r"spends?|spent|spending": "use, take",
    r"undo|undoes|undone|undoing": "reconstruct, subtract, restore",
    r"poison\w*": "set to NaN",
    r"puts? off|putting off": "relative error, angle",
    r"(?:goes|go|going|went) before": "overrides, precedes",
    r"what stays": "weights, gradients and optimizer state",
    r"what is not counted": "reserve for CUDA and fragmentation",
}
#: Where a word is the right one.
ALLOWED = (
    "can tell",
    "cannot tell",
    "model card",
    "sound card",
    "share a room",
)

_ANY = re.compile(
    "|".join(rf"(\b(?:{word})\b)".replace(" ", r"\s+") for word in WORDS), re.IGNORECASE
)
_USE = list(WORDS.values())
_ALLOWED = re.compile("|".join(ALLOWED).replace(" ", r"\s+"), re.IGNORECASE)
#: Names of code and options in a text.
_CODE = re.compile(r"``.+?``|`[^`]+`|--[a-z][\w-]*|\b\w*_\w*\b", re.DOTALL)
_NOT_IN_DOCSTRINGS = (
    re.compile(r"^ *(?:>>>|\.\.\.) .*$", re.MULTILINE),
    re.compile(r"^ *\w[\w, ]* : ", re.MULTILINE),  # a parameter and its type
)
_NOT_IN_PAGES = (
    re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL),
    re.compile(r"^ *>.*$", re.MULTILINE),  # messages, as their sources have them
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"\]\([^)]*\)"),
)
_TEXTS = (tokenize.COMMENT, tokenize.STRING)
#: Of texts with values, from Python 3.12 on: what is between values, and the quotes.
_PIECE, _QUOTES = (
    [getattr(tokenize, f"FSTRING_{name}", -1) for name in names]
    for names in (["MIDDLE"], ["START", "END"])
)
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _blank(match: re.Match[str]) -> str:
    """Keep the lines of a text, and none of its words."""
    return re.sub(r"\S", "·", match[0])


def of_page(text: str) -> str:
    """Blank what a page has of code, quoted messages and targets of links."""
    for form in _NOT_IN_PAGES:
        text = form.sub(_blank, text)
    return text


def of_yaml(text: str) -> str:
    """Keep the comments of a YAML file."""
    return re.sub(
        r"^[^#\n]*(?:#|$)", lambda m: " " * len(m[0]), text, flags=re.MULTILINE
    )


def of_python(text: str) -> str:
    """Keep the comments and texts of a Python file where they are, and blank the rest."""
    lines = [[" "] * len(line) for line in text.splitlines()]
    before = tokenize.NL
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT:
            continue
        goes_on = before == tokenize.STRING or before in _QUOTES
        before = token.type
        if token.type in _QUOTES:
            continue
        kept = token.string if token.type in _PIECE else "·"
        if token.type in _TEXTS:
            kept = _text_of(token.string, goes_on)
        row, column = token.start
        for number, part in enumerate(kept.splitlines()):
            start = column if number == 0 else 0
            lines[row - 1 + number][start : start + len(part)] = part
    return "\n".join(map("".join, lines))


def _text_of(literal: str, goes_on: bool) -> str:
    """Give the words of a comment or text, spaces for what surrounds them."""
    start = re.match(r"#:?|\w{0,2}(?:\"\"\"|'''|[\"'])|", literal)
    assert start is not None
    if "f" in start[0].lower():
        literal = re.sub(r"\{[^{}]*\}", _blank, literal)
    words = literal[start.end() :]
    if not (goes_on or re.search(r"\s", words.strip())):
        return "·"  # a key, a name or a path
    for form in _NOT_IN_DOCSTRINGS:
        words = form.sub(_blank, words)
    # Ends of lines within a text end no sentence.
    words = re.sub(r"\\n|[\"']+$", lambda m: " " * len(m[0]), words)
    return " " * start.end() + words


KINDS: dict[str, Callable[[str], str]] = {
    ".md": of_page,
    ".yaml": of_yaml,
    ".py": of_python,
}


def hits(text: str, kind: str) -> Iterator[tuple[int, str, str]]:
    """List the words of a file's text: line, word and the word to use."""
    read = KINDS[kind](text)
    for form in (_CODE, _ALLOWED):
        read = form.sub(_blank, read)
    for match in _ANY.finditer(read):
        line = read.count("\n", 0, match.start()) + 1
        assert match.lastindex is not None
        yield line, " ".join(match[0].split()), _USE[match.lastindex - 1]


def files(places: Iterable[Path]) -> Iterator[Path]:
    """List the files that are read, in order."""
    for place in places:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in KINDS:
                yield path


def main(arguments: list[str] | None = None) -> int:
    """Print the words of files; give 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.words", description=__doc__
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    places = parser.parse_args(arguments).paths or [ROOT / place for place in PLACES]
    status = 0
    for path in files(place.resolve() for place in places):
        for line, word, use in hits(path.read_text(encoding="utf-8"), path.suffix):
            print(f"{path.relative_to(ROOT)}:{line}: {word!r}: use {use}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
