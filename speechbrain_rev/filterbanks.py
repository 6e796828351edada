"""Filterbanks that encoders take, as rows that settings, plans and exports read.

All have windows of 25 ms each 10 ms. Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    Samples = TypeVar("Samples", int, Tensor)

#: Milliseconds of a window, and from one to the next.
WINDOW_MS, HOP_MS = 25, 10


@dataclass(frozen=True)
class FilterbankRow:
    """One kind of filterbanks: its class, and how it counts frames.

    Attributes
    ----------
    name : str
        The value of ``features`` in YAML files, and of ``kind`` in a front end.
    path : str
        The class, as "package.module:Class". It takes ``n_mels``, ``sample_rate``,
        ``win_length`` and ``hop_length``, and maps [batch, samples] to
        [batch, time, n_mels].
    padded : bool
        Whether an utterance is padded by half a window of zeros at both ends. Without
        padding all windows lie within it.
    """

    name: str
    path: str
    padded: bool

    @property
    def made(self) -> Any:
        """The class."""
        return resolve_name(self.path)

    @property
    def tag(self) -> str:
        """The class in YAML."""
        return "!new:" + self.path.replace(":", ".")

    def frames(self, samples: Samples, sample_rate: int) -> Samples:
        """Count the frames of an utterance.

        Parameters
        ----------
        samples : int or torch.Tensor, [batch]
            Samples of one utterance, or of each in a batch.
        sample_rate : int
            Hertz.

        Returns
        -------
        int or torch.Tensor, [batch]
            Frames. Without padding, an utterance shorter than a window has less than 1.

        Examples
        --------
        >>> FILTERBANKS["speechbrain"].frames(31840, 16000)
        200
        >>> FILTERBANKS["kaldi"].frames(32240, 16000)
        200
        """
        window = 0 if self.padded else sample_rate * WINDOW_MS // 1000
        return 1 + (samples - window) // (sample_rate * HOP_MS // 1000)


#: All kinds by name.
FILTERBANKS = {
    row.name: row
    for row in (
        FilterbankRow("speechbrain", "speechbrain.lobes.features:Fbank", padded=True),
        FilterbankRow(
            "kaldi", "speechbrain_rev.lobes.features:KaldiFilterbanks", padded=False
        ),
    )
}
