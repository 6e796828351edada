"""Trained encoders as their folders describe them: a run's, or an exported one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from speechbrain_rev.inference.encoder_settings import (
    ASSUMED,
    encoder_of,
    run_settings,
)
from speechbrain_rev.inference.hub import reading
from speechbrain_rev.inference.model_folder import is_exported, read_model
from speechbrain_rev.inference.run_folder import read_objects, read_weights
from speechbrain_rev.inference.state_dicts import check_tensors
from speechbrain_rev.inference.thresholds import (
    Thresholds,
    read_thresholds,
    run_thresholds,
)
from speechbrain_rev.inference.waveform import WaveformEncoder
from speechbrain_rev.lobes import SpeakerEncoder, inference_form
from speechbrain_rev.lobes.pretrained import unwrapped
from speechbrain_rev.whole_files import check_path


@dataclass(frozen=True)
class Trained:
    """An encoder and what must be known to use it.

    Attributes
    ----------
    encoder : SpeakerEncoder
        With its weights, on the CPU.
    settings : mapping of str to object
        ``ENCODER_SETTINGS``, ``front_end`` and ``pooling_variance``, and maybe others.
    fingerprint : str
        Of the weights, see ``fingerprint_of``.
    thresholds : Thresholds
        Of its scores.
    """

    encoder: SpeakerEncoder
    settings: Mapping[str, Any]
    fingerprint: str
    thresholds: Thresholds

    def model_for(self, device: torch.device, precision: str) -> WaveformEncoder:
        """Put the front-end before the encoder, or before what embeds as it does.

        On a CPU that is its form for inference, which takes from half to all of the
        memory (docs/deploying.md). In half precision its sums would be rounded more often,
        and on a GPU it was not measured.

        Parameters
        ----------
        device : torch.device
            Where the model will be.
        precision : str
            What it will compute in.

        Returns
        -------
        WaveformEncoder
            On the CPU.
        """
        lean = device.type == "cpu" and precision == "fp32"
        return WaveformEncoder(
            inference_form(self.encoder) if lean else self.encoder,
            n_mels=self.settings["n_mels"],
            sample_rate=self.settings["sample_rate"],
            front_end=self.settings["front_end"],
        )


def read_trained(source: str | PathLike[str]) -> Trained:
    """Read a trained encoder from whichever folder it lies in, running nothing of it.

    Parameters
    ----------
    source : str or path-like
        The ``output_folder`` of a training run, or what ``convert_from_wespeaker`` or
        ``export_run`` wrote; the last is read as strictly as it says of itself.

    Returns
    -------
    Trained
        The encoder and what is known of it.

    Raises
    ------
    FileNotFoundError
        If the folder, its hyperparams.yaml or any weights are missing.
    ValueError
        If a file is not what training or export writes, leads out of the folder, or the
        weights are not those of the encoder that hyperparams.yaml names.
    """
    return read_exported(source) if is_exported(source) else read_run(source)


def read_run(folder: str | PathLike[str]) -> Trained:
    """Read what a training run made.

    Parameters
    ----------
    folder : str or path-like
        As of ``SpeakerEmbedder.from_run``.

    Returns
    -------
    Trained

    Raises
    ------
    FileNotFoundError, ValueError
        As of ``SpeakerEmbedder.from_run``.
    """
    check_path(folder, "a run", "Give its folder.")
    settings = run_settings(folder)
    encoder = encoder_of(settings)
    weights = read_weights(folder)
    expected = encoder.state_dict()
    own = unwrapped(weights.state_dict, expected)
    try:
        check_tensors(own, expected, weights.path, exactly=False)
    except ValueError as error:
        left_out = read_objects(folder).left_out()
        if not left_out:
            raise
        defaults = ", ".join(f"{name}: {value}" for name, value in left_out.items())
        raise ValueError(
            f"{error} hyperparams.yaml does not give {defaults}, which are defaults; write "
            "there what was trained."
        ) from error
    encoder.load_state_dict(own, strict=True)
    thresholds = run_thresholds(Path(folder), weights.fingerprint)
    return Trained(encoder, settings, weights.fingerprint, thresholds)


def read_exported(source: str | PathLike[str], revision: str | None = None) -> Trained:
    """Read what export wrote, here or on the Hub.

    Parameters
    ----------
    source, revision
        As of ``SpeakerEmbedder.from_hparams``.

    Returns
    -------
    Trained

    Raises
    ------
    FileNotFoundError, PermissionError, ConnectionError, ValueError
        As of ``SpeakerEmbedder.from_hparams``.
    """
    check_path(source, "an exported model", "Give its folder.")
    with reading(source, revision) as folder:
        found, thresholds = read_model(folder), read_thresholds(folder)
    return Trained(
        found.encoder, ASSUMED | found.settings, found.fingerprint, thresholds
    )
