"""What a mutant is, and how the files beside this one write it down."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One sabotage: which promise it breaks, where, how, and who must notice."""

    promise: str
    file: str
    code: str
    sabotage: str
    tests: str
    select: str


@dataclass(frozen=True)
class Tests:
    """A file of tests, of which some guard a promise."""

    file: str

    def __call__(self, select: str) -> tuple[str, str]:
        return self.file, select


@dataclass(frozen=True)
class Source:
    """A module of the package, whose code is replaced."""

    file: str

    def __call__(
        self, promise: str, code: str, sabotage: str, guard: tuple[str, str]
    ) -> Mutant:
        return Mutant(promise, self.file, code, sabotage, *guard)
