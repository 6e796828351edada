"""What the README shows runs, exists and was measured."""

import re
from pathlib import Path

import pytest
import torch

from speechbrain_rev.cli import main
from tests.benchmarks.readme import PUBLISHED, README, TABLES, rendered

ROOT = README.parent
DOCUMENTS = [
    README,
    PUBLISHED,
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes/VoxCeleb/README.md",
]
TEXT = README.read_text()
TABLES_TEXT = PUBLISHED.read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run(code):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    if "chain" in names:
        assert names["chain"].blocks[0].f[0].weight.grad is not None
    elif "chosen" in names:
        assert names["chosen"].measured_bytes <= names["chosen"].budget_bytes
        assert "Recompute" in repr(names["network"])
    elif "lossy" in names:
        assert "compress" in names["lossy"].modes.values()
        assert 0 < names["lossy"].measured_gradient_error <= 0.03
    elif "report" in names:
        assert names["report"].activations_bytes > 0
    elif "optimizer" in names:
        for _ in range(2):
            y = names["resnet"](torch.randn(4, 100, 80))
            (y * torch.randn_like(y)).sum().backward()
            names["optimizer"].step()
        assert "conv1" in names["compression"].rules["convolution"].bounds
    elif "compression" in names:
        assert names["compression"].records["conv1"].ratio > 2
    else:
        assert {"ecapa", "resnet"} <= names.keys()
        blocks = [*names["ecapa"].blocks, *names["resnet"].layer1]
        assert all("Recompute" in repr(block) for block in blocks)


@pytest.mark.parametrize("text", YAML)
def test_yaml_blocks_build_an_encoder_and_an_optimizer(text):
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    hparams = hyperpyyaml.load_hyperpyyaml(text)
    encoder = hparams["embedding_model"]
    assert encoder.architecture.name == "df_revnet281"
    assert hparams["opt_class"](encoder.parameters()).param_groups


@pytest.mark.parametrize("document", TABLES, ids=lambda p: p.name)
def test_tables_are_those_of_the_committed_results(document):
    text = document.read_text()
    assert rendered(document) == text
    places = re.findall(r"<!-- table: (\w+) -->\n\|", text)
    assert sorted(places) == sorted(TABLES[document])


#: Of the README those that take a moment.
COMMANDS = re.findall(r"(?:^|`)speechbrain-rev (models[^\n`]*)", TEXT, re.MULTILINE)
COMMANDS += re.findall(r"^speechbrain-rev (.*)$", TABLES_TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_table_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out


def test_picture_and_table_of_the_encoders_open_the_readme():
    picture = TEXT.index("](docs/models.png)")
    table = TEXT.index("<!-- table: models -->")
    assert picture < table < TEXT.index("\n## ")
    assert (ROOT / "docs/models.png").stat().st_size < 300_000


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_documents_name_exist(document):
    text = document.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    scripts = re.findall(r"python3? ((?:recipes|tests)/\S+\.py)", text)
    settings = re.findall(r"\bhparams/\w+\.yaml", text)
    assert links + scripts + settings
    for link in links:
        assert (document.parent / link).exists(), link
    for name in scripts + settings:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_make_targets_that_documents_name_exist(document):
    targets = set(re.findall(r"\bmake ([a-z]+)", document.read_text()))
    rules = Path(ROOT, "Makefile").read_text()
    for target in targets & {
        "demo",
        "test",
        "check",
        "slow",
        "mutants",
        "bench",
        "gpu",
    }:
        assert f"\n{target}:" in rules


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"speechbrain-rev (\w+)", TEXT + TABLES_TEXT)))
)
def test_console_commands_exist(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert command in capsys.readouterr().out
