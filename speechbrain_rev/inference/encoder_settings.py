"""The settings that tell which encoder was trained, and the encoder of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from speechbrain_rev.hparams.knobs import KNOBS, Knob
from speechbrain_rev.inference.front_ends import FRONT_ENDS
from speechbrain_rev.inference.run_folder import (
    HYPERPARAMS,
    read_objects,
    read_settings,
)
from speechbrain_rev.inference.run_objects import ENCODERS
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.lobes.pooling import CORRECTIONS

ENCODER_SETTINGS = (
    "arch",
    "widths",
    "blocks",
    "n_mels",
    "embedding_dim",
    "sample_rate",
)
#: What training has one of; weights of others may have another.
ASSUMED = {"front_end": "speechbrain", "pooling_variance": "population"}
_KNOBS = KNOBS | {
    "front_end": Knob("str", one_of=tuple(FRONT_ENDS)),
    "pooling_variance": Knob("str", one_of=tuple(CORRECTIONS)),
}


def run_settings(folder: str | PathLike[str]) -> dict[str, Any]:
    """Read which encoder a run has, and behind which front-end.

    The encoder, Fbank and InputNormalization that hyperparams.yaml describes say it, under
    whatever names they stand there. A file that describes no encoder, or several, says it
    by plain values of the names of ``ENCODER_SETTINGS``.

    Parameters
    ----------
    folder : str or path-like
        The run's ``output_folder``.

    Returns
    -------
    dict of str to object
        ``ENCODER_SETTINGS``, ``front_end`` and ``pooling_variance``.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or no hyperparams.yaml in it.
    ValueError
        If a value is missing or none that it takes, or features are not made as
        this package makes them.
    """
    objects = read_objects(folder)
    plain = set(ENCODER_SETTINGS) <= objects.file.top.keys()
    described = None
    if len(objects.encoders()) == 1 or not plain:
        described = objects.settings()
    if described is None:
        described = _plain_settings(folder)
    settings = ASSUMED | described
    check_settings(settings, folder)
    return settings


def _plain_settings(folder: str | PathLike[str]) -> dict[str, Any]:
    """Read the settings of a file that does not describe its encoder as an object."""
    found = read_settings(folder, [], optional=(*ENCODER_SETTINGS, *ASSUMED))
    missing = [name for name in ENCODER_SETTINGS if name not in found]
    if missing:
        raise ValueError(
            f"{Path(folder, HYPERPARAMS)} lacks {', '.join(missing)}, and describes no "
            f"encoder of this package ({ENCODERS[0]} or {ENCODERS[1]}; !name: and "
            "!include: are not read). Give the "
            "output_folder of a run that trained one, or add these to the file as plain "
            "values."
        )
    return found


def check_settings(settings: Mapping[str, Any], folder: str | PathLike[str]) -> None:
    """Refuse values that training does not take.

    Parameters
    ----------
    settings : mapping of str to object
        Plain values by the names of knobs.
    folder : str or path-like
        Where its hyperparams.yaml is, for the error message.

    Raises
    ------
    ValueError
        If a value is of another type or out of range.

    Example
    -------
    >>> check_settings({"n_mels": 80}, "run")
    >>> check_settings({"n_mels": 4}, "run")
    Traceback (most recent call last):
    ValueError: run/hyperparams.yaml has n_mels: 4 (it takes ...
    """
    wrong = []
    for name, value in settings.items():
        knob = _KNOBS[name]
        # build_encoder names the nearest of the architectures.
        if not knob.has_kind(value) or (name != "arch" and not knob.allows(value)):
            wrong.append(f"{name}: {reprlib.repr(value)} (it takes {knob.takes()})")
    if wrong:
        raise ValueError(
            f"{Path(folder, 'hyperparams.yaml')} has {', '.join(wrong)}. Give the "
            "folder of a run of recipes/VoxCeleb/train.py, or one that speechbrain-rev "
            "export wrote, where these are plain values without tags or references."
        )


def encoder_of(settings: Mapping[str, Any]) -> SpeakerEncoder:
    """Build the encoder, with weights that are to be replaced.

    Parameters
    ----------
    settings : mapping of str to object
        ``ENCODER_SETTINGS``, and maybe others; ``pooling_variance`` among them counts.

    Returns
    -------
    SpeakerEncoder
        As training builds it, but for what matters in training alone.

    Example
    -------
    >>> settings = dict(arch="revnet57", widths=[4] * 4, blocks=[1] * 4, n_mels=80)
    >>> encoder_of({**settings, "embedding_dim": 16}).fc.out_features
    16
    """
    return build_encoder(
        settings["arch"],
        n_mels=settings["n_mels"],
        embedding_dim=settings["embedding_dim"],
        widths=settings["widths"],
        blocks=settings["blocks"],
        pooling_variance=settings.get("pooling_variance", "population"),
    )
