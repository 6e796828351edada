"""What the page for users of other recipes shows runs, and says what is so."""

import inspect
import re
import subprocess
import sys

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev.architectures import architecture
from speechbrain_rev.hparams import plain_settings, resolve
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import AdamW
from tests.recipes.stock import DOCUMENT, KEYS, SHAPES, blocks, with_line

ROOT = DOCUMENT.parents[1]
TEXT = DOCUMENT.read_text()
TINY = '"revnet57", widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1)'
LOOP, ENGINE = (code.replace('"revnet57"', TINY) for code in blocks("python"))
# Any import of SpeechBrain is an error from now on.
BARRED = "import sys\nsys.modules['speechbrain'] = None\n"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(code):
    names = {}
    exec(compile(code, DOCUMENT.name, "exec"), names)
    return names


def states(names):
    return {name: each.state_dict() for name, each in names["saved"].items()}


def assert_same(one, other):
    """Compare what state dicts hold, to the bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


@pytest.mark.slow
def test_a_plain_loop_that_was_interrupted_has_the_bits_of_one_that_was_not(
    tmp_path, monkeypatch
):
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(LOOP)
    monkeypatch.chdir(tmp_path / "parts")
    interrupted = LOOP.replace("range(first_epoch, epochs)", "range(first_epoch, 1)")
    first = run(interrupted)
    rest = run(LOOP)
    assert (first["first_epoch"], rest["first_epoch"]) == (0, 1)
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert len(whole["losses"]) == 4
    assert_same(states(whole), states(rest))
    moments = whole["optimizer"].state.values()
    assert torch.uint8 in {state["state1"].dtype for state in moments}
    assert whole["schedule"].get_last_lr() == [pytest.approx(0.0)]


@pytest.mark.slow
def test_nothing_of_the_plain_loops_imports_speechbrain(tmp_path):
    program = (
        f"{BARRED}import torch\ntorch.set_num_threads(1)\n{LOOP}\n{ENGINE}\n"
        "assert not [name for name in sys.modules if name.startswith('speechbrain.')]\n"
        "print(len(losses), len(history))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["4", "20"], done.stderr[-3000:]


def test_a_network_of_your_own_learns_in_reversible_blocks():
    history = run(ENGINE)["history"]
    assert history[-1] < 0.5 * history[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_lines_take_the_place_of_keys_that_the_files_have(shape, tmp_path):
    five, more, kept, *_ = blocks("yaml")
    lines = five.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(KEYS)
    assert all(f"| `{key}` |" in TEXT for key in KEYS)
    text = SHAPES[shape]
    for line in [*lines, *more.splitlines()[1::2], kept.rstrip("\n")]:
        text = with_line(text, line)
    hparams = load_hyperpyyaml(
        with_line(text, "n_mels: 80"),
        {"data_folder": "nowhere", "output_folder": str(tmp_path)},
    )
    # The line in the document's words, which is deep.
    assert hparams["embedding_model"].architecture.name == "df_revnet89"
    assert hparams["wav_augment"].chunk_samples == (300 - 1) * 160 <= 3.0 * 16000
    assert hparams["lr_annealing"].loss is hparams["compute_cost"]


def test_rates_are_those_of_the_families():
    words = " ".join(TEXT.split())
    sgd, adamw = (architecture(name).training for name in ("revnet57", "df_revnet89"))
    assert f"from {sgd.lr} to {sgd.final_lr:.0e}".replace("e-0", "e-") in words
    assert f"from {adamw.lr:.2e} to {adamw.final_lr:.0e}".replace("e-0", "e-") in words
    assert (sgd.weight_decay, adamw.weight_decay) == (1e-4, 0.05)


class TestWeSpeaker:
    def test_its_published_settings_are_this_packages(self, tmp_path):
        path = tmp_path / "mine.yaml"
        path.write_text(blocks("yaml")[-1])
        settings = plain_settings(resolve(path, {"data_folder": "/speech"}))
        # conf/resnet.yaml, in the words of the table.
        assert settings["arch"] == "resnet34"
        assert (settings["lr"], settings["final_lr"]) == (0.1, 5e-5)
        assert (settings["number_of_epochs"], settings["warmup_epochs"]) == (150, 6)
        assert (settings["margin_start_epoch"], settings["margin_end_epoch"]) == (
            20,
            40,
        )
        assert (settings["margin"], settings["scale"]) == (0.2, 32.0)
        assert settings["average_checkpoints"] == 10
        assert settings["chunk_samples"] == (200 - 1) * 160
        assert settings["speeds"] == [1.0, 0.9, 1.1]
        assert settings["augment_prob"] == 0.6
        assert (settings["n_mels"], settings["embedding_dim"]) == (80, 256)
        assert (settings["momentum"], settings["weight_decay"]) == (0.9, 1e-4)

    def test_knobs_that_the_table_names_are_there(self):
        settings = plain_settings((ROOT / "hparams/train.yaml").read_text())
        table = TEXT[TEXT.index("| WeSpeaker |") : TEXT.index("This comes nearest")]
        rows = [row.split(" | ") for row in table.splitlines()[2:] if row]
        named = {
            name
            for row in rows
            for name in re.findall(r"`([a-z_]+)`|`([a-z_]+):", row[1])
            for name in name
            if name
        } - {"resnet101", "resnet152", "adamw", "bf16", "num_frms"}
        assert len(named) > 20
        assert named <= settings.keys() | {"pretrained_run"}

    @pytest.mark.parametrize(
        "blocks", [[2, 2, 2, 2], [3, 4, 6, 3], [6, 16, 48, 3], [10, 20, 64, 3]]
    )
    def test_depths_that_have_no_row_are_built_by_blocks(self, blocks):
        assert f"`{blocks}`" in TEXT or f"`blocks: {blocks}`" in TEXT
        name = "resnet34" if blocks == [2, 2, 2, 2] else "resnet101"
        with torch.device("meta"):
            encoder = build_encoder(name, blocks=blocks)
        assert [len(stage.blocks) for stage in encoder.stages] == blocks


def test_the_weight_decay_that_each_adamw_has_by_default_is_the_page_s():
    ours, torchs = (
        inspect.signature(kind).parameters["weight_decay"].default
        for kind in (AdamW, torch.optim.AdamW)
    )
    assert (ours, torchs) == (0.0, 0.01)
    said = "`AdamW` has no weight decay by default, `torch.optim.AdamW` 0.01"
    assert said in TEXT
