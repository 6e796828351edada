"""A model from somebody else runs no code, writes no file and takes bounded memory.

By class of attack. The attacker writes the checksums too, so they stop none of these.
"""

import hashlib
import io
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from safetensors.torch import load_file, save_file

from speechbrain_rev.inference import (
    SpeakerEmbedder,
    export_run,
    model_folder,
    read_cohort,
)
from speechbrain_rev.inference.cohort import Cohort
from speechbrain_rev.inference.state_dicts import read_checkpoint, read_safetensors
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


# ------------------------------------------------------------ code in pickles


class Attack:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def zipped(data, records):
    """A file as torch.save writes it, of a pickle and records."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr("archive/data.pkl", data)
        members.writestr("archive/version", "3\n")
        for name, record in records.items():
            members.writestr(f"archive/{name}", record)
    return file.getvalue()


@pytest.fixture
def checkpoint(folder):
    """The folder without .safetensors, whose weights are read from the .ckpt."""
    (folder / TENSORS).unlink()
    return folder


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (Attack(os.mkdir, "executed"), "posix.mkdir"),
        (Attack(os.system, "mkdir executed"), "posix.system"),
        (Attack(eval, "__import__('os').mkdir('executed')"), "__builtin__.eval"),
        (Attack(getattr, "x", "mkdir"), "__builtin__.getattr"),
        # Both are on torch's own list for weights_only.
        (Attack(bytearray, 10**12), "__builtin__.bytearray"),
        (Attack(torch.Tensor, 10**6, 10**6), "torch.Tensor"),
        (torch.nn.Parameter(torch.ones(1)), "torch._utils._rebuild_parameter"),
        (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.ones(2, dtype=torch.float16), "torch.HalfStorage"),
    ],
)
def test_a_pickle_of_anything_but_tensors_is_refused_by_name(checkpoint, attack, name):
    state = torch.load(checkpoint / CKPT, weights_only=True)
    file = io.BytesIO()
    torch.save({**state, "stem": attack}, file)
    write(checkpoint, CKPT, file.getvalue())
    refused(checkpoint, f"it names {name}")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pickle.dumps(Attack(os.mkdir, "executed"), protocol=4), "FRAME"),
        (b"\x80\x02X\x05\0\0\0posixX\x05\0\0\0mkdir\x93.", "STACK_GLOBAL"),
        (pickle.dumps(Attack(os.mkdir, "executed"), protocol=0), "posix.mkdir"),
        (b"(ios\nmkdir\n.", "INST"),
        (b"(cos\nmkdir\nS'executed'\no.", "os.mkdir"),
        (b"\x82\x01.", "EXT1"),
        (b"no pickle", "opcode"),
        (b"", "not loaded"),
        (b"(" * 1000, "not loaded"),
        (b"]." , "not loaded"),
        (b"\x80\x02h\x05.", "it is damaged"),
        (b"\x80\x02R.", "it is damaged"),
        (b"\x80\x02}b.", "it is damaged"),
        (b"\x80\x02}u.", "it is damaged"),
        (b"\x80\x02}\x86.", "it is damaged"),
        (b"\x80\x02}))s.", "a name in it is no text"),
        (b"\x80\x02)))s.", "a name in it is no text"),
        (b"\x80\x02}}b0.", "instruction POP"),
        (b"\x80\x02))b.", "its pickle builds something"),
        (b"\x80\x02)Q.", "names a storage in another way"),
        (b"\x80\x02ccollections\nOrderedDict\n}\x85R.", "another way than torch"),
        (b"\x80\x02).", "something else than names and tensors"),
    ],
)  # fmt: skip
def test_a_pickle_of_any_protocol_runs_nothing(checkpoint, data, name):
    size = (checkpoint / CKPT).stat().st_size
    write(checkpoint, CKPT, zipped(data, {"data/0": b"\0" * (size - 1000)}))
    refused(checkpoint, CKPT, name)


def sealed(pickled, *, prefix="a", others=()):
    """A checkpoint's members, with the pickle as given."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr(f"{prefix}/data.pkl", pickled)
        for name, record in others:
            members.writestr(name, record)
    return file.getvalue()


def parts(content):
    """The pickle of a checkpoint and its other members."""
    with zipfile.ZipFile(io.BytesIO(content)) as members:
        records = [(name, members.read(name)) for name in members.namelist()]
    (pickled,) = (r for name, r in records if name.endswith("/data.pkl"))
    records = [(n.partition("/")[2], r) for n, r in records]
    return pickled, [(f"a/{n}", r) for n, r in records if n != "data.pkl"]


def test_a_checkpoint_behind_an_old_pickle_is_refused(checkpoint):
    genuine = (checkpoint / CKPT).read_bytes()
    for prefix in (pickle.dumps(Attack(bytearray, 10**11), protocol=2), b"\0", b"PK"):
        write(checkpoint, CKPT, prefix + genuine)
        with zipfile.ZipFile(checkpoint / CKPT) as members:
            assert members.testzip() is None
        refused(checkpoint, "it does not begin as a zip file")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([("a/DATA.PKL", b"]")], "two of its members have one name"),
        ([("b/data.pkl", b"]")], "'b/data.pkl' is in no folder of the first's"),
        ([("b/DATA.PKL", b"]")], "'b/DATA.PKL' is in no folder of the first's"),
        ([("version", b"3")], "'version' is in no folder of the first's"),
        ([("aa/version", b"3")], "'aa/version' is in no folder of the first's"),
        ([("a/byteorder", b"big")], "are not little-endian"),
    ],
)
def test_members_that_readers_take_for_others_are_refused(checkpoint, others, words):
    pickled, records = parts((checkpoint / CKPT).read_bytes())
    records = [(name, r) for name, r in records if name != "a/byteorder"]
    write(checkpoint, CKPT, sealed(pickled, others=[*records, *others]))
    refused(checkpoint, words)


def test_the_first_member_s_folder_is_the_pickle_s(checkpoint):
    pickled, records = parts((checkpoint / CKPT).read_bytes())
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        # To torch's reader this is one of b, whose pickle is the second.
        for name, record in [("b/version", b"3"), ("b/DATA.PKL", b"]")]:
            members.writestr(name, record)
        for name, record in [("a/data.pkl", pickled), *records]:
            members.writestr(name, record)
    write(checkpoint, CKPT, file.getvalue())
    refused(checkpoint, "'a/data.pkl' is in no folder of the first's")
    write(checkpoint, CKPT, sealed(pickled, prefix="a/b", others=records))
    refused(checkpoint, "it has no a/data.pkl")


def test_a_pickle_longer_than_its_tensors_take_is_refused(checkpoint):
    pickled, records = parts((checkpoint / CKPT).read_bytes())
    write(checkpoint, CKPT, sealed(b"}" * 10**6 + pickled, others=records[:1]))
    refused(checkpoint, CKPT, "bytes")
    many = b"}" * 60_000
    write(checkpoint, CKPT, sealed(many + pickled, others=records))
    refused(checkpoint, "its pickle has more than", "instructions")


def test_a_checkpoint_of_a_great_many_members_is_not_opened(checkpoint, monkeypatch):
    monkeypatch.setattr("speechbrain_rev.inference.state_dicts._FILE_BYTES", 10**7)
    pickled, records = parts((checkpoint / CKPT).read_bytes())
    more = [(f"a/data/x{i}", b"") for i in range(3000)]
    write(checkpoint, CKPT, sealed(pickled, others=records + more))
    refused(checkpoint, "it has more members than tensors")


@pytest.mark.parametrize("change", ["shorter", "missing"])
def test_a_storage_of_another_size_than_its_record_is_refused(checkpoint, change):
    pickled, records = parts((checkpoint / CKPT).read_bytes())
    name, record = records.pop(
        next(i for i, (name, _) in enumerate(records) if name == "a/data/0")
    )
    if change == "shorter":
        records += [(name, record[:-4]), ("a/padding", b"1234")]
    write(checkpoint, CKPT, sealed(pickled, others=[*records, ("a/more", record)]))
    shorter = ("its storage '0' of", f"numbers has {len(record) - 4:,} bytes")
    refused(checkpoint, *(shorter if change == "shorter" else ["it is damaged"]))


def reread(state):
    """What is read of what torch.save writes, whatever its folder."""
    file = io.BytesIO()
    torch.save(state, file)
    return read_checkpoint(file.getvalue(), Path("a.ckpt"), state)


def test_what_is_read_of_a_checkpoint_is_what_torch_reads():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3))
    base = torch.randn(4, 6)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    views = {"all": base, "part": base[1:3, 2:], "turned": base.T, "images": images}
    odd = {"scalar": torch.tensor(7), "none": torch.zeros(0), "flat": torch.zeros(3, 0)}
    wide = {"wide": torch.ones(1).expand(5), "needs": torch.ones(2).requires_grad_()}
    many = {f"layer.{i}": torch.full((2,), float(i)) for i in range(1500)}
    for state in (plain.state_dict(), dict(plain.state_dict()), views, odd, wide, many):
        found = reread(state)
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found[name], value)
            assert (found[name].dtype, found[name].stride()) == (
                value.dtype,
                value.stride(),
            )


def viewed(offset, size, stride):
    """A checkpoint of three numbers, and one tensor that is so much of them."""

    def number(value):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    text = b"X\x01\0\0\0x"
    pickled = (
        b"\x80\x02}" + text + b"ctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0"
        b"X\x03\0\0\0cpuK\x03tQ"
        + number(offset) + numbers(size) + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip
    return sealed(pickled, others=[("a/data/0", struct.pack("<3f", 1, 2, 3))])


def read_viewed(*view):
    return read_checkpoint(viewed(*view), Path("a.ckpt"), {"x": torch.ones(3)})["x"]


def test_a_tensor_that_leads_out_of_its_storage_is_refused():
    assert read_viewed(0, [3], [1]).tolist() == [1, 2, 3]
    assert read_viewed(1, [2], [1]).tolist() == [2, 3]
    assert read_viewed(2, [1, 1], [9, 9]).tolist() == [[3]]
    for view in [
        (1, [3], [1]),
        (0, [4], [1]),
        (0, [2], [3]),
        (3, [], []),
        (0, [2**32, 2**32], [2**32, 2**32]),
        (2**62, [2], [2**62]),
    ]:
        with pytest.raises(ValueError, match="a tensor leads out of its storage '0'"):
            read_viewed(*view)
    for view in [(-1, [3], [1]), (0, [-1], [1]), (2, [3], [-1]), (0, [1], [])]:
        with pytest.raises(ValueError, match="tensors in another way than torch"):
            read_viewed(*view)
    for view in [(2**70, [0], [1]), (0, [0, 2**70], [1, 1])]:
        with pytest.raises(ValueError, match=r"a\.ckpt is not loaded"):
            read_viewed(*view)


def test_too_little_memory_for_a_file_is_an_error_of_that_file(folder, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("safetensors.torch.load", fail)
    refused(folder, TENSORS, "is not loaded")
    monkeypatch.setattr("torch.frombuffer", fail)
    (folder / TENSORS).unlink()
    refused(folder, CKPT, "is not loaded")


def test_a_raw_pickle_and_torch_s_old_format_are_refused(checkpoint):
    state = torch.load(checkpoint / CKPT, weights_only=True)
    old = io.BytesIO()
    torch.save(state, old, _use_new_zipfile_serialization=False)
    padding = b"\0" * (checkpoint / CKPT).stat().st_size
    raw = pickle.dumps(Attack(os.mkdir, "executed")) + padding
    for content in (old.getvalue(), raw):
        write(checkpoint, CKPT, content)
        refused(checkpoint, CKPT, "is not loaded")


def test_files_that_are_not_needed_are_not_opened(folder):
    torch.save(Attack(os.mkdir, "executed"), folder / "classifier.ckpt")
    torch.save(Attack(os.mkdir, "executed"), folder / CKPT)
    (folder / "label_encoder.txt").write_text("__import__('os').mkdir('executed')")
    embedder = SpeakerEmbedder.from_hparams(folder, device="cpu")
    assert np.isfinite(embedder.embed(speech_like(), 16000)).all()


# ------------------------------------------------------------ paths and links


@pytest.mark.parametrize("name", [YAML, TENSORS, CKPT, "SHA256SUMS"])
@pytest.mark.parametrize("target", ["outside", "/dev/zero", "../model/../outside"])
def test_links_out_of_the_folder_are_not_followed(folder, name, target):
    outside = folder.parent / "outside"
    if name == CKPT:
        (folder / TENSORS).unlink()
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


def test_a_name_of_a_model_elsewhere_is_told_how_to_be_downloaded(folder):
    for name in ("speechbrain/spkrec-ecapa-voxceleb", "https://example.org/model"):
        with pytest.raises(FileNotFoundError, match=r"snapshot_download"):
            SpeakerEmbedder.from_hparams(name)


@pytest.mark.parametrize("name", [YAML, CKPT, "SHA256SUMS"])
def test_missing_files_are_named(folder, name):
    (folder / TENSORS).unlink()
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


@pytest.mark.parametrize("name", [YAML, TENSORS, CKPT, "SHA256SUMS"])
@pytest.mark.parametrize("other", ["pipe", "link", "file"])
def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    folder, name, other, monkeypatch
):
    if name == CKPT:
        (folder / TENSORS).unlink()
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
    checked, summed = model_folder.check_size, model_folder._summed

    def grown(*arguments):
        checked(*arguments)
        os.truncate(folder / TENSORS, 10**12)

    def noted(folder, name, content):
        read.append(len(content))
        return summed(folder, name, content)

    monkeypatch.setattr(model_folder, "check_size", grown)
    monkeypatch.setattr(model_folder, "_summed", noted)
    SpeakerEmbedder.from_hparams(folder, device="cpu")
    assert max(read) == size


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


@pytest.mark.parametrize("name", [TENSORS, CKPT])
@pytest.mark.parametrize("size", [0, 7, 10**12])
def test_a_file_of_another_size_is_not_read(folder, name, size):
    if name == CKPT:
        (folder / TENSORS).unlink()
    os.truncate(folder / name, size)
    refused(folder, f"{name} has {size:,} bytes")


@pytest.mark.parametrize("name", [YAML, "SHA256SUMS"])
def test_a_text_without_end_is_not_read_to_its_end(folder, name):
    os.truncate(folder / name, 10**12)
    refused(folder, f"{name} has more than 100,000 bytes")


def test_a_zip_bomb_in_a_checkpoint_is_refused(checkpoint):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("archive/data.pkl", b"\0" * 10**7)
        size = (checkpoint / CKPT).stat().st_size
        members.writestr("archive/padding", bytes(size), zipfile.ZIP_STORED)
    write(checkpoint, CKPT, file.getvalue())
    refused(checkpoint, "archive/data.pkl is compressed")


@pytest.mark.parametrize("count", [10**12, 2**62])
def test_a_pickle_that_lies_about_its_storages_is_refused(checkpoint, count):
    state = torch.load(checkpoint / CKPT, weights_only=True)
    with zipfile.ZipFile(checkpoint / CKPT) as members:
        pickled = members.read(
            next(n for n in members.namelist() if n.endswith("data.pkl"))
        )
        records = {n.split("/", 1)[1]: members.read(n) for n in members.namelist()}
    records = {n: r for n, r in records.items() if n.startswith("data/")}
    # As it is, it loads.
    write(checkpoint, CKPT, zipped(pickled, records))
    SpeakerEmbedder.from_hparams(checkpoint, device="cpu")
    numel = next(iter(state.values())).numel()
    small = b"K" + bytes([numel]) if numel < 256 else b"M" + struct.pack("<H", numel)
    assert small in pickled
    large = b"\x8a\x08" + struct.pack("<q", count)
    write(checkpoint, CKPT, zipped(pickled.replace(small, large), records))
    refused(checkpoint, "its storage '", f" of {count:,} numbers has ")


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


@pytest.mark.parametrize("file", [TENSORS, CKPT])
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
def test_weights_of_other_names_shapes_and_types_are_refused(
    folder, file, change, words
):
    state = load_file(folder / TENSORS)
    change(state)
    if file == CKPT:
        (folder / TENSORS).unlink()
        torch.save(state, folder / CKPT)
    else:
        save_file(state, folder / TENSORS)
    write(folder, file, (folder / file).read_bytes())
    refused(folder, file, words)


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


def test_a_checkpoint_of_no_names_is_refused(checkpoint):
    state = torch.load(checkpoint / CKPT, weights_only=True)
    size = (checkpoint / CKPT).stat().st_size
    for content, words in (
        (tuple(state.values()), "it holds something else than names and tensors"),
        ({**state, "more": 5}, "it holds something else than names and tensors"),
        ({**state, "more": state}, "it holds something else than names and tensors"),
        ({**state, 5: torch.ones(1)}, "a name in it is no text"),
        (state["fc.bias"], "it holds something else than names and tensors"),
    ):
        file = io.BytesIO()
        torch.save(content, file)
        with zipfile.ZipFile(file, "a") as members:
            members.writestr("archive/padding", bytes(max(0, size - file.tell())))
        write(checkpoint, CKPT, file.getvalue())
        refused(checkpoint, words)


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
    for name, harm in (("ones", bytearray), ("tensor", torch.Tensor)):
        folders.append(attack(name))
        (folders[-1] / TENSORS).unlink()
        state = torch.load(folders[-1] / CKPT, weights_only=True)
        torch.save({**state, "x": Attack(harm, 10**11)}, folders[-1] / CKPT)
        write(folders[-1], CKPT, (folders[-1] / CKPT).read_bytes())
    genuine, padding = exported[CKPT], bytes(20_000)
    prefix = pickle.dumps(Attack(bytearray, 10**11), protocol=2)
    pickled, records = parts(genuine)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    entries = {f"{i}": entry for i in range(1500)}
    for name, content in (
        ("behind a pickle", prefix + genuine),
        ("dicts", sealed(b"}" * 150_000 + pickled, others=records)),
        ("members", sealed(pickled, others=[*records, ("b/data.pkl", padding)])),
    ):
        folders.append(attack(name))
        (folders[-1] / TENSORS).unlink()
        write(folders[-1], CKPT, content)
    folders.append(attack("entries"))
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


@pytest.mark.parametrize("name", [YAML, TENSORS, CKPT])
@pytest.mark.parametrize("tries", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_whatever_it_hits(
    folder, exported, name, tries, fuzz_seed
):
    draw = random.Random(fuzz_seed)
    if name == CKPT:
        (folder / TENSORS).unlink()
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
    with pytest.raises(FileNotFoundError, match=r"has no cohort\.safetensors"):
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
