import os
import pickle
import zipfile

import pytest
import torch

from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.inference.run_folder import read_settings, read_weights
from tests.run_folders import TINY, speech_like, write_run


def checkpoint(run, name, unixtime, weights):
    folder = run / "save" / name
    folder.mkdir(parents=True)
    (folder / "CKPT.yaml").write_text(f"end-of-epoch: true\nunixtime: {unixtime}\n")
    torch.save(weights, folder / "embedding_model.ckpt")


def test_plain_values_are_read_and_no_tag_is_followed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert read_settings(tmp_path / "run", list(TINY)) == TINY
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "value",
    [
        "!new:os.system [ls]",
        "!!python/object/apply:os.system [ls]",
        "!!python/name:os.system",
        "!ref <a>",
        "[1, !tuple (1, 2)]",
        "*b",
    ],
)
def test_a_tag_where_a_plain_value_is_needed_is_refused(tmp_path, value):
    (tmp_path / "hyperparams.yaml").write_text(
        f"a: 1\nb: &b [!name:x ]\narch: {value}\n"
    )
    with pytest.raises(ValueError, match=r"line [23] has the tag !.*without tags and"):
        read_settings(tmp_path, ["arch"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("&a x", "x"),
        ("*x", [1]),
        ("[1, *x]", [1, [1]]),
        ("{b: *x}", {"b": [1]}),
        ("{<<: *y}", {"a": 1}),
        ("{<<: *y, a: 2}", {"a": 2}),
        ("{<<: [{a: 3}, *y]}", {"a": 3}),
        ("[&b [1, 1], [*b, *b]]", [[1, 1], [[1, 1], [1, 1]]]),
    ],
)
def test_aliases_and_merges_are_what_they_stand_for(tmp_path, value, expected):
    text = f"x: &x [1]\ny: &y {{a: 1}}\narch: {value}\n"
    (tmp_path / "hyperparams.yaml").write_text(text)
    assert read_settings(tmp_path, ["arch"]) == {"arch": expected}


def test_a_key_is_merged_into_the_file_itself(tmp_path):
    text = "y: &y {arch: revnet57, n_mels: 40}\n<<: *y\nn_mels: 80\n"
    (tmp_path / "hyperparams.yaml").write_text(text)
    expected = {"arch": "revnet57", "n_mels": 80}
    assert read_settings(tmp_path, ["arch", "n_mels"]) == expected


def doubled(count, line):
    """Lines of which each has the one before twice."""
    lines = [line(f"&a{i}", f"*a{i - 1}", i) for i in range(1, count + 1)]
    return f"a0: &a0 [x, x]\n{''.join(lines)}arch: 1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arch: &a [*a]\n", r"line 1: \*a is a part of itself"),
        ("x: 1\narch: &a {b: {c: *a}}\n", r"line 2: \*a is a part of itself"),
        ("arch: &a {<<: *a}\n", r"line 1: \*a is a part of itself"),
        ("arch: *x\n", "line 1: found undefined alias 'x'"),
        ("arch: {<<: [1]}\n", "line 1: expected a mapping for merging"),
        ("arch: 1\nx: {b: 1, b: 2}\n", "line 2: b stands there twice"),
        ("arch: 1\nx: 2\narch: 3\n", "line 3: arch stands there twice"),
        (f"x: {'[' * 51}{']' * 51}\n", "line 1: it is nested deeper than 50"),
        (
            doubled(60, lambda own, last, i: f"a{i}: {own} [{last}, {last}]\n"),
            r"line 19: with aliases expanded .* 1,000,000 characters",
        ),
        (
            doubled(60, lambda own, last, i: f"a{i}: {own} {{b: {last}, c: {last}}}\n"),
            "with aliases expanded",
        ),
        (
            "a0: &a0 {x: 1}\n"
            + "".join(
                f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(60)
            ),
            "with aliases expanded",
        ),
        (
            f"x: &x {'y' * 1000}\narch: [{'*x, ' * 1000}*x]\n",
            "line 2: with aliases expanded",
        ),
        (
            "".join(f"? &a{i + 1} [*a{i}, *a{i}]\n: 1\n" for i in range(60)).replace(
                "*a0", "x"
            ),
            "with aliases expanded",
        ),
        ("arch: \u0007\n", "special characters are not allowed"),
    ],
)
def test_what_has_no_end_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "hyperparams.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_settings(tmp_path, ["arch"])
    assert "\n" not in str(error.value)
    assert "hyperparams.yaml" in str(error.value)
    assert len(str(error.value)) < 1000


def test_anchors_of_other_values_are_passed_over(tmp_path):
    text = "x: &x [1]\ny: [*x, *x]\nz: &z {a: 1}\nw: {<<: *z}\narch: [1]\n"
    (tmp_path / "hyperparams.yaml").write_text(text)
    assert read_settings(tmp_path, ["arch"]) == {"arch": [1]}


@pytest.mark.parametrize(
    "value",
    [f"{'1:' * 1000}1.5", f"0x{'f' * 5000}", "9" * 5000, f"[1, {'9' * 101}]"],
)
def test_numbers_without_end_are_refused(tmp_path, value):
    (tmp_path / "hyperparams.yaml").write_text(f"arch: {value}\n")
    with pytest.raises(ValueError, match=r"line 1 has '.*'\.\.\., which has no end"):
        read_settings(tmp_path, ["arch"])


def test_an_error_does_not_repeat_a_long_value(tmp_path):
    write_run(tmp_path, widths=list(range(2000)))
    with pytest.raises(ValueError, match=r"widths: \[0, 1, 2, ") as error:
        SpeakerEmbedder.from_run(tmp_path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("time", ["null", "[]", "yesterday"])
def test_a_checkpoint_of_no_time_is_named(tmp_path, time):
    weights = write_run(tmp_path).state_dict()
    (tmp_path / "embedding_model.ckpt").unlink()
    checkpoint(tmp_path, "CKPT+a", time, weights)
    with pytest.raises(ValueError, match=r"CKPT\+a does not say its epoch.*unixtime"):
        read_weights(tmp_path)


def test_tensors_without_numbers_are_refused(tmp_path):
    write_run(tmp_path)
    empty = {"fc.bias": torch.ones(16, device="meta")}
    torch.save(empty, tmp_path / "embedding_model.ckpt")
    with pytest.raises(ValueError, match=r"names 'torch._utils._rebuild_meta_tensor"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- arch\n", "no YAML mapping"),
        ("", "no YAML mapping"),
        ("arch: [\n", "cannot be read as plain values"),
        ("a: " + "[" * 1000, "cannot be read as plain values"),
        ("other: 1\n", "lacks arch"),
        ("a: " + "x" * 1_000_001, "another file"),
    ],
)
def test_a_file_that_is_no_run_s_yaml_is_refused(tmp_path, text, message):
    (tmp_path / "hyperparams.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path, ["arch"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": 57}, "arch: 57"),
        ({"n_mels": "eighty"}, "n_mels: 'eighty'"),
        ({"embedding_dim": 0}, "embedding_dim: 0"),
        ({"sample_rate": True}, "sample_rate: True"),
        ({"widths": [8, 16, 16, -16]}, "widths"),
        ({"sample_rate": 48000}, "48000 .it takes an integer from 4000 to 16000"),
        ({"sample_rate": 50}, "sample_rate: 50 "),
        ({"sample_rate": 99999999999999999999999}, "sample_rate: 9999"),
        ({"sample_rate": 2000}, "sample_rate: 2000 "),
        ({"sample_rate": "9" * 5000}, "plain values"),
        ({"embedding_dim": 99999999999}, "embedding_dim: 99999999999"),
        ({"n_mels": 99999999999}, "n_mels: 99999999999"),
        ({"widths": [8, 16, 16, 99999999999]}, "widths"),
        ({"blocks": [1, 1, 1, 99999999999]}, "blocks"),
        ({"blocks": "[]]"}, "plain values"),
        ({"arch": "revnet58"}, "revnet57"),
    ],
)
def test_values_training_never_writes_are_named(tmp_path, changed, message):
    write_run(tmp_path, **changed)
    with pytest.raises(ValueError, match=message):
        SpeakerEmbedder.from_run(tmp_path)


def test_missing_pieces_are_named_with_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder .*output_folder"):
        SpeakerEmbedder.from_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no hyperparams\.yaml"):
        SpeakerEmbedder.from_run(tmp_path)
    write_run(tmp_path)
    (tmp_path / "embedding_model.ckpt").unlink()
    with pytest.raises(FileNotFoundError, match="has this run been trained"):
        SpeakerEmbedder.from_run(tmp_path)


def test_the_newest_checkpoint_serves_until_training_has_ended(tmp_path):
    final = write_run(tmp_path, seed=0).state_dict()
    older, newer = ({k: v + i for k, v in final.items()} for i in (1, 2))
    checkpoint(tmp_path, "CKPT+b", 200.5, newer)
    checkpoint(tmp_path, "CKPT+c", 100.0, older)
    assert read_weights(tmp_path).path == tmp_path / "embedding_model.ckpt"
    (tmp_path / "embedding_model.ckpt").unlink()
    found = read_weights(tmp_path)
    assert found.path.parent.name == "CKPT+b"
    assert all(torch.equal(found.state_dict[k], newer[k]) for k in newer)


def test_a_pickle_is_never_executed(tmp_path):
    write_run(tmp_path)

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for save in (torch.save, lambda o, p: p.write_bytes(pickle.dumps(o))):
        save({"stem": Attack()}, tmp_path / "embedding_model.ckpt")
        with pytest.raises(ValueError, match="not loaded"):
            SpeakerEmbedder.from_run(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_weights_that_are_cut_short_are_refused(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "embedding_model.ckpt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cut short"):
        SpeakerEmbedder.from_run(tmp_path)


def test_an_archive_that_is_none_of_torch_is_refused(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "embedding_model.ckpt"
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{archive.namelist()[0].split('/')[0]}/more", bytes(10**7))
    with pytest.raises(ValueError, match=r"ckpt is not loaded: .*more' is compressed"):
        SpeakerEmbedder.from_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "is no state dict .*: it holds a list"),
        ({"a": 1}, r"is no state dict .*: it holds a\."),
        (
            {"model": {f"{n}": torch.ones(1) for n in "abcdefg"}},
            r"stem\S+ is missing.* more\. It holds a, b, c, d and 3 more names\.",
        ),
    ],
)
def test_a_file_of_something_else_is_named_by_what_it_holds(tmp_path, content, message):
    write_run(tmp_path)
    torch.save(content, tmp_path / "embedding_model.ckpt")
    with pytest.raises(ValueError, match=message) as error:
        SpeakerEmbedder.from_run(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {f"module.{n}": t for n, t in s.items()},
        lambda s: {f"module._orig_mod.encoder.{n}": t for n, t in s.items()},
        lambda s: {"epoch": 3, "state_dict": {f"model.{n}": t for n, t in s.items()}},
        lambda s: {"model": {"state_dict": {f"front.{n}": t for n, t in s.items()}}},
        lambda s: {n: torch.nn.Parameter(t, False) for n, t in s.items()},
    ],
)
def test_weights_of_a_wrapper_are_those_of_what_it_wraps(tmp_path, wrap):
    state = write_run(tmp_path).state_dict()
    embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    expected = embedder.embed(speech_like(), 16000)
    torch.save(wrap(state), tmp_path / "embedding_model.ckpt")
    embedder = SpeakerEmbedder.from_run(tmp_path, device="cpu")
    assert (embedder.embed(speech_like(), 16000) == expected).all()


def test_weights_of_another_network_are_refused_not_partly_loaded(tmp_path):
    state = write_run(tmp_path).state_dict()
    state.popitem()
    torch.save(state, tmp_path / "embedding_model.ckpt")
    with pytest.raises(ValueError, match="does not fit"):
        SpeakerEmbedder.from_run(tmp_path)
    write_run(tmp_path, widths=[8, 16, 16, 24])
    with pytest.raises(ValueError, match="does not fit"):
        SpeakerEmbedder.from_run(tmp_path)


def test_weights_of_a_diverged_training_are_refused(tmp_path):
    state = write_run(tmp_path).state_dict()
    next(iter(state.values())).view(-1)[0] = float("nan")
    torch.save(state, tmp_path / "embedding_model.ckpt")
    with pytest.raises(ValueError, match="diverged"):
        SpeakerEmbedder.from_run(tmp_path)


@pytest.mark.parametrize("name", ["hyperparams.yaml", "embedding_model.ckpt"])
def test_links_out_of_the_folder_are_refused(tmp_path, name):
    run = tmp_path / "run"
    write_run(run)
    (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match="link out of its folder"):
        SpeakerEmbedder.from_run(run)


def test_a_checkpoint_that_links_out_of_the_folder_is_refused(tmp_path):
    run = tmp_path / "run"
    weights = write_run(run).state_dict()
    (run / "embedding_model.ckpt").unlink()
    checkpoint(tmp_path, "CKPT+a", 1.0, weights)
    (tmp_path / "save").rename(tmp_path / "elsewhere")
    (run / "save").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="link out of its folder"):
        SpeakerEmbedder.from_run(run)


def test_a_folder_reached_through_a_link_is_fine(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    embedder = SpeakerEmbedder.from_run(tmp_path / "latest", device="cpu")
    assert embedder.embed(speech_like(), 16000).shape == (TINY["embedding_dim"],)


def test_a_named_pipe_is_not_opened(tmp_path):
    write_run(tmp_path)
    (tmp_path / "hyperparams.yaml").unlink()
    os.mkfifo(tmp_path / "hyperparams.yaml")
    with pytest.raises(ValueError, match="no regular file"):
        SpeakerEmbedder.from_run(tmp_path)
