"""A model from somebody else runs no code, writes no file and takes bounded memory.

By class of attack. The attacker writes the checksums too, so they stop none of these.
"""

import json
import os
import random
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from safetensors.torch import load, save

from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.untrusted import read_safetensors
from tests.run_folders import speech_like
from tests.unit.inference.conftest import Attack, put, within_memory

YAML, CKPT, SUMS = "hyperparams.yaml", "embedding_model.ckpt", "SHA256SUMS"
TENSORS, THRESHOLDS = "embedding_model.safetensors", "thresholds.json"


def refused(folder, *words, kind=ValueError):
    """The message with which the folder is refused; the words must be in it."""
    with pytest.raises(kind, match=re.escape(str(folder))) as error:
        SpeakerEmbedder.from_hparams(folder, device="cpu")
    message = str(error.value)
    assert all(word in message for word in words), message
    return message


# ------------------------------------------------------------ code in YAML

#: What is written, with which HyperPyYAML would make a folder; what the error names.
CODE = [
    ("!new:pathlib.Path [executed]", "!new:pathlib.Path"),
    ("!apply:os.mkdir [executed]", "!apply:os.mkdir"),
    ("!applyref:os.mkdir [executed]", "!applyref:os.mkdir"),
    ("!include:other.yaml", "!include:other.yaml"),
    ("! x", "!"),
    ("!!python/object/apply:os.mkdir [executed]", "!!python/object/apply:os.mkdir"),
    ("!!int 5", "!!int"),
    (
        "!<tag:yaml.org,2002:python/object/apply:os.mkdir> [executed]",
        "!!python/object/",
    ),
    ("!e!os.mkdir [executed]", "!!python/object/apply:os.mkdir"),
    # Names that are nearly those known.
    ("!new:speechbrain_rev.lobes.build_encoder", "!new:speechbrain_rev.lobes.build"),
    ("!apply:speechbrain_rev.lobes.build_encoder.x", "build_encoder.x"),
    ("!apply:speechbrain_rev.lobes.build_encoder%20", "build_encoder "),
    ("!new:speechbrain.lobes.features.fbank", "!new:speechbrain.lobes.features.fbank"),
]
TAG = "%TAG !e! tag:yaml.org,2002:python/object/apply:\n---\n"
RUN_BY_HYPERPYYAML = ("!apply:os", "!applyref:os", "!!python/object/apply", "!<", "!e!")

PLACES = {
    "a key of its own": lambda text, code: f"{text}more: {code}\n",
    "the first key": lambda text, code: f"more: {code}\n{text}",
    "a plain value": lambda text, code: text.replace("revnet57", code),
    "in a list": lambda text, code: text.replace("[8, 16, 16, 16]", f"[8, {code}]"),
    "an argument": lambda text, code: text.replace("!ref <n_mels>", code, 1),
    "in a mapping": lambda text, code: text.replace(
        "modules:", f"modules:\n    x: {code}"
    ),
    "a key": lambda text, code: f"{text}? {code}\n: 1\n",
    "a second document": lambda text, code: f"{text}...\n{TAG}{code}\n",
}


@pytest.mark.parametrize("place", PLACES)
def test_no_tag_of_any_form_and_place_runs(model, place):
    text = (model / YAML).read_text()
    for code, name in CODE:
        attacked = PLACES[place](text, code)
        assert code in attacked
        put(model, YAML, TAG + attacked)
        message = refused(model, f"{YAML}, line ", name)
        assert "EncoderClassifier.from_hparams loads it" in message


def test_the_attacks_are_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in [code for code, _ in CODE if code.startswith(RUN_BY_HYPERPYYAML)]:
        text = f"arch: revnet57\nmore: {code}\n"
        load_hyperpyyaml((TAG if code.startswith("!e!") else "") + text)
        Path("executed").rmdir()


TUPLE = "(!!python/object/apply:os.mkdir ['executed'])"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        # HyperPyYAML would run this text as a tuple.
        ("revnet57", TUPLE, "executed"),
        ("modules:", f"more: {TUPLE}\nmodules:", "more is no part of an exported"),
        ("win_length: 25", "win_length: 20", "compute_features is not as"),
        ("    name: !ref <arch>", "    plan: x\n    name: !ref <arch>", "embedding_mo"),
        ("new:speechbrain.dataio.encoder.CategoricalEncoder", "ref <arch>", "label_en"),
        ("n_mels: 80\n", "n_mels: 80\nn_mels: 40\n", "n_mels stands there twice"),
        ("n_mels: 80\n", "", "lacks n_mels"),
        ("n_mels: 80\n", "n_mels: 2024-13-45\n", "'2024-13-45' is no value"),
        ("n_mels: 80\n", f"n_mels: {'9' * 5000}\n", "is longer than 100"),
        ("arch: revnet57\n", "arch: [\n", "cannot be read as YAML"),
        # An encoder that would not fit its weights is not built.
        ("[1, 1, 1, 1]", "[9999, 9999, 9999, 9999]", "of which no more than 4,000"),
        ("[1, 1, 1, 1]", "[30, 30, 30, 40]", "bytes; the weights of 130 blocks"),
        ("16, 16]", "16, 15]", "multiples of 4"),
        ("[8, 16, 16, 16]", "[16384, 16384, 16384, 16384]", "bytes; the weights"),
        ("out_n_neurons: 3", "out_n_neurons: 99999999999999999999999", "out_n_neurons"),
        ("a", "a" * 20_001, "characters; an exported model's has less than 20,000"),
    ],
)
def test_settings_of_other_values_are_refused(model, old, new, message):
    text = (model / YAML).read_text()
    assert old in text
    put(model, YAML, text.replace(old, new, 1))
    refused(model, message)


def test_values_in_place_of_references_are_the_same(model):
    text = (model / YAML).read_text()
    put(model, YAML, text.replace("!ref <n_mels>", "80").replace("# Hz", "# hertz"))
    assert SpeakerEmbedder.from_hparams(model, device="cpu").sample_rate == 16000


BOMBS = {
    "aliases": "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "a merge key": "a: &a {x: 1}\nb: {<<: *a}\n",
    "brackets": "a: " + "[" * 4000,
    "dashes": "- " * 8000,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_grows(model, bomb):
    text = (model / YAML).read_text()
    for content in (BOMBS[bomb] + text, text + BOMBS[bomb]):
        put(model, YAML, content)
        message = refused(model, YAML)
    assert bomb != "aliases" or "&a repeats a part of the file" in message


# ------------------------------------------------------------ files, links and sums


def test_files_that_are_not_needed_are_not_opened(model):
    torch.save(Attack(os.mkdir, "executed"), model / "classifier.ckpt")
    torch.save(Attack(os.mkdir, "executed"), model / CKPT)
    (model / "label_encoder.txt").write_text("__import__('os').mkdir('executed')")
    with (model / SUMS).open("a") as sums:
        sums.write("0  ../../../../etc/passwd\n0  /dev/zero\nnonsense\n")
    embedder = SpeakerEmbedder.from_hparams(model, device="cpu")
    assert np.isfinite(embedder.embed(speech_like(), 16000)).all()
    (model / "custom.py").write_text("import os\nos.mkdir('executed')\n")
    refused(model, "custom.py", "foreign_class")


@pytest.fixture
def judging(model):
    """A model with thresholds."""
    put(model, THRESHOLDS, '{"thresholds": []}\n')
    return model


READ = pytest.mark.parametrize("name", [YAML, TENSORS, SUMS, THRESHOLDS])


@READ
def test_only_files_of_the_folder_are_read(judging, name):
    path, outside = judging / name, judging.parent / "outside"
    path.rename(outside)
    for target in (outside, "../model/../outside"):
        path.symlink_to(target)
        refused(judging, f"{name} is a link out of its folder")
        path.unlink()
    (judging / CKPT).unlink()
    if name != THRESHOLDS:
        refused(judging, f"has no {name}", kind=FileNotFoundError)


@pytest.mark.parametrize("name", [YAML, TENSORS, THRESHOLDS])
def test_a_changed_file_is_refused_by_its_checksum(judging, name):
    content = bytearray((judging / name).read_bytes())
    content[-2] ^= 1
    (judging / name).write_bytes(content)
    refused(judging, f"{name} is not as it was written")
    sums = (judging / SUMS).read_text().splitlines(keepends=True)
    kept = [line for line in sums if not line.endswith(f"  {name}\n")]
    (judging / SUMS).write_text("".join(kept))
    refused(judging, f"{name} is not listed")


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        (TENSORS, 0, "has 0 bytes"),
        (TENSORS, 10**12, "has 1,000,000,000,000 bytes"),
        (YAML, 10**12, "has more than 100,000 bytes"),
        (SUMS, 10**12, "has more than 100,000 bytes"),
    ],
)
def test_a_file_of_another_size_is_not_read_to_its_end(model, name, size, words):
    os.truncate(model / name, size)
    refused(model, f"{name} {words}")


# ------------------------------------------------------------ headers and tensors


def with_header(content, change):
    """A .safetensors file whose header was changed, of the same data."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def first(key, value):
    """A change of the first tensor in a header."""
    return lambda h: next(e for n, e in h.items() if n[0] != "_").update({key: value})


LYING = {
    "a shape of other size": first("shape", [10**12]),
    "a shape that overflows": first("shape", [2**32, 2**32, 2**32]),
    "a type unheard of": first("dtype", "F7"),
    "a hole": lambda header: header.pop(next(iter(header))) and None,
    "deep JSON": lambda header: b"[" * 60000,
}
NUMBERS = "fc.bias is torch.{} instead of torch.float32 [16]"


def fc_bias(change):
    def changed(content):
        state = load(content)
        return save(state | {"fc.bias": change(state["fc.bias"])})

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((lambda c, lie=lie: with_header(c, lie), TENSORS) for lie in LYING.values()),
        *(
            (lambda c, n=n: struct.pack("<Q", n) + c[8:], "no whole .safetensors file")
            for n in (2**64 - 1, 10**5, 0)
        ),
        (lambda c: save({"more": torch.ones(1), **load(c)}), "'more' is surplus"),
        (fc_bias(lambda t: t[:-1].clone()), NUMBERS.format("float32 [15]")),
        (fc_bias(lambda t: t.double()), NUMBERS.format("float64 [16]")),
        (fc_bias(lambda t: t / 0), "fc.bias holds NaN"),
    ],
)
def test_weights_of_another_header_names_shapes_and_types_are_refused(
    model, change, words
):
    put(model, TENSORS, change((model / TENSORS).read_bytes()))
    refused(model, TENSORS, words)


def test_a_header_of_more_or_larger_tensors_than_expected_is_not_parsed():
    path, state = Path("a.safetensors"), {"x": torch.ones(1)}
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    def read(entries, expected):
        header = json.dumps(entries).encode()
        return read_safetensors(struct.pack("<Q", len(header)) + header, path, expected)

    entries = {f"{i}": entry for i in range(2000)}
    assert len(read(entries, dict.fromkeys(entries))) == 2000
    with pytest.raises(ValueError, match=r"header has .* bytes, of at most 66,048"):
        read(entries, state)
    for size in (2**63, 2**64 - 1):
        with pytest.raises(ValueError, match=r"a\.safetensors is no whole"):
            read({"x": {**entry, "shape": [0, size]}}, state)


# ------------------------------------------------------------ memory and damage


@pytest.mark.slow(drawn=False)
def test_no_attack_takes_more_than_the_stated_memory(model, exported, tmp_path):
    text, folders = exported[YAML].decode(), [model]

    def attack(name, content=None, size=None):
        folders.append(shutil.copytree(model, tmp_path / f"attack{len(folders)}"))
        if content is not None:
            put(folders[-1], name, content)
        if size is not None:
            os.truncate(folders[-1] / (name if content is None else TENSORS), size)

    for bomb in BOMBS.values():
        attack(YAML, text + bomb)
    for lie in LYING.values():
        attack(TENSORS, with_header(exported[TENSORS], lie))
    for name in (YAML, TENSORS, SUMS):
        attack(name, size=10**12)
    for blocks in (1000, 10000):
        attack(YAML, text.replace("1, 1, 1, 1", f"{[blocks] * 4}"[1:-1]), 10**7)
    attack(YAML, text.replace("8, 16, 16, 16", f"{[16384] * 4}"[1:-1]), 10**7)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{i}": entry for i in range(1500)}).encode()
    content = struct.pack("<Q", len(header)) + header
    attack(TENSORS, content + exported[TENSORS][len(content) :])
    ended = within_memory(200_000_000, 4, folders)
    assert ended == ["loaded"] + ["refused"] * (len(folders) - 1)


def test_too_little_memory_for_a_file_is_an_error_of_that_file(model, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("safetensors.torch.load", fail)
    refused(model, TENSORS, "is not loaded")


@pytest.mark.parametrize("name", [YAML, TENSORS])
@pytest.mark.parametrize("tries", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_whatever_it_hits(
    model, exported, name, tries, fuzz_seed
):
    draw, outcomes = random.Random(fuzz_seed), []
    for _ in range(tries):
        content = bytearray(exported[name])
        # Most of a file of weights is numbers; headers are at both ends.
        places = [*range(3000), *range(len(content) - 3000, len(content))]
        for _ in range(draw.choice([1, 3])):
            content[draw.choice(places) % len(content)] = draw.randrange(256)
        put(model, name, bytes(content))
        try:
            SpeakerEmbedder.from_hparams(model, device="cpu")
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes
    assert all(str(model) in message for message in outcomes)
