"""Distributions built from a copy of this tree, and environments that hold a wheel.

``python -m tests.release.wheel WHEEL`` makes an empty environment, installs the wheel with
what it asks for, and uses it there: minutes, and some gigabytes of torch.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What lies in a checkout and is no part of the project.
_LEFT_OUT = {".git", ".venv", "build", "dist", "results", "shared"}


def copy_of_tree(folder: Path) -> Path:
    """Copy what is tracked, or would be: build folders of the checkout have no say."""

    def left_out(directory: str, names: list[str]) -> set[str]:
        top = _LEFT_OUT if Path(directory) == ROOT else set()
        return {
            name
            for name in names
            if name in top
            or name.startswith(".venv")
            or name.endswith((".egg-info", "_cache", "__pycache__", ".hypothesis"))
        }

    shutil.copytree(ROOT, folder, ignore=left_out)
    return folder


def build(tree: Path, out: Path, *kinds: str) -> list[Path]:
    """Build a tree's wheel or source distribution without asking a network."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
    run([*command, *kinds, str(tree)], tree)
    return sorted(out.iterdir())


def install(wheel: Path, folder: Path, dependencies: Path | None = None) -> Path:
    """Make an environment that holds a wheel alone; its Python.

    Parameters
    ----------
    wheel : Path
    folder : Path
        Where the environment is made.
    dependencies : Path, optional
        A folder of installed packages on which the wheel then stands; nothing that is
        linked from there is seen. Without it pip installs what the wheel asks for.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    run([*command, *(["--no-deps"] if dependencies else []), str(wheel)], folder)
    if dependencies:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return python


def use(python: Path, folder: Path) -> str:
    """Use the package that a Python has, far from this tree; what that printed."""
    (folder / "tests").mkdir(parents=True)
    shutil.copy(ROOT / "tests/release/use.py", folder)
    shutil.copy(ROOT / "tests/run_folders.py", folder / "tests")
    return run([str(python), "use.py"], folder)


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command in a folder without this tree on its path; what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Try a wheel in an environment with nothing but what it asks for."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as folder:
        python = install(wheel, Path(folder, "environment"))
        print(use(python, Path(folder, "elsewhere")), end="")


if __name__ == "__main__":
    main()
