"""The wheel is installed into an environment without this tree, and used there."""

import sys
from pathlib import Path

import pytest
import torch

from tests.release.wheel import build, copy_of_tree, install, run, use

pytestmark = pytest.mark.slow(drawn=False)

TYPED = """\
import torch

from speechbrain_rev.hparams import resolve
from speechbrain_rev.inference import SpeakerEmbedder
from speechbrain_rev.lobes import SpeakerEncoder, build_encoder
from speechbrain_rev.optim import build_optimizer
from speechbrain_rev.planner import Plan, plan
from speechbrain_rev.reversible import recompute_blocks
from speechbrain_rev.scoring import eer

encoder: SpeakerEncoder = build_encoder("revnet57", embedding_dim=192)
optimizer: torch.optim.Optimizer = build_optimizer(
    encoder.parameters(), name="sgd", bits=8, lr=0.1
)
embedder: SpeakerEmbedder = SpeakerEmbedder.from_run("run", device="cpu")
text: str = resolve("revnet57", {"lr": 0.1})
network = torch.nn.Sequential(torch.nn.Linear(8, 8))
chosen: Plan = plan(network, torch.randn(4, 8), "1MB", blocks=["*"])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Give the Python of an environment that holds the wheel; the rest is lent."""
    folder = tmp_path_factory.mktemp("release")
    (wheel,) = build(copy_of_tree(folder / "tree"), folder / "dist", "--wheel")
    return install(wheel, folder / "environment", Path(torch.__file__).parents[1])


def test_all_that_the_readme_promises_works_from_the_wheel(python, tmp_path):
    done = use(python, tmp_path / "elsewhere")
    assert [line.split(":")[0] for line in done.splitlines() if ": " in line] == [
        "see_where_it_is", "use_the_command", "train_a_step", "embed_and_export",
        "run_doctests",
    ]  # fmt: skip


def test_a_typed_program_on_it_passes_mypy_strict(python, tmp_path):
    (tmp_path / "mine.py").write_text(TYPED)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable"]
    assert "Success" in run([*mypy, str(python), "mine.py"], tmp_path)


def test_what_a_typed_program_gets_wrong_is_seen(python, tmp_path):
    wrong = (
        'from speechbrain_rev.lobes import build_encoder\nbuild_encoder(57, bits="8")\n'
    )
    (tmp_path / "mine.py").write_text(wrong)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable"]
    with pytest.raises(
        RuntimeError, match=r"arg-type(.|\n)*call-arg|call-arg(.|\n)*arg-type"
    ):
        run([*mypy, str(python), "mine.py"], tmp_path)
