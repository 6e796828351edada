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

from speechbrain_rev.inference.untrusted import load_tensors, open_own, strict_json
from tests.unit.inference.conftest import Attack, within_memory

REMEDY = "Ask for the weights."


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


# ------------------------------------------------------------ what is loaded


def test_what_is_loaded_is_what_torch_loads():
    base = torch.randn(4, 6)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    parts_of = {
        "all": base,
        "part": base[1:3, 2:],
        "transposed": base.T,
        "images": images,
    }
    odd = {"scalar": torch.tensor(7), "none": torch.zeros(0), "flat": torch.zeros(3, 0)}
    types = {
        f"{t}": torch.ones(3).to(t) for t in (torch.half, torch.double, torch.bool)
    }
    needs = {"needs": torch.ones(2).requires_grad_(), "p": torch.nn.Parameter(base)}
    many = {f"layer.{i}": torch.full((2,), float(i)) for i in range(1500)}
    for wanted in (state(), dict(state()), parts_of, odd, types, needs, many):
        found = load(saved(wanted))
        # A tensor does not follow its file.
        Path("weights.ckpt").write_bytes(b"")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
            assert type(found[name]) is torch.Tensor
            assert not found[name].requires_grad


# ------------------------------------------------------------ code in pickles


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        (Attack(os.mkdir, "executed"), "posix.mkdir"),
        (Attack(eval, "__import__('os').mkdir('executed')"), "__builtin__.eval"),
        # Both are on torch's own list for weights_only.
        (Attack(bytearray, 10**12), "__builtin__.bytearray"),
        (Attack(torch.Tensor, 10**6, 10**6), "torch.Tensor"),
        (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.ones(2, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
    ],
)
def test_a_pickle_of_anything_but_tensors_is_refused_by_name(attack, name):
    with torch.serialization.safe_globals([os.mkdir]):
        refused(saved({**state(), "stem": attack}), f"it names '{name}'")


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (pickle.dumps(Attack(os.mkdir, "executed"), protocol=4), "of protocol 4"),
        (b"\x80\x02X\x05\0\0\0posixX\x05\0\0\0mkdir\x93.", "of protocol 4"),
        (b"\x80\x02\x8f.", "of protocol 4"),  # a set, of 216 bytes
        (pickle.dumps(Attack(os.mkdir, "executed"), protocol=0), "names 'posix.mkdir'"),
        (b"(ios\nmkdir\n.", "holds more than plain"),
        (b"(cos\nmkdir\nS'executed'\no.", "names 'os.mkdir'"),
        (b"no pickle", "opcode b'n' unknown"),
        (b"", "pickle exhausted"),
        (b"].", "it holds a list"),
        (b"\x80\x02h\x05.", "it is damaged or"),
        (b"\x80\x02}))s.", "it holds ()"),
        (b"}" * (2 * 2**20 + 1), "its data.pkl has 2,097,153 bytes"),
    ],
)
def test_a_pickle_of_any_kind_is_refused_and_runs_nothing(pickled, words):
    refused(pickled_as(pickled), words)


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ([torch.ones(3)], "it holds a list"),
        ({"a": torch.ones(3), "more": 5}, "it holds a, more."),
        ({"a": torch.ones(3), 5: torch.ones(1)}, "it holds a, 5."),
        ({"a\x1b[2J\n": 1}, r"it holds 'a\x1b[2J\n'."),
    ],
)
def test_a_file_of_anything_but_names_and_tensors_is_refused(loaded, words):
    refused(saved(loaded), "is no state dict", words)


def test_a_dictionary_in_itself_is_refused():
    loaded = {}
    loaded["model"] = loaded
    refused(saved(loaded), "it holds model")


# ------------------------------------------------------------ archives


def test_other_files_than_archives_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), "script.pt")
    genuine = saved(state())
    for content, words in (
        (b"", "no zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no zip archive"),
        (pickle.dumps(Attack(os.mkdir, "executed")), "no zip archive"),
        (saved(state(), _use_new_zipfile_serialization=False), "no zip archive"),
        (Path("script.pt").read_bytes(), "a TorchScript program"),
        (sealed([]), "no zip archive"),
        (sealed([("a/b.txt", "c")]), "has no 'a'/data.pkl"),
        (sealed([("a.txt", "b")]), "'a.txt' is not in 'a.txt/'"),
        (sealed((f"a/{n}", r) for n, r in parts(genuine)), "has no 'a'/data.pkl"),
        (genuine[:-1], "cut short"),
        (genuine[:1000], "cut short"),
        (genuine[:4], "cut short"),
    ):
        refused(content, words)


def test_data_before_and_behind_an_archive_are_refused():
    genuine = saved(state())
    pickled = pickle.dumps(Attack(bytearray, 10**11), protocol=2)
    for prefix in (pickled, b"\0", b"PK"):
        refused(prefix + genuine, "no zip archive")
    # In front of it lies what torch would take for the beginning.
    for prefix in (sealed([("a/b", b"c")]), genuine[:60], genuine):
        refused(prefix + genuine, "something lies before or within its archive")
    commented = bytearray(sealed(parts(genuine)) + b"comment")
    commented[-9:-7] = struct.pack("<H", 7)
    # A comment, and one that is announced and not there.
    more = genuine + b"\0", genuine + b"PK\x05\x06", commented, genuine[:-2] + b"\1\0"
    for content in more:
        refused(content, "something follows its archive")


def test_a_second_list_of_members_is_refused():
    """Readers take either the 64-bit list or the one before it."""
    genuine, other = saved(state()), sealed([("a/data.pkl", b"x")])
    place = genuine.rindex(b"PK\x06\x06")
    located = bytearray(genuine)
    located[-42 + 8 : -42 + 16] = struct.pack("<Q", place - 56)
    refused(located, "something lies before or within")
    start = genuine.index(b"PK\x01\x02")
    hidden = genuine[:start] + other + genuine[start:]
    refused(hidden, "something lies before or within")


def moved(content, place, inserted):
    """An archive with bytes inserted, which its list of members takes into account."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        offsets = [info.header_offset for info in archive.infolist()]
        start = archive.start_dir
    found = bytearray(content[:place] + inserted + content[place:])
    at = found.index(b"PK\x01\x02", start)
    for offset in offsets:
        if offset >= place:
            found[at + 42 : at + 46] = struct.pack("<L", offset + len(inserted))
        at = found.index(b"PK", at + 4)
    found[-6:-2] = struct.pack("<L", start + len(inserted))
    return found


def test_hidden_and_overlapping_members_are_refused():
    genuine = sealed(parts(saved(state())))
    with zipfile.ZipFile(io.BytesIO(genuine)) as archive:
        second, start = archive.infolist()[1].header_offset, archive.start_dir
    hidden = sealed([("archive/more", bytes(50))])[:92]
    # Before members, between them, and between them and their list.
    changed = [moved(genuine, place, hidden) for place in (0, second, start)]
    # Room behind a header.
    assert genuine[30:46] == b"archive/data.pkl"
    changed.append(moved(genuine, 46, bytes(200)))
    changed[-1][28:30] = struct.pack("<H", 200)
    for content in changed:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
        refused(content, "does not fill its place in the archive")
    # Two entries of one place, as overlapping bombs have.
    overlapping = bytearray(genuine)
    entry = genuine.index(b"PK\x01\x02", start + 4)
    overlapping[entry + 42 : entry + 46] = struct.pack("<L", 0)
    refused(overlapping, "does not fill its place in the archive")
    counted = bytearray(genuine)
    counted[-12:-10] = struct.pack("<H", 1)
    refused(counted, "members, not 1")
    # Python takes the name up to a NUL, torch's reader does not.
    named = genuine[start:].replace(b"archive/data.pkl", b"archive/data\0pkl", 1)
    refused(genuine[:start] + named, "its member")


FIRST = [("b/version", b"3"), ("b/DATA.PKL", b"]")]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ([], [("archive/data.pkl", b"]")], "two members of its archive have one name"),
        ([], [("b/data.pkl", b"]")], "'b/data.pkl' is not in 'archive/' as the first"),
        ([], [("version", b"3")], "'version' is not in 'archive/' as the first is"),
        # To torch's reader this is one of b, whose pickle is the second.
        (FIRST, [], "'archive/data.pkl' is not in 'b/'"),
    ],
)
def test_members_that_readers_take_for_others_are_refused(before, after, words):
    refused(sealed([*before, *parts(saved(state())), *after]), words)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_compressed_member_is_refused(method):
    members = parts(saved(state()))
    refused(sealed(members, compression=method), "'archive/data.pkl' is compressed")
    file = io.BytesIO(sealed(members))
    with zipfile.ZipFile(file, "a", method) as archive:
        archive.writestr("archive/data/9", bytes(10**7))
    refused(file.getvalue(), "'archive/data/9' is compressed")


def test_a_great_many_members_are_refused():
    many = [(f"archive/data/{i:0250}", b"") for i in range(16_000)]
    refused(sealed([*parts(saved(state())), *many]), "its list of members has")


def test_numbers_of_another_checksum_are_refused():
    content = bytearray(saved({"a": torch.full((100,), 7.0)}))
    content[content.index(struct.pack("<2f", 7, 7))] ^= 1
    refused(content, "'archive/data/0' is damaged")


# ------------------------------------------------------------ tensors that lie


def viewed(offset, size, stride, *, numel=3):
    """A file of three numbers, and one tensor that is so much of them."""

    def number(value):
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    pickled = (
        b"\x80\x02}X\x01\0\0\0xctorch._utils\n_rebuild_tensor_v2\n(("
        b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0" + b"0"
        b"X\x03\0\0\0cpu" + number(numel) + b"tQ"
        + number(offset) + numbers(size) + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip
    record = struct.pack("<3f", 1, 2, 3)
    members = {"data.pkl": pickled, "version": b"3\n", "data/0": record}
    return sealed((f"a/{name}", content) for name, content in members.items())


def test_a_tensor_is_what_its_storage_holds_of_it():
    assert load(viewed(0, [3], [1]))["x"].tolist() == [1, 2, 3]
    assert load(viewed(1, [2], [1]))["x"].tolist() == [2, 3]
    assert load(viewed(2, [1, 1], [9, 9]))["x"].tolist() == [[3]]


@pytest.mark.parametrize("numel", [3, 10**6, 2**62])
@pytest.mark.parametrize(
    "view",
    [
        (0, [10**6], [1]),
        (0, [2**32, 2**32], [2**32, 2**32]),
        (-1, [3], [1]),
        (0, [-1], [1]),
        (2**70, [3], [1]),
        (0, [0, 2**70], [1, 1]),
    ],
)
def test_a_tensor_that_leads_out_of_its_file_is_refused(view, numel):
    refused(viewed(*view, numel=numel), "not loaded")


@pytest.mark.parametrize("numel", [0, 2, 4, 10**12])
def test_a_storage_of_another_size_than_its_record_is_refused(numel):
    # Those of fewer numbers fit.
    refused(viewed(0, [min(numel, 2)], [1], numel=numel), "more or fewer numbers")


def test_tensors_of_more_numbers_than_the_file_are_refused():
    for count in (10**3, 2**40):
        words = f"its tensors take {4 * count:,} bytes, more than"
        refused(viewed(0, [count], [0]), words)
    base = torch.ones(10_000)
    same = {f"{i}": base for i in range(500)}
    refused(saved(same), "take 20,000,000 bytes, more than")


def memory_of(beside, contents):
    """How reading files ends, within twice their size and so many bytes beside."""
    for i, content in enumerate(contents):
        Path(f"{i}.ckpt").write_bytes(content)
    # The file is mapped, and its tensors are copied.
    return within_memory(beside, 2, [f"{i}.ckpt" for i in range(len(contents))])


def test_a_file_takes_no_more_memory_than_twice_its_size():
    bomb = io.BytesIO(sealed(parts(saved(state()))))
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(2 * 10**8))
    contents = [
        saved({"a": torch.ones(10**7)}),
        bomb.getvalue(),
        saved({"a": Attack(bytearray, 10**11)}),
        saved({"a": Attack(torch.Tensor, 10**11)}),
        viewed(0, [10**10], [0]),
        viewed(0, [10**10], [1], numel=10**10),
        pickled_as(b"\x80\x02" + b"}" * 10**5),
    ]
    found = memory_of(50_000_000, contents)
    assert found == ["loaded"] + ["refused"] * (len(contents) - 1)


def test_a_file_of_holes_is_not_read():
    Path("weights.ckpt").write_bytes(saved(state()))
    os.truncate("weights.ckpt", 10**12)
    with pytest.raises(ValueError, match=r"it has 1,000,000,000,000 bytes, more than"):
        load_tensors(Path("weights.ckpt"), REMEDY)


@pytest.mark.slow
def test_the_largest_pickles_and_lists_of_members_take_the_stated_memory():
    rebuilt = dict(parts(viewed(0, [3], [1])))
    # The tensor's function and arguments are called again and again.
    again = rebuilt["a/data.pkl"].replace(b"_v2\n", b"_v2\nq\x01")
    again = again.replace(b")Rt", b")Rtq\x02")[:-2] + b"h\x01h\x02R" * 400_000 + b"."
    members = parts(saved(state())) + [(f"archive/{i}", b"") for i in range(60_000)]
    contents = [
        saved(state()),
        sealed({**rebuilt, "a/data.pkl": again}.items()),
        pickled_as(b"\x80\x02" + b"}" * 2_000_000 + b"]."),
        sealed(members),
    ]
    found = memory_of(400_000_000, contents)
    assert found == ["loaded", "refused", "refused", "loaded"]


@pytest.mark.parametrize("tries", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_wherever_it_is(tries, fuzz_seed):
    draw = random.Random(fuzz_seed)
    wanted, outcomes = state(), []
    genuine = saved(wanted)
    for _ in range(tries):
        content = bytearray(genuine)
        for _ in range(draw.choice([1, 1, 3, 10])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        try:
            found = load(content)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            # What is not covered by a checksum is padding and such.
            assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert outcomes
    assert all(words.startswith("weights.ckpt is ") for words in outcomes)


# ------------------------------------------------------------ links in a cache

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = f"cache/models--owner--model/snapshots/{COMMIT}"
A, B, C = "a" * 40, "b" * 64, "c" * 64


@pytest.mark.parametrize(
    ("folder", "blob", "own"),
    [
        (SNAPSHOT, f"../../blobs/{A}", True),
        (SNAPSHOT, f"../../blobs/{B}", True),
        (SNAPSHOT, f"../../../blobs/cc/{C}", True),
        (SNAPSHOT, "../../../../secret", False),
        (SNAPSHOT, "../../blobs/name", False),
        (SNAPSHOT, f"../../blobs/deeper/{A}", False),
        (SNAPSHOT, f"../../../models--owner--other/blobs/{A}", False),
        (SNAPSHOT, f"../../../blobs/cc/{B}", False),
        (SNAPSHOT, f"../../../../blobs/{A}", False),
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


def test_a_key_that_stands_twice_among_many_is_found_at_once():
    keys = [f"k{i:05}" for i in range(80_000)]
    content = "{" + ", ".join(f'"{key}": 0' for key in [*keys, keys[-1]]) + "}"
    # Looked for key by key, it takes minutes.
    with pytest.raises(ValueError, match=f"{keys[-1]} stands there twice"):
        strict_json(content.encode())
