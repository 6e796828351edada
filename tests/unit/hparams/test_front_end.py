"""The front end that each file of settings gives its encoder."""

from pathlib import Path

import pytest
import yaml
from yaml.nodes import MappingNode, ScalarNode

SETTINGS = Path(__file__).parents[3] / "hparams"
FILES = [
    path for path in SETTINGS.rglob("*.yaml") if "SpeakerEncoder" in path.read_text()
]
FILES += [SETTINGS / "train.yaml"]


def mappings(node):
    """All mappings of a document at any depth: the tag, and nodes by key."""
    if isinstance(node, MappingNode):
        yield node.tag, {key.value: value for key, value in node.value}
        for _, value in node.value:
            yield from mappings(value)


def value(node):
    return (node.tag, node.value) if isinstance(node, ScalarNode) else node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_encoder_gets_the_settings_that_build_its_features(path):
    found = list(mappings(yaml.compose(path.read_text())))
    (front_end,) = [dict(m["front_end"].value) for _, m in found if "front_end" in m]
    front_end = {key.value: node for key, node in front_end.items()}
    (features,) = [
        m for tag, m in found if tag.endswith(("Fbank", "features.build_features"))
    ]
    assert (
        value(front_end["n_mels"]) == value(features["n_mels"]) == ("!ref", "<n_mels>")
    )
    fbank = ScalarNode("tag:yaml.org,2002:str", "speechbrain")
    assert value(front_end["kind"]) == value(features.get("kind", fbank))
    rate = value(front_end["sample_rate"])
    assert rate == value(features.get("sample_rate", front_end["sample_rate"]))
    assert rate == ("!ref", "<sample_rate>")
