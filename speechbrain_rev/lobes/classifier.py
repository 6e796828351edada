"""The training head: cosines to one weight vector per speaker, and losses with a margin.

Both compute in float32 under any autocast: near a cosine of 1, where training
ends, bfloat16 has steps of 0.004, as large as the differences that matter.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from speechbrain_rev.architectures import HEAD
from speechbrain_rev.compression.codec import has_contents
from speechbrain_rev.reversible.replay import autocast_off

# The angle's derivative is infinite at a cosine of +-1.
_COSINE_BOUND = 1.0 - 1e-7
# Cosines in bfloat16, near 1 in steps of 0.008, may come out above 1.
_LARGEST_COSINE = 1.01
# Each look at scores lets the CPU wait for the device.
_LAST_LOOK = 1000


class CosineClassifier(nn.Module):
    """Cosine between an embedding and one learned direction per speaker.

    Parameters
    ----------
    input_size : int
        Size of the embeddings.
    out_neurons : int
        Number of training speakers (times the number of speeds, where speed
        perturbation makes new speakers).

    Example
    -------
    >>> classifier = CosineClassifier(input_size=256, out_neurons=30)
    >>> classifier(torch.randn(8, 1, 256)).shape
    torch.Size([8, 1, 30])
    """

    def __init__(self, input_size: int, out_neurons: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_neurons, input_size))
        # Xavier's rule for VoxCeleb2's classes, for which learning rates are published. For
        # a small corpus the rule makes directions several times as long. The longer a
        # direction is, the less an optimizer's step turns it.
        bound = math.sqrt(6 / (input_size + HEAD.classes))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Compare embeddings with every speaker.

        Parameters
        ----------
        embeddings : torch.Tensor, [batch, 1, input_size]

        Returns
        -------
        torch.Tensor, [batch, 1, out_neurons]
            Cosines in float32.
        """
        with autocast_off(embeddings.device):
            directions = functional.normalize(self.weight.float(), dim=-1)
            return functional.linear(
                functional.normalize(embeddings.float(), dim=-1), directions
            )


def true_speakers(weight: torch.Tensor, *, speeds: int) -> torch.Tensor:
    """Keep the speakers as recorded, of a classifier that takes speeds for speakers.

    ``SpeakerAugment`` numbers them speaker + k * number of speakers, and k is 0 for
    speed 1.0.

    Parameters
    ----------
    weight : torch.Tensor, [speakers * speeds, input_size]
        One direction per class.
    speeds : int
        How many speeds there are.

    Returns
    -------
    torch.Tensor, [speakers, input_size]

    Raises
    ------
    ValueError
        If the number of classes is no multiple of that of the speeds.

    Example
    -------
    >>> weight = torch.tensor([[1.0], [2.0], [1.9], [2.9]])  # two speakers, two speeds
    >>> true_speakers(weight, speeds=2).tolist()
    [[1.0], [2.0]]
    """
    speakers, left_over = divmod(len(weight), speeds)
    if left_over:
        raise ValueError(
            f"The classifier has {len(weight)} classes, no multiple of its {speeds} "
            "speeds: which of them are speakers as recorded is unknown. Give a "
            "classifier with a class for each speaker at each speed."
        )
    return weight[:speakers]


class MarginSoftmax(nn.Module, abc.ABC):
    """Softmax loss of cosines, of which the target's has a margin to overcome.

    The margin lowers the target's cosine, then all cosines times `scale` enter the softmax
    cross-entropy. To add a loss, write its ``with_margin`` and name it in a row of ``HEADS``.
    A loss has no parameters and no buffers: parameters belong in the classifier of its row.
    Model cards print its ``citation``.

    The 1st, 10th, 100th and 1000th batch are checked for scores that are no cosines: a layer
    that does not normalise may give scores below 1 until it has trained. If a batch is not
    finite, the next one is checked.

    Parameters
    ----------
    margin : float
        The margin, of an angle in radians; the attribute of this name may be set at any
        time, as a schedule does.
    scale : float
        Factor on the cosines.

    Example
    -------
    >>> loss = AAMSoftmax(margin=0.2, scale=32.0)
    >>> cosines = torch.tensor([[[0.9, 0.1]], [[-0.2, 0.8]]])
    >>> targets = torch.tensor([[0], [1]])
    >>> round(loss(cosines, targets).item(), 6)
    0.0
    >>> loss.margin = 0.5
    >>> bool(loss(cosines, 1 - targets) > 25)
    True
    """

    #: Authors, title and year of its paper, or nothing.
    citation: ClassVar[str] = ""

    def __init__(self, margin: float = 0.2, scale: float = 32.0) -> None:
        super().__init__()
        self.margin = margin
        self.scale = scale
        self._batches = 0
        self._next_look: float = 1

    def forward(
        self,
        predictions: torch.Tensor,
        targets: torch.Tensor,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean loss of a batch.

        Parameters
        ----------
        predictions : torch.Tensor, [batch, 1, classes]
            Cosines.
        targets : torch.Tensor, [batch, 1]
            Class numbers.
        lengths : torch.Tensor, [batch], optional
            Accepted because SpeechBrain's losses take it; unused, since an
            utterance has one embedding whatever its length.

        Returns
        -------
        torch.Tensor
            Scalar, float32.

        Raises
        ------
        ValueError
            If the predictions of a batch that is looked at are no cosines.
        """
        del lengths
        self._look(predictions)
        with autocast_off(predictions.device):
            cosines = predictions.squeeze(1).float()
            targets = targets.long().reshape(-1, 1)
            target_cosines = cosines.gather(1, targets)
            logits = cosines.scatter(1, targets, self.with_margin(target_cosines))
            return functional.cross_entropy(self.scale * logits, targets.squeeze(1))

    @abc.abstractmethod
    def with_margin(self, cosines: torch.Tensor) -> torch.Tensor:
        """Lower the cosines of targets, [batch, 1]."""

    def _look(self, predictions: torch.Tensor) -> None:
        if not has_contents(predictions):
            return
        self._batches += 1
        if self._batches < self._next_look:
            return
        # They are not clamped to cosines: of those some have no gradient.
        least, largest = (value.item() for value in predictions.detach().aminmax())
        if not math.isfinite(least) or not math.isfinite(largest):
            return
        if least < -_LARGEST_COSINE or largest > _LARGEST_COSINE:
            raise ValueError(
                f"{type(self).__name__} takes cosines, but was given scores from {least:.3g} to "
                f"{largest:.3g}. Give it those of a classifier that normalises, such as "
                "speechbrain_rev.lobes.classifier.CosineClassifier."
            )
        is_last = self._next_look == _LAST_LOOK
        self._next_look = math.inf if is_last else 10 * self._next_look

    def extra_repr(self) -> str:
        """Show margin and scale when printed."""
        return f"margin={self.margin}, scale={self.scale}"


class AAMSoftmax(MarginSoftmax):
    """Additive angular margin softmax loss: cos(t) becomes cos(t + margin).

    Deng et al. 2019, "ArcFace", equation 3. Past t = pi - margin, where cos(t + margin)
    would rise again, cos(t) - margin * sin(margin) continues it, as in the authors' code
    with easy_margin off.

    Parameters
    ----------
    margin : float
        Radians.
    scale : float
        Factor on the cosines.

    Example
    -------
    >>> AAMSoftmax(margin=math.pi / 6).with_margin(torch.tensor([[0.0]])).item()
    -0.5
    """

    citation = (
        'Deng et al.: "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", '
        "2019"
    )

    def with_margin(self, cosines: torch.Tensor) -> torch.Tensor:
        """Add the margin to the angles of targets, [batch, 1]."""
        cosines = cosines.clamp(-_COSINE_BOUND, _COSINE_BOUND)
        sines = torch.sqrt(1.0 - cosines**2)
        shifted = cosines * math.cos(self.margin) - sines * math.sin(self.margin)
        continued = cosines - math.sin(self.margin) * self.margin
        return torch.where(
            cosines > math.cos(math.pi - self.margin), shifted, continued
        )


class AMSoftmax(MarginSoftmax):
    """Additive margin softmax loss: cos(t) becomes cos(t) - margin.

    Wang et al. 2018, "CosFace", equation 4; SpeechBrain's ``AngularMargin`` does the same.

    Parameters
    ----------
    margin : float
        Of the cosine.
    scale : float
        Factor on the cosines.

    Example
    -------
    >>> AMSoftmax(margin=0.25).with_margin(torch.tensor([[0.75]])).item()
    0.5
    """

    citation = (
        'Wang et al.: "CosFace: Large Margin Cosine Loss for Deep Face Recognition", '
        "2018"
    )

    def with_margin(self, cosines: torch.Tensor) -> torch.Tensor:
        """Take the margin off the cosines of targets, [batch, 1]."""
        return cosines - self.margin


@dataclass(frozen=True)
class TrainingHead:
    """A classifier and the losses that take its scores: one row of ``HEADS``.

    Attributes
    ----------
    classifier : type of nn.Module
        Called with ``input_size`` and ``out_neurons``; maps embeddings
        [batch, 1, input_size] to scores [batch, 1, out_neurons]. Exported models have its
        one parameter, ``weight`` [out_neurons, input_size].
    losses : mapping of str to type of MarginSoftmax
        By the names that the YAML's ``loss`` takes.
    """

    classifier: type[nn.Module]
    losses: Mapping[str, type[MarginSoftmax]]

    @property
    def tag(self) -> str:
        """How a YAML names the classifier."""
        return f"!new:{self.classifier.__module__}.{self.classifier.__qualname__}"


#: Heads by the names that model cards give them.
HEADS = {
    "cosine": TrainingHead(
        CosineClassifier, {"aam_softmax": AAMSoftmax, "am_softmax": AMSoftmax}
    ),
}


def head_of(loss: str) -> str:
    """Name the head that a loss goes with.

    Parameters
    ----------
    loss : {"aam_softmax", "am_softmax"}
        A name in a row of ``HEADS``.

    Returns
    -------
    str
        The row's name.

    Raises
    ------
    ValueError
        If there is no such loss.

    Example
    -------
    >>> head_of("am_softmax")
    'cosine'
    """
    for name, head in HEADS.items():
        if loss in head.losses:
            return name
    known = ", ".join(name for head in HEADS.values() for name in head.losses)
    raise ValueError(f"loss must be one of {known}, but is {loss!r}.")


def build_classifier(loss: str, *, input_size: int, out_neurons: int) -> nn.Module:
    """Make the classifier that a loss goes with, as a YAML file does with ``!apply:``.

    Parameters
    ----------
    loss : {"aam_softmax", "am_softmax"}
        A name in a row of ``HEADS``.
    input_size, out_neurons : int
        Sizes of embeddings and of scores.

    Returns
    -------
    nn.Module
        The classifier, [batch, 1, input_size] to [batch, 1, out_neurons].

    Raises
    ------
    ValueError
        If there is no such loss.

    Example
    -------
    >>> classifier = build_classifier("aam_softmax", input_size=256, out_neurons=30)
    >>> classifier(torch.randn(8, 1, 256)).shape
    torch.Size([8, 1, 30])
    """
    classifier = HEADS[head_of(loss)].classifier
    return classifier(input_size=input_size, out_neurons=out_neurons)


def build_loss(name: str, *, margin: float = 0.2, scale: float = 32.0) -> MarginSoftmax:
    """Make a loss by its name, as a YAML file does with ``!apply:``.

    Parameters
    ----------
    name : {"aam_softmax", "am_softmax"}
        A name in a row of ``HEADS``.
    margin, scale : float
        As the loss takes them.

    Returns
    -------
    MarginSoftmax
        The loss of scores [batch, 1, classes].

    Raises
    ------
    ValueError
        If there is no such loss, or it has parameters or buffers.

    Example
    -------
    >>> build_loss("am_softmax", margin=0.3)
    AMSoftmax(margin=0.3, scale=32.0)
    """
    loss = HEADS[head_of(name)].losses[name](margin, scale)
    held = [*dict(loss.named_parameters()), *dict(loss.named_buffers())]
    if held:
        raise ValueError(
            f"loss {name} ({type(loss).__name__}) has {', '.join(held)}, but a loss has no "
            "parameters and no buffers: no optimizer trains them and no checkpoint has "
            "them. Put them in the classifier of its row of HEADS."
        )
    return loss
