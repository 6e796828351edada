"""What setup.cfg cannot say: the files of ``hparams/`` travel in the wheel.

They stand at the top of the repository, where one looks for them, and in a wheel within
``speechbrain_rev/hparams/files``.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithHparams(build_py):
    """Builds the package and puts the YAML files into it."""

    def run(self) -> None:
        """Build; an editable installation finds the files where they are."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "speechbrain_rev", "hparams", "files")
        for file in sorted(Path("hparams").rglob("*.yaml")):
            copy = folder / file.relative_to("hparams")
            self.mkpath(str(copy.parent))
            self.copy_file(str(file), str(copy))


setup(cmdclass={"build_py": BuildWithHparams})
