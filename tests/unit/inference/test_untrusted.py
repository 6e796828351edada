"""Files of torch.save from somebody else: loaded as torch loads them, or refused.

Nothing of a refused file is executed, and no more memory is taken than its size.
"""

import io
import os
import pickle
import random
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from speechbrain_rev.inference.untrusted import load_tensors, open_own
from tests.unit.inference.conftest import Attack, within_memory

REMEDY = "Ask for the weights."
MKDIR = Attack(os.mkdir, "executed")


@pytest.fixture(autouse=True)
def _nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not Path("executed").exists()


def saved(loaded, **options):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(loaded, file, **options)
    return file.getvalue()


def load(content):
    """What is loaded of a file that is such."""
    Path("weights.ckpt").write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_tensors(Path("weights.ckpt"), REMEDY)


def refused(content, *words):
    """Check that a file is refused in one line, with these words."""
    with pytest.raises(ValueError, match=r"^weights\.ckpt is ") as error:
        load(content)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert message.endswith(REMEDY)


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
    many = {f"layer.{i}": torch.full((2,), float(i)) for i in range(1500)}
    for wanted in (state(), views, odd, needs, many):
        loaded = load(saved(wanted))
        # A tensor does not follow its file.
        Path("weights.ckpt").write_bytes(b"")
        assert loaded.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(loaded[name], value)
            assert loaded[name].dtype == value.dtype
            assert type(loaded[name]) is torch.Tensor
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
OLD = {"_use_new_zipfile_serialization": False}
SELF = {}
SELF["model"] = SELF
ONE, ONES = torch.ones(1), torch.ones(10_000)
OUTSIDE, BYTES = "not loaded", "its tensors take {:,} bytes, more than"
ATTACKS = {
    "posix.mkdir": MKDIR,
    "__builtin__.eval": Attack(eval, "__import__('os').mkdir('executed')"),
    # Both are on torch's own list for weights_only.
    "__builtin__.bytearray": Attack(bytearray, 10**12),
    "torch.Tensor": Attack(torch.Tensor, 10**6, 10**6),
    "torch._utils._rebuild_sparse_tensor": torch.ones(2).to_sparse(),
}
FILES = [
    *((saved({**state(), "stem": a}), f"it names '{n}'") for n, a in ATTACKS.items()),
    # Pickles of other kinds.
    (pickled_as(pickle.dumps(MKDIR, protocol=4)), "of protocol 4"),
    (pickled_as(b"\x80\x02X\x05\0\0\0posixX\x05\0\0\0mkdir\x93."), "of protocol 4"),
    (pickled_as(pickle.dumps(MKDIR, protocol=0)), "names 'posix.mkdir'"),
    (pickled_as(b"(ios\nmkdir\n."), "holds more than plain"),
    (pickled_as(b"no pickle"), "opcode b'n' unknown"),
    (pickled_as(b""), "pickle exhausted"),
    (pickled_as(b"\x80\x02h\x05."), "it is damaged or"),
    (pickled_as(b"}" * (2 * 2**20 + 1)), "its data.pkl has 2,097,153 bytes"),
    # Anything but names and tensors.
    (pickled_as(b"]."), "is no state dict (names and their tensors): it holds a list"),
    (pickled_as(b"\x80\x02}))s."), "it holds ()"),
    (saved({"a": ONE, "more": 5}), "it holds a, more."),
    (saved({"a": ONE, 5: ONE}), "it holds a, 5."),
    (saved({"a\x1b[2J\n": 1}), r"it holds 'a\x1b[2J\n'."),
    (saved(SELF), "it holds model"),
    # Other files, and archives that readers take for others.
    (b"", "no zip archive"),
    (pickle.dumps(MKDIR), "no zip archive"),
    (saved(state(), **OLD), "no zip archive"),
    (sealed([]), "no zip archive"),
    (sealed([("a/b.txt", "c")]), "has no 'a'/data.pkl"),
    (sealed([("a.txt", "b")]), "'a.txt' is not in 'a.txt/'"),
    (sealed([*MEMBERS, ("archive/constants.pkl", b"")]), "a TorchScript program"),
    (GENUINE[:-1], "cut short"),
    (GENUINE[:4], "cut short"),
    (sealed([*MEMBERS, ("archive/data.pkl", b"]")]), "two members of its archive"),
    (sealed([*MEMBERS, ("b/data.pkl", b"]")]), "'b/data.pkl' is not in 'archive/' as"),
    # To torch's reader this is one of b, whose pickle is the second.
    (sealed([("b/DATA.PKL", b"]"), *MEMBERS]), "'archive/data.pkl' is not in 'b/'"),
    (sealed(MEMBERS, compression=zipfile.ZIP_DEFLATED), "data.pkl' is compressed"),
    (sealed(MEMBERS, compression=zipfile.ZIP_LZMA), "data.pkl' is compressed"),
    (pickle.dumps(Attack(bytearray, 10**11), protocol=2) + GENUINE, "no zip archive"),
    # Tensors that are not all in their file.
    (viewed(0, [10**6], [1]), OUTSIDE),
    (viewed(0, [10**6], [1], numel=10**6), OUTSIDE),
    (viewed(0, [2**32, 2**32], [2**32, 2**32], numel=2**62), OUTSIDE),
    (viewed(-1, [3], [1]), OUTSIDE),
    (viewed(0, [-1], [1]), OUTSIDE),
    (viewed(2**70, [3], [1]), OUTSIDE),
    (viewed(0, [0, 2**70], [1, 1]), OUTSIDE),
    (viewed(0, [2], [1], numel=2), "more or fewer numbers"),
    (viewed(0, [2], [1], numel=10**12), "more or fewer numbers"),
    # One number, or one storage, many times over.
    (viewed(0, [2**40], [0]), BYTES.format(2**42)),
    (saved({f"{i}": ONES for i in range(500)}), BYTES.format(20_000_000)),
]


@pytest.mark.parametrize(("content", "words"), FILES, ids=range(len(FILES)))
def test_other_files_are_refused_and_run_nothing(content, words):
    with torch.serialization.safe_globals([os.mkdir]):
        refused(content, words)


def test_a_tensor_is_what_its_storage_holds_of_it():
    assert load(viewed(1, [2], [1]))["x"].tolist() == [2, 3]
    assert load(viewed(2, [1, 1], [9, 9]))["x"].tolist() == [[3]]


def test_data_before_and_behind_an_archive_are_refused():
    """What readers may take for the beginning, a comment, or a second list of members."""
    other = sealed([("a/data.pkl", b"x")])
    commented = bytearray(sealed(MEMBERS) + b"comment")
    commented[-9:-7] = struct.pack("<H", 7)
    for content in (GENUINE + b"\0", commented, GENUINE[:-2] + b"\1\0"):
        refused(content, "something follows its archive")
    located, listed = bytearray(GENUINE), GENUINE.index(b"PK\x01\x02")
    located[-34:-26] = struct.pack("<Q", GENUINE.rindex(b"PK\x06\x06") - 56)
    hidden = GENUINE[:listed] + other + GENUINE[listed:]
    for content in (other + GENUINE, GENUINE * 2, located, hidden):
        refused(content, "something lies before or within its archive")


def moved(content, place, inserted):
    """An archive with bytes inserted, which its list of members takes into account."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        offsets = [info.header_offset for info in archive.infolist()]
        start = archive.start_dir
    changed = bytearray(content[:place] + inserted + content[place:])
    at = changed.index(b"PK\x01\x02", start)
    for offset in offsets:
        if offset >= place:
            changed[at + 42 : at + 46] = struct.pack("<L", offset + len(inserted))
        at = changed.index(b"PK", at + 4)
    changed[-6:-2] = struct.pack("<L", start + len(inserted))
    return changed


def test_hidden_and_overlapping_members_are_refused():
    genuine = sealed(MEMBERS)
    with zipfile.ZipFile(io.BytesIO(genuine)) as archive:
        second, start = archive.infolist()[1].header_offset, archive.start_dir
    hidden = sealed([("archive/more", bytes(50))])[:92]
    # Before members, between them, between them and their list, and behind a header.
    changed = [moved(genuine, place, hidden) for place in (0, second, start)]
    changed.append(moved(genuine, 46, bytes(200)))
    changed[-1][28:30] = struct.pack("<H", 200)
    for content in changed:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
        refused(content, "does not fill its place in the archive")
    # Two entries of one place, as overlapping bombs have.
    overlapping, counted = bytearray(genuine), bytearray(genuine)
    entry = genuine.index(b"PK\x01\x02", start + 4)
    overlapping[entry + 42 : entry + 46] = struct.pack("<L", 0)
    refused(overlapping, "does not fill its place in the archive")
    counted[-12:-10] = struct.pack("<H", 1)
    refused(counted, "members, not 1")
    # Python takes the name up to a NUL, torch's reader does not.
    named = genuine[start:].replace(b"archive/data.pkl", b"archive/data\0pkl", 1)
    refused(genuine[:start] + named, "its member")


def test_damaged_and_very_many_members_are_refused():
    many = [(f"archive/data/{i:0250}", b"") for i in range(15_000)]
    refused(sealed([*MEMBERS, *many]), "its list of members has")
    content = bytearray(saved({"a": torch.full((100,), 7.0)}))
    content[content.index(struct.pack("<2f", 7, 7))] ^= 1
    refused(content, "'archive/data/0' is damaged")


def test_a_file_of_holes_is_not_read():
    Path("weights.ckpt").write_bytes(GENUINE)
    os.truncate("weights.ckpt", 10**12)
    with pytest.raises(ValueError, match=r"it has 1,000,000,000,000 bytes, more than"):
        load_tensors(Path("weights.ckpt"), REMEDY)


def largest_files():
    bomb = io.BytesIO(sealed(MEMBERS))
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(2 * 10**8))
    yield saved({"a": torch.ones(10**7)})
    yield bomb.getvalue()
    yield saved({"a": Attack(bytearray, 10**11)})
    yield viewed(0, [10**10], [0])
    yield viewed(0, [10**10], [1], numel=10**10)
    yield pickled_as(b"\x80\x02" + b"}" * 10**5)


def largest_pickles_and_lists_of_members():
    rebuilt = dict(parts(viewed(0, [3], [1])))
    # The tensor's function and arguments are called again and again.
    again = rebuilt["a/data.pkl"].replace(b"_v2\n", b"_v2\nq\x01")
    again = again.replace(b")Rt", b")Rtq\x02")[:-2] + b"h\x01h\x02R" * 400_000 + b"."
    yield GENUINE
    yield sealed({**rebuilt, "a/data.pkl": again}.items())
    yield pickled_as(b"\x80\x02" + b"}" * 2_000_000 + b"].")
    yield sealed([*MEMBERS, *((f"archive/{i}", b"") for i in range(60_000))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "beside", "loaded"),
    [
        (largest_files, 50_000_000, {0}),
        (largest_pickles_and_lists_of_members, 400_000_000, {0, 3}),
    ],
)
def test_a_file_takes_no_more_memory_than_is_stated(made, beside, loaded):
    paths = [Path(f"{i}.ckpt") for i, _ in enumerate(made())]
    for path, content in zip(paths, made(), strict=True):
        path.write_bytes(content)
    # The file is mapped, and its tensors are copied.
    ended = within_memory(beside, 2, paths)
    assert {i for i, how in enumerate(ended) if how == "loaded"} == loaded
    assert "memory" not in ended


@pytest.mark.parametrize("tries", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_wherever_it_is(tries, fuzz_seed):
    draw = random.Random(fuzz_seed)
    wanted, messages = state(), []
    for _ in range(tries):
        content = bytearray(GENUINE)
        for _ in range(draw.choice([1, 1, 3, 10])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        try:
            loaded = load(content)
        except ValueError as error:
            messages.append(str(error))
        else:
            # What is not covered by a checksum is padding and such.
            assert all(torch.equal(loaded[name], wanted[name]) for name in loaded)
    assert messages
    assert all(words.startswith("weights.ckpt is ") for words in messages)


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
        with open_own(folder, "file") as file:
            assert file.read() == b"content"
        # Content that is a link itself is not.
        (folder / blob).rename(tmp_path / "elsewhere")
        (folder / blob).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="file is a link out of its folder"):
        open_own(folder, "file")
