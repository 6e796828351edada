"""A plan: what each block keeps, so that a step is as fast as a memory budget allows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from speechbrain_rev.planner import documents
from speechbrain_rev.planner.network import as_network, give, not_made_for
from speechbrain_rev.reversible import Mode
from speechbrain_rev.sizes import size_text
from speechbrain_rev.whole_files import check_path, check_regular, write_whole

# A step of more, or an error of a million norms, is none; nor has a plan so many bytes.
_MOST_SECONDS, _MOST_ERROR, _MOST_BYTES = 1e9, 1e6, 10_000_000


@dataclass(frozen=True)
class Plan:
    """What each block keeps, and what that takes.

    Attributes
    ----------
    modes : mapping of str to str
        A mode for each block.
    channels : sequence of int or None, or None
        Channels at a time, at each level of an encoder; None for another network.
    budget_bytes : int
        What a training step was allowed beside weights, gradients and optimizer.
    predicted_bytes, measured_bytes : int
        Peak of live tensors that a step makes: as the profile says, and counted when the
        plan was run.
    seconds : float
        Predicted time of a step.
    about : mapping of str to str
        What was planned, where, and how its times were found.
    predicted_gradient_error, measured_gradient_error : float
        By what part of its norm a plan that compresses puts the gradient off, of the
        example batch and with the weights of then; 0 for a lossless plan.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from speechbrain_rev.planner import plan
    >>> block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    >>> network = nn.Sequential(*(block() for _ in range(8)))
    >>> tight = plan(network, torch.randn(512, 64), 2_500_000, blocks=["?"])
    >>> tight.measured_bytes <= 2_500_000, Plan.from_json(tight.to_json()) == tight
    (True, True)
    """

    modes: Mapping[str, str]
    channels: Sequence[int | None] | None
    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    seconds: float
    about: Mapping[str, str]
    predicted_gradient_error: float = 0.0
    measured_gradient_error: float = 0.0

    def apply(self, module: nn.Module) -> None:
        """Give the blocks of a module the modes of the plan, and channels at a time.

        Parameters
        ----------
        module : nn.Module
            What was planned, or another one with such blocks.

        Raises
        ------
        ValueError
            If it has other blocks, or they cannot have what the plan gives: then the
            module is as it was.
        """
        own = hasattr(module, "named_blocks")
        network = as_network(module, () if own else list(self.modes))
        if network.named_blocks().keys() != self.modes.keys():
            raise ValueError(not_made_for(module, network, self.modes, self.about))
        give(network, self.modes, self.channels)

    def with_about(self, **more: str) -> Plan:
        """Give the plan with more said about it."""
        return replace(self, about={**self.about, **more})

    def to_json(self) -> str:
        """Write it as a JSON document, which ``from_json`` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises
        ------
        ValueError
            If the text is no plan.
        """
        with documents.reading("plan", "Plan anew."):
            found = cls(**documents.parsed(text))
            modes = documents.mapping("modes", found.modes)
            if not modes:
                raise ValueError("modes names no block")
            errors = {
                name: documents.finite(name, getattr(found, name), most=_MOST_ERROR)
                for name in ("predicted_gradient_error", "measured_gradient_error")
            }
            plan = cls(
                {
                    documents.block_name(n): Mode(mode).value
                    for n, mode in modes.items()
                },
                documents.channels(found.channels),
                documents.whole("budget_bytes", found.budget_bytes),
                documents.whole("predicted_bytes", found.predicted_bytes),
                documents.whole("measured_bytes", found.measured_bytes),
                documents.finite("seconds", found.seconds, most=_MOST_SECONDS),
                documents.facts(found.about),
                **errors,
            )
            plan._check()
            return plan

    def _check(self) -> None:
        """Refuse numbers that no plan has together."""
        if self.measured_bytes > self.budget_bytes:
            raise ValueError(
                f"measured_bytes is {self.measured_bytes}, more than budget_bytes, which "
                f"is {self.budget_bytes}"
            )
        errors = self.predicted_gradient_error, self.measured_gradient_error
        if Mode.COMPRESS.value not in self.modes.values() and any(errors):
            raise ValueError(
                f"gradient errors are {errors[0]:g} and {errors[1]:g}, and no block "
                "compresses"
            )

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read it from a file.

        Raises
        ------
        ValueError
            If the file is no plan, or no regular file; the message names it.
        OSError
            If it cannot be read.
        """
        check_path(path, "a plan", "Plan.from_json takes its text.")
        check_regular(path)
        try:
            with documents.reading("plan", "Plan anew."), open(path, "rb") as file:
                content = file.read(_MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
                text = content.decode()
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def counts(self) -> str:
        """Say how many blocks have which mode."""
        found = Counter(self.modes.values())
        return ", ".join(f"{count} {mode}" for mode, count in found.items())

    def __str__(self) -> str:
        return (
            f"{self.counts()}: peak {size_text(self.measured_bytes)} counted "
            f"({size_text(self.predicted_bytes)} predicted) of "
            f"{size_text(self.budget_bytes)}{self.error_text()}"
        )

    def error_text(self) -> str:
        """Say by how much gradients differ; nothing of a lossless plan."""
        if Mode.COMPRESS.value not in self.modes.values():
            return ""
        errors = self.predicted_gradient_error, self.measured_gradient_error
        predicted, measured = (f"{100 * error:.2g} %" for error in errors)
        return f"; gradient error {predicted} predicted, {measured} measured"
