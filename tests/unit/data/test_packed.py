import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import (
    ChunkDataset,
    SpeakerAugment,
    Utterance,
    audio_exists,
    audio_files,
    audio_info,
    read_audio,
    read_first_channel,
)
from speechbrain_rev.data.columns import TextColumn, map_columns, save_columns
from speechbrain_rev.data.packed import (
    INDEX,
    JOURNAL,
    SAMPLES,
    PackedAudio,
    find_packed,
)
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.inference.extraction import _source
from tests.corpus import write_corpus, write_noise, write_rooms

RATE = 16000


def pack(source, packed, *, first=None):
    """Pack a folder, or the first files of it."""
    files = audio_files(source)[:first]
    with Packing(packed, source=str(source), sample_rate=RATE) as packing:
        for path in files:
            name = path.relative_to(source).as_posix()
            if name not in packing:
                packing.add(name, read_first_channel(path, sample_rate=RATE))
        if first is None:
            packing.finish()
    return packed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"), speakers=3, seconds=0.3)
    soundfile.write(folder / "wav/id00000/s00/00009.flac", np.ones(50) / 4, RATE)
    return folder


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory):
    return pack(corpus, tmp_path_factory.mktemp("pack") / "corpus.packed")


@pytest.mark.parametrize(
    ("start", "samples"), [(0, None), (17, 1000), (17, None), (3000, 10**6), (10**6, 5)]
)
def test_every_range_of_a_packed_file_is_that_of_the_file(
    corpus, packed, start, samples
):
    files = audio_files(corpus)
    assert len(files) == 13
    for path in files:
        inside = packed / path.relative_to(corpus)
        assert audio_info(inside) == audio_info(path)
        ranges = {"sample_rate": RATE, "start": start, "samples": samples}
        assert torch.equal(read_audio(inside, **ranges), read_audio(path, **ranges))


def test_a_packed_folder_lists_what_it_holds(corpus, packed):
    names = [path.relative_to(corpus) for path in audio_files(corpus)]
    assert audio_files(packed) == [packed / name for name in names]
    some = packed / "wav" / "id00001"
    assert audio_files(some) == [p for p in audio_files(packed) if some in p.parents]
    assert audio_exists(audio_files(packed)[0])
    assert not audio_exists(packed / "wav" / "id00001")
    assert not audio_exists(packed / "wav/id00001/s00/nobody.wav")


@pytest.mark.parametrize(("subtype", "loud"), [("FLOAT", 3.0), ("PCM_24", 0.01)])
def test_samples_of_more_than_16_bits_keep_16_of_them(tmp_path, subtype, loud):
    wav = loud * np.linspace(-0.9, 1, 999) ** 3
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "a.wav"
    soundfile.write(path, wav, RATE, subtype=subtype)
    pack(tmp_path / "source", tmp_path / "a.packed")
    inside = read_audio(tmp_path / "a.packed" / "a.wav", sample_rate=RATE)
    original = read_audio(path, sample_rate=RATE)
    step = original.abs().max() / (2**15 - 1)
    # Half a step, and what float32 makes of the largest sample.
    assert (inside - original).abs().max() <= 0.5 * step + 2e-7 * loud
    assert not torch.equal(inside, original)


def same_pack(one, other):
    assert (one / SAMPLES).read_bytes() == (other / SAMPLES).read_bytes()
    (columns, about), (wanted, of_all) = map(map_columns, (one / INDEX, other / INDEX))
    assert about == of_all
    for name in wanted:
        assert list(columns[name]) == list(wanted[name])
    assert not (one / JOURNAL).exists()


def test_packing_goes_on_where_it_was(corpus, packed, tmp_path):
    again = pack(corpus, tmp_path / "again.packed", first=5)
    with pytest.raises(ValueError, match="not packed to its end"):
        audio_files(again)
    # What was written after the journal was, and a line that is torn.
    with (again / SAMPLES).open("ab") as file:
        file.write(b"\1\2\3")
    with (again / JOURNAL).open("a") as file:
        file.write('["wav/id00001/s0')
    pack(corpus, again, first=8)
    lines = (again / JOURNAL).read_text().splitlines()
    assert [len(json.loads(line)) for line in lines[1:]] == [4] * 8
    pack(corpus, again)
    same_pack(again, packed)


def test_a_journal_of_an_earlier_version_goes_on(corpus, packed, tmp_path):
    again = pack(corpus, tmp_path / "again.packed", first=5)
    about, *rows = map(json.loads, (again / JOURNAL).read_text().splitlines())
    lines = [about, *(row[:3] for row in rows)]
    (again / JOURNAL).write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    pack(corpus, again)
    same_pack(again, packed)


def test_a_length_in_the_journal_that_changed_is_noticed(corpus, tmp_path):
    again = pack(corpus, tmp_path / "again.packed", first=5)
    lines = (again / JOURNAL).read_text().splitlines()
    row = json.loads(lines[3])
    row[1] -= 1
    lines[3] = json.dumps(row)
    (again / JOURNAL).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"damaged in line 4 \(it is not as it was"):
        pack(corpus, again)


@pytest.mark.parametrize("journal", [None, "", '{"source": '])
def test_samples_of_which_no_journal_tells_are_cut_off(
    corpus, packed, tmp_path, journal
):
    """As a kill leaves them before the journal has its first line."""
    again = tmp_path / "again.packed"
    again.mkdir()
    (again / SAMPLES).write_bytes(b"\1\2\3\4")
    if journal is not None:
        (again / JOURNAL).write_text(journal)
    pack(corpus, again, first=4)
    pack(corpus, again)
    same_pack(again, packed)


def test_a_kill_between_the_index_and_the_end_costs_nothing(corpus, packed, tmp_path):
    again = pack(corpus, tmp_path / "again.packed", first=5)
    (again / INDEX).write_bytes((packed / INDEX).read_bytes())
    pack(corpus, again)
    same_pack(again, packed)


_KILLED = """
import os, signal, sys
from pathlib import Path
from speechbrain_rev.data import packing
from tests.unit.data.test_packed import Packing, pack
added = Packing.add

def add(self, name, wav):
    added(self, name, wav)
    if len(self) == 7:
        os.kill(os.getpid(), signal.SIGKILL)

packing._KEPT_EVERY = int(sys.argv[3])
Packing.add = add
pack(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept_every", [10, 10_000, 10**9])
def test_a_killed_packing_goes_on(corpus, packed, tmp_path, kept_every):
    again = tmp_path / "again.packed"
    command = [sys.executable, "-c", _KILLED, str(corpus), str(again), str(kept_every)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    pack(corpus, again)
    same_pack(again, packed)


def test_no_two_pack_one_folder_at_once(corpus, tmp_path):
    begun = tmp_path / "begun.packed"
    with (
        Packing(begun, source="a", sample_rate=RATE),
        pytest.raises(ValueError, match="Another process is packing"),
    ):
        Packing(begun, source="a", sample_rate=RATE)


def test_what_was_begun_and_is_damaged_is_refused(corpus, tmp_path):
    begun = pack(corpus, tmp_path / "begun.packed", first=3)
    kept = (begun / SAMPLES).read_bytes()
    (begun / SAMPLES).write_bytes(kept[:100])
    with pytest.raises(ValueError, match=r"has 100 bytes, less than.*Delete"):
        pack(corpus, begun)
    (begun / SAMPLES).write_bytes(kept)
    with (begun / JOURNAL).open("a") as file:
        file.write("no JSON\n")
    with pytest.raises(ValueError, match=r"unfinished\.jsonl is damaged"):
        pack(corpus, begun)


WAV = "wav/id00000/s00/00000.wav"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": 1}', "is no file with its length"),
        ('["a.wav", 5]', "is no file with its length"),
        ('["", 5, 1.0]', "'' is no name"),
        ("[7, 5, 1.0]", "7 is no name"),
        ('["a.wav", -5, 1.0]', "a.wav has -5 samples"),
        ('["a.wav", 5.5, 1.0]', "a.wav has 5.5 samples"),
        ('["a.wav", true, 1.0]', "a.wav has True samples"),
        ('["a.wav", 1e30, 1.0]', "a.wav has 1e[+]30 samples"),
        (f'["a.wav", {10**30}, 1.0]', f"a.wav has {10**30} samples"),
        ('["a.wav", 5, NaN]', "a.wav has the scale nan"),
        ('["a.wav", 5, Infinity]', "a.wav has the scale inf"),
        ('["a.wav", 5, 1e300]', "a.wav has the scale 1e[+]300"),
        ('["a.wav", 5, 0.0]', "a.wav has the scale 0.0"),
        ('["a.wav", 5, -1.0]', "a.wav has the scale -1.0"),
        (f'["{WAV}", 0, 1.0]', f"{WAV} is there twice"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_journal_of_other_things_than_files_is_refused(
    corpus, tmp_path, line, reason
):
    begun = pack(corpus, tmp_path / "begun.packed", first=3)
    with (begun / JOURNAL).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(
        ValueError,
        match=rf"unfinished\.jsonl is damaged in line 5 \(.*{reason}.*Delete",
    ):
        pack(corpus, begun)


def test_a_journal_that_does_not_say_what_is_packed_is_refused(corpus, tmp_path):
    begun = pack(corpus, tmp_path / "begun.packed", first=3)
    lines = (begun / JOURNAL).read_text().splitlines(keepends=True)
    (begun / JOURNAL).write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match=r"unfinished\.jsonl is damaged in line 1 "):
        pack(corpus, begun)


def _set(name, row, value):
    def change(columns, about):
        columns[name] = columns[name].copy()
        columns[name][row] = value

    return change


def _exchange(name):
    def change(columns, about):
        columns[name] = columns[name][[1, 0, *range(2, 13)]]

    return change


def _rename(row, name):
    def change(columns, about):
        names = list(columns["names"])
        names[row] = name
        columns["names"] = TextColumn.of(names)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda columns, about: columns.pop("keys"), "has the columns"),
        (lambda columns, about: columns.update(more=np.ones(13)), "has the columns"),
        (lambda c, about: c.update(names=c["keys"]), "names are no texts"),
        (lambda c, about: c.update(keys=c["names"]), "keys are texts"),
        (lambda c, about: c.update(begins=c["begins"][:12]), r"begins are \[12\]"),
        (
            lambda c, about: c.update(places=c["places"][:, None]),
            r"places are \[13, 1\]",
        ),
        (lambda c, about: c.update(lengths=c["lengths"] / 1), r"lengths .* float64"),
        (
            lambda c, about: c.update(scales=c["scales"].astype("<f8")),
            "scales .* float64",
        ),
        (_set("begins", 0, -1), "overlap, or leave out"),
        (_set("begins", 1, 2**62), "overlap, or leave out"),
        (_set("begins", 1, 0), "overlap, or leave out"),
        (_set("lengths", 0, -5), "lengths are -5 to"),
        (_set("lengths", 0, 2**62), "lengths are"),
        (_set("lengths", 12, 5), "do not end|overlap"),
        (_exchange("lengths"), "overlap, or leave out"),
        (_set("scales", 2, np.nan), "a scale is not finite"),
        (_set("scales", 2, np.inf), "a scale is not finite"),
        (_set("scales", 2, 0), "a scale is not finite"),
        (_set("scales", 2, -1), "a scale is not finite"),
        (_set("places", 0, 13), "places are not"),
        (_set("places", 0, -1), "places are not"),
        (_exchange("places"), "keys are not those of the names"),
        (_exchange("keys"), "keys are not sorted"),
        (_set("keys", 0, -(2**63)), "keys are not those of the names"),
        (_rename(0, "wav/id00000/s00/0000.wav"), "keys are not those of the names"),
        (_rename(0, ""), "'' is empty"),
        (_rename(1, "wav/id00000/s00/00000.wav"), "there twice"),
        (_rename(0, "z"), "not sorted"),
        (lambda columns, about: about.pop("samples"), "samples is ''"),
        (lambda columns, about: about.update(samples="-1"), "samples is '-1'"),
        (lambda columns, about: about.update(samples="9" * 99), "samples is '999"),
        (lambda columns, about: about.update(sample_rate="0"), "sample_rate is '0'"),
        (
            lambda columns, about: about.update(sample_rate="16e3"),
            "sample_rate is '16e3'",
        ),
    ],
)
def test_an_index_of_anything_but_files_one_behind_another_is_refused(
    packed, tmp_path, change, reason
):
    folder = shutil.copytree(packed, tmp_path / "copied.packed")
    columns, about = map_columns(packed / INDEX)
    change(columns, about)
    save_columns(folder / INDEX, columns, about)
    with pytest.raises(
        ValueError, match=rf"index\.columns is damaged: .*{reason}.*pack anew"
    ):
        audio_files(folder)


@pytest.mark.parametrize(
    "ends",
    [
        # Differences of 64 bits that wrap around are above 0.
        np.array([2**63 - 1, -2, 5]),
        np.array([-1, 5]),
        np.array([3, 2, 5]),
        np.array([3, 6]),
        np.array([5.0]),
        np.array([[5]]),
    ],
)
def test_ends_of_texts_that_are_not_in_their_bytes_are_refused(ends):
    assert list(TextColumn(np.zeros(5, np.uint8), np.array([2, 5]))) == [
        "\0" * 2,
        "\0" * 3,
    ]
    with pytest.raises(ValueError, match="ends"):
        TextColumn(np.zeros(5, np.uint8), ends)


def test_no_flipped_bit_of_an_index_gives_the_audio_of_another_file(corpus, tmp_path):
    packed, flipped = tmp_path / "whole.packed", tmp_path / "flipped.packed"
    pack(corpus / "wav" / "id00000", packed)
    whole, refused = PackedAudio(str(packed)), []
    shutil.copytree(packed, flipped)
    content = (packed / INDEX).read_bytes()
    for place in range(len(content)):
        other = bytearray(content)
        other[place] ^= 1 << place % 8
        (flipped / INDEX).write_bytes(other)
        try:
            opened = PackedAudio(str(flipped))
        except ValueError as error:
            refused.append(str(error))
            continue
        assert list(opened.names) == list(whole.names)
        for name in whole.names:
            ours, theirs = (one.read(name, 0, None) for one in (opened, whole))
            # A bit of a scale is not noticed, nor is one of the sample rate.
            assert np.array_equal(np.sign(ours), np.sign(theirs))
    assert all(str(flipped) in message for message in refused)
    # The 5 scales have 4 bytes each, the rate has 5.
    assert len(refused) >= len(content) - 5 * 4 - 5


def test_a_full_disk_is_told_of_with_what_to_do(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Packing(tmp_path / "a.packed", source="a", sample_rate=RATE) as made:
        made.add("a.wav", torch.ones(5) / 2)
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left.*goes on where it was"):
            made.finish()
        monkeypatch.undo()


def test_what_16_bits_cannot_hold_is_refused_by_name(tmp_path):
    with Packing(tmp_path / "a.packed", source="a", sample_rate=RATE) as made:
        made.add("a.wav", torch.ones(5) / 2)
        with pytest.raises(ValueError, match=r"a\.wav is in .* already"):
            made.add("a.wav", torch.ones(5) / 2)
        with pytest.raises(ValueError, match=r"b\.wav holds NaN"):
            made.add("b.wav", torch.tensor([0.1, float("nan")]))
        made.add("quiet.wav", torch.full((5,), 1e-43))
        made.finish()
    inside = tmp_path / "a.packed"
    assert read_audio(inside / "quiet.wav", sample_rate=RATE).tolist() == [0.0] * 5
    assert read_audio(inside / "a.wav", sample_rate=RATE).tolist() == [0.5] * 5
    with pytest.raises(ValueError, match="start is -1"):
        read_audio(inside / "a.wav", sample_rate=RATE, start=-1)


def test_folders_may_have_such_names_and_hold_packed_ones(
    corpus, tmp_path, monkeypatch
):
    outer = tmp_path / "run.packed"
    inner = pack(corpus, outer / "speech.packed")
    assert len(audio_files(inner)) == 13
    write_noise(outer / "files")
    assert len(audio_files(outer / "files")) == 2
    monkeypatch.chdir(outer)
    relative = audio_files("speech.packed")
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in relative] == [str(p) for p in audio_files(inner)]


def test_noise_of_a_relative_packed_folder_has_its_own_ratios(tmp_path, monkeypatch):
    pack(write_noise(tmp_path / "files" / "music"), tmp_path / "music.packed")
    monkeypatch.chdir(tmp_path)
    augment = SpeakerAugment(
        out_n_neurons=3, chunk_samples=2000, augment_prob=1.0,
        noise_folder="music.packed",
    )  # fmt: skip
    assert augment(torch.randn(3, 2200), torch.ones(3))[0].shape == (3, 2000)


def test_a_folder_packed_anew_is_read_anew(corpus, tmp_path):
    made = pack(corpus, tmp_path / "made.packed")
    path = audio_files(made)[0]
    before = _source(path, None, None)
    shutil.rmtree(made)
    with Packing(made, source="a", sample_rate=RATE) as packing:
        packing.add(path.relative_to(made).as_posix(), torch.ones(7) / 2)
        packing.finish()
    assert read_audio(path, sample_rate=RATE).tolist() == [0.5] * 7
    assert _source(path, None, None) != before


def test_a_link_to_a_packed_folder_is_no_other_audio(corpus, tmp_path):
    path = audio_files(pack(corpus, tmp_path / "made.packed"))[0]
    (tmp_path / "link.packed").symlink_to(tmp_path / "made.packed")
    other = tmp_path / "link.packed" / path.relative_to(tmp_path / "made.packed")
    assert _source(other, None, None) == _source(path, None, None)


def test_links_are_followed_and_do_not_lead_round(corpus, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "wav").symlink_to(corpus / "wav")
    (tmp_path / "links" / "self").symlink_to(tmp_path / "links")
    found = audio_files(tmp_path / "links")
    assert [p.relative_to(tmp_path / "links") for p in found] == [
        p.relative_to(corpus) for p in audio_files(corpus)
    ]


def test_a_folder_that_is_not_in_a_packed_one_is_refused(packed):
    with pytest.raises(ValueError, match=r"There is no .* file below .*typo"):
        audio_files(packed / "typo")


def test_files_come_in_any_order(corpus, packed, tmp_path):
    other = tmp_path / "other.packed"
    with Packing(other, source="corpus", sample_rate=RATE) as packing:
        for path in reversed(audio_files(corpus)):
            name = path.relative_to(corpus).as_posix()
            packing.add(name, read_audio(path, sample_rate=RATE))
        packing.finish()
    for path in audio_files(packed):
        inside = other / path.relative_to(packed)
        assert torch.equal(
            read_audio(inside, sample_rate=RATE), read_audio(path, sample_rate=RATE)
        )


def test_what_cannot_become_a_packed_folder_is_refused(corpus, packed, tmp_path):
    with pytest.raises(ValueError, match=r"does not end in \.packed.*Give x\.packed"):
        Packing(tmp_path / "x", source="a", sample_rate=RATE)
    with pytest.raises(ValueError, match="is packed already"):
        pack(corpus, packed)
    pack(corpus, tmp_path / "begun.packed", first=2)
    with pytest.raises(ValueError, match="was begun with"):
        Packing(tmp_path / "begun.packed", source="elsewhere", sample_rate=RATE)
    with pytest.raises(ValueError, match="was begun with"):
        Packing(tmp_path / "begun.packed", source=str(corpus), sample_rate=8000)


def test_an_unusable_packed_folder_is_refused_by_name(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.packed is no packed folder"):
        audio_info(tmp_path / "nothing.packed" / "a.wav")
    short = pack(corpus, tmp_path / "short.packed")
    os.truncate(short / SAMPLES, 100)
    with pytest.raises(ValueError, match=r"has 100 bytes.*cut short"):
        audio_files(short)


def test_a_packed_folder_that_is_cut_short_later_is_an_error_and_no_end(
    corpus, tmp_path
):
    short = pack(corpus, tmp_path / "short.packed")
    path = audio_files(short)[-1]
    with pytest.raises(ValueError, match="no such file in that packed folder"):
        read_audio(short / "nobody.wav", sample_rate=RATE)
    with pytest.raises(ValueError, match="has 16000 samples per second, but 8000"):
        read_audio(path, sample_rate=8000)
    os.truncate(short / SAMPLES, 100)
    with pytest.raises(ValueError, match=r"short\.packed/.*ends before"):
        read_audio(path, sample_rate=RATE)


def test_chunks_and_augmentation_are_those_of_files(corpus, packed, tmp_path):
    def chunks(root):
        paths = [p for p in audio_files(root) if p.suffix == ".wav"]
        rows = [
            Utterance(p.stem, str(p), audio_info(p).samples, p.parts[-3]) for p in paths
        ]
        numbers = {row.spk_id: n for n, row in enumerate(rows)}
        dataset = ChunkDataset(rows, numbers, samples=3000)
        return torch.stack([dataset[1, index].wav for index in range(len(dataset))])

    assert torch.equal(chunks(corpus), chunks(packed))

    def augmented(noise, rooms):
        augment = SpeakerAugment(
            out_n_neurons=9,
            chunk_samples=2000,
            augment_prob=1.0,
            noise_folder=noise,
            rir_folder=rooms,
        )
        return augment(chunks(corpus), torch.ones(12))[0]

    noise, rooms = write_noise(tmp_path / "noise"), write_rooms(tmp_path / "rooms")
    packed_noise = pack(noise, tmp_path / "noise.packed")
    packed_rooms = pack(rooms, tmp_path / "rooms.packed")
    assert torch.equal(augmented(noise, rooms), augmented(packed_noise, packed_rooms))


def test_names_with_one_key_are_told_apart(corpus, tmp_path, monkeypatch):
    for module in ("packed", "packing"):
        monkeypatch.setattr(
            f"speechbrain_rev.data.{module}.key_of", lambda name: np.int64(7)
        )
    one = pack(corpus, tmp_path / "one.packed")
    for path in audio_files(corpus):
        inside = read_audio(one / path.relative_to(corpus), sample_rate=RATE)
        assert torch.equal(inside, read_audio(path, sample_rate=RATE))
    assert not audio_exists(one / "nobody.wav")


def test_paths_that_lead_into_no_packed_folder_are_left_alone(tmp_path):
    for path in ("a.wav", "a.packed.wav", "x.packedness/a.wav", tmp_path):
        assert find_packed(path) is None
