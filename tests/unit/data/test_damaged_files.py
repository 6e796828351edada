"""Files that are damaged in header and body are read, or refused."""

import json
import subprocess
import sys

import pytest

from .damage import READERS, write_damaged

FILES = 1000


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="memory is bounded as Linux does it"
)
def test_damaged_files_are_read_or_refused_by_name(tmp_path, fuzz_seed):
    """No crash, no hang, no other kind of error, and no header that takes the memory."""
    folder = write_damaged(tmp_path, FILES, seed=fuzz_seed)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.data.damage", str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    for reader in READERS:
        outcomes = counts[reader]
        assert outcomes["read"] + outcomes["refused"] == FILES
        assert min(outcomes.values()) > FILES / 10, reader
