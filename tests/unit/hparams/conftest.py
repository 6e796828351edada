import pytest

from tests.unit.hparams.files import COMPLETE


@pytest.fixture
def write(tmp_path):
    """Write files by name, a complete one among them; their folder."""

    def write(**files):
        for name, content in {"train": COMPLETE, **files}.items():
            (tmp_path / f"{name}.yaml").write_text(content)
        return tmp_path

    return write
