"""What the wheel and the source distribution hold, and how their metadata reads."""

import configparser
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import speechbrain_rev
from tests.release.wheel import ROOT, build, copy_of_tree, run

pytestmark = pytest.mark.slow

NAME = f"speechbrain_rev-{speechbrain_rev.__version__}"
#: What lies in a checkout and must not be handed on.
STRAY = (
    "results/run/embedding_model.ckpt",
    "shared/speech/a.wav",
    "build/lib/speechbrain_rev/old.py",
    "speechbrain_rev/__pycache__/sizes.cpython-311.pyc",
    "speechbrain_rev/notes.txt",
    "tests/__pycache__/conftest.cpython-311.pyc",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = copy_of_tree(tmp_path_factory.mktemp("copied") / "tree")
    for name in STRAY:
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"stray")
    return tree


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """Both distributions, as `python -m build` makes them: the wheel from the sdist."""
    return build(tree, tmp_path_factory.mktemp("dist"))


def in_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def in_sdist(sdist):
    with tarfile.open(sdist) as archive:
        files = [member for member in archive if member.isfile()]
        assert all(file.name.startswith(f"{NAME}/") for file in files)
        return {
            file.name.removeprefix(f"{NAME}/"): archive.extractfile(file).read()
            for file in files
        }


def below(folder, *patterns):
    """Files of this tree below a folder, by their path from the top."""
    return {
        file.relative_to(ROOT).as_posix(): file.read_bytes()
        for pattern in patterns
        for file in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in file.parts and file.is_file()
    }


def sections(text):
    parser = configparser.ConfigParser()
    parser.read_string(text.decode())
    return {
        name: {key: value.split() for key, value in section.items()}
        for name, section in parser.items()
    }


def test_both_are_there_and_pass_the_strict_check(built):
    wheel, sdist = built
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    assert sdist.name == f"{NAME}.tar.gz"
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], ROOT)


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(built):
    held = in_wheel(built[0])
    package = below("speechbrain_rev", "*.py", "py.typed", "counts_meta.json")
    yaml = {
        f"speechbrain_rev/{name.replace('hparams/', 'hparams/files/')}": content
        for name, content in below("hparams", "*.yaml").items()
    }
    assert len(yaml) > 25
    described = {name for name in held if name.startswith(f"{NAME}.dist-info/")}
    assert held.keys() - described == package.keys() | yaml.keys()
    for name, content in (package | yaml).items():
        assert held[name] == content, name
    assert f"{NAME}.dist-info/licenses/LICENSE" in described


def test_the_source_distribution_holds_what_builds_tests_and_documents(built):
    held = in_sdist(built[1])
    wanted = {
        **below("speechbrain_rev", "*.py", "py.typed", "counts_meta.json"),
        **below("tests", "*"),
        **below("recipes", "*"),
        **below("hparams", "*"),
        **below("docs", "*"),
        **below(".github", "*"),
    }
    top = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
           "Makefile", "README.md", "SECURITY.md", "pyproject.toml", "setup.cfg",
           "setup.py"]  # fmt: skip
    wanted |= {name: (ROOT / name).read_bytes() for name in top}
    made = {name for name in held if name == "PKG-INFO" or ".egg-info/" in name}
    assert held.keys() - made == wanted.keys()
    # setuptools writes setup.cfg anew, without comments, with a section of its own.
    settings = sections(held.pop("setup.cfg"))
    del settings["egg_info"]
    assert settings == sections(wanted.pop("setup.cfg"))
    for name, content in wanted.items():
        assert held[name] == content, name


def test_the_metadata_is_that_of_setup_cfg(built):
    metadata = BytesParser().parsebytes(
        in_wheel(built[0])[f"{NAME}.dist-info/METADATA"]
    )
    assert metadata["Version"] == speechbrain_rev.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = settings["options"]["install_requires"].split("\n")
    declared = {Requirement(line) for line in lines if line}
    assert len(declared) > 10
    assert declared <= {*map(Requirement, metadata.get_all("Requires-Dist"))}
    assert metadata.get_payload().startswith("#")


def test_an_editable_installation_finds_the_files_at_the_top(tree):
    printed = subprocess.run(
        [sys.executable, "-c", "from speechbrain_rev.hparams.shipped import shipped\n"
         "print(shipped()['train'])"],
        cwd=tree, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert Path(printed.strip()) == tree / "hparams" / "train.yaml"
