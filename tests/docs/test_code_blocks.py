"""Code that documents show runs."""

import ast
import gc
import importlib
import sys
import types

import hyperpyyaml
import pytest
import torch
from ruamel.yaml import YAML

from speechbrain_rev import hparams
from speechbrain_rev.modes import Mode
from speechbrain_rev.reversible.wrapping import mode_of

from .documents import DOCUMENTS, README, ROOT, fences, name_of


def bounds_follow_the_optimizer(names):
    for _ in range(2):
        y = names["resnet"](torch.randn(4, 100, 80))
        (y * torch.randn_like(y)).sum().backward()
        names["optimizer"].step()
    return "conv1" in names["compression"].rules["convolution"].bounds


def keeps_less(network):
    """Whether a plan of measured times gave a block another mode than store, whichever."""
    return any(mode_of(block) is not Mode.STORE for block in network.modules())


#: What has to hold after a page's block that makes a name: the first that it makes.
HOLDS = {
    ("docs/reversible_training.md", "chain"): lambda names: (
        names["chain"].blocks[0].f[0].weight.grad is not None
    ),
    ("docs/memory_plans.md", "chosen"): lambda names: (
        names["chosen"].measured_bytes <= names["chosen"].budget_bytes
        and keeps_less(names["network"])
    ),
    ("docs/memory_plans.md", "lossy"): lambda names: (
        "compress" in names["lossy"].modes.values()
        and 0 < names["lossy"].measured_gradient_error <= 0.03
    ),
    ("docs/other_networks.md", "network"): lambda names: keeps_less(names["network"]),
    ("docs/other_networks.md", "report"): lambda names: (
        names["report"].activations_bytes > 0
    ),
    ("docs/compression.md", "optimizer"): bounds_follow_the_optimizer,
    ("docs/compression.md", "compression"): lambda names: (
        names["compression"].records["conv1"].ratio > 2
    ),
    ("docs/other_networks.md", "ecapa"): lambda names: all(
        "Recompute" in repr(block)
        for block in [*names["ecapa"].blocks, *names["resnet"].layer1]
    ),
}


def blocks(info, *, but=(), long=()):
    """Give the blocks of each document that has some, those of long ones as slow."""
    shown = {d: [f for f in fences(d) if f.info == info] for d in DOCUMENTS}
    marks = {d: [pytest.mark.slow] if name_of(d) in long else [] for d in DOCUMENTS}
    return [
        pytest.param(d, f, id=name_of(d), marks=marks[d])
        for d, f in shown.items()
        if f and name_of(d) not in but
    ]


#: Run in tests of its own, with a smaller encoder.
MIGRATING = "docs/migrating.md"
#: Plans.
PLANS = "docs/memory_plans.md"


@pytest.mark.parametrize(
    ("document", "code"), blocks("python", but=[MIGRATING], long=[PLANS])
)
def test_python_blocks_run_one_after_the_other(document, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gc.unfreeze()  # as where the reader runs it
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    names = vars(page)
    for block in code:
        before = dict(names)
        # Lines of errors are those of the document.
        text = "\n" * block.line + block.code
        exec(compile(text, name_of(document), "exec"), names)
        made = {n for n, value in names.items() if before.get(n) is not value}
        page = name_of(document)
        checks = [holds for (p, n), holds in HOLDS.items() if p == page and n in made]
        assert all(holds(names) for holds in checks[:1])


def test_every_check_of_a_block_is_made():
    for page, name in HOLDS:
        made = [f.code for f in fences(ROOT / page) if f.info == "python"]
        assert f"{name} = " in " ".join(made), page


@pytest.mark.parametrize(("document", "code"), blocks("python notest"))
def test_python_blocks_that_need_a_model_name_what_there_is(document, code):
    for block in code:
        for node in ast.walk(ast.parse(block.code, name_of(document))):
            module = getattr(node, "module", None) or ""
            if module.split(".")[0] == "speechbrain_rev":
                there = dir(importlib.import_module(module))
                assert {alias.name for alias in node.names} <= set(there)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_blocks_are_of_known_kinds(document):
    kinds = {"", "python", "python notest", "yaml", "yaml notest", "console", "text"}
    kinds |= {"bash", "sh", "json"}
    for fence in fences(document):
        assert fence.info in kinds, f"line {fence.line}: {fence.info!r}"


@pytest.mark.parametrize(("document", "code"), blocks("yaml notest"))
def test_yaml_blocks_parse(document, code):
    for block in code:
        assert YAML().compose(block.code) is not None


@pytest.mark.parametrize(("document", "code"), blocks("yaml"))
@pytest.mark.filterwarnings("ignore::speechbrain_rev.hparams.OptimizerWarning")
def test_yaml_blocks_build_what_they_name(document, code, tmp_path):
    for block in code:
        if "base:" in block.code.split():
            file = tmp_path / "override.yaml"
            folder = f"base: {ROOT / 'hparams'}/"
            file.write_text(block.code.replace("base: ", folder, 1))
            assert hparams.plain_settings(hparams.resolve(file))["arch"]
            continue
        built = hyperpyyaml.load_hyperpyyaml(block.code)
        encoder = built.get("embedding_model")
        if "opt_class" in built and encoder is not None:
            assert built["opt_class"](encoder.parameters()).param_groups
        if document == README:
            assert encoder.architecture.name == "df_revnet281"
