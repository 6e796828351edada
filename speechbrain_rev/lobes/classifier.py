"""Training heads: cosines to learned directions of speakers, and losses with a margin.

Both compute in float32 under any autocast: near a cosine of 1, where training
ends, bfloat16 has steps of 0.004, as large as the differences that matter.

Where the scores of a batch with all classes would take too much memory, ``forward`` of a
classifier that ``build_classifier`` made gives :class:`ClassScores`, whose loss works on some
classes at a time.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from speechbrain_rev.compression.codec import has_contents
from speechbrain_rev.heads import (
    HEAD,
    HEADS,
    classes_at_a_time,
    fits_at_once,
    head_of,
)
from speechbrain_rev.reversible.replay import autocast_off

# The angle's derivative is infinite at a cosine of +-1.
_COSINE_BOUND = 1.0 - 1e-7
# Cosines in bfloat16, near 1 in steps of 0.008, may come out above 1.
_LARGEST_COSINE = 1.01
# Each look at scores lets the CPU wait for the device.
_LAST_LOOK = 1000


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Scores of a batch that are made for some classes at a time.

    Attributes
    ----------
    embeddings : torch.Tensor, [batch, input_size]
        In float32.
    weight : torch.Tensor, [classes, ...]
        The classifier's.
    scores_of : callable
        Makes scores [batch, n] of embeddings and of the weight of n classes.
    centers : int
        Directions of a class.
    """

    embeddings: Tensor
    weight: Tensor
    scores_of: Callable[[Tensor, Tensor], Tensor]
    centers: int

    @property
    def parts(self) -> Iterator[slice]:
        """The classes of each part."""
        batch, dim = self.embeddings.shape
        classes, size = len(self.weight), classes_at_a_time(self.centers, dim, batch)
        return (slice(i, min(i + size, classes)) for i in range(0, classes, size))

    def detach(self) -> ClassScores:
        """Give the same scores without a graph."""
        return replace(
            self, embeddings=self.embeddings.detach(), weight=self.weight.detach()
        )

    @torch.no_grad()
    def argmax(self, dim: int = -1) -> Tensor:
        """Return the classes of the largest scores, [batch, 1]; ``dim`` is -1."""
        assert dim == -1
        largest = self.embeddings.new_full((len(self.embeddings), 1), -math.inf)
        classes = torch.zeros_like(largest, dtype=torch.int64)
        for part in self.parts:
            scores = self.scores_of(self.embeddings, self.weight[part])
            best, index = scores.max(dim=1, keepdim=True)
            classes = torch.where(best > largest, part.start + index, classes)
            largest = best.maximum(largest)
        return classes


class CosineClassifier(nn.Module):
    """Cosine between an embedding and one learned direction per speaker.

    Parameters
    ----------
    input_size : int
        Size of the embeddings.
    out_neurons : int
        Number of training speakers (times the number of speeds, where speed
        perturbation makes new speakers).
    in_parts : bool
        Whether ``forward`` gives :class:`ClassScores` in training where the scores of all
        classes would take more than ``speechbrain_rev.heads.SCORES_BYTES``.

    Example
    -------
    >>> classifier = CosineClassifier(input_size=256, out_neurons=30)
    >>> classifier(torch.randn(8, 1, 256)).shape
    torch.Size([8, 1, 30])
    """

    _head: ClassVar[str] = "cosine"

    def __init__(
        self, input_size: int, out_neurons: int, *, in_parts: bool = False
    ) -> None:
        super().__init__()
        self.in_parts = in_parts
        shape = HEADS[self._head].weight_shape(out_neurons, input_size)
        self.weight = nn.Parameter(torch.empty(shape))
        # Xavier's rule for VoxCeleb2's classes, for which learning rates are published. For
        # a small corpus the rule makes directions several times as long. The longer a
        # direction is, the less an optimizer's step turns it.
        bound = math.sqrt(6 / (input_size + HEAD.classes))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, embeddings: Tensor) -> Tensor | ClassScores:
        """Compare embeddings with every speaker.

        Parameters
        ----------
        embeddings : torch.Tensor, [batch, 1, input_size]

        Returns
        -------
        torch.Tensor, [batch, 1, out_neurons]
            Cosines in float32, or :class:`ClassScores` of them.
        """
        with autocast_off(embeddings.device):
            embeddings, weight = embeddings.float(), self.weight.float()
            classes, *_, dim = weight.shape
            centers = weight.numel() // (classes * dim)
            if (
                self.training
                and self.in_parts
                and not fits_at_once(centers, classes, dim, len(embeddings))
            ):
                rows = embeddings.squeeze(1)
                return ClassScores(rows, weight, self.scores_of, centers)
            return self.scores_of(embeddings, weight)

    @staticmethod
    def scores_of(embeddings: Tensor, weight: Tensor) -> Tensor:
        """Give cosines [..., n] of embeddings [..., input_size] and directions of n classes."""
        directions = functional.normalize(weight, dim=-1)
        return functional.linear(functional.normalize(embeddings, dim=-1), directions)


class SubcenterClassifier(CosineClassifier):
    """The largest cosine between an embedding and several directions of a speaker.

    Deng et al. 2020, "Sub-center ArcFace": three directions a speaker, of which those of
    noisy or wrongly labelled utterances may differ from the others.

    Parameters
    ----------
    input_size, out_neurons, in_parts
        As of :class:`CosineClassifier`.

    Example
    -------
    >>> classifier = SubcenterClassifier(input_size=256, out_neurons=30)
    >>> classifier.weight.shape, classifier(torch.randn(8, 1, 256)).shape
    (torch.Size([30, 3, 256]), torch.Size([8, 1, 30]))
    """

    _head = "subcenter"

    @staticmethod
    def scores_of(embeddings: Tensor, weight: Tensor) -> Tensor:
        """Give the largest cosines [..., n] of embeddings and directions [n, 3, input_size]."""
        cosines = CosineClassifier.scores_of(embeddings, weight.flatten(0, 1))
        return cosines.unflatten(-1, weight.shape[:2]).max(dim=-1).values


def true_speakers(weight: torch.Tensor, *, speeds: int) -> torch.Tensor:
    """Keep the speakers as recorded, of a classifier that takes speeds for speakers.

    ``SpeakerAugment`` numbers them speaker + k * number of speakers, and k is 0 for
    speed 1.0.

    Parameters
    ----------
    weight : torch.Tensor, [speakers * speeds, ...]
        Of a head, by class.
    speeds : int
        How many speeds there are.

    Returns
    -------
    torch.Tensor, [speakers, ...]

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
    With ``hardest`` above 0 the largest other cosines go through ``with_penalty`` as well.
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
    #: How many of the largest cosines beside the target's have a penalty.
    hardest: ClassVar[int] = 0

    def __init__(self, margin: float = 0.2, scale: float = 32.0) -> None:
        super().__init__()
        self.margin = margin
        self.scale = scale
        self._batches = 0
        self._next_look: float = 1

    def forward(
        self,
        predictions: Tensor | ClassScores,
        targets: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of a batch.

        Parameters
        ----------
        predictions : torch.Tensor, [batch, 1, classes], or ClassScores
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
        targets = targets.long().reshape(-1, 1)
        if isinstance(predictions, ClassScores):
            tensors = predictions.embeddings, predictions.weight, targets
            loss: Tensor = _LossOfParts.apply(*tensors, predictions, self)
            return loss
        self._look(predictions)
        with autocast_off(predictions.device):
            cosines = predictions.squeeze(1).float()
            target_cosines = cosines.gather(1, targets)
            logits = cosines.scatter(1, targets, self.with_margin(target_cosines))
            if self.hardest:
                others = cosines.detach().scatter(1, targets, -math.inf)
                hardest = min(self.hardest, cosines.shape[1] - 1)
                classes = others.topk(hardest).indices
                penalised = self.with_penalty(cosines.gather(1, classes))
                logits = logits.scatter(1, classes, penalised)
            return functional.cross_entropy(self.scale * logits, targets.squeeze(1))

    @abc.abstractmethod
    def with_margin(self, cosines: Tensor) -> Tensor:
        """Lower the cosines of targets, [batch, 1]."""

    def with_penalty(self, cosines: Tensor) -> Tensor:
        """Raise the largest cosines of others, [batch, hardest]."""
        return cosines

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


class SubcenterAAMSoftmax(AAMSoftmax):
    """AAM softmax loss with a penalty on the five largest cosines of other speakers.

    Zhao et al. 2022, "Multi-query multi-head attention pooling and inter-topK penalty for
    speaker verification": their cos(t) become cos(t - penalty). The penalty is 0.06 at a
    margin of 0.2 and proportional to it, as WeSpeaker schedules it.

    Parameters
    ----------
    margin : float
        Radians.
    scale : float
        Factor on the cosines.

    Example
    -------
    >>> loss = SubcenterAAMSoftmax(margin=0.2)
    >>> round(loss.with_penalty(torch.tensor([[0.0]])).item(), 6) == round(math.sin(0.06), 6)
    True
    """

    citation = (
        'Deng et al.: "Sub-center ArcFace: Boosting Face Recognition by Large-scale Noisy '
        'Web Faces", 2020; Zhao et al.: "Multi-query multi-head attention pooling and '
        'inter-topK penalty for speaker verification", 2022'
    )
    hardest = 5

    def with_penalty(self, cosines: Tensor) -> Tensor:
        """Take the penalty off the angles of others, [batch, hardest]."""
        penalty = 0.3 * self.margin
        cosines = cosines.clamp(-_COSINE_BOUND, _COSINE_BOUND)
        sines = torch.sqrt(1.0 - cosines**2)
        return cosines * math.cos(penalty) + sines * math.sin(penalty)


class _LossOfParts(torch.autograd.Function):
    """A loss with a margin, whose scores are made for some classes at a time, twice.

    ``margin`` may change before the backward pass, so that the forward pass keeps the slopes
    of what it depends on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        weight: Tensor,
        targets: Tensor,
        scores: ClassScores,
        loss: MarginSoftmax,
    ) -> Tensor:
        with autocast_off(embeddings.device):
            batch, hardest = len(embeddings), min(loss.hardest, len(weight) - 1)
            lowest = embeddings.new_full((batch, 1), -math.inf)
            others = lowest.squeeze(1)  # log of the sum over other classes so far
            target_cosines, classes = lowest, targets.new_zeros(batch, hardest)
            largest = lowest.expand(batch, hardest)
            for part in scores.parts:
                cosines = scores.scores_of(embeddings, weight[part])
                inside = (targets >= part.start) & (targets < part.stop)
                index = (targets - part.start).clamp(0, part.stop - part.start - 1)
                own = cosines.gather(1, index)
                target_cosines = torch.where(inside, own, target_cosines)
                cosines = cosines.scatter(1, index, torch.where(inside, lowest, own))
                if hardest:
                    numbers = torch.arange(
                        part.start, part.stop, device=targets.device, dtype=torch.int64
                    )
                    classes = torch.cat([classes, numbers.expand(batch, -1)], 1)
                    cosines = torch.cat([largest, cosines], 1)
                    largest, index = cosines.topk(hardest)
                    classes = classes.gather(1, index)
                    cosines = cosines.scatter(1, index, -math.inf)
                others = others.logaddexp((loss.scale * cosines).logsumexp(1))
            changed, slopes = _changed(loss, target_cosines, largest)
            total = torch.cat([others[:, None], changed], 1).logsumexp(1)
            chances = (changed - total[:, None]).exp()
            chances[:, 0] -= 1
            classes = torch.cat([targets, classes], 1)
            ctx.save_for_backward(embeddings, weight, total, classes, chances * slopes)
            ctx.scores, ctx.scale = scores.detach(), loss.scale
            return (total - changed[:, 0]).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, weight, total, classes, slopes = ctx.saved_tensors
        grad = grad / len(embeddings)
        grad_weight = torch.empty_like(weight)
        grad_embeddings = torch.zeros_like(embeddings)
        with torch.enable_grad(), autocast_off(embeddings.device):
            leaf = embeddings.detach().requires_grad_()
            for part in ctx.scores.parts:
                directions = weight[part].detach().requires_grad_()
                cosines = ctx.scores.scores_of(leaf, directions)
                size = part.stop - part.start
                # The last column takes classes of other parts.
                inside = (classes >= part.start) & (classes < part.stop)
                index = torch.where(inside, classes - part.start, size)
                slope = cosines.new_empty(len(classes), size + 1)
                part_slope = torch.mul(cosines.detach(), ctx.scale, out=slope[:, :size])
                part_slope.sub_(total[:, None]).exp_().mul_(ctx.scale)
                slope.scatter_(1, index, slopes).mul_(grad)
                of_embeddings, grad_weight[part] = torch.autograd.grad(
                    cosines, (leaf, directions), slope[:, :size]
                )
                grad_embeddings += of_embeddings
        return grad_embeddings, grad_weight, None, None, None


@torch.enable_grad()
def _changed(
    loss: MarginSoftmax, targets: Tensor, largest: Tensor
) -> tuple[Tensor, Tensor]:
    """Give logits of targets and of the largest others, [batch, 1 + hardest], and slopes."""
    leaves = [cosines.detach().requires_grad_() for cosines in (targets, largest)]
    made = [loss.with_margin(leaves[0]), loss.with_penalty(leaves[1])]
    logits = loss.scale * torch.cat(made, 1)
    slopes = torch.autograd.grad(logits.sum(), leaves)
    return logits.detach(), torch.cat(slopes, 1)


def build_classifier(loss: str, *, input_size: int, out_neurons: int) -> nn.Module:
    """Make the classifier that a loss goes with, as a YAML file does with ``!apply:``.

    Parameters
    ----------
    loss : str
        A name in a row of ``speechbrain_rev.heads.HEADS``.
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
    classifier: nn.Module = head_of(loss).classifier(
        input_size=input_size, out_neurons=out_neurons
    )
    if isinstance(classifier, CosineClassifier):
        classifier.in_parts = True
    return classifier


def build_loss(name: str, *, margin: float = 0.2, scale: float = 32.0) -> MarginSoftmax:
    """Make a loss by its name, as a YAML file does with ``!apply:``.

    Parameters
    ----------
    name : str
        A name in a row of ``speechbrain_rev.heads.HEADS``.
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
    loss: MarginSoftmax = resolve_name(head_of(name).losses[name])(margin, scale)
    held = [*dict(loss.named_parameters()), *dict(loss.named_buffers())]
    if held:
        raise ValueError(
            f"loss {name} ({type(loss).__name__}) has {', '.join(held)}, but a loss has no "
            "parameters and no buffers: no optimizer trains them and no checkpoint has "
            "them. Put them in the classifier of its row of HEADS."
        )
    return loss
