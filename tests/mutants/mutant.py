"""What a mutant is."""

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
