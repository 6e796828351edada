"""Poolings, and heads with their losses, as rows that settings and help read.

A pooling makes one vector of an utterance's feature maps. A head is the classifier of
embeddings that is trained with an encoder. Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

_FLOAT = 4
#: Bytes of scores or of directions, beyond which training makes them for some classes at a time.
SCORES_BYTES = 2**26
#: Bytes of a part's scores, and of its directions.
PART_BYTES = SCORES_BYTES // 4


@dataclass(frozen=True)
class PoolingRow:
    """All that the package knows of a pooling, beside its arithmetic.

    Attributes
    ----------
    name : str
        As ``pooling`` in YAML files and ``build_encoder`` take it.
    path : str
        Its class, as "package.module:Class".
    statistics : int
        Values that it makes of each channel and frequency.
    variances : tuple of str
        The values of ``pooling_variance`` that it takes.
    """

    name: str
    path: str
    statistics: int
    variances: tuple[str, ...]

    @property
    def made(self) -> Any:
        """The class."""
        return resolve_name(self.path)


_POOLING = "speechbrain_rev.lobes.pooling"
#: All poolings by name.
POOLINGS = {
    row.name: row
    for row in (
        PoolingRow(
            "statistics",
            f"{_POOLING}:StatisticsPooling",
            statistics=2,
            variances=("population", "unbiased"),
        ),
        PoolingRow(
            "attentive",
            f"{_POOLING}:AttentiveStatisticsPooling",
            statistics=2,
            variances=("population",),
        ),
    )
}
#: The values of ``pooling_variance``, with the degrees of freedom that each gives up.
CORRECTIONS = {"population": 0, "unbiased": 1}


def fits_at_once(centers: int, classes: int, dim: int, batch: int) -> bool:
    """Return whether training makes the scores of all classes at once."""
    return _FLOAT * classes * centers * max(batch, dim) <= SCORES_BYTES


def classes_at_a_time(centers: int, dim: int, batch: int) -> int:
    """Count the classes of a part, where scores are made for some classes at a time.

    Parameters
    ----------
    centers : int
        Directions of a class.
    dim : int
        Size of the embeddings.
    batch : int
        Utterances of a step.

    Example
    -------
    >>> classes_at_a_time(1, dim=256, batch=128)
    16384
    """
    return max(1, PART_BYTES // (_FLOAT * centers * max(batch, dim)))


def _step_bytes(centers: int) -> Callable[[int, int, int], int]:
    """Bound the bytes of cosines, loss and their backward pass.

    The tests count them: copies of the weight, of cosines to all directions, of scores of
    classes, and of embeddings.
    """

    def step_bytes(classes: int, dim: int, batch: int) -> int:
        weight = _FLOAT * classes * centers * dim
        embeddings = _FLOAT * batch * dim
        if fits_at_once(centers, classes, dim, batch):
            cosines = _FLOAT * classes * centers * batch
            copies = 4 if centers == 1 else 3
            large = 1.01 * weight + copies * cosines
            large += max(0.02 * cosines, 1.05 * embeddings)
            return math.ceil(max(max(5.01, 5 + 2.1 / dim) * weight, large))
        part = min(classes, classes_at_a_time(centers, dim, batch))
        scores, part_weight = _FLOAT * part * batch, _FLOAT * part * centers * dim
        small = 5.05 * part_weight + 2.05 * scores + 3.05 * embeddings
        large = 3.02 * centers * scores + 1.01 * part_weight + 3.4 * embeddings
        large += scores if centers > 1 else 0
        return math.ceil(1.01 * weight + max(small, large))

    return step_bytes


@dataclass(frozen=True)
class HeadRow:
    """A classifier and the losses that take its scores.

    Attributes
    ----------
    name : str
        As model cards have it.
    path : str
        The classifier's class, as "package.module:Class". It is called with
        ``input_size`` and ``out_neurons``, and has one parameter, ``weight``.
    losses : mapping of str to str
        Classes of losses, likewise, by the names that the YAML's ``loss`` takes.
    weight_shape : callable
        Gives the weight's shape for a number of classes, which is its first axis, and
        the size of embeddings.
    step_bytes : callable
        Bounds the bytes that scores, loss and their backward pass make, for a number of
        classes, the size of embeddings, and a batch.
    """

    name: str
    path: str
    losses: Mapping[str, str]
    weight_shape: Callable[[int, int], tuple[int, ...]]
    step_bytes: Callable[[int, int, int], int]

    @property
    def classifier(self) -> Any:
        """The classifier's class."""
        return resolve_name(self.path)

    @property
    def tag(self) -> str:
        """How a YAML names the classifier."""
        return "!new:" + self.path.replace(":", ".")


_CLASSIFIER = "speechbrain_rev.lobes.classifier"
#: All heads by name.
HEADS = {
    row.name: row
    for row in (
        HeadRow(
            "cosine",
            f"{_CLASSIFIER}:CosineClassifier",
            {
                "aam_softmax": f"{_CLASSIFIER}:AAMSoftmax",
                "am_softmax": f"{_CLASSIFIER}:AMSoftmax",
            },
            weight_shape=lambda classes, dim: (classes, dim),
            step_bytes=_step_bytes(1),
        ),
        HeadRow(
            "subcenter",
            f"{_CLASSIFIER}:SubcenterClassifier",
            {"subcenter_aam_softmax": f"{_CLASSIFIER}:SubcenterAAMSoftmax"},
            weight_shape=lambda classes, dim: (classes, 3, dim),
            step_bytes=_step_bytes(3),
        ),
    )
}
#: The head of each loss, by the loss's name.
HEAD_OF = {loss: row for row in HEADS.values() for loss in row.losses}


def head_of(loss: str) -> HeadRow:
    """Look up the head that a loss goes with.

    Raises
    ------
    ValueError
        If there is no such loss.

    Example
    -------
    >>> head_of("am_softmax").name
    'cosine'
    """
    if loss not in HEAD_OF:
        raise ValueError(f"loss must be one of {', '.join(HEAD_OF)}, but is {loss!r}.")
    return HEAD_OF[loss]


@dataclass(frozen=True)
class Head:
    """The recipe's classifier of embeddings, and its loss, which are trained with an encoder.

    Attributes
    ----------
    classes : int
        Training speakers of VoxCeleb2 dev, each at three speeds. 0 for no classifier.
    embedding_dim : int
        Size of the embeddings.
    loss : str
        A name in a row of ``HEADS``.

    Examples
    --------
    >>> HEAD.classes, HEAD.parameters
    (17982, 4603392)
    """

    classes: int = 5994 * 3
    embedding_dim: int = 256
    loss: str = "aam_softmax"

    @property
    def parameters(self) -> int:
        """Values of its weight."""
        row = head_of(self.loss)
        return math.prod(row.weight_shape(self.classes, self.embedding_dim))

    def step_bytes(self, batch: int) -> int:
        """Bound the bytes that scores, loss and their backward pass make."""
        return head_of(self.loss).step_bytes(self.classes, self.embedding_dim, batch)


#: That of the recipe on VoxCeleb2, and of figures that name no other.
HEAD = Head()
