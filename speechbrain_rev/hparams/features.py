"""The one set of features that a run may train on: what embedding rebuilds.

A run's folder is read without building what its YAML describes, so window, hop and
normalisation are not looked up there. Training on others would embed wrongly in silence.
"""

from __future__ import annotations

from speechbrain_rev.hparams.document import Document, walk

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


def refuse_other_features(document: Document) -> None:
    r"""Refuse a complete text whose features are not those that embedding rebuilds.

    Parameters
    ----------
    document : Document
        A complete text; one without ``compute_features`` and ``mean_var_norm`` passes.

    Raises
    ------
    ValueError
        If window, hop, normalisation or another of their settings is not the expected.

    Examples
    --------
    >>> text = "mean_var_norm: !new:speechbrain.processing.features.InputNormalization"
    >>> refuse_other_features(Document("train.yaml", text + "\n    std_norm: true\n"))
    Traceback (most recent call last):
    ValueError: train.yaml, line 2: mean_var_norm.std_norm is true, but must be false...
    """
    for path, node in walk(document.root):
        if not path.startswith(_OBJECTS) and path not in _EXPECTED:
            continue
        tag = str(node.tag) if str(node.tag).startswith("!") else ""
        value = node.value if isinstance(node.value, str) else ""
        found = f"{tag} {value}".strip()
        if found != (expected := _EXPECTED.get(path, "left out")):
            raise ValueError(
                f"{document.where(node)}: {path} is {found}, but must be {expected}: "
                "embedding a run builds its features anew from n_mels and sample_rate "
                "alone, and would not see this change. Change those two only."
            )
