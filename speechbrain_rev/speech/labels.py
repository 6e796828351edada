"""Labels of speakers, where each speed makes another speaker."""

from __future__ import annotations

import torch

# Each look at labels on a GPU waits for it.
_LOOKS = (1, 10, 100, 1000)


def check_utterances(labels: torch.Tensor, utterances: int) -> None:
    """Refuse labels of another batch than the one that was augmented last.

    Parameters
    ----------
    labels : torch.Tensor, [batch, 1]
        Speakers.
    utterances : int
        Of the batch that was augmented.

    Raises
    ------
    ValueError
        If there are more labels, or fewer.
    """
    if len(labels) != utterances:
        raise ValueError(
            f"There are {len(labels)} labels, but the batch augmented last had "
            f"{utterances} utterances. Pass the labels of that batch."
        )


def check_speakers(
    labels: torch.Tensor, speakers: int, speeds: int, *, batch: int
) -> None:
    """Refuse a speaker beyond those that classes were counted for.

    At another speed that would be another speaker. On a GPU it is looked for in the 1st,
    10th, 100th and 1000th batch.

    Parameters
    ----------
    labels : torch.Tensor, [batch, 1]
        Speakers.
    speakers, speeds : int
        Whose product is the number of classes.
    batch : int
        Which one it is, from 1 on.

    Raises
    ------
    ValueError
        If a label is negative, or not below the number of speakers.

    Example
    -------
    >>> check_speakers(torch.tensor([[0], [9]]), 10, 3, batch=1)
    """
    if labels.device.type != "cpu" and batch not in _LOOKS:
        return
    lowest, highest = (int(end) for end in labels.aminmax())
    if lowest < 0 or highest >= speakers:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"A label is {wrong}, but out_n_neurons {speakers * speeds} at {speeds} "
            f"speed(s) means speakers 0 to {speakers - 1}. Give --out_n_neurons: the "
            "number of your speakers times that of the speeds."
        )
