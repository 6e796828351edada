"""The one set of features that a run may train on: what embedding rebuilds.

A run's folder is read without building what its YAML describes, so window, hop and
normalisation are not looked up there. Training on others would embed wrongly in silence.
"""

from __future__ import annotations

from speechbrain_rev.hparams.settings import Settings

_FBANK = "!new:speechbrain.lobes.features.Fbank"
_NORMALIZATION = "!new:speechbrain.processing.features.InputNormalization"
_EXPECTED = {
    "compute_features": _FBANK,
    "compute_features.sample_rate": "!ref <sample_rate>",
    "compute_features.n_mels": "!ref <n_mels>",
    "compute_features.win_length": "25",
    "compute_features.hop_length": "10",
    "mean_var_norm": _NORMALIZATION,
    "mean_var_norm.norm_type": "sentence",
    "mean_var_norm.std_norm": "false",
    "modules.compute_features": "!ref <compute_features>",
    "modules.mean_var_norm": "!ref <mean_var_norm>",
}
_OBJECTS = ("compute_features", "mean_var_norm")


def refuse_other_features(settings: Settings) -> None:
    r"""Refuse settings whose features are not those that embedding rebuilds.

    Parameters
    ----------
    settings : Settings
        Those without ``compute_features`` and ``mean_var_norm`` pass.

    Raises
    ------
    ValueError
        If window, hop, normalisation or another of their settings is not the expected.

    Examples
    --------
    >>> from speechbrain_rev.hparams.document import Document
    >>> text = "mean_var_norm: !new:speechbrain.processing.features.InputNormalization"
    >>> document = Document("train.yaml", text + "\n    std_norm: true\n")
    >>> refuse_other_features(Settings(document))
    Traceback (most recent call last):
    ValueError: train.yaml, line 2: mean_var_norm.std_norm is true, but must be false...
    """
    for path, value in settings.nodes():
        if not path.startswith(_OBJECTS) and path not in _EXPECTED:
            continue
        tag = str(value.node.tag) if str(value.node.tag).startswith("!") else ""
        written = value.node.value if isinstance(value.node.value, str) else ""
        found = f"{tag} {written}".strip()
        if found != (expected := _EXPECTED.get(path, "left out")):
            raise ValueError(
                f"{value.where}: {path} is {found}, but must be {expected}: "
                "embedding a run builds its features anew from n_mels and sample_rate "
                "alone, and would not see this change. Change those two only."
            )
