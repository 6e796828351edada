"""A model from somebody else runs no code, writes no file and takes bounded memory.

By class of attack. The attacker writes the checksums too, so they stop none of these.
"""

import hashlib
import json
import os
import random
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hyperpyyaml import load_hyperpyyaml
from safetensors.torch import load_file, save_file
from speechbrain.inference.classifiers import EncoderClassifier

from speechbrain_rev import cli
from speechbrain_rev.inference import (
    SpeakerEmbedder,
    export_run,
    model_folder,
    read_cohort,
)
from speechbrain_rev.inference.cohort import Cohort
from speechbrain_rev.inference.export import convert_from_speechbrain
from speechbrain_rev.inference.untrusted import read_safetensors
from tests.run_folders import speech_like, write_finished_run

YAML, CKPT, TENSORS = (
    "hyperparams.yaml",
    "embedding_model.ckpt",
    "embedding_model.safetensors",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    write_finished_run(folder / "run")
    export_run(folder / "run", folder / "out")
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


@pytest.fixture
def folder(exported, tmp_path, monkeypatch):
    """A model's folder; after the test, nothing else may have been written."""
    place = tmp_path / "model"
    place.mkdir()
    for name, content in exported.items():
        (place / name).write_bytes(content)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield place
    assert not any(path.name == "executed" for path in tmp_path.rglob("*"))
    assert not list((tmp_path / "cwd").iterdir())


def write(folder, name, content):
    """Put a file into the folder, with its checksum."""
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(content)
    sums = (folder / "SHA256SUMS").read_text().splitlines()
    sums = [line for line in sums if not line.endswith(f"  {name}")]
    sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}")
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")


def refused(folder, *words):
    """The message with which the folder is refused; the words must be in it."""
    with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
        SpeakerEmbedder.from_hparams(folder, device="cpu")
    message = str(error.value)
    assert all(word in message for word in words), message
    return message


# ------------------------------------------------------------ code in YAML

#: What is written, with which HyperPyYAML would make a folder; what the error names.
CODE = [
    ("!new:pathlib.Path [executed]", "!new:pathlib.Path"),
    ("!apply:os.mkdir [executed]", "!apply:os.mkdir"),
    ("!name:os.mkdir [executed]", "!name:os.mkdir"),
    ("!module:os", "!module:os"),
    ("!applyref:os.mkdir [executed]", "!applyref:os.mkdir"),
    ("!include:other.yaml", "!include:other.yaml"),
    ("!copy <arch>", "!copy"),
    ("!PLACEHOLDER", "!PLACEHOLDER"),
    ("!tuple (1, 2)", "!tuple"),
    ("! x", "!"),
    ("!unheard_of x", "!unheard_of"),
    ("!!python/object/apply:os.mkdir [executed]", "!!python/object/apply:os.mkdir"),
    ("!!python/object/new:os.mkdir [executed]", "!!python/object/new:os.mkdir"),
    ("!!python/object:os.mkdir {}", "!!python/object:os.mkdir"),
    ("!!python/name:os.mkdir", "!!python/name:os.mkdir"),
    ("!!python/module:os", "!!python/module:os"),
    ("!!python/tuple [1]", "!!python/tuple"),
    ("!!binary aGk=", "!!binary"),
    ("!!set {a}", "!!set"),
    ("!!int 5", "!!int"),
    (
        "!<tag:yaml.org,2002:python/object/apply:os.mkdir> [executed]",
        "!!python/object/apply:os.mkdir",
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
        "modules:", f"modules:\n    more: {code}"
    ),
    "a key": lambda text, code: f"{text}? {code}\n: 1\n",
    "a second document": lambda text, code: f"{text}...\n{TAG}{code}\n",
}


@pytest.mark.parametrize(("code", "name"), CODE)
@pytest.mark.parametrize("place", PLACES)
def test_no_tag_of_any_form_and_place_runs(folder, place, code, name):
    text = PLACES[place]((folder / YAML).read_text(), code)
    assert code in text
    write(folder, YAML, TAG + text)
    message = refused(folder, f"{YAML}, line ", name)
    assert "EncoderClassifier.from_hparams loads it" in message


@pytest.mark.parametrize(
    "code", [code for code, _ in CODE if code.startswith(RUN_BY_HYPERPYYAML)]
)
def test_the_attacks_are_real(tmp_path, monkeypatch, code):
    monkeypatch.chdir(tmp_path)
    text = f"arch: revnet57\nmore: {code}\n"
    load_hyperpyyaml((TAG if code.startswith("!e!") else "") + text)
    assert (tmp_path / "executed").exists()


def test_a_text_that_hyperpyyaml_would_run_as_a_tuple_is_a_text(folder):
    code = "(!!python/object/apply:os.mkdir ['executed'])"
    text = (folder / YAML).read_text()
    write(folder, YAML, text.replace("revnet57", code))
    refused(folder, "executed")
    write(folder, YAML, f"{text}more: {code}\n")
    refused(folder, "more is no part of an exported model")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("win_length: 25", "win_length: 20", "compute_features is not as"),
        ("n_mels: !ref <n_mels>", "n_mels: 40", "compute_features is not as"),
        ("<n_mels>", "<n_mels> * 2", "compute_features is not as"),
        ("<n_mels>", "<os.environ>", "compute_features is not as"),
        ("std_norm: false", "std_norm: true", "mean_var_norm is not as"),
        ("    name: !ref <arch>\n", "", "embedding_model is not as"),
        ("    name: !ref <arch>", "    plan: x\n    name: !ref <arch>", "embedding_mo"),
        ("label_encoder: label_encoder.txt", "label_encoder: ../x", "pretrainer is"),
        ("label_encoder: label_encoder.txt", "label_encoder: /etc/passwd", "pretraine"),
        ("new:speechbrain.dataio.encoder.CategoricalEncoder", "ref <arch>", "label_en"),
        ("n_mels: 80\n", "n_mels: 80\nn_mels: 40\n", "n_mels stands there twice"),
        ("n_mels: 80\n", "", "lacks n_mels"),
        ("modules:", "parts:", "lacks modules"),
        ("n_mels: 80\n", "n_mels: !ref <embedding_dim>\n", "n_mels: _Tagged"),
        ("n_mels: 80\n", "n_mels: 2024-13-45\n", "'2024-13-45' is no value"),
        ("n_mels: 80\n", f"n_mels: {'9' * 5000}\n", "is longer than 100"),
        ("n_mels: 80\n", f"n_mels: 0x{'f' * 5000}\n", "is longer than 100"),
        ("n_mels: 80\n", f"n_mels: {'1:' * 1000}1.5\n", "is longer than 100"),
        ("n_mels: 80\n", f"n_mels: {'1:' * 48}1.5\n", "n_mels: 2.2832804448157176e+85"),
        ("n_mels: 80\n", "n_mels: 1.5\n", "n_mels: 1.5 (it takes an integer"),
        ("arch: revnet57\n", "arch: [\n", "cannot be read as YAML"),
        ("arch: revnet57\n", "arch: \x00\n", "cannot be read as YAML"),
    ],
)
def test_known_objects_of_other_values_are_refused(folder, old, new, message):
    text = (folder / YAML).read_text()
    assert old in text
    write(folder, YAML, text.replace(old, new, 1))
    refused(folder, message)


def test_values_in_place_of_references_are_the_same(folder):
    text = (folder / YAML).read_text()
    write(folder, YAML, text.replace("!ref <n_mels>", "80").replace("# Hz", "# hertz"))
    assert SpeakerEmbedder.from_hparams(folder, device="cpu").sample_rate == 16000


@pytest.mark.parametrize("name", ["custom.py", "build.py"])
def test_code_beside_the_model_is_refused_by_name(folder, name):
    (folder / name).write_text("import os\nos.mkdir('executed')\n")
    refused(folder, name, "foreign_class")


# ------------------------------------------------------------ files that are not read


class Attack:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def test_weights_in_a_checkpoint_alone_are_refused_with_the_command_that_helps(
    folder, tmp_path, capsys
):
    (folder / TENSORS).unlink()
    message = refused(folder, f"has its weights in {CKPT} alone")
    command = message.partition("Write a folder with both: ")[2]
    assert (
        command == f"speechbrain-rev convert speechbrain {folder} {folder}_safetensors"
    )
    assert cli.main(shlex.split(command)[1:]) == 0
    assert f"embed {folder}_safetensors FILE" in capsys.readouterr().out
    SpeakerEmbedder.from_hparams(f"{folder}_safetensors", device="cpu")


@pytest.mark.parametrize("given", [".", "../a model", "../a model/inner/.."])
def test_the_command_that_helps_names_a_folder_that_can_be_written(
    folder, monkeypatch, given
):
    (folder / TENSORS).unlink()
    (folder / "inner").mkdir()
    folder = folder.rename(folder.with_name("a model"))
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="convert speechbrain") as error:
        SpeakerEmbedder.from_hparams(given)
    *_, source, target = shlex.split(str(error.value))
    assert Path(source).samefile(folder)
    assert Path(target).resolve() == folder.with_name("a model_safetensors").resolve()
    monkeypatch.chdir(folder.with_name("cwd"))


#: What others save of an encoder.
SAVED = {
    "its state dict": lambda s: s,
    "of a wrapper": lambda s: {f"module.{n}": t for n, t in s.items()},
    "of wrappers": lambda s: {f"model.encoder.{n}": t for n, t in s.items()},
    "of a training run": lambda s: {"epoch": 3, "state_dict": s},
    "of Lightning": lambda s: {"state_dict": {f"front.{n}": t for n, t in s.items()}},
}


@pytest.mark.parametrize("form", SAVED)
def test_a_folder_with_a_checkpoint_alone_becomes_what_export_writes(
    folder, exported, form, tmp_path
):
    (folder / TENSORS).unlink()
    torch.save(SAVED[form](load_file_of(exported)), folder / CKPT)
    write(folder, CKPT, (folder / CKPT).read_bytes())
    assert convert_from_speechbrain(folder, tmp_path / "new") == [
        "cohort.safetensors",
        "thresholds.json",
    ]
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written.keys() == exported.keys()
    for name in exported.keys() - {CKPT, "classifier.ckpt", "SHA256SUMS"}:
        assert written[name] == exported[name], name
    EncoderClassifier.from_hparams(tmp_path / "new", savedir=tmp_path / "savedir")


def load_file_of(exported):
    return safetensors.torch.load(exported[TENSORS])


def test_what_belongs_to_a_model_goes_with_it(folder, tmp_path):
    (folder / TENSORS).unlink()
    (folder / "SHA256SUMS").unlink()
    (folder / "classifier.ckpt").unlink()
    (folder / "thresholds.json").write_text(listed({}))
    (folder / "other.txt").write_text("stays")
    missing = convert_from_speechbrain(folder, tmp_path / "new")
    assert missing == ["classifier.ckpt", "cohort.safetensors"]
    embedder = SpeakerEmbedder.from_hparams(tmp_path / "new", device="cpu")
    assert embedder.thresholds.known[0].trials == "vox1_o"
    assert not (tmp_path / "new" / "other.txt").exists()


def test_a_file_of_weights_is_taken_where_it_is_named(folder, exported, tmp_path):
    state = {n: t * 2 for n, t in load_file_of(exported).items()}
    torch.save(state, folder / "averaged.pt")
    with pytest.raises(ValueError, match=f"has {TENSORS} already: load it as it is"):
        convert_from_speechbrain(folder, tmp_path / "new")
    convert_from_speechbrain(folder / "averaged.pt", tmp_path / "new")
    found = load_file(tmp_path / "new" / TENSORS)
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("name", "loaded", "words"),
    [
        (CKPT, lambda s: {"stem": Attack(os.mkdir, "executed")}, "names 'posix.mkdir'"),
        ("classifier.ckpt", lambda s: Attack(os.mkdir, "executed"), "names 'posix.mkd"),
        ("classifier.ckpt", lambda s: s, "weight is missing"),
        (
            CKPT,
            lambda s: {"weight": torch.ones(10**4)},
            "It holds weight. Are both of one",
        ),
        (
            CKPT,
            lambda s: {**s, "fc.bias": s["fc.bias"].half()},
            "is torch.float16 [16]",
        ),
        (CKPT, lambda s: {**s, "fc.bias": s["fc.bias"] / 0}, "fc.bias holds NaN"),
        (CKPT, lambda s: {"net": s}, "is no state dict"),
    ],
)
@pytest.mark.parametrize("sums", [True, False])
def test_a_folder_with_anything_else_in_its_checkpoints_is_not_converted(
    folder, exported, tmp_path, name, loaded, words, sums
):
    (folder / TENSORS).unlink()
    torch.save(loaded(load_file_of(exported)), folder / name)
    write(folder, name, (folder / name).read_bytes())
    if not sums:
        (folder / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match=re.escape(str(folder / name))) as error:
        convert_from_speechbrain(folder, tmp_path / "new")
    assert words in str(error.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [YAML, CKPT, "README.md", "SHA256SUMS"])
@pytest.mark.parametrize("harm", ["link", "changed", "long", "code"])
def test_a_folder_that_was_made_to_harm_is_not_converted(folder, tmp_path, name, harm):
    (folder / TENSORS).unlink()
    if harm == "link":
        (folder / name).rename(tmp_path / "outside")
        (folder / name).symlink_to(tmp_path / "outside")
    elif harm == "long":
        os.truncate(folder / name, 10**12)
    elif harm == "changed":
        lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
        other = [f"0{line[1:]}" if line[0] != "0" else f"1{line[1:]}" for line in lines]
        (folder / "SHA256SUMS").write_text("".join(other))
    else:
        (folder / "custom.py").write_text("import os\nos.mkdir('executed')\n")
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        convert_from_speechbrain(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_nothing_is_converted_over_something(folder, tmp_path, capsys):
    (folder / TENSORS).unlink()
    for there in (folder, tmp_path / "cwd" / "no" / "new"):
        with pytest.raises(ValueError, match=r"there already|There is no folder"):
            convert_from_speechbrain(folder, there)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        convert_from_speechbrain(tmp_path / "nowhere", tmp_path / "new")
    assert cli.main(["convert", "speechbrain", "--back", str(folder), "new"]) != 0
    assert "--back is for wespeaker" in capsys.readouterr().err


def test_too_little_memory_for_a_file_is_an_error_of_that_file(folder, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("safetensors.torch.load", fail)
    refused(folder, TENSORS, "is not loaded")


def test_files_that_are_not_needed_are_not_opened(folder):
    torch.save(Attack(os.mkdir, "executed"), folder / "classifier.ckpt")
    torch.save(Attack(os.mkdir, "executed"), folder / CKPT)
    (folder / "label_encoder.txt").write_text("__import__('os').mkdir('executed')")
    embedder = SpeakerEmbedder.from_hparams(folder, device="cpu")
    assert np.isfinite(embedder.embed(speech_like(), 16000)).all()


# ------------------------------------------------------------ paths and links


@pytest.mark.parametrize("name", [YAML, TENSORS, "SHA256SUMS"])
@pytest.mark.parametrize("target", ["outside", "/dev/zero", "../model/../outside"])
def test_links_out_of_the_folder_are_not_followed(folder, name, target):
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    place = outside if target == "outside" else target
    (folder / name).symlink_to(place)
    refused(folder, f"{name} is a link out of its folder")


@pytest.mark.parametrize("name", [YAML, TENSORS, "SHA256SUMS"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_regular_file_is_not_opened(folder, name, kind):
    (folder / name).unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(folder / name)
    refused(folder, f"{name} is no regular file")


def test_names_in_the_checksums_lead_nowhere(folder):
    with (folder / "SHA256SUMS").open("a") as sums:
        sums.write("0  ../../../../etc/passwd\n0  /dev/zero\nnonsense\n")
    SpeakerEmbedder.from_hparams(folder, device="cpu")


@pytest.mark.parametrize("name", [YAML, TENSORS, "SHA256SUMS"])
def test_missing_files_are_named(folder, name):
    (folder / CKPT).unlink()
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        SpeakerEmbedder.from_hparams(folder)


@pytest.mark.parametrize("name", [YAML, TENSORS])
def test_a_changed_file_is_refused_by_its_checksum(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    refused(folder, f"{name} is not as it was written")
    sums = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    kept = [line for line in sums if not line.endswith(f"  {name}\n")]
    (folder / "SHA256SUMS").write_text("".join(kept))
    refused(folder, f"{name} is not listed")


@pytest.mark.parametrize("name", [YAML, TENSORS, "SHA256SUMS"])
@pytest.mark.parametrize("other", ["pipe", "link", "file"])
def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    folder, name, other, monkeypatch
):
    path, genuine = folder / name, Path.open

    def replaced(self, *arguments, **options):
        if self == path.resolve():
            file = genuine(self.parent / "classifier.ckpt", "rb")
            if other != "file":
                path.unlink()
                path.symlink_to("classifier.ckpt") if other == "link" else os.mkfifo(
                    path
                )
            return file
        return genuine(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", replaced)
    refused(folder, f"{name} was replaced while it was opened")


def test_weights_that_grow_after_their_size_was_looked_at_are_not_read_on(
    folder, monkeypatch
):
    size, read = (folder / TENSORS).stat().st_size, []
    checked, loaded = model_folder.check_size, model_folder.read_safetensors

    def grown(*arguments):
        checked(*arguments)
        os.truncate(folder / TENSORS, 10**12)

    def noted(content, path, expected):
        read.append(len(content))
        return loaded(content, path, expected)

    monkeypatch.setattr(model_folder, "check_size", grown)
    monkeypatch.setattr(model_folder, "read_safetensors", noted)
    SpeakerEmbedder.from_hparams(folder, device="cpu")
    assert read == [size]


# ------------------------------------------------------------ sizes and headers


def with_header(content, change):
    """A .safetensors file whose header was changed, of the same data."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def first(header):
    return next(entry for name, entry in header.items() if name != "__metadata__")


def set_first(key, value):
    return lambda header: first(header).update({key: value})


LYING = {
    "offsets beyond the file": set_first("data_offsets", [0, 10**12]),
    "offsets backwards": set_first("data_offsets", [10, 0]),
    "negative offsets": set_first("data_offsets", [-4, 0]),
    "a shape of other size": set_first("shape", [10**12]),
    "a shape that overflows": set_first("shape", [2**32, 2**32, 2**32]),
    "a shape of text": set_first("shape", "all"),
    "a type unheard of": set_first("dtype", "F7"),
    "a type of other size": set_first("dtype", "F64"),
    "a hole": lambda header: header.pop(next(iter(header))) and None,
    "no header": lambda header: b"",
    "no JSON": lambda header: b"{" * 100,
    "deep JSON": lambda header: b"[" * 60000,
    "a list": lambda header: b"[]",
}


@pytest.mark.parametrize("lie", LYING)
def test_a_header_that_lies_is_refused(folder, lie):
    content = with_header((folder / TENSORS).read_bytes(), LYING[lie])
    write(folder, TENSORS, content)
    refused(folder, TENSORS)


def test_a_header_longer_than_its_tensors_take_is_not_parsed():
    entries = {
        f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for i in range(2000)
    }
    text = json.dumps(entries).encode()
    content = struct.pack("<Q", len(text)) + text
    path, state = Path("a.safetensors"), {"x": torch.ones(1)}
    assert len(read_safetensors(content, path, dict.fromkeys(entries))) == 2000
    with pytest.raises(ValueError, match=r"header has .* bytes, of at most 66,048"):
        read_safetensors(content, path, state)


@pytest.mark.parametrize("size", [2**63, 2**64 - 1])
def test_a_header_s_shape_beyond_torch_s_numbers_is_refused(size):
    text = b'{"x":{"dtype":"F32","shape":[0,%d],"data_offsets":[0,0]}}' % size
    content = struct.pack("<Q", len(text)) + text
    with pytest.raises(ValueError, match=r"a\.safetensors is no whole"):
        read_safetensors(content, Path("a.safetensors"), {"x": torch.ones(1)})


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 10**5, 0])
def test_a_header_s_length_that_lies_is_refused(folder, length):
    content = struct.pack("<Q", length) + (folder / TENSORS).read_bytes()[8:]
    write(folder, TENSORS, content)
    refused(folder, f"{TENSORS} is no whole .safetensors file")


@pytest.mark.parametrize("size", [0, 7, 10**12])
def test_a_file_of_another_size_is_not_read(folder, size):
    os.truncate(folder / TENSORS, size)
    refused(folder, f"{TENSORS} has {size:,} bytes")


@pytest.mark.parametrize("name", [YAML, "SHA256SUMS"])
def test_a_text_without_end_is_not_read_to_its_end(folder, name):
    os.truncate(folder / name, 10**12)
    refused(folder, f"{name} has more than 100,000 bytes")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"blocks": "[10000, 10000, 10000, 10000]"},
            "40,000 blocks, of which no more than 4,000",
        ),
        ({"blocks": "[30, 30, 30, 40]"}, "bytes; the weights of 130 blocks"),
        ({"blocks": "[10, 10, 10, 10]"}, "bytes; the weights"),
        ({"arch": "revnet58"}, "revnet57"),
        ({"widths": "[8, 16, 16, 15]"}, "multiples of 4"),
        ({"widths": "[16384, 16384, 16384, 16384]"}, "bytes; the weights"),
        ({"widths": "[99999999, 16, 16, 16]"}, "widths"),
        ({"embedding_dim": "65536"}, "bytes; the weights"),
        ({"out_n_neurons": "99999999999999999999999"}, "out_n_neurons"),
    ],
)
def test_an_encoder_that_would_not_fit_its_weights_is_not_built(folder, changed, words):
    lines = (folder / YAML).read_text().splitlines()
    for name, value in changed.items():
        lines = [f"{name}: {value}" if x.startswith(f"{name}:") else x for x in lines]
    write(folder, YAML, "\n".join(lines))
    refused(folder, words)


# ------------------------------------------------------------ shapes and types


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("fc.bias"), "fc.bias is missing"),
        (lambda s: s.update(more=torch.ones(1)), "'more' is surplus"),
        (lambda s: s.update({"fc.bias": s["fc.bias"][:-1].clone()}), "torch.float32 [15]"),
        (lambda s: s.update({"fc.bias": s["fc.bias"][None]}), "torch.float32 [1, 16]"),
        (lambda s: s.update({"fc.bias": s["fc.bias"].long()}), "torch.int64 [16]"),
        (lambda s: s["fc.bias"].fill_(float("nan")), "fc.bias holds NaN"),
    ],
)  # fmt: skip
def test_weights_of_other_names_shapes_and_types_are_refused(folder, change, words):
    state = load_file(folder / TENSORS)
    change(state)
    save_file(state, folder / TENSORS)
    write(folder, TENSORS, (folder / TENSORS).read_bytes())
    refused(folder, TENSORS, words)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool])
def test_other_numbers_than_float32_are_refused(folder, dtype):
    state = load_file(folder / TENSORS)
    state["fc.bias"] = state["fc.bias"].to(dtype)
    save_file(state, folder / TENSORS)
    write(folder, TENSORS, (folder / TENSORS).read_bytes())
    if dtype == torch.float64:
        refused(folder, "fc.bias is torch.float64 [16] instead of torch.float32 [16]")
    else:
        refused(folder, TENSORS)


# ------------------------------------------------------------ recursion and aliases

BOMBS = {
    "aliases": "a: &a [x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "an alias of itself": "a: &a [*a]\n",
    "an anchor alone": "a: &a x\n",
    "a merge key": "a: &a {x: 1}\nb: {<<: *a}\n",
    "brackets": "a: " + "[" * 15000,
    "braces": "a: " + "{a: " * 4000,
    "a deep block": "".join(" " * i + "a:\n" for i in range(150)),
    "dashes": "- " * 8000,
    "question marks": "? " * 8000,
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("after", [True, False])
def test_a_bomb_is_refused_before_it_grows(folder, bomb, after):
    text = (folder / YAML).read_text()
    write(folder, YAML, text + BOMBS[bomb] if after else BOMBS[bomb] + text)
    refused(folder, YAML)


def test_aliases_are_named(folder):
    write(folder, YAML, (folder / YAML).read_text() + BOMBS["aliases"])
    refused(folder, "&a repeats a part of the file")


# ------------------------------------------------------------ memory

#: Loads each folder with no more memory than is stated, and says how it ended.
WITHIN_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from speechbrain_rev.inference import SpeakerEmbedder

SpeakerEmbedder.from_hparams(sys.argv[1], device="cpu")
for folder in sys.argv[1:]:
    weights = [p.stat().st_size for p in Path(folder).glob("embedding_model.*")]
    now = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    more = 200_000_000 + 4 * min(10**8, max(weights))
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))
    try:
        SpeakerEmbedder.from_hparams(folder, device="cpu")
        print("loaded")
    except ValueError:
        print("refused")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


@pytest.mark.slow
def test_no_attack_takes_more_than_the_stated_memory(folder, exported, tmp_path):
    def attack(name):
        place = tmp_path / name
        place.mkdir()
        for file, content in exported.items():
            (place / file).write_bytes(content)
        return place

    text = exported[YAML].decode()
    folders = [folder]
    for name, bomb in BOMBS.items():
        folders.append(attack(name))
        write(folders[-1], YAML, text + bomb)
    for name, lie in LYING.items():
        folders.append(attack(name))
        write(folders[-1], TENSORS, with_header(exported[TENSORS], lie))
    for file in (YAML, TENSORS, "SHA256SUMS"):
        folders.append(attack(f"long {file}"))
        os.truncate(folders[-1] / file, 10**12)
    for old, new in (
        ("blocks: [1, 1, 1, 1]", "blocks: [1000, 1000, 1000, 1000]"),
        ("blocks: [1, 1, 1, 1]", "blocks: [10000, 10000, 10000, 10000]"),
        ("widths: [8, 16, 16, 16]", "widths: [16384, 16384, 16384, 16384]"),
    ):
        folders.append(attack(new.replace("/", "")))
        assert old in text
        write(folders[-1], YAML, text.replace(old, new))
        os.truncate(folders[-1] / TENSORS, 10**7)
    folders.append(attack("entries"))
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    entries = {f"{i}": entry for i in range(1500)}
    text = json.dumps(entries).encode()
    content = struct.pack("<Q", len(text)) + text
    write(folders[-1], TENSORS, content + exported[TENSORS][len(content) :])
    done = subprocess.run(
        [sys.executable, "-c", WITHIN_MEMORY, *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["loaded"] + ["refused"] * (len(folders) - 1)


# ------------------------------------------------------------ damage of any kind


@pytest.mark.parametrize("name", [YAML, TENSORS])
@pytest.mark.parametrize("tries", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_whatever_it_hits(
    folder, exported, name, tries, fuzz_seed
):
    draw = random.Random(fuzz_seed)
    outcomes = []
    for _ in range(tries):
        content = bytearray(exported[name])
        # Most of a file of weights is numbers; headers are at both ends.
        places = [*range(3000), *range(len(content) - 3000, len(content))]
        for _ in range(draw.choice([1, 3])):
            content[draw.choice(places) % len(content)] = draw.randrange(256)
        write(folder, name, bytes(content))
        try:
            SpeakerEmbedder.from_hparams(folder, device="cpu")
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes
    assert all(str(folder) in message for message in outcomes)


# ------------------------------------------------------------ the cohort


def test_a_cohort_is_read_as_it_was_written(folder):
    means = np.random.default_rng(0).standard_normal((4, 16))
    Cohort(means, 3, "f00d, bf16", means[0].astype(np.float32)).write(
        folder / "cohort.safetensors"
    )
    write(folder, "cohort.safetensors", (folder / "cohort.safetensors").read_bytes())
    found = read_cohort(folder)
    assert np.array_equal(found.means, means)
    assert np.array_equal(found.centre, means[0].astype(np.float32))
    assert (found.top_n, found.fingerprint) == (3, "f00d, bf16")


@pytest.mark.parametrize(
    "arrays",
    [
        {"means": torch.zeros(4, 16, dtype=torch.float64)},
        {
            "means": torch.zeros(4, 16).double(),
            "top_n": torch.tensor([2]),
            "fingerprint": None,
        },
        {
            "means": torch.zeros(4, 16).double(),
            "top_n": torch.tensor([2]),
            "fingerprint": torch.tensor([27], dtype=torch.uint8),
        },
        {
            "means": torch.zeros(4, 16).double(),
            "top_n": torch.tensor([2]),
            "fingerprint": torch.tensor([7.0]),
        },
        {"means": torch.zeros(4, 16), "top_n": torch.tensor([2])},
        {"means": torch.zeros(4).double(), "top_n": torch.tensor([2])},
        {"means": torch.zeros(4, 16).double(), "top_n": torch.tensor([2, 3])},
        {"means": torch.zeros(4, 16).double(), "top_n": torch.tensor(2)},
        {"means": torch.zeros(4, 16).double() / 0, "top_n": torch.tensor([2])},
        {"means": torch.zeros(4, 16).double(), "top_n": torch.tensor([5])},
        {"means": torch.zeros(4, 16).double(), "top_n": torch.tensor([1])},
        {"means": torch.zeros(4, 16).double(), "top_n": torch.tensor([2.5])},
        {
            "means": torch.zeros(4, 16).double(),
            "top_n": torch.tensor([2]),
            "centre": torch.zeros(3),
        },
        {
            "means": torch.zeros(4, 16).double(),
            "top_n": torch.tensor([2]),
            "more": torch.zeros(3),
        },
        b"nothing",
    ],
)
def test_a_cohort_of_anything_else_is_refused(folder, arrays):
    path = folder / "cohort.safetensors"
    if isinstance(arrays, bytes):
        path.write_bytes(arrays)
    else:
        named = {"fingerprint": torch.tensor([102], dtype=torch.uint8)} | arrays
        save_file({n: t for n, t in named.items() if t is not None}, path)
    write(folder, path.name, path.read_bytes())
    with pytest.raises(ValueError, match=r"cohort\.safetensors is no cohort"):
        read_cohort(folder)


def test_a_model_without_a_cohort_says_so(folder):
    with pytest.raises(
        FileNotFoundError, match=r"has no cohort\.safetensors: .*export"
    ):
        read_cohort(folder)


# ------------------------------------------------------------ thresholds

THRESHOLD = {
    "trials": "vox1_o", "point": "EER", "normalisation": "cosine", "value": 0.31,
    "targets": 18802, "impostors": 18818, "eer": 0.0123,
}  # fmt: skip


def listed(*changed):
    return json.dumps({"thresholds": [{**THRESHOLD, **one} for one in changed]})


def test_thresholds_are_read_as_they_were_written(folder):
    write(folder, "thresholds.json", listed({}, {"point": "minDCF(0.01)", "value": 1}))
    embedder = SpeakerEmbedder.from_hparams(folder, device="cpu")
    assert [one.value for one in embedder.thresholds.known] == [0.31, 1]
    assert embedder.thresholds.known[0].trials == "vox1_o"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[]",
        "7",
        '{"thresholds": {}}',
        '{"thresholds": [7]}',
        '{"thresholds": [{}]}',
        '{"thresholds": [], "more": 1}',
        '{"thresholds": [], "thresholds": []}',
        listed({"more": 1}),
        json.dumps(
            {"thresholds": [{k: v for k, v in THRESHOLD.items() if k != "eer"}]}
        ),
        listed({}, {}),
        listed(*({"trials": f"t{i}"} for i in range(1001))),
        listed({"value": float("nan")}),
        listed({"value": float("inf")}),
        listed({"value": 1.5}),
        listed({"value": "0.3"}),
        listed({"value": True}),
        listed({"value": None}),
        listed({"value": [0.3]}),
        listed({"normalisation": "as_norm", "value": 1e300}),
        listed({"normalisation": "s_norm"}),
        listed({"normalisation": ["cosine"]}),
        listed({"trials": ""}),
        listed({"trials": "x" * 201}),
        listed({"trials": "\x1b[2J"}),
        listed({"trials": "a\nb"}),
        listed({"trials": "\ud800"}),
        listed({"point": "\u202e"}),
        listed({"trials": 7}),
        listed({"targets": -1}),
        listed({"targets": 0}),
        listed({"impostors": 1.0}),
        listed({"impostors": 10**13}),
        listed({"eer": 1.1}),
        listed({"eer": -0.1}),
        listed({}).replace("0.31", "1e999"),
        listed({}).replace("0.31", "9" * 5000),
        listed({}).replace("18802", "9" * 900_000),
        listed({}).replace("18802", "0x10"),
        "[" * 200_000,
        '{"thresholds":' * 50_000,
        " " * 1_000_001,
        "\ufeff" + listed({}),
        b"\xff\xfe{}",
    ],
)
def test_thresholds_that_are_none_are_refused(folder, content):
    write(folder, "thresholds.json", content)
    refused(folder, "thresholds.json")


def test_thresholds_are_not_read_from_elsewhere(folder, tmp_path):
    (tmp_path / "theirs.json").write_text(listed({}))
    write(folder, "thresholds.json", listed({}))
    (folder / "thresholds.json").unlink()
    (folder / "thresholds.json").symlink_to(tmp_path / "theirs.json")
    refused(folder, "is a link out of its folder")


def test_thresholds_without_their_checksum_are_refused(folder):
    (folder / "thresholds.json").write_text(listed({}))
    refused(folder, "thresholds.json is not listed")
    write(folder, "thresholds.json", listed({}))
    (folder / "thresholds.json").write_text(listed({"value": 0.0}))
    refused(folder, "thresholds.json is not as it was written")


def test_a_model_without_thresholds_decides_nothing(folder):
    embedder = SpeakerEmbedder.from_hparams(folder, device="cpu")
    found = embedder.verify(speech_like(), speech_like(seed=1), 16000)
    assert found.same_speaker is None
    assert "has no thresholds.json" in found.origin
