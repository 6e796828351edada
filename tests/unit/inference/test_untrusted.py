"""What somebody else made runs no code, writes no file and is refused or harmless.

Files of weights, and whole folders of a model or a run, by class of attack. The attacker
writes the checksums too, so they stop none of these.
"""

import io
import json
import os
import pickle
import random
import re
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from speechbrain_rev.files import plain_yaml
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.runs import RECORD, read_record
from speechbrain_rev.inference.trained import read_weights
from speechbrain_rev.inference.untrusted import (
    own_file,
    read_tensors,
)
from speechbrain_rev.lobes.description import DESCRIPTION
from tests.run_folders import speech_like
from tests.unit.inference.conftest import Attack, put, within_memory

MKDIR = Attack(os.mkdir, "executed")


@pytest.fixture(autouse=True)
def _nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not any(path.name == "executed" for path in tmp_path.rglob("*"))


def saved(loaded, **options):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(loaded, file, **options)
    return file.getvalue()


def load(content):
    """What is loaded of a file that is such."""
    Path("weights.ckpt").write_bytes(content)
    return read_tensors(Path("weights.ckpt"))


def refused_file(content, words=""):
    """Check that a file is refused in one line, with these words."""
    with pytest.raises(
        ValueError, match=r"^weights\.ckpt (is not loaded:|holds) "
    ) as error:
        load(content)
    message = str(error.value)
    assert words in message, message
    assert "\n" not in message
    assert "a state dict of plain tensors" in message


def state():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)
    return torch.nn.Sequential(*layers).state_dict()


def parts(content):
    """The members of an archive: names and records."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def sealed(members, **options):
    """An archive of these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # two of one name
        for name, record in members:
            archive.writestr(name, record)
    return file.getvalue()


def pickled_as(pickled):
    """A file whose pickle was exchanged."""
    members = dict(parts(saved(state())))
    return sealed({**members, "archive/data.pkl": pickled}.items())


def test_what_is_loaded_is_what_torch_loads():
    base = torch.randn(4, 6)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    views = {"all": base, "part": base[1:3, 2:], "transposed": base.T, "images": images}
    odd = {"scalar": torch.tensor(7), "none": torch.zeros(0), "half": base.half()}
    needs = {"needs": torch.ones(2).requires_grad_(), "p": torch.nn.Parameter(base)}
    for wanted in (state(), views, odd, needs):
        loaded = load(saved(wanted))
        assert loaded.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(loaded[name], value)
            assert loaded[name].dtype == value.dtype
            assert not loaded[name].requires_grad


def viewed(offset, size, stride, *, numel=3):
    """A file of three numbers, and one tensor that is so much of them."""

    def numbers(values):
        each = (value.to_bytes(9, "little", signed=True) for value in values)
        return b"".join(b"\x8a\x09" + one for one in each)

    pickled = (
        b"\x80\x02}X\x01\0\0\0xctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0"
        b"X\x03\0\0\0cpu" + numbers([numel]) + b"tQ" + numbers([offset])
        + b"(" + numbers(size) + b"t(" + numbers(stride)
        + b"t\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip
    record = struct.pack("<3f", 1, 2, 3)
    members = {"data.pkl": pickled, "version": b"3\n", "data/0": record}
    return sealed((f"a/{name}", content) for name, content in members.items())


GENUINE = saved(state())
MEMBERS = parts(GENUINE)
SELF = {}
SELF["model"] = SELF
ONE = torch.ones(1)
NOT_LOADED, HOLDS = "is not loaded: it is damaged, or", "weights.ckpt holds {}. Weights"
ATTACKS = [
    MKDIR,
    Attack(eval, "__import__('os').mkdir('executed')"),
    # Both are on torch's own list for weights_only.
    Attack(bytearray, 10**13),
    Attack(torch.Tensor, 10**6, 10**6),
]
FILES = [
    *((saved({**state(), "stem": attack}), NOT_LOADED) for attack in ATTACKS),
    # Pickles of other kinds.
    (pickled_as(pickle.dumps(MKDIR, protocol=4)), NOT_LOADED),
    (pickled_as(b"\x80\x02X\x05\0\0\0posixX\x05\0\0\0mkdir\x93."), NOT_LOADED),
    (pickled_as(pickle.dumps(MKDIR, protocol=0)), NOT_LOADED),
    (pickled_as(b"(ios\nmkdir\n."), NOT_LOADED),
    (pickled_as(b"no pickle"), NOT_LOADED),
    (pickled_as(b""), NOT_LOADED),
    (pickled_as(b"\x80\x02h\x05."), NOT_LOADED),
    # Anything but names and tensors.
    (pickled_as(b"]."), HOLDS.format("a list")),
    (pickled_as(b"\x80\x02}))s."), HOLDS.format("()")),
    (saved({"a": ONE, "more": 5}), HOLDS.format("a, more")),
    (saved({"a": ONE, 5: ONE}), HOLDS.format("a, 5")),
    (saved({"a\x1b[2J\n": 1}), HOLDS.format(r"'a\x1b[2J\n'")),
    (saved(SELF), HOLDS.format("model")),
    # Other files, and archives that readers take for others.
    (b"", NOT_LOADED),
    (pickle.dumps(MKDIR), NOT_LOADED),
    (saved(state(), _use_new_zipfile_serialization=False), NOT_LOADED),
    (sealed([("a/b.txt", "c")]), NOT_LOADED),
    (sealed([*MEMBERS, ("archive/constants.pkl", b"")]), NOT_LOADED),
    (GENUINE[:-1], NOT_LOADED),
    (GENUINE[:4], NOT_LOADED),
    (sealed([("b/DATA.PKL", b"]"), *MEMBERS]), NOT_LOADED),
    (pickle.dumps(Attack(bytearray, 10**11), protocol=2) + GENUINE, NOT_LOADED),
    # Tensors that are not all in their file.
    (viewed(0, [10**6], [1]), NOT_LOADED),
    (viewed(0, [10**6], [1], numel=10**6), NOT_LOADED),
    (viewed(0, [2**32, 2**32], [2**32, 2**32], numel=2**62), NOT_LOADED),
    (viewed(-1, [3], [1]), NOT_LOADED),
    (viewed(0, [-1], [1]), NOT_LOADED),
    (viewed(2**70, [3], [1]), NOT_LOADED),
    (viewed(0, [0, 2**70], [1, 1]), NOT_LOADED),
]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:.*TorchScript")
@pytest.mark.parametrize(("content", "words"), FILES, ids=range(len(FILES)))
def test_other_files_are_refused_and_run_nothing(content, words):
    refused_file(content, words)


def largest_files():
    bomb = io.BytesIO(sealed(MEMBERS))
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(2 * 10**8))
    yield saved({"a": torch.ones(10**7)})
    yield bomb.getvalue()
    yield viewed(0, [10**10], [0])
    yield viewed(0, [10**10], [1], numel=10**10)
    yield saved({"a": Attack(bytearray, 10**11)})


@pytest.mark.slow
def test_a_file_takes_no_more_memory_than_is_stated():
    paths = [Path(f"{i}.ckpt") for i, _ in enumerate(largest_files())]
    for path, content in zip(paths, largest_files(), strict=True):
        path.write_bytes(content)
    ended = within_memory(50_000_000, 2, paths)
    # What is mapped takes none, whatever its shape.
    assert ended == ["loaded", "loaded", "loaded", "refused", "memory"]


@pytest.mark.parametrize("tries", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_wherever_it_is(tries, fuzz_seed):
    draw, messages = random.Random(fuzz_seed), []
    for _ in range(tries):
        content = bytearray(GENUINE)
        for _ in range(draw.choice([1, 1, 3, 10])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        try:
            assert len(load(content)) == len(state())
        except ValueError as error:
            messages.append(str(error))
    assert messages
    assert all(message.startswith("weights.ckpt ") for message in messages)


# ------------------------------------------------------------ folders of models and runs

YAML, CKPT, SUMS = "hyperparams.yaml", "embedding_model.ckpt", "SHA256SUMS"
TENSORS, THRESHOLDS = "embedding_model.safetensors", "thresholds.json"


def embed(folder):
    embedder = SpeakerEmbedder.from_hparams(folder, device="cpu")
    return embedder.embed(speech_like(0.5), 16000)


def refused(folder, *words, kind=ValueError):
    """The message with which the folder is refused; the words must be in it."""
    with pytest.raises(kind, match=re.escape(str(folder))) as error:
        SpeakerEmbedder.from_hparams(folder, device="cpu")
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


TAG = "%TAG !e! tag:yaml.org,2002:python/object/apply:\n---\n"
#: What HyperPyYAML would make a folder of.
CODE = [
    "more: !new:pathlib.Path [executed]\n",
    "more: !apply:os.mkdir [executed]\n",
    "more: !applyref:os.mkdir [executed]\n",
    "more: !!python/object/apply:os.mkdir [executed]\n",
    "more: !<tag:yaml.org,2002:python/object/apply:os.mkdir> [executed]\n",
    f"{TAG}more: !e!os.mkdir [executed]\n",
    "arch: (!!python/object/apply:os.mkdir ['executed'])\n",
]
RUN_BY_HYPERPYYAML = CODE[1:6]


def test_the_attacks_are_real(tmp_path):
    for text in RUN_BY_HYPERPYYAML:
        load_hyperpyyaml(text)
        Path("executed").rmdir()


def link_outside(path):
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


UNREAD = [
    *((YAML, lambda p, text=text: p.write_text(text)) for text in CODE),
    (YAML, lambda p: p.write_text("a: &a [x, x]\nb: &b [*a, *a]\n" + "- " * 8000)),
    (YAML, lambda p: p.write_text("embedding_dim: 99999\n")),
    (YAML, lambda p: os.truncate(p, 10**12)),
    (YAML, link_outside),
    (YAML, Path.unlink),
    ("settings.json", lambda p: p.write_text("[" * 60_000)),
    ("classifier.ckpt", lambda p: torch.save(MKDIR, p)),
    (CKPT, lambda p: torch.save(MKDIR, p)),
    (CKPT, link_outside),
    ("label_encoder.txt", lambda p: p.write_text("__import__('os').mkdir('executed')")),
    ("custom.py", lambda p: p.write_text("import os\nos.mkdir('executed')\n")),
    (
        SUMS,
        lambda p: p.write_text("0  ../../../../etc/passwd\n0  /dev/zero\nnonsense\n"),
    ),
    (SUMS, link_outside),
    (SUMS, Path.unlink),
]


@pytest.mark.parametrize(("name", "attack"), UNREAD, ids=range(len(UNREAD)))
def test_what_is_not_needed_is_not_looked_at(model, embedder, name, attack):
    attack(model / name)
    assert np.array_equal(embed(model), embedder.embed(speech_like(0.5), 16000))


@pytest.fixture
def judging(model):
    """A model with thresholds."""
    put(model, THRESHOLDS, '{"thresholds": []}\n')
    return model


@pytest.mark.parametrize("name", [TENSORS, THRESHOLDS])
def test_only_files_of_the_folder_are_read(judging, name):
    path, outside = judging / name, judging.parent / "outside"
    path.rename(outside)
    for target in (outside, "../model/../outside"):
        path.symlink_to(target)
        refused(judging, f"{name} is a link out of its folder")
        path.unlink()


@pytest.mark.parametrize("name", [TENSORS, THRESHOLDS])
def test_a_changed_file_is_refused_by_its_checksum(judging, name):
    content = bytearray((judging / name).read_bytes())
    content[-2] ^= 1
    (judging / name).write_bytes(content)
    refused(judging, f"{name} is not as it was written")


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        (TENSORS, 0, "is not loaded"),
        (TENSORS, 10**12, "is not loaded"),
        (SUMS, 10**12, "has more than 1,000,000 bytes"),
        (THRESHOLDS, 10**12, "has more than 1,000,000 bytes"),
    ],
)
def test_a_file_of_another_size_is_not_read_to_its_end(judging, name, size, words):
    (judging / SUMS).write_text("")
    os.truncate(judging / name, size)
    refused(judging, f"{name} {words}")


def with_header(content, change):
    """A .safetensors file whose header was changed, of the same data."""
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    text = change(header)
    text = text if isinstance(text, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def first(key, value):
    """A change of the first tensor in a header."""
    return lambda h: next(e for n, e in h.items() if n[:2] != "__").update({key: value})


LYING = [
    first("shape", [10**12]),
    first("shape", [2**32, 2**32, 2**32]),
    first("dtype", "F7"),
    # A hole, and deep JSON.
    lambda header: header.pop(next(iter(header))) and None,
    lambda header: b"[" * 60000,
]


def replacing(name, change):
    """A change of one tensor of a .safetensors file."""

    def changed(content):
        tensors = load_safetensors(content)
        return save_safetensors(tensors | {name: change(tensors[name])})

    return changed


def of_description(change):
    """A change of the description's text."""

    def written(tensor):
        text = change(bytes(tensor.tolist()).decode())
        return torch.tensor(list(text.encode()), dtype=torch.int32)

    return replacing(DESCRIPTION, written)


WEIGHTS = [
    *((lambda c, lie=lie: with_header(c, lie), "is not loaded") for lie in LYING),
    *(
        (lambda c, n=n: struct.pack("<Q", n) + c[8:], "is not loaded")
        for n in (2**64 - 1, 10**5, 0)
    ),
    (
        lambda c: save_safetensors({"more": torch.ones(1), **load_safetensors(c)}),
        "'more' is surplus",
    ),
    (replacing("fc.bias", lambda t: t[:-1].clone()), "fc.bias is [15] instead of [16]"),
    (replacing("fc.bias", lambda t: t.double()), "fc.bias is of torch.float64"),
    (replacing("fc.bias", lambda t: t / 0), "holds NaN or infinity in fc.bias"),
    # Descriptions of other encoders, and of none.
    (of_description(lambda t: t.replace("16, 16]", "16, 32]", 1)), "instead of [8, 16"),
    (
        of_description(lambda t: t.replace("[1, 1, 1, 1]", "[30, 30, 30, 40]")),
        "missing",
    ),
    (of_description(lambda t: t.replace("16, 16]", "16, 15]", 1)), "multiples of 4"),
    (
        of_description(lambda t: t.replace("revnet57", "revnet58")),
        "no encoder 'revnet58'",
    ),
    (
        of_description(lambda t: t.replace("[8, 16,", "[1048576, 16,")),
        "stead of [1048576",
    ),
]


@pytest.mark.parametrize(("change", "words"), WEIGHTS, ids=range(len(WEIGHTS)))
def test_weights_of_another_header_names_shapes_and_types_are_refused(
    model, change, words
):
    put(model, TENSORS, change((model / TENSORS).read_bytes()))
    refused(model, TENSORS, words)


def each(change):
    """A change of all weights, but for the description."""
    return lambda s: {n: t if n == DESCRIPTION else change(t) for n, t in s.items()}


def one_number(tensor):
    return tensor.flatten()[0].clone().expand(tensor.shape)


OTHERS = [
    (lambda s: {**s, "stem": MKDIR}, "is not loaded"),
    (
        lambda s: {DESCRIPTION: s[DESCRIPTION], **dict.fromkeys("abcdefg", ONE)},
        "It holds a, b, c, d and 3 more",
    ),
    (lambda s: {**s, "fc.bias": ONE.expand(2**40)}, "fc.bias is [1099511627776] inst"),
    # One number for each tensor, where all would fit.
    (each(one_number), "bytes, and they take"),
    (lambda s: {**s, "fc.bias": s["fc.bias"].to_sparse()}, "fc.bias is of torch.flo"),
    (lambda s: {**s, "fc.bias": s["fc.bias"] / 0}, "diverged"),
    *(
        (lambda s, change=change: {**s, DESCRIPTION: change(s[DESCRIPTION])}, "_extra_")
        for change in (
            lambda t: t[None],
            lambda t: t.repeat(100),
            lambda t: t[:1].expand(2**40),
            lambda t: t * torch.nan,
            lambda t: t * torch.inf,
            lambda t: t.to(torch.complex64),
            lambda t: t.to_sparse(),
            lambda t: -t,
        )
    ),
]


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize(("change", "words"), OTHERS, ids=range(len(OTHERS)))
def test_other_weights_than_the_encoder_s_are_refused(run, change, words):
    torch.save(change(torch.load(run / CKPT, weights_only=True)), run / CKPT)
    refused(run, words)


@pytest.mark.parametrize("size", [0, 1, 100, 5000, 20_000, 20_001, 40_000, 60_000])
def test_weights_that_were_cut_short_are_named(run, size):
    os.truncate(run / CKPT, size)
    refused(
        run, f"{CKPT} is not loaded: it is damaged, or holds more than plain tensors"
    )


@pytest.mark.slow(drawn=False)
def test_no_attack_takes_more_than_the_stated_memory(model, exported, tmp_path):
    folders = [model]

    def attack(content, size=None):
        folders.append(shutil.copytree(model, tmp_path / f"attack{len(folders)}"))
        put(folders[-1], TENSORS, content)
        if size is not None:
            os.truncate(folders[-1] / TENSORS, size)

    for lie in LYING:
        attack(with_header(exported[TENSORS], lie))
    blocks = of_description(lambda t: t.replace("1, 1, 1, 1", f"{[999] * 4}"[1:-1]))
    widths = of_description(
        lambda t: t.replace("8, 16, 16, 16", f"{[2**20] * 4}"[1:-1])
    )
    for change in (blocks, widths):
        attack(change(exported[TENSORS]))
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{i}": entry for i in range(1500)}).encode()
    content = struct.pack("<Q", len(header)) + header
    attack(content + exported[TENSORS][len(content) :])
    ended = within_memory(200_000_000, 4, folders)
    assert ended == ["loaded"] + ["refused"] * (len(folders) - 1)


def test_too_little_memory_for_a_file_is_an_error_of_that_file(model, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("safetensors.torch.load_file", fail)
    refused(model, TENSORS, "is not loaded")


@pytest.mark.parametrize("tries", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_damage_of_a_model_is_refused_or_harmless_whatever_it_hits(
    model, exported, tries, fuzz_seed
):
    draw, outcomes = random.Random(fuzz_seed), []
    for _ in range(tries):
        content = bytearray(exported[TENSORS])
        # Most of a file of weights is numbers; headers are at both ends.
        places = [*range(3000), *range(len(content) - 3000, len(content))]
        for _ in range(draw.choice([1, 3])):
            content[draw.choice(places) % len(content)] = draw.randrange(256)
        put(model, TENSORS, bytes(content))
        try:
            SpeakerEmbedder.from_hparams(model, device="cpu")
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes
    assert all(str(model) in message for message in outcomes)


DOUBLED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 61)
)


NO_PLACES = [
    *CODE[1:6],
    DOUBLED,
    "[" * 50_000,
    f"step: &s {'1:' * 1000}1.5\nunixtime: *s\n",
    "- 1\n",
    "{step: [], unixtime: []}",
    "{step: null, unixtime: null}",
    "{step: some, unixtime: yesterday}",
    "step: \u0007\n",
    "x" * 100_001,
]


@pytest.mark.parametrize("text", NO_PLACES, ids=range(len(NO_PLACES)))
@pytest.mark.parametrize("name", ["CKPT.yaml", "brain.ckpt", "counter.ckpt"])
def test_a_checkpoint_of_no_place_in_its_run_is_refused(run, name, text):
    (run / CKPT).unlink()
    (checkpoint,) = (run / "save").glob("CKPT*")
    (checkpoint / SUMS).unlink()
    (checkpoint / "counter.ckpt").write_text("1")
    (checkpoint / name).write_text(text)
    with pytest.raises(ValueError, match=r"does not say its epoch and step \("):
        read_weights(run)


def test_a_run_that_links_elsewhere_is_refused(run, tmp_path):
    (tmp_path / "latest").symlink_to(run)
    assert len(embed(tmp_path / "latest")) == 16
    for name in (CKPT, "save"):
        link_outside(run / name)
        refused(run, "link out of its folder")
        (run / name).unlink()
        (tmp_path / "outside").rename(tmp_path / f"elsewhere {name}")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 200_000,
        lambda text: text.replace("{", '{"more": 1,', 1),
        lambda text: text.replace('"epochs": 2', '"epochs": true'),
        lambda text: text.replace('"epochs": 2', '"epochs": "2"'),
        lambda text: text.replace('"epochs": 2', f'"epochs": {"9" * 900}'),
        lambda text: text.replace('"lr": 0.01', '"lr": NaN'),
        lambda text: text.replace('"number_of_epochs": 2', '"number_of_epochs": "2"'),
        lambda text: text.replace('"number_of_epochs": 2', '"epochs": 2'),
        lambda text: text.replace('"/secret/place/one.txt"', "1"),
        lambda text: text.replace('"held_out_speakers": 2', '"held_out_speakers": "a"'),
        lambda text: text.replace('"noise": false', '"noise": 0'),
        lambda text: text.replace('"epochs": [\n   2', '"epochs": [\n   2.5'),
        lambda text: text.replace('"average_checkpoints"', '"average"'),
        lambda text: text.replace('"batch_size": 4', '"batch_size": "u"'),
        lambda text: text.replace('"output_folder"', '"folder"'),
        lambda text: text.replace('"seconds": 90.0', '"seconds": 1e999'),
        lambda text: text + " " * 1_000_001,
    ],
)
def test_a_record_that_training_does_not_write_is_refused(run, change):
    text = (run / RECORD).read_text()
    assert change(text) != text
    (run / RECORD).write_text(change(text))
    with pytest.raises(ValueError, match=r"run\.json (is not what|has more than)"):
        read_record(run)


def test_merge_keys_and_tags_are_no_plain_values():
    assert plain_yaml(b"a: [1, x]\nb: {c: null}\n") == {"a": [1, "x"], "b": {"c": None}}
    for text in (DOUBLED, *CODE[1:6], "[" * 50_000):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            plain_yaml(text.encode())


# ------------------------------------------------------------ links, JSON

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = f"cache/models--owner--model/snapshots/{COMMIT}"
A, B, C = "a" * 40, "b" * 64, "c" * 64


@pytest.mark.parametrize(
    ("folder", "blob", "own"),
    [
        (SNAPSHOT, f"../../blobs/{A}", True),
        (SNAPSHOT, f"../../../blobs/cc/{C}", True),
        (SNAPSHOT, "../../../../secret", False),
        (SNAPSHOT, "../../blobs/name", False),
        (SNAPSHOT, f"../../blobs/deeper/{A}", False),
        (SNAPSHOT, f"../../../models--owner--other/blobs/{A}", False),
        (SNAPSHOT, f"../../../blobs/cc/{B}", False),
        ("models--a--b/snapshots/main", f"../../blobs/{A}", False),
        (f"models--a--b/x/{COMMIT}", f"../../blobs/{A}", False),
    ],
)
def test_only_links_to_content_of_the_hub_s_cache_are_followed(
    tmp_path, folder, blob, own
):
    folder = tmp_path / folder
    folder.mkdir(parents=True)
    (folder / blob).parent.mkdir(parents=True, exist_ok=True)
    (folder / blob).write_bytes(b"content")
    (folder / "file").symlink_to(blob)
    if own:
        assert own_file(folder, "file").read_bytes() == b"content"
        # Content that is a link itself is not.
        (folder / blob).rename(tmp_path / "elsewhere")
        (folder / blob).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="file is a link out of its folder"):
        own_file(folder, "file")
