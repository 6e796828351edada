"""WeSpeaker's models as folders of runs, and back.

WeSpeaker feeds its networks Kaldi's filterbanks and pools the unbiased variance, which
the run that is written says of itself.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from speechbrain_rev.inference.encoder_settings import run_settings
from speechbrain_rev.inference.plain_yaml import plain_values
from speechbrain_rev.inference.run_folder import (
    read_weights,
    saved_bytes,
    write_run,
)
from speechbrain_rev.inference.state_dicts import load_tensors
from speechbrain_rev.inference.wespeaker_names import from_wespeaker, to_wespeaker
from speechbrain_rev.whole_files import check_path, check_regular, write_whole

#: What WeSpeaker's own settings are for the front-end and the pooling that are ours.
_OURS = {
    "sample_rate": 16000,
    "front_end": "kaldi",
    "pooling_variance": "unbiased",
}
_TAKEN = (
    "Taken are the averaged or last weights (avg_model.pt, model_150.pt) of WeSpeaker's "
    "ResNet18 to ResNet293 with TSTP pooling and one embedding layer."
)
#: What its config.yaml has to say, where it says anything.
_CONFIG: dict[tuple[str, ...], object] = {
    ("model_args", "pooling_func"): "TSTP",
    ("model_args", "two_emb_layer"): False,
    ("dataset_args", "frontend"): "fbank",
    ("dataset_args", "resample_rate"): _OURS["sample_rate"],
    ("dataset_args", "fbank_args", "frame_length"): 25,
    ("dataset_args", "fbank_args", "frame_shift"): 10,
    ("dataset_args", "cmvn"): True,
    ("dataset_args", "cmvn_args", "norm_mean"): True,
    ("dataset_args", "cmvn_args", "norm_var"): False,
}
# The same of the sizes that follow from the weights.
_CONFIG_SIZES = {
    ("model_args", "feat_dim"): "n_mels",
    ("model_args", "embed_dim"): "embedding_dim",
    ("dataset_args", "fbank_args", "num_mel_bins"): "n_mels",
}


def convert_from_wespeaker(
    path: str | PathLike[str], folder: str | PathLike[str]
) -> dict[str, Any]:
    """Write a WeSpeaker model as a run that ``SpeakerEmbedder.from_run`` loads.

    Parameters
    ----------
    path : str or path-like
        ``avg_model.pt``. A ``config.yaml`` beside it must say nothing else than the
        weights and than what is assumed of their front-end.
    folder : str or path-like
        A new or an empty folder.

    Returns
    -------
    dict of str to object
        What was written into its hyperparams.yaml.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds anything but the weights of a WeSpeaker ResNet; see
        ``from_wespeaker``.
    OSError
        If the folder cannot be written.
    """
    check_path(path, "a WeSpeaker model")
    path = Path(path)
    theirs = _read(path)
    try:
        settings, weights = from_wespeaker(theirs)
    except ValueError as error:
        raise ValueError(f"{path} cannot be converted: {error} {_TAKEN}") from error
    settings |= _OURS
    config = path.with_name("config.yaml")
    if config.exists():
        _check_config(config, settings)
    write_run(folder, settings, weights)
    return settings


def convert_to_wespeaker(
    folder: str | PathLike[str], path: str | PathLike[str]
) -> None:
    """Write the weights of a run, of a converted model for instance, as WeSpeaker's.

    Parameters
    ----------
    folder : str or path-like
        The run, whose hyperparams.yaml has ``front_end: kaldi`` and
        ``pooling_variance: unbiased``: WeSpeaker would feed it nothing else.
    path : str or path-like
        The file, a new one.

    Raises
    ------
    FileNotFoundError
        If the folder or what it must hold is missing.
    ValueError
        If WeSpeaker has no such network or would compute other embeddings with it, or
        the file is there already.
    OSError
        If it cannot be written.
    """
    if Path(path).exists():
        raise ValueError(
            f"{path} is there already, and nothing is written over it. Give the name of "
            "a new file."
        )
    settings = run_settings(folder)
    other = [
        f"{name} is {settings[name]}, not {value}"
        for name, value in _OURS.items()
        if settings[name] != value
    ]
    if other:
        raise ValueError(
            f"{folder}: {'; '.join(other)}. WeSpeaker would compute other embeddings "
            "with these weights than they were trained for. Convert a model back that "
            "came from there, or has these settings."
        )
    for name in _OURS:
        del settings[name]
    weights = read_weights(folder)
    try:
        theirs = to_wespeaker(settings, weights.state_dict)
    except ValueError as error:
        raise ValueError(f"{weights.path} cannot be converted: {error}") from error
    write_whole(Path(path), saved_bytes(theirs))


def _read(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path}. Give the avg_model.pt of a WeSpeaker model."
        )
    return load_tensors(
        path,
        f"{_TAKEN} Of another file, load it where you trust it and write "
        "torch.save(model.state_dict(), 'avg_model.pt').",
    )


def _check_config(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a network or a front-end that is not what its weights are taken for."""
    config = plain_values(path.parent, path.name, ["model_args", "dataset_args"])
    expected = _CONFIG | {key: settings[name] for key, name in _CONFIG_SIZES.items()}
    for keys, value in expected.items():
        found: Any = config
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if found is not None and found != value:
            raise ValueError(
                f"{path} says {'.'.join(keys)}: {reprlib.repr(found)}, but the weights are taken for "
                f"{value}. {_TAKEN}"
            )
