"""What the page for users of other recipes shows runs, and says what is so."""

import inspect
import re
import subprocess
import sys

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from speechbrain_rev.architectures import WESPEAKER_ARCHITECTURES, architecture
from speechbrain_rev.hparams import plain_settings, resolve
from speechbrain_rev.lobes import build_encoder
from speechbrain_rev.optim import AdamW
from tests.recipes.stock import DOCUMENT, KEYS, SHAPES, blocks, with_line
from tests.unit.hparams.files import PUBLISHED_SETTINGS
from tests.unit.optim.steps import assert_identical

ROOT = DOCUMENT.parents[1]
TEXT = DOCUMENT.read_text()
TINY = '"revnet46", widths=(8, 8, 8, 8), blocks=(1, 1, 1, 1)'
LOOP, ENGINE = (code.replace('"revnet46"', TINY) for code in blocks("python"))
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
    assert_identical(states(rest), states(whole))
    moments = whole["optimizer"].state.values()
    assert torch.uint8 in {state["state1"].dtype for state in moments}
    assert whole["schedule"].get_last_lr() == [pytest.approx(0.0)]


@pytest.mark.slow
def test_the_plain_loops_learn_and_import_nothing_of_speechbrain(tmp_path):
    program = (
        f"{BARRED}import torch\ntorch.set_num_threads(1)\n{LOOP}\n{ENGINE}\n"
        "assert not [name for name in sys.modules if name.startswith('speechbrain.')]\n"
        "print(len(losses), history[-1] < 0.5 * history[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["4", "True"], done.stderr[-3000:]


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


def test_published_settings_of_wespeaker_are_this_packages(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(blocks("yaml")[-1])
    settings = plain_settings(resolve(path, {"data_folder": "/speech"}))
    # conf/resnet.yaml, in the words of the table.
    expected = {**PUBLISHED_SETTINGS, "arch": "resnet34", "chunk_samples": 32240}
    del expected["optimizer_bits"], expected["batch_size"]
    assert {key: settings[key] for key in expected} == expected


def test_knobs_that_the_table_of_wespeaker_names_are_there():
    settings = plain_settings((ROOT / "hparams/train.yaml").read_text())
    table = TEXT[TEXT.index("| WeSpeaker |") : TEXT.index("This comes nearest")]
    ours = [row.split(" | ")[1] for row in table.splitlines()[2:] if row]
    named = {name for cell in ours for name in re.findall(r"`([a-z_]+)[`:]", cell)}
    named -= {"resnet101", "resnet152", "adamw", "bf16", "num_frms"}
    assert len(named) > 20
    assert named <= settings.keys()


@pytest.mark.parametrize("name", WESPEAKER_ARCHITECTURES)
def test_the_table_of_wespeaker_names_every_encoder_that_is_there_for_it(name):
    theirs = name.replace("df_", "DF_").replace("gemini", "Gemini")
    assert f"{name}`" in TEXT
    assert f"{theirs.replace('resnet', 'ResNet')}`" in TEXT


@pytest.mark.parametrize("depths", [[2, 2, 2, 2], [3, 4, 6, 3]])
def test_depths_that_have_no_row_are_built_by_blocks(depths):
    assert f"`{depths}`" in TEXT or f"`blocks: {depths}`" in TEXT
    name = "resnet34" if depths == [2, 2, 2, 2] else "resnet101"
    with torch.device("meta"):
        encoder = build_encoder(name, blocks=depths)
    assert [len(stage.blocks) for stage in encoder.stages] == depths


def test_the_weight_decay_that_each_adamw_has_by_default_is_the_page_s():
    kinds = AdamW, torch.optim.AdamW
    defaults = [inspect.signature(k).parameters["weight_decay"].default for k in kinds]
    assert defaults == [0.0, 0.01]
    said = "`AdamW` has no weight decay by default, `torch.optim.AdamW` 0.01"
    assert said in TEXT
