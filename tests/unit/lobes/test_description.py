"""What an encoder's state dict says of it: written by all, needed by none, checked."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load, save
from speechbrain.utils.checkpoints import (
    Checkpointer,
    average_checkpoints,
    torch_parameter_transfer,
)

from speechbrain_rev.inference.archive import fingerprint_of
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.lobes.description import (
    DESCRIPTION,
    EncoderDescription,
    FrontEnd,
    front_end_of,
    weights_in,
)
from speechbrain_rev.lobes.pretrained import load_strictly
from tests.run_folders import tiny_encoder

KALDI = {"kind": "kaldi", "sample_rate": 16000}
SIZES = {"widths": (8, 8, 8, 8), "blocks": (1, 1, 1, 1), "embedding_dim": 16}


def read(state_dict):
    return EncoderDescription.of_state_dict(state_dict)


def as_tensor(value):
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.int32)


@pytest.mark.parametrize(
    "built",
    [
        {"name": "resnet34"},
        {"name": "df_revnet66", "front_end": KALDI, **SIZES},
        {"name": "revnet57", "pooling": "attentive"},
        {"name": "revnet57", "pooling_variance": "unbiased", **SIZES},
        {"name": "revnet57", "n_mels": 40, "front_end": FrontEnd("kaldi", 8000, 40)},
    ],
)
def test_whoever_has_the_weights_builds_their_encoder(built):
    with torch.device("meta"):
        encoder = build_encoder(**built)
    said = read(encoder.state_dict())
    assert said == encoder.description
    fields = dataclasses.asdict(said)
    given = {**built, "front_end": said.front_end}
    assert all(getattr(said, name) == value for name, value in given.items())
    with torch.device("meta"):
        again = build_encoder(**fields).state_dict()
    assert {n: t.shape for n, t in again.items()} == {
        n: t.shape for n, t in encoder.state_dict().items()
    }


def test_state_dicts_are_the_same_in_all_modes():
    torch.manual_seed(0)
    texts = [
        build_encoder("revnet57", mode=mode, **SIZES).state_dict()[DESCRIPTION]
        for mode in ("store", "recompute", "reconstruct", "compress")
    ]
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_a_description_goes_through_safetensors_and_through_files(tmp_path):
    encoder = tiny_encoder()
    written = save({n: t.contiguous() for n, t in encoder.state_dict().items()})
    assert read(load(written)) == encoder.description
    (tmp_path / "weights.safetensors").write_bytes(written)
    torch.save(encoder.state_dict(), tmp_path / "weights.ckpt")
    for path in tmp_path.iterdir():
        weights = read_weights(path)
        assert weights.description == encoder.description
        assert weights.fingerprint == fingerprint_of(
            encoder.state_dict(), encoder.description
        )


def test_equal_weights_behind_other_features_or_pooling_are_another_model(tmp_path):
    encoder = tiny_encoder()
    torch.save(weights_in(encoder.state_dict()), tmp_path / "weights.ckpt")
    built = dataclasses.asdict(encoder.description)
    front_ends = [{"kind": k, "sample_rate": 16000} for k in ("speechbrain", "kaldi")]
    front_ends.append({"kind": "kaldi", "sample_rate": 8000})
    given = [{**built, "front_end": front_end} for front_end in front_ends]
    given.append({**given[0], "pooling_variance": "unbiased"})
    weights = [read_weights(tmp_path / "weights.ckpt", one) for one in given]
    assert len({one.fingerprint for one in weights}) == 4


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_the_average_of_checkpoints_says_what_each_does(tmp_path, count):
    encoder = tiny_encoder()
    checkpointer = Checkpointer(tmp_path, {"encoder": encoder})
    for _ in range(count):
        checkpointer.save_checkpoint()
    average = average_checkpoints(checkpointer.list_checkpoints(), "encoder")
    assert read(average) == encoder.description
    # As SpeechBrain's script evaluates it.
    torch.save(average, tmp_path / "average.ckpt")
    torch_parameter_transfer(encoder, tmp_path / "average.ckpt")
    assert read(encoder.state_dict()) == encoder.description


def test_weights_without_a_description_are_loaded_strictly(tmp_path):
    encoder = tiny_encoder()
    weights = weights_in(encoder.state_dict())
    assert fingerprint_of(weights) == fingerprint_of(encoder.state_dict())
    assert read(weights) is None
    encoder.load_state_dict(weights, strict=True)
    wrapped = torch.nn.ModuleDict({"encoder": encoder})
    wrapped.load_state_dict({f"encoder.{n}": t for n, t in weights.items()})
    torch.save(weights, tmp_path / "a.ckpt")
    load_strictly(encoder, tmp_path / "a.ckpt")
    assert DESCRIPTION not in weights


def test_an_encoder_stays_what_it_was_built_as():
    encoder, other = tiny_encoder(), tiny_encoder(front_end=KALDI)
    encoder.load_state_dict(other.state_dict())
    assert read(encoder.state_dict()).front_end.kind == "speechbrain"


SAID = dataclasses.asdict(tiny_encoder().description)
OF = "_extra_state is no description of one "


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "is not a mapping"),
        ({**SAID, "more": 1}, "unexpected keyword argument 'more'"),
        (
            {n: v for n, v in SAID.items() if n != "pooling"},
            "missing 1 required .*'pooling'",
        ),
        ({**SAID, "name": 5}, "name is 5 and takes str"),
        ({**SAID, "widths": 8}, "widths is 8 and takes tuple"),
        ({**SAID, "widths": [8.5] * 4}, r"widths is \[8\.5, .* takes tuple"),
        ({**SAID, "widths": [2**21] * 4}, "a number of widths is 2097152"),
        ({**SAID, "blocks": [10**6, 1, 1, 1]}, "1,000,003 in all, of at most 4,000"),
        ({**SAID, "blocks": [True] * 4}, r"blocks is \[True, .* takes tuple"),
        ({**SAID, "n_mels": "80"}, "n_mels is '80'"),
        ({**SAID, "n_mels": 40}, "front_end makes n_mels 80, and the encoder takes 40"),
        ({**SAID, "embedding_dim": 0}, "embedding_dim is 0"),
        ({**SAID, "pooling": ["statistics"]}, r"pooling is \['statistics'\] and takes"),
        ({**SAID, "pooling_variance": None}, "pooling_variance is None and takes"),
        ({**SAID, "front_end": "kaldi"}, "front_end is 'kaldi'"),
        (
            {**SAID, "front_end": {"kind": "kaldi"}},
            "missing 2 required .*'sample_rate'",
        ),
        (
            {**SAID, "front_end": {**SAID["front_end"], "sample_rate": 48000}},
            "takes a whole number from 4000 to 16,000",
        ),
        (
            {**SAID, "front_end": {**SAID["front_end"], "kind": "htk"}},
            "kind of front_end is 'htk' and takes speechbrain or kaldi",
        ),
    ],
)
def test_descriptions_of_other_types_and_sizes_are_refused(value, words):
    with pytest.raises(ValueError, match=f"{OF}.*{words}"):
        read({DESCRIPTION: as_tensor(value)})


@pytest.mark.parametrize(
    "change",
    [
        lambda t: "text",
        lambda t: t[None],
        lambda t: t[:1].expand(2**40),
        lambda t: t[:-1],
        lambda t: t * torch.inf,
        lambda t: t.to(torch.complex64),
        lambda t: torch.tensor(list(b"[" * 3999)),
    ],
)
def test_tensors_of_no_text_are_refused(change):
    with pytest.raises(ValueError, match=OF):
        read({DESCRIPTION: change(as_tensor(SAID))})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("kaldi", "give kind, sample_rate, n_mels, normalisation"),
        ({**KALDI, "mean": True}, "give kind, sample_rate, n_mels, normalisation"),
        ({"kind": "kaldi"}, "missing .*'sample_rate'"),
        (
            {**KALDI, "n_mels": 40},
            "front_end makes n_mels 40, and the encoder takes 80",
        ),
        ({**KALDI, "n_mels": 1024}, "from 1 to 512"),
    ],
)
def test_a_front_end_that_is_none_is_refused_where_it_is_given(given, words):
    with pytest.raises(ValueError, match=words):
        build_encoder("resnet34", front_end=given, **SIZES)
    assert front_end_of(None, 80) is None
