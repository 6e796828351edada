"""What an encoder says of itself in its weights: how it was built, and its features.

The description is an entry of the state dict, so that whoever has the weights can build the
encoder again: a tensor, as files of weights hold nothing else, of 32 bits, as checkpoints
are averaged by adding them up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.files import made_of, parse_json, refusing
from speechbrain_rev.filterbanks import FILTERBANKS
from speechbrain_rev.heads import CORRECTIONS, POOLINGS

#: Key of the description in an encoder's state dict, as torch names it.
DESCRIPTION = "_extra_state"

NORMALISATIONS = ("sentence_mean",)

# A description has some 300 characters; one of a network of 4,000 blocks has no more.
_MOST_CHARACTERS = 4000
# An encoder on the meta device takes time and memory for each of its blocks.
_MOST_BLOCKS = 4000
_LARGEST = 2**20


@dataclass(frozen=True)
class FrontEnd:
    """How the features are made that an encoder takes.

    Attributes
    ----------
    kind : {"speechbrain", "kaldi"}
        Whose filterbanks of windows of 25 ms each 10 ms: SpeechBrain's or, as WeSpeaker
        takes them, Kaldi's.
    sample_rate : int
        Of the waveforms, Hz: at most 16000, whose windows SpeechBrain's Fbank takes.
    n_mels : int
        Mel bands, at most 512.
    normalisation : {"sentence_mean"}
        What is subtracted from the filterbanks of an utterance: their mean over time.

    Raises
    ------
    ValueError
        If a value is none of these.

    Examples
    --------
    >>> FrontEnd("speechbrain", 16000, 80).normalisation
    'sentence_mean'
    """

    kind: str
    sample_rate: int
    n_mels: int
    normalisation: str = "sentence_mean"

    def __post_init__(self) -> None:
        _check_one_of("kind of front_end", self.kind, tuple(FILTERBANKS))
        _check_count(
            "sample_rate of front_end", self.sample_rate, least=4000, most=16000
        )
        _check_count("n_mels of front_end", self.n_mels, most=512)
        _check_one_of("normalisation of front_end", self.normalisation, NORMALISATIONS)


@dataclass(frozen=True)
class EncoderDescription:
    """The arguments of ``build_encoder`` that an encoder's weights and embeddings depend on.

    Attributes
    ----------
    name : str
        One of ``speechbrain_rev.architectures.ENCODERS``.
    widths, blocks : tuple of int
        Channels and blocks of each stage.
    n_mels, embedding_dim : int
        Mel bands of the input, and numbers of an embedding.
    pooling, pooling_variance : str
        As ``SpeakerEncoder`` takes them.
    front_end : FrontEnd or None
        None where it is not known.

    Examples
    --------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1))
    >>> EncoderDescription.of_state_dict(encoder.state_dict()).blocks
    (1, 1, 1, 1)
    """

    name: str
    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    n_mels: int
    embedding_dim: int
    pooling: str
    pooling_variance: str
    front_end: FrontEnd | None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"name is {self.name!r} and takes a text")
        for field in ("widths", "blocks"):
            for number in getattr(self, field):
                _check_count(f"a number of {field}", number, least=0)
        if sum(self.blocks) > _MOST_BLOCKS:
            raise ValueError(
                f"blocks are {sum(self.blocks):,} in all, of at most {_MOST_BLOCKS:,}"
            )
        _check_count("n_mels", self.n_mels)
        _check_count("embedding_dim", self.embedding_dim)
        _check_one_of("pooling", self.pooling, tuple(POOLINGS))
        _check_one_of("pooling_variance", self.pooling_variance, tuple(CORRECTIONS))
        if self.front_end is not None and self.front_end.n_mels != self.n_mels:
            raise ValueError(
                f"front_end makes n_mels {self.front_end.n_mels}, and the encoder takes "
                f"{self.n_mels}: give both the same"
            )

    def as_tensor(self) -> Tensor:
        """Write the description as a tensor.

        Returns
        -------
        torch.Tensor, [bytes], int32
            The values of the bytes of a JSON text. (SpeechBrain's average of checkpoints
            adds up entries of state dicts, which overflows in 8 bits.)
        """
        text = json.dumps(dataclasses.asdict(self))
        return torch.tensor(list(text.encode()), dtype=torch.int32, device="cpu")

    @classmethod
    def of_state_dict(cls, state_dict: Mapping[str, Any]) -> EncoderDescription | None:
        """Read the description that an encoder's state dict has.

        Parameters
        ----------
        state_dict : mapping of str to torch.Tensor
            Of an encoder.

        Returns
        -------
        EncoderDescription or None
            None if there is none, as in weights of other programs.

        Raises
        ------
        ValueError
            If it is anything else than what an encoder writes.
        """
        if DESCRIPTION not in state_dict:
            return None
        with refusing(
            "the weights do not say of which encoder they are: "
            f"{DESCRIPTION} is no description of one",
            "Copy the file again, or update this package.",
        ):
            return made_of(cls, parse_json(_read_text(state_dict[DESCRIPTION])))


def weights_in(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out an encoder's description: parameters and buffers alone.

    Parameters
    ----------
    state_dict : mapping of str to torch.Tensor
        Of an encoder, or of a classifier, which has none.

    Returns
    -------
    dict of str to torch.Tensor

    Examples
    --------
    >>> from speechbrain_rev.lobes import build_encoder
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1))
    >>> len(encoder.state_dict()) - len(weights_in(encoder.state_dict()))
    1
    """
    return {name: value for name, value in state_dict.items() if name != DESCRIPTION}


def _read_text(tensor: object) -> str:
    """Read a text from the values of its bytes, which averaging makes floating-point."""
    if not isinstance(tensor, Tensor) or tensor.dim() != 1:
        raise ValueError("it is no row of numbers")
    if tensor.numel() > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS:,} bytes")
    try:
        return bytes(int(value) for value in tensor.tolist()).decode()
    except (ArithmeticError, RuntimeError) as error:
        raise ValueError(str(error)) from error


def front_end_of(
    given: FrontEnd | Mapping[str, Any] | None, n_mels: int
) -> FrontEnd | None:
    """Take what an encoder was given as its ``front_end``.

    Parameters
    ----------
    given : FrontEnd, mapping, or None
        A mapping has the fields of :class:`FrontEnd` by their names.
    n_mels : int
        Of the encoder, for a mapping without.

    Returns
    -------
    FrontEnd or None

    Raises
    ------
    ValueError
        If it is anything else.

    Examples
    --------
    >>> front_end_of({"kind": "kaldi", "sample_rate": 16000}, n_mels=80)
    FrontEnd(kind='kaldi', sample_rate=16000, n_mels=80, normalisation='sentence_mean')
    """
    if given is None or isinstance(given, FrontEnd):
        return given
    fields = [field.name for field in dataclasses.fields(FrontEnd)]
    if not isinstance(given, Mapping) or not given.keys() <= set(fields):
        raise ValueError(
            f"front_end is {given!r}; give {', '.join(fields)}, or None where it is not "
            "known."
        )
    try:
        return FrontEnd(**{"n_mels": n_mels, **given})
    except TypeError as error:
        raise ValueError(f"front_end is {given!r}: {error}.") from error


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r} and takes {' or '.join(allowed)}")


def _check_count(
    name: str, value: object, *, least: int = 1, most: int = _LARGEST
) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{name} is {value!r} and takes a whole number from {least} to {most:,}"
        )
