"""Loading an exported model through SpeechBrain's own interfaces, strictly."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from speechbrain.utils.fetching import FetchConfig, FetchSource, LocalStrategy
from speechbrain.utils.parameter_transfer import Pretrainer
from torch import nn

from speechbrain_rev.lobes.description import DESCRIPTION
from speechbrain_rev.lobes.encoder import SpeakerEncoder


class ModelPretrainer(Pretrainer):
    """SpeechBrain's Pretrainer, which neither passes over keys nor needs a fixed place.

    SpeechBrain's warns of missing and surplus weights and goes on; here both are
    errors. Paths without a folder are of files beside hyperparams.yaml, wherever that
    is, so that a model's folder can be moved.

    Parameters
    ----------
    loadables : mapping of str to object
        What is loaded, by name. "label_encoder" must number as many speakers as
        "classifier" has classes, where both are there.
    paths : mapping of str to str, optional
        Files by the same names; without one, ``<name>.ckpt``.

    Example
    -------
    >>> folder = getfixture("tmp_path")
    >>> torch.save({"weight": torch.ones(1, 1)}, folder / "linear.ckpt")
    >>> linear = nn.Linear(1, 1, bias=False)
    >>> pretrainer = ModelPretrainer({"linear": linear})
    >>> _ = pretrainer.collect_files(folder)
    >>> pretrainer.load_collected()
    >>> linear.weight.item()
    1.0
    """

    def __init__(
        self, loadables: Mapping[str, Any], paths: Mapping[str, str] | None = None
    ) -> None:
        modules = [n for n, value in loadables.items() if isinstance(value, nn.Module)]
        super().__init__(
            loadables=loadables,
            paths=paths,
            custom_hooks=dict.fromkeys(modules, load_strictly),
        )

    def collect_files(
        self,
        default_source: str | Path | FetchSource | None = None,
        local_strategy: LocalStrategy = LocalStrategy.SYMLINK,
        fetch_config: FetchConfig = FetchConfig(),  # noqa: B008
    ) -> dict[str, Path]:
        """Find the files, those without a folder in the default source.

        Parameters
        ----------
        default_source : str, path or FetchSource, optional
            The model's folder, or what else SpeechBrain fetches from.
        local_strategy, fetch_config
            As SpeechBrain's.

        Returns
        -------
        dict of str to pathlib.Path
            The files by name.
        """
        for name, path in self.paths.items():
            if default_source is not None and "/" not in str(path):
                self.paths[name] = _beside(default_source, path)
        files: dict[str, Path] = super().collect_files(
            default_source, local_strategy, fetch_config
        )
        return files

    def load_collected(self) -> None:
        """Load the collected files.

        Raises
        ------
        ValueError
            If weights are missing, surplus or of another shape, or there are more or
            fewer labels than speakers in the classifier.
        """
        super().load_collected()
        labels = self.loadables.get("label_encoder")
        classifier = self.loadables.get("classifier")
        if labels is not None and classifier is not None:
            speakers = len(classifier.weight)
            if len(labels) != speakers:
                raise ValueError(
                    f"label_encoder.txt numbers {len(labels)} speakers, but the "
                    f"classifier has {speakers} classes: the files are of two models. "
                    "Copy the folder again."
                )
            labels.expect_len(speakers)


T = TypeVar("T")

# What wrappers put before each name: DataParallel and DDP, torch.compile, Lightning, a
# container of SpeechBrain's or others' own.
_PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "embedding_model.",
    "encoder.",
    "front.",
)
# Under which name checkpoints of a whole training run have the network's state dict.
_CONTAINERS = ("state_dict", "model_state_dict", "model")


def state_dict_in(loaded: Any) -> Any:
    """Find the network's state dict in what a checkpoint of a training run holds.

    Parameters
    ----------
    loaded : object
        What ``torch.load`` gave.

    Returns
    -------
    object
        What it has under ``state_dict``, ``model_state_dict`` or ``model``, where that
        is a dictionary; else the same.

    Example
    -------
    >>> state_dict_in({"epoch": 3, "state_dict": {"weight": 1}})
    {'weight': 1}
    """
    # One in another, but not one in itself.
    for name in 2 * _CONTAINERS:
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
    return loaded


def unwrapped(state_dict: Mapping[str, T], names: Collection[str]) -> Mapping[str, T]:
    """Take off what wrappers put before all names of a state dict.

    Parameters
    ----------
    state_dict : mapping of str to object
        Of a module or of its wrapper.
    names : collection of str
        Those of the module; where it has one of them, nothing is taken off.

    Returns
    -------
    mapping of str to object
        Without ``module.``, ``_orig_mod.``, ``model.``, ``embedding_model.``,
        ``encoder.`` or ``front.``, one or several after each other; the same where not
        all names begin with one of them.

    Example
    -------
    >>> wrapped = {"module.encoder.weight": 1, "module.encoder.bias": 2}
    >>> list(unwrapped(wrapped, ["weight", "bias"]))
    ['weight', 'bias']
    """
    if not state_dict or not state_dict.keys().isdisjoint(names):
        return state_dict
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state_dict):
            inner = {n.removeprefix(prefix): v for n, v in state_dict.items()}
            return unwrapped(inner, names)
    return state_dict


def load_strictly(module: nn.Module, path: str | Path) -> None:
    """Load weights into a module: all that it has, and nothing else.

    Parameters
    ----------
    module : nn.Module
        Gets the weights.
    path : str or Path
        A state dict, as ``torch.save`` writes it, or an open file of one. Only tensors are
        read from it. It may be in a dictionary (``state_dict_in``), and its names those of
        a wrapper (``unwrapped``).

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds anything but tensors, or a key is missing, surplus or of another
        shape; the message names them.

    Example
    -------
    >>> path = getfixture("tmp_path") / "linear.ckpt"
    >>> torch.save({"weight": torch.ones(1, 1), "scale": torch.ones(1)}, path)
    >>> load_strictly(nn.Linear(1, 1, bias=False), path)
    Traceback (most recent call last):
    ValueError: ... 1 surplus (the first is scale). ...
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{path} holds more than plain tensors, and is not loaded. Copy the model's "
            "folder again, or ask whoever made it."
        ) from error
    state_dict: Mapping[str, Any] = {}
    try:
        own = module.state_dict()
        state_dict = unwrapped(state_dict_in(loaded), own)
        differences = _differences(state_dict, own)
        if not differences:
            module.load_state_dict(state_dict, strict=True)
            return
    except (RuntimeError, TypeError, AttributeError) as error:
        differences = " ".join(str(error).split())
    advice = "Both must be of one model: copy the folder again."
    if isinstance(module, SpeakerEncoder):
        differences = f"this file holds {_in_words(state_dict)}; {differences}"
        advice = (
            "Give --arch, --widths, --blocks, --n_mels and --embedding_dim as the "
            "model's own hyperparams.yaml has them; if it is this one, copy the folder "
            "again."
        )
    raise ValueError(
        f"{path} does not fit what hyperparams.yaml describes: {differences}. {advice}"
    )


def _differences(given: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Count what of a state dict does not fit, and name the first of each kind."""
    shapes = (
        f"{name}, which is {list(given[name].shape)} and not {list(weight.shape)}"
        for name, weight in own.items()
        if name in given and name != DESCRIPTION and given[name].shape != weight.shape
    )
    kinds = {
        # Weights of other programs do not say of which encoder they are.
        "missing": [n for n in own if n not in given and n != DESCRIPTION],
        "surplus": [name for name in given if name not in own],
        "of another shape": list(shapes),
    }
    return ", ".join(
        f"{len(names)} {kind} (the first is {names[0]})"
        for kind, names in kinds.items()
        if names
    )


def _in_words(state_dict: Mapping[str, Any]) -> str:
    """Describe the size of the encoder whose weights these are."""
    blocks: dict[int, set[str]] = {}
    for name in state_dict:
        match = re.match(r"stages\.(\d+)\.(?:(?:chain\.)?blocks\.(\d+)\.)?", name)
        if match:
            names = blocks.setdefault(int(match[1]), set())
            names |= {match[2]} if match[2] else set()
    counts = [len(blocks.get(i, ())) for i in range(1 + max(blocks, default=-1))]
    if not any(counts) or "fc.weight" not in state_dict:
        return "no encoder of this package"
    kind = (
        "a reversible" if any(".chain." in name for name in state_dict) else "a vanilla"
    )
    return (
        f"{kind} encoder with blocks {counts} and embedding_dim "
        f"{len(state_dict['fc.weight'])}"
    )


def _beside(source: str | Path | FetchSource, name: str) -> str | FetchSource:
    if isinstance(source, FetchSource):
        fetch_from, place = source
        return FetchSource(fetch_from, f"{place}/{name}")
    return f"{source}/{name}"
