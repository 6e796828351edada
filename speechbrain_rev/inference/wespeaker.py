"""WeSpeaker's models as folders of weights of ours, and back.

WeSpeaker feeds its networks Kaldi's filterbanks and pools the unbiased variance. The
converted weights have both in their description.

The networks are the same, layer by layer. Each weight of ours has one name there, which
follows from the structure of our encoder. Weights with any other name are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechbrain_rev.architectures import ENCODERS, Architecture, architecture
from speechbrain_rev.files import (
    digest_of,
    folder_whole,
    plain_yaml,
    write_sums,
    write_whole,
)
from speechbrain_rev.inference.trained import (
    SAFETENSORS,
    SETTINGS,
    new_folder,
    read_weights,
    saved_bytes,
    write_weights,
)
from speechbrain_rev.inference.untrusted import (
    check_weights,
    read_own,
    read_tensors,
    short,
    some_names,
)
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.description import (
    EncoderDescription,
    FrontEnd,
    weights_in,
)
from speechbrain_rev.lobes.pretrained import unwrapped

_COUNTER = ".num_batches_tracked"
# Prefix of the training classifier, which is dropped.
_DROPPED = "projection."


def from_wespeaker(
    state_dict: Mapping[str, Tensor],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Rename the weights of a WeSpeaker ResNet or Gemini-DF-ResNet to ours.

    Parameters
    ----------
    state_dict : mapping of str to torch.Tensor
        Of the network, with the classifier of its training (``projection``), which is
        left out, or without. What wrappers put before all names (``module.``,
        ``front.``) is taken off, see ``unwrapped``.

    Returns
    -------
    settings : dict of str to object
        Keywords of ``build_encoder`` that make the network; its ``name`` is that of the
        table with blocks of this kind, and this depth if there is one.
    weights : dict of str to torch.Tensor
        Its state dict. Counts of batches, which averaging makes fractions, are cut to
        whole numbers as torch does when it loads them; all else is the same to the bit.

    Raises
    ------
    ValueError
        If a name is missing, unknown or has tensors of another shape or type than the
        network that the others belong to, or they are not finite.

    Example
    -------
    >>> encoder = build_encoder("resnet34", widths=(4, 8, 8, 8), blocks=(1, 2, 1, 1))
    >>> settings = {"name": "resnet34", "widths": (4, 8, 8, 8), "blocks": (1, 2, 1, 1)}
    >>> theirs = to_wespeaker(settings, encoder.state_dict())
    >>> settings, weights = from_wespeaker(theirs)
    >>> settings["blocks"], settings["n_mels"]
    ([1, 2, 1, 1], 80)
    >>> weights.keys() == weights_in(encoder.state_dict()).keys()
    True
    """
    weights = {
        name: weight.to(torch.int64)
        if name.endswith(_COUNTER) and weight.is_floating_point()
        else weight.detach()
        for name, weight in _drop_classifier(state_dict).items()
    }
    layout = next((row for row in _LAYOUTS if row.marker in weights), _LAYOUTS[-1])
    settings = _recognise_network(weights, layout)
    encoder_weights = _encoder_weights(settings)
    names = {name: layout.rename(name) for name in encoder_weights}
    check_weights(weights, {names[n]: weight for n, weight in encoder_weights.items()})
    return settings, {ours: weights[theirs] for ours, theirs in names.items()}


def to_wespeaker(
    settings: Mapping[str, Any], state_dict: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rename the weights of an encoder to those of WeSpeaker's network.

    Parameters
    ----------
    settings : mapping of str to object
        Keywords of ``build_encoder``.
    state_dict : mapping of str to torch.Tensor
        The encoder's.

    Returns
    -------
    dict of str to torch.Tensor
        The same tensors, without a classifier.

    Raises
    ------
    ValueError
        If WeSpeaker has no such network, or the weights are of another one.

    Example
    -------
    >>> encoder = build_encoder("resnet34", blocks=(1, 1, 1, 1))
    >>> settings = {"name": "resnet34", "blocks": (1, 1, 1, 1)}
    >>> sorted(to_wespeaker(settings, encoder.state_dict()))[:3]
    ['bn1.bias', 'bn1.num_batches_tracked', 'bn1.running_mean']
    """
    encoder_weights = _encoder_weights(settings)
    check_weights(state_dict, encoder_weights)
    rename = _layout_of(settings["name"]).rename
    return {rename(name): state_dict[name].detach() for name in encoder_weights}


def _drop_classifier(state_dict: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Leave out the classifier, and what wrappers put before all other names."""
    while True:
        network = {k: v for k, v in state_dict.items() if not k.startswith(_DROPPED)}
        state_dict = unwrapped(network, ())
        if state_dict is network:
            return network


@dataclass(frozen=True)
class _Layout:
    """WeSpeaker's names of the weights of one kind of network.

    Attributes
    ----------
    kind : str
        WeSpeaker's name of the kind, without a depth.
    example : str
        An encoder of ours of this kind.
    marker : str
        The weight by which the kind is recognised.
    stages : tuple of str
        Prefix of the blocks' names in each stage.
    width_axis : int
        Axis of a block's ``conv1.weight`` whose size is the stage's width.
    rename : callable
        Returns WeSpeaker's name of a weight of ours.
    """

    kind: str
    example: str
    marker: str
    stages: tuple[str, ...]
    width_axis: int
    rename: Callable[[str], str]

    def rows(self) -> list[Architecture]:
        """List the encoders of this kind."""
        kind = architecture(self.example).kind
        return [row for row in ENCODERS.values() if row.kind == kind]


def _rename_resnet(name: str) -> str:
    match name.split("."):
        case ["stem", "convs", "0", tensor]:
            return f"conv1.{tensor}"
        case ["stem", "norms", "0", tensor]:
            return f"bn1.{tensor}"
        case ["stages", stage, "blocks", block, "shortcut", layer, tensor]:
            position = ("conv", "norm").index(layer)
            return f"layer{int(stage) + 1}.{block}.shortcut.{position}.{tensor}"
        case ["stages", stage, "blocks", block, layer, tensor]:
            layer = layer.replace("norm", "bn")
            return f"layer{int(stage) + 1}.{block}.{layer}.{tensor}"
        case ["fc", tensor]:
            return f"seg_1.{tensor}"
    raise AssertionError(name)


def _rename_gemini(name: str) -> str:
    match name.split("."):
        case ["stem", layer, "0", tensor]:
            return f"downsample_layers.0.{('convs', 'norms').index(layer)}.{tensor}"
        case ["stages", stage, "entry", layer, tensor]:
            position = ("conv", "norm").index(layer)
            return f"downsample_layers.{int(stage) + 1}.{position}.{tensor}"
        case ["stages", stage, "blocks", block, layer, tensor]:
            return f"stages.{stage}.{block}.{layer.replace('norm', 'bn')}.{tensor}"
        case ["fc", tensor]:
            return f"seg_1.{tensor}"
    raise AssertionError(name)


_RESNET_STAGES = ("layer1.", "layer2.", "layer3.", "layer4.")
_GEMINI_STAGES = ("stages.0.", "stages.1.", "stages.2.", "stages.3.")
#: In order of recognition: a bottleneck ResNet has the last marker too. Errors name the
#: last kind if no marker is there.
_LAYOUTS = (
    _Layout(
        "Gemini-DF-ResNet", "gemini_df_resnet60", "downsample_layers.0.0.weight",
        _GEMINI_STAGES, 1, _rename_gemini,
    ),
    _Layout(
        "ResNet", "resnet101", "layer1.0.conv3.weight", _RESNET_STAGES, 0, _rename_resnet
    ),
    _Layout("ResNet", "resnet34", "conv1.weight", _RESNET_STAGES, 0, _rename_resnet),
)  # fmt: skip


def _layout_of(name: str) -> _Layout:
    """Return WeSpeaker's layout of an encoder."""
    row = architecture(name)
    for layout in _LAYOUTS:
        if row in layout.rows():
            return layout
    names = [row.name for layout in _LAYOUTS[::-1] for row in layout.rows()]
    raise ValueError(
        f"{name} is no network of WeSpeaker's; these are: {', '.join(names)}."
    )


def _recognise_network(
    state_dict: Mapping[str, Tensor], layout: _Layout
) -> dict[str, Any]:
    """Recognise the network by names and shapes."""
    blocks = [
        len({n[len(stage) :].split(".")[0] for n in state_dict if n.startswith(stage)})
        for stage in layout.stages
    ]
    widths = [
        _read_size(state_dict, f"{stage}0.conv1.weight", layout.width_axis, layout)
        for stage in layout.stages
    ]
    rows = layout.rows()
    channels = widths[-1] * rows[0].expansion
    pooled = _read_size(state_dict, "seg_1.weight", 1, layout)
    bands, left_over = divmod(pooled, 2 * channels)
    if left_over or not bands:
        raise ValueError(
            f"seg_1.weight takes {pooled:,} statistics, which are not the means and "
            f"deviations of {channels:,} channels at some frequencies. Was the pooling "
            "another one than TSTP?"
        )
    exact = [row for row in rows if list(row.blocks) == blocks]
    return {
        "name": (exact or rows)[0].name,
        "widths": widths,
        "blocks": blocks,
        # WeSpeaker rounds frequencies down: other numbers of bands cannot be built there.
        "n_mels": rows[0].geometry().frequency_downsampling * bands,
        "embedding_dim": _read_size(state_dict, "seg_1.weight", 0, layout),
    }


def _read_size(
    state_dict: Mapping[str, Tensor], name: str, axis: int, layout: _Layout
) -> int:
    if name not in state_dict or state_dict[name].dim() <= axis:
        raise ValueError(
            f"it has no weights {name}, which a WeSpeaker {layout.kind} has; it holds "
            f"{some_names(state_dict)}."
        )
    size = state_dict[name].shape[axis]
    if size == 0:
        raise ValueError(f"{name} is empty, {list(state_dict[name].shape)}.")
    return size


def _encoder_weights(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Build the weights of our encoder on the meta device."""
    sizes = dict(settings)
    name = sizes.pop("name")
    layout = _layout_of(name)
    with torch.device("meta"):
        encoder = build_encoder(name, **sizes)
    step = encoder.geometry.frequency_downsampling
    if encoder.n_mels % step:
        raise ValueError(
            f"n_mels is {encoder.n_mels}; WeSpeaker's {layout.kind}s take multiples of "
            f"{step}."
        )
    return weights_in(encoder.state_dict())


#: How WeSpeaker makes features, and which variance it pools.
_FRONT_END, _VARIANCE = FrontEnd("kaldi", 16000, 80), "unbiased"
_TAKEN = (
    "Taken are the averaged or last weights (avg_model.pt, model_150.pt) of WeSpeaker's "
    "ResNet18 to ResNet293 or Gemini_DF_ResNet60 to 237, with TSTP pooling and one "
    "embedding layer."
)
#: Values that config.yaml may have for these keys, if it has them.
_CONFIG: dict[tuple[str, ...], object] = {
    ("model_args", "pooling_func"): "TSTP",
    ("model_args", "two_emb_layer"): False,
    ("dataset_args", "frontend"): "fbank",
    ("dataset_args", "resample_rate"): _FRONT_END.sample_rate,
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
_MOST_BYTES = 1_000_000


def convert_from_wespeaker(
    path: str | PathLike[str], folder: str | PathLike[str]
) -> EncoderDescription:
    """Write a WeSpeaker model as a folder that ``SpeakerEmbedder.from_hparams`` loads.

    Parameters
    ----------
    path : str or path-like
        ``avg_model.pt``. A ``config.yaml`` beside it must say nothing else than the
        weights and than what is assumed of their front-end.
    folder : str or path-like
        A new or an empty folder.

    Returns
    -------
    EncoderDescription
        What the weights say of themselves.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it holds anything but the weights of such a network; see ``from_wespeaker``.
    OSError
        If the folder cannot be written.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path}. Give the avg_model.pt of a WeSpeaker model."
        )
    theirs = read_tensors(path)
    try:
        settings, weights = from_wespeaker(theirs)
    except ValueError as error:
        raise ValueError(f"{path} cannot be converted: {error} {_TAKEN}") from error
    if path.with_name("config.yaml").exists():
        _check_config(path.with_name("config.yaml"), settings)
    front_end = replace(_FRONT_END, n_mels=settings["n_mels"])
    with torch.device("meta"):
        encoder = build_encoder(
            **settings, pooling_variance=_VARIANCE, front_end=front_end
        )
    with new_folder(folder) as new, folder_whole(new) as part:
        write_weights(part, encoder.description, weights)
        names = (SAFETENSORS, SETTINGS)
        write_sums(part, {name: digest_of(part / name) for name in names})
    return encoder.description


def convert_to_wespeaker(
    folder: str | PathLike[str], path: str | PathLike[str]
) -> None:
    """Write the weights of a run, of a converted model for instance, as WeSpeaker's.

    Parameters
    ----------
    folder : str or path-like
        The run or model, whose weights say that its front end is Kaldi's and its pooling
        of the unbiased variance: WeSpeaker would feed it nothing else.
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
    weights = read_weights(folder)
    settings = asdict(weights.description)
    front_end, variance = settings.pop("front_end"), settings.pop("pooling_variance")
    expected = asdict(replace(_FRONT_END, n_mels=settings["n_mels"]))
    if (front_end, variance) != (expected, _VARIANCE):
        raise ValueError(
            f"{folder}: front_end is {front_end}, not {expected}, or pooling_variance is "
            f"{variance}, not {_VARIANCE}. WeSpeaker would compute other embeddings with "
            "these weights than they were trained for. Convert a model back that came from "
            "there, or has these settings."
        )
    try:
        theirs = to_wespeaker(settings, weights.state_dict)
    except ValueError as error:
        raise ValueError(f"{weights.path} cannot be converted: {error}") from error
    write_whole(Path(path), saved_bytes(theirs))


def _check_config(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a network or a front-end that is not what its weights are taken for."""
    try:
        config = plain_yaml(read_own(path.parent, path.name, _MOST_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as plain YAML: {error}") from error
    expected = _CONFIG | {key: settings[name] for key, name in _CONFIG_SIZES.items()}
    for keys, value in expected.items():
        entry: Any = config
        for key in keys:
            entry = entry.get(key) if isinstance(entry, dict) else None
        if entry is not None and entry != value:
            raise ValueError(
                f"{path} says {'.'.join(keys)}: {short(entry)}, but the weights are taken for "
                f"{value}. {_TAKEN}"
            )
