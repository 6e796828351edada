"""Files of torch.save from somebody else: loaded as torch loads them, or refused.

Nothing of a refused file is executed, and no more memory is taken than its size.
"""

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from speechbrain_rev.inference.untrusted import load_tensors

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
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)
    ).state_dict()


def parts(content):
    """The members of an archive."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


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
    members = parts(saved(state()))
    return sealed({**members, "archive/data.pkl": pickled}.items())


# ------------------------------------------------------------ what is loaded


def test_what_is_loaded_is_what_torch_loads():
    base = torch.randn(4, 6)
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    views = {"all": base, "part": base[1:3, 2:], "turned": base.T, "images": images}
    odd = {"scalar": torch.tensor(7), "none": torch.zeros(0), "flat": torch.zeros(3, 0)}
    types = {
        f"{t}": torch.ones(3).to(t) for t in (torch.half, torch.double, torch.bool)
    }
    needs = {"needs": torch.ones(2).requires_grad_(), "p": torch.nn.Parameter(base)}
    many = {f"layer.{i}": torch.full((2,), float(i)) for i in range(1500)}
    for wanted in (state(), dict(state()), views, odd, types, needs, many):
        found = load(saved(wanted))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
            assert type(found[name]) is torch.Tensor
            assert not found[name].requires_grad


def test_a_loaded_tensor_does_not_follow_its_file():
    found = load(saved({"a": torch.ones(1000)}))
    Path("weights.ckpt").write_bytes(b"")
    assert found["a"].sum() == 1000


# ------------------------------------------------------------ code in pickles


class Attack:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


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
        (torch.ones(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
        (torch.ones(2, device="meta"), "torch._utils._rebuild_meta_tensor_no_storage"),
    ],
)
def test_a_pickle_of_anything_but_tensors_is_refused_by_name(attack, name):
    refused(saved({**state(), "stem": attack}), f"it names '{name}'")


def test_names_that_a_user_allowed_to_torch_are_refused():
    with torch.serialization.safe_globals([os.mkdir]):
        refused(saved({"stem": Attack(os.mkdir, "executed")}), "it names 'posix.mkdir'")


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (pickle.dumps(Attack(os.mkdir, "executed"), protocol=4), "of protocol 4"),
        (b"\x80\x02X\x05\0\0\0posixX\x05\0\0\0mkdir\x93.", "of protocol 4"),
        (b"\x80\x02\x8f.", "of protocol 4"),  # a set, of 216 bytes
        (pickle.dumps(Attack(os.mkdir, "executed"), protocol=0), "names 'posix.mkdir'"),
        (b"(ios\nmkdir\n.", "holds more than plain"),
        (b"(cos\nmkdir\nS'executed'\no.", "names 'os.mkdir'"),
        (b"\x82\x01.", "holds more than plain"),
        (b"no pickle", "opcode b'n' unknown"),
        (b"", "pickle exhausted"),
        (b"(" * 1000, "pickle exhausted"),
        (b"].", "it holds a list"),
        (b"\x80\x02h\x05.", "it is damaged or"),
        (b"\x80\x02R.", "it is damaged or"),
        (b"\x80\x02}u.", "it is damaged or"),
        (b"\x80\x02}))s.", "it holds ()"),
        (b"\x80\x02)Q.", "it is damaged or"),
        (b"\x80\x02).", "it holds a tuple"),
        (b"}" * (2 * 2**20 + 1), "its data.pkl has 2,097,153 bytes"),
    ],
)
def test_a_pickle_of_any_kind_is_refused_and_runs_nothing(pickled, words):
    refused(pickled_as(pickled), words)


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (torch.ones(3), "it holds a Tensor"),
        ([torch.ones(3)], "it holds a list"),
        ({"a": torch.ones(3), "more": 5}, "it holds a, more."),
        ({"a": torch.ones(3), 5: torch.ones(1)}, "it holds a, 5."),
        ({f"n{i}": i for i in range(9)}, "it holds n0, n1, n2, n3 and 5 more names."),
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
        (b"<!DOCTYPE html>", "no zip archive"),
        (pickle.dumps(Attack(os.mkdir, "executed")), "no zip archive"),
        (saved(state(), _use_new_zipfile_serialization=False), "no zip archive"),
        (Path("script.pt").read_bytes(), "a TorchScript program"),
        (sealed([]), "no zip archive"),
        (sealed([("a/b.txt", "c")]), "has no 'a'/data.pkl"),
        (sealed([("a.txt", "b")]), "'a.txt' is not in 'a.txt/'"),
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
    for suffix in (b"\0", b"PK\x05\x06"):
        refused(genuine + suffix, "something follows its archive")
    commented = bytearray(sealed(parts(genuine).items()) + b"comment")
    commented[-9:-7] = struct.pack("<H", 7)
    with zipfile.ZipFile(io.BytesIO(commented)) as archive:
        assert archive.testzip() is None
    refused(commented, "something follows its archive")
    # A comment that is announced, and not there.
    refused(genuine[:-2] + b"\1\0", "something follows its archive")


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


def walk(content):
    """Where each member begins, and where the list of them."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return [info.header_offset for info in archive.infolist()], archive.start_dir


def test_hidden_and_overlapping_members_are_refused():
    genuine = sealed(parts(saved(state())).items())
    places, start = walk(genuine)
    hidden = sealed([("archive/more", bytes(50))])[:92]
    # Before members, between them, and between them and their list.
    for place in (0, places[1], start):
        moved = bytearray(genuine[:place] + hidden + genuine[place:])
        at = moved.index(b"PK\x01\x02", start)
        for offset in places:
            if offset >= place:
                moved[at + 42 : at + 46] = struct.pack("<L", offset + len(hidden))
            at = moved.index(b"PK", at + 4)
        moved[-6:-2] = struct.pack("<L", start + len(hidden))
        with zipfile.ZipFile(io.BytesIO(moved)) as archive:
            assert archive.testzip() is None
        refused(moved, "does not fill its place in the archive")
    # Two entries of one place, as overlapping bombs have.
    overlapping = bytearray(genuine)
    second = genuine.index(b"PK\x01\x02", start + 4)
    overlapping[second + 42 : second + 46] = struct.pack("<L", places[0])
    refused(overlapping, "does not fill its place in the archive")
    # Room behind a header.
    padded = bytearray(genuine[: 30 + 16] + bytes(200) + genuine[46:])
    assert genuine[30:46] == b"archive/data.pkl"
    padded[28:30] = struct.pack("<H", 200)
    at = padded.index(b"PK\x01\x02", start)
    for offset in places:
        moved_by = 200 if offset else 0
        padded[at + 42 : at + 46] = struct.pack("<L", offset + moved_by)
        at = padded.index(b"PK", at + 4)
    padded[-6:-2] = struct.pack("<L", start + 200)
    with zipfile.ZipFile(io.BytesIO(padded)) as archive:
        assert archive.testzip() is None
    refused(padded, "does not fill its place in the archive")


def test_a_number_of_members_that_lies_is_refused():
    genuine = bytearray(sealed(parts(saved(state())).items()))
    genuine[-12:-10] = struct.pack("<H", 1)
    refused(genuine, "members, not 1")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([("archive/data.pkl", b"]")], "two members of its archive have one name"),
        ([("archive/DATA.PKL", b"]")], "two members of its archive have one name"),
        ([("b/data.pkl", b"]")], "'b/data.pkl' is not in 'archive/' as the first is"),
        ([("b/DATA.PKL", b"]")], "'b/DATA.PKL' is not in 'archive/' as the first is"),
        ([("version", b"3")], "'version' is not in 'archive/' as the first is"),
    ],
)
def test_members_that_readers_take_for_others_are_refused(others, words):
    refused(sealed([*parts(saved(state())).items(), *others]), words)


def test_the_first_member_s_folder_is_the_pickle_s():
    members = [*parts(saved(state())).items()]
    # To torch's reader this is one of b, whose pickle is the second.
    others = [("b/version", b"3"), ("b/DATA.PKL", b"]")]
    refused(sealed([*others, *members]), "'archive/data.pkl' is not in 'b/'")
    inner = [(f"a/{name}", record) for name, record in members]
    refused(sealed(inner), "has no 'a'/data.pkl")


def test_a_name_that_another_field_exchanges_is_refused():
    """Python takes a name in an extra field, torch's reader does not."""
    genuine = sealed(parts(saved(state())).items())
    _, start = walk(genuine)
    named = b"archive/data.pkl"
    at = genuine.index(b"PK\x01\x02", start)
    assert genuine[at + 46 :].startswith(named)
    nul = genuine[:start] + genuine[start:].replace(named, b"archive/data\0pkl", 1)
    refused(nul, "its member")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_compressed_member_is_refused(method):
    members = [*parts(saved(state())).items()]
    refused(sealed(members, compression=method), "'archive/data.pkl' is compressed")
    bomb = ("archive/data/9", bytes(10**7))
    file = io.BytesIO(sealed(members))
    with zipfile.ZipFile(file, "a", method) as archive:
        archive.writestr(*bomb)
    refused(file.getvalue(), "'archive/data/9' is compressed")


def test_a_great_many_members_are_refused():
    many = [(f"archive/data/{i:050}", b"") for i in range(40_000)]
    refused(sealed([*parts(saved(state())).items(), *many]), "its list of members has")


def test_numbers_of_another_checksum_are_refused():
    content = bytearray(saved({"a": torch.full((100,), 7.0)}))
    at = content.index(struct.pack("<2f", 7, 7))
    content[at] ^= 1
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


@pytest.mark.parametrize("numel", [3, 10**6, 10**12, 2**62])
@pytest.mark.parametrize(
    "view",
    [
        (0, [10**6], [1]),
        (0, [2], [10**6]),
        (10**6, [3], [1]),
        (0, [2**32, 2**32], [2**32, 2**32]),
        (2**61, [2], [1]),
        (-1, [3], [1]),
        (0, [-1], [1]),
        (2, [3], [-1]),
        (0, [10**6], []),
        (2**70, [3], [1]),
        (0, [0, 2**70], [1, 1]),
    ],
)
def test_a_tensor_that_leads_out_of_its_file_is_refused(view, numel):
    refused(viewed(*view, numel=numel), "not loaded")


@pytest.mark.parametrize("numel", [0, 2, 4, 10**6, 10**12])
def test_a_storage_of_another_size_than_its_record_is_refused(numel):
    # Those of fewer numbers fit.
    refused(viewed(0, [min(numel, 2)], [1], numel=numel), "more or fewer numbers")


@pytest.mark.parametrize("count", [10**3, 10**9, 2**40])
def test_a_tensor_whose_strides_make_it_larger_than_the_file_is_refused(count):
    refused(viewed(0, [count], [0]), f"its tensors take {4 * count:,} bytes, more than")


def test_many_tensors_of_the_same_numbers_are_refused():
    base = torch.ones(10_000)
    refused(
        saved({f"{i}": base for i in range(500)}), "take 20,000,000 bytes, more than"
    )


#: Loads each file with no more memory than is stated, and prints how it ended.
WITHIN_MEMORY = """
import resource, sys
from pathlib import Path
from speechbrain_rev.inference.untrusted import load_tensors

beside, *files = sys.argv[1:]
load_tensors(Path(files[0]), "")
for file in map(Path, files):
    now = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    # The file is mapped, and its tensors are copied.
    more = int(beside) + 2 * min(2**32, file.stat().st_size)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))
    try:
        load_tensors(file, "")
        print("loaded")
    except ValueError as error:
        print("memory" if isinstance(error.__cause__, MemoryError) else "refused")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


def within_memory(beside, contents):
    """Load files with so many bytes beside twice their size, and list how each ended."""
    files = []
    for i, content in enumerate(contents):
        files.append(f"{i}.ckpt")
        Path(files[-1]).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", WITHIN_MEMORY, f"{beside}", *files],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_a_file_takes_no_more_memory_than_twice_its_size():
    members = [*parts(saved(state())).items()]
    bomb = io.BytesIO(sealed(members))
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/9", bytes(5 * 10**8))
    contents = [
        saved({"a": torch.ones(10**7)}),
        bomb.getvalue(),
        saved({"a": Attack(bytearray, 10**11)}),
        saved({"a": Attack(torch.Tensor, 10**11)}),
        viewed(0, [10**10], [0]),
        viewed(0, [10**10], [1], numel=10**10),
        pickled_as(b"\x80\x02" + b"}" * 10**5),
    ]
    found = within_memory(50_000_000, contents)
    assert found == ["loaded"] + ["refused"] * (len(contents) - 1)


def test_a_file_of_holes_is_not_read():
    with Path("weights.ckpt").open("wb") as file:
        file.write(saved(state()))
        file.truncate(10**12)
    with pytest.raises(ValueError, match=r"it has 1,000,000,000,000 bytes, more than"):
        load_tensors(Path("weights.ckpt"), REMEDY)


@pytest.mark.slow
def test_the_largest_pickles_and_lists_of_members_take_the_stated_memory():
    rebuilt = viewed(0, [3], [1])
    tensor = parts(rebuilt)["a/data.pkl"]
    # The tensor's function and arguments are called again and again.
    again = tensor.replace(b"_v2\n", b"_v2\nq\x01").replace(b")Rt", b")Rtq\x02")
    again = again[:-2] + b"h\x01h\x02R" * 400_000 + b"."
    largest = sealed({**parts(rebuilt), "a/data.pkl": again}.items())
    members = [*parts(saved(state())).items()]
    members += [(f"archive/{i}", b"") for i in range(60_000)]
    contents = [
        saved(state()),
        largest,
        pickled_as(b"\x80\x02" + b"}" * 2_000_000 + b"]."),
        sealed(members),
    ]
    found = within_memory(400_000_000, contents)
    assert found == ["loaded", "refused", "refused", "loaded"]


@pytest.mark.parametrize("tries", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_wherever_it_is(tries, fuzz_seed):
    draw = random.Random(fuzz_seed)
    wanted = state()
    genuine = saved(wanted)
    outcomes = []
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
