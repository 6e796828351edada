"""A folder of audio becomes one file, goes on where it was, and loses nothing to a bad one."""

import io
import os
import sys

import numpy as np
import pytest
import soundfile
import torch

from speechbrain_rev.data import audio_files
from speechbrain_rev.data.packing import Packing
from speechbrain_rev.inference import (
    EmbeddingArchive,
    SpeakerEmbedder,
    embed_folder,
    embed_into,
    extraction,
)
from speechbrain_rev.inference.extraction import list_audio, look_through, told
from tests.audio_headers import say_no_length
from tests.run_folders import speech_like, write_audio


@pytest.mark.parametrize("given", [io.BytesIO(b"a\nb\n"), b"a.wav", [io.BytesIO()], 3])
def test_what_is_no_path_is_refused_in_a_line_that_says_what_to_do(given):
    words = "is read by the path of its file, and (BytesIO|bytes|int|list) is none"
    with pytest.raises(ValueError, match=f"{words}.*SpeakerEmbedder.embed takes"):
        list_audio(given)
    with pytest.raises(ValueError, match=words):
        audio_files(given)


class Counting(torch.nn.Module):
    """Embeds an utterance as its first samples; counts the utterances it has seen."""

    seen = 0

    def forward(self, waves, samples):
        self.seen += len(waves)
        return waves[:, :4].unsqueeze(1)


class Weighing(torch.nn.Module):
    """Embeds an utterance as what each of its samples has a part in."""

    def forward(self, waves, samples):
        weights = torch.linspace(1, 2, waves.shape[1])
        sums = torch.stack([waves @ weights, waves.abs() @ weights], dim=1)
        return sums.unsqueeze(1)


def embedder(fingerprint="one", model=Counting):
    return SpeakerEmbedder(model(), device="cpu", fingerprint=fingerprint)


NAMES = ["a/1.wav", "a/2.FLAC", "b/1.wav", "c.ogg"]


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "speech"
    for seed, name in enumerate(NAMES):
        write_audio(place / name.lower(), speech_like(0.3, seed=seed)).rename(
            place / name
        )
    (place / "notes.txt").write_text("no audio")
    (place / "README").write_text("no audio")
    return place


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_folder_becomes_rows_by_names_relative_to_it(folder, tmp_path, suffix):
    out = tmp_path / f"rows{suffix}"
    found = embed_folder(folder, out, embedder())
    assert found.archive.names == tuple(NAMES)
    assert (dict(found.bad), found.others) == (
        {},
        {".txt": 1, "without an ending": 1},
    )
    stored = EmbeddingArchive.load(out)
    assert stored.names == tuple(NAMES)
    assert (stored.fingerprint, stored.sources) == ("one", found.archive.sources)
    expected = embedder().embed([folder / name for name in NAMES])
    assert np.array_equal(stored.embeddings, expected)
    assert stored.embeddings.dtype == np.float32


def test_parquet_has_columns_that_other_programs_read(folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    embed_folder(folder, tmp_path / "rows.parquet", embedder())
    table = parquet.read_table(tmp_path / "rows.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["name"] == kinds["source"] == "string"
    assert kinds["embedding"].startswith("fixed_size_list<")
    assert "float" in kinds["embedding"]
    assert table.schema.metadata[b"fingerprint"] == b"one"
    assert table["name"].to_pylist() == NAMES


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_only_what_is_not_there_is_embedded(folder, tmp_path, suffix):
    out, again = tmp_path / f"rows{suffix}", embedder()
    embed_folder(folder, out, embedder())
    embed_folder(folder, out, again)
    assert again.model.seen == 0
    write_audio(folder / "d.wav", speech_like(0.3, seed=9))
    write_audio(folder / "b/1.wav", speech_like(0.4, seed=10))
    embed_folder(folder, out, again)
    assert again.model.seen == 2


def test_other_channels_and_windows_are_not_taken_for_the_same(folder, tmp_path):
    out = tmp_path / "rows.npz"
    embed_folder(folder, out, embedder())
    for options in ({"channels": 0}, {"window": 0.25}):
        again = embedder()
        found = embed_folder(folder, out, again, **options)
        assert again.model.seen >= len(NAMES)
        assert found.archive.names == tuple(NAMES)
    same = embedder()
    embed_folder(folder, out, same, window=0.25)
    assert same.model.seen == 0


def test_another_model_s_embeddings_are_not_replaced(folder, tmp_path):
    out = tmp_path / "rows.npz"
    embed_folder(folder, out, embedder())
    before = out.read_bytes()
    with pytest.raises(
        ValueError, match=r"rows\.npz holds embeddings of another model"
    ):
        embed_folder(folder, out, embedder("two"))
    assert out.read_bytes() == before
    out.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"rows\.npz is no archive"):
        embed_folder(folder, out, embedder())
    assert out.read_bytes() == b"mine"


@pytest.fixture
def bad(folder):
    """Names of files that cannot be embedded, and what is said of them."""
    (folder / "a/0.wav").write_text("no audio")
    write_audio(folder / "silent.wav", np.zeros(8000, np.float32))
    write_audio(folder / "short.wav", speech_like(0.1))
    write_audio(folder / "two.wav", np.stack([speech_like(0.3)] * 2, axis=1))
    (folder / "gone.wav").symlink_to(folder / "nowhere.wav")
    return {
        "a/0.wav": "cannot be read as audio",
        "gone.wav": "there is no such file",
        "short.wav": "at least 0.25 s",
        "silent.wav": "is silent",
        "two.wav": "2 channels",
    }


@pytest.mark.parametrize("window", [None, 0.25])
def test_bad_files_lose_no_others_and_are_told_of_all_at_once(
    folder, bad, tmp_path, window
):
    out, again = tmp_path / "rows.npz", embedder()
    with pytest.raises(ValueError, match=r"5 files cannot be embedded:") as error:
        embed_folder(folder, out, embedder(), window=window)
    message = str(error.value)
    for name, why in bad.items():
        line = next(x for x in message.splitlines() if x.startswith(f"- {name}: "))
        assert why in line
    assert f"The other 4 are in {out}" in message
    assert EmbeddingArchive.load(out).names == tuple(NAMES)
    found = embed_folder(folder, out, again, window=window, bad_files="skip")
    assert again.model.seen == 0
    assert found.archive.names == tuple(NAMES)
    assert set(found.bad) == set(bad)
    seconds, told = look_through(list_audio(folder), window=window)
    assert set(told) == set(bad) - {"silent.wav"}
    assert seconds == pytest.approx(4 * 0.3 + 0.5, abs=0.01)


@pytest.mark.parametrize("window", [None, 0.25])
def test_files_of_all_formats_are_embedded_whole_or_refused(tmp_path, window):
    formats = {"sph": "NIST", "aiff": "AIFF", "au": "AU", "w64": "W64", "rf64": "RF64"}
    weighing, rows = embedder(model=Weighing), {}
    wave = np.round(speech_like(0.6) * 2**14).astype(np.int16)
    for kind in ("whole", "stream", "cut"):
        place = tmp_path / kind
        for suffix in ("wav", "flac", *formats):
            path = place / f"a.{suffix}"
            place.mkdir(exist_ok=True)
            soundfile.write(path, wave, 16000, "PCM_16", format=formats.get(suffix))
            if kind == "stream" and suffix in ("wav", "flac"):
                say_no_length(path)
            if kind == "cut":
                os.truncate(path, path.stat().st_size - 100)
        if kind == "cut":
            with pytest.raises(ValueError, match="7 files cannot be embedded") as error:
                embed_folder(place, tmp_path / "cut.npz", weighing, window=window)
            assert str(error.value).count("is cut short, 100 of") == 6
        else:
            found = embed_folder(
                place, tmp_path / f"{kind}.npz", weighing, window=window
            )
            rows[kind] = found.archive.embeddings
    assert rows["whole"].shape == (7, 2)
    # Sums of 9600 numbers in float32.
    assert np.allclose(rows["whole"], rows["whole"][0], rtol=1e-5)
    assert np.array_equal(rows["whole"], rows["stream"])


def test_names_that_are_not_utf_8_do_not_stop_the_others(folder, tmp_path, capsys):
    (folder / os.fsdecode(b"\xff.wav")).write_text("no audio")
    (folder / os.fsdecode(b"b.\xff")).touch()
    found = embed_folder(folder, tmp_path / "o.npz", embedder(), bad_files="skip")
    assert found.archive.names == tuple(NAMES)
    print(told(found.bad), list_audio(folder).passed_over())
    said = capsys.readouterr().out
    assert "- \\udcff.wav: " in said
    assert "1 .\\udcff" in said
    with pytest.raises(ValueError, match="cannot be embedded") as error:
        embed_folder(folder, tmp_path / "o.npz", embedder())
    str(error.value).encode()


def test_of_very_many_bad_files_a_hundred_are_named():
    said = told({f"{i:06}.wav": "it is silent" for i in range(200_000)})
    assert said.startswith(
        "200000 files cannot be embedded:\n- 000000.wav: it is silent"
    )
    assert "- and 199990 more: 000010.wav, " in said
    assert said.endswith("000109.wav, ...\n")


def test_a_folder_of_bad_files_alone_is_an_error_and_writes_nothing(tmp_path):
    write_audio(tmp_path / "in/silent.wav", np.zeros(8000, np.float32))
    for bad_files in ("refuse", "skip"):
        with pytest.raises(ValueError, match=r"(?s)1 files cannot.*silent"):
            embed_folder(
                tmp_path / "in", tmp_path / "o.npz", embedder(), bad_files=bad_files
            )
    assert not (tmp_path / "o.npz").exists()


def test_audio_that_went_bad_has_no_row_of_what_it_was(folder, tmp_path):
    out = tmp_path / "rows.npz"
    embed_folder(folder, out, embedder())
    write_audio(folder / "b/1.wav", np.zeros(8000, np.float32))
    embed_folder(folder, out, embedder(), bad_files="skip")
    assert "b/1.wav" not in EmbeddingArchive.load(out).names


def test_a_diverged_encoder_is_not_taken_for_bad_audio(folder, tmp_path):
    class Diverged(torch.nn.Module):
        def forward(self, waves, samples):
            return waves[:, None, :4] * float("nan")

    write_audio(folder / "silent.wav", np.zeros(8000, np.float32))
    broken = SpeakerEmbedder(Diverged(), device="cpu", fingerprint="one")
    for window in (None, 0.25):
        with pytest.raises(ValueError, match="diverged"):
            embed_folder(
                folder, tmp_path / "o.npz", broken, window=window, bad_files="skip"
            )


def test_a_choice_of_no_channel_is_not_taken_for_bad_audio(folder, tmp_path):
    with pytest.raises(ValueError, match=r"channels takes .*but is 'left'"):
        embed_folder(
            folder, tmp_path / "o.npz", embedder(), channels="left", bad_files="skip"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [({"channels": -1}, "channels takes"), ({"window": 0.1}, "window of 0.1 s is no")],
)
def test_looking_through_does_not_blame_files_for_options(folder, options, message):
    with pytest.raises(ValueError, match=message):
        look_through(list_audio(folder), **options)


def test_an_interrupted_folder_goes_on(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(extraction, "_SAVE_SECONDS", 0.0)
    out, first, again = tmp_path / "rows.parquet", embedder(), embedder()
    original = first.embed_each

    def interrupted(*args, **options):
        for count, one in enumerate(original(*args, **options)):
            if count == 2:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(first, "embed_each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embed_folder(folder, out, first)
    embed_folder(folder, out, again)
    assert again.model.seen == 2


def test_lists_of_files_and_folders_are_named_as_given(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    odd = write_audio(folder / "x.wav", speech_like(0.3)).rename(folder / "x.sound")
    listing = list_audio(["a", odd.name, "c.ogg", "c.ogg"])
    assert list(listing.files) == ["a/1.wav", "a/2.FLAC", "x.sound", "c.ogg"]
    found = embed_folder(["a", "x.sound"], tmp_path / "o.npz", embedder())
    assert found.archive.names == ("a/1.wav", "a/2.FLAC", "x.sound")


@pytest.fixture
def packed(tmp_path):
    """A packed folder of two files of one speaker and one of another."""
    with Packing(tmp_path / "c.packed", source="c", sample_rate=16000) as packing:
        for seed, name in enumerate(("id1/a.wav", "id1/b.wav", "id2/a.wav")):
            packing.add(name, torch.from_numpy(speech_like(0.3, seed=seed)))
        packing.finish()
    return tmp_path / "c.packed"


def test_files_of_a_packed_folder_are_named_as_those_of_a_folder(packed, monkeypatch):
    monkeypatch.chdir(packed.parent)
    for place in ("c.packed", packed, "./c.packed/"):
        found = embed_folder(place, "whole.npz", embedder())
        assert found.archive.names == ("id1/a.wav", "id1/b.wav", "id2/a.wav")
    expected = embedder().embed([packed / name for name in found.archive.names])
    assert np.array_equal(found.archive.embeddings, expected)
    assert list(list_audio("c.packed/id1").files) == ["a.wav", "b.wav"]
    given = ["c.packed/id2", "c.packed/id1/b.wav", str(packed / "id1")]
    assert list(list_audio(given).files) == [
        "c.packed/id2/a.wav",
        "c.packed/id1/b.wav",
        f"{packed}/id1/a.wav",
        f"{packed}/id1/b.wav",
    ]


def test_a_mean_of_channels_is_not_given_to_who_refuses_several(tmp_path):
    two = np.stack([speech_like(0.3, seed=s) for s in (0, 1)], axis=1)
    write_audio(tmp_path / "in/two.wav", two)
    out = tmp_path / "o.npz"
    embed_folder(tmp_path / "in", out, embedder(), channels="mean")
    with pytest.raises(ValueError, match="2 channels"):
        embed_folder(tmp_path / "in", out, embedder())


def test_a_window_of_a_whole_number_is_one_window_of_any_type(folder, tmp_path):
    out, again = tmp_path / "rows.npz", embedder()
    embed_folder(folder, out, embedder(), window=3)
    for same in (3.0, np.float32(3.0), np.int64(3)):
        embed_folder(folder, out, again, window=same)
    assert again.model.seen == 0


def test_links_are_followed_and_lead_round_nowhere(folder):
    (folder / "again").symlink_to(folder / "a")
    (folder / "round").symlink_to(folder)
    assert list(list_audio(folder).files) == sorted(
        [*NAMES, "again/1.wav", "again/2.FLAC"]
    )


@pytest.mark.parametrize("out", ["rows.csv", "rows", "rows.npz.gz"])
def test_a_name_of_no_format_is_refused_before_the_work(folder, out):
    idle = embedder()
    with pytest.raises(ValueError, match=r"ends in \.npz or \.parquet, not"):
        embed_folder(folder, out, idle)
    assert idle.model.seen == 0


def test_without_pyarrow_the_way_out_is_named_before_the_work(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    idle = embedder()
    with pytest.raises(ImportError, match=r"speechbrain_rev\[parquet\]"):
        embed_folder(folder, tmp_path / "rows.parquet", idle)
    assert idle.model.seen == 0
    embed_folder(folder, tmp_path / "rows.npz", idle)


def test_a_folder_without_audio_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"no audio in .*1 \.txt"):
        list_audio(tmp_path)
    with pytest.raises(ValueError, match="an empty list"):
        list_audio([])
    with pytest.raises(ValueError, match="refuse or skip, not 'drop'"):
        embed_folder(tmp_path, "o.npz", embedder(), bad_files="drop")


@pytest.mark.parametrize("content", [b"", b"no parquet", b"PAR1" * 20])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, content):
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.parquet is no archive of embeddings"):
        EmbeddingArchive.load(path)


def test_a_table_of_something_else_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for columns in ({"a": [1]}, {"name": ["a"], "embedding": [1.0], "source": ["s"]}):
        parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
        with pytest.raises(ValueError, match="is no archive of embeddings"):
            EmbeddingArchive.load(tmp_path / "rows.parquet")


def test_one_file_that_cannot_be_embedded_stops_embed_into_without_on_bad(
    folder, bad, tmp_path
):
    files = {"a": folder / "a/1.wav", "b": folder / "silent.wav"}
    with pytest.raises(ValueError, match=r"silent\.wav is silent"):
        embed_into(tmp_path / "o.npz", embedder(), files)
