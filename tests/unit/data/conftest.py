"""A small corpus, and what prepares and packs it, for the tests of this folder."""

import csv

import pytest

from speechbrain_rev.data.listing import DataSettings
from speechbrain_rev.data.packing import pack
from speechbrain_rev.data.preparation import prepare
from tests.corpus import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Six speakers with four short utterances each, which no test changes."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), seconds=0.13)


@pytest.fixture(scope="session")
def packed(corpus, tmp_path_factory):
    """The corpus, packed; no test changes it."""
    folder = tmp_path_factory.mktemp("pack") / "corpus.packed"
    pack(corpus, folder, sample_rate=16000)
    return folder


@pytest.fixture
def prepared(corpus, tmp_path):
    """Prepare a folder into a save folder, both below tmp_path."""

    def run(data=corpus, save="save", *, begun=False, **settings):
        given = {"data_folder": str(data), "seed": 1, **settings}
        return prepare(DataSettings(**given), tmp_path / save, begun=begun)

    return run


def left_out(save):
    """The reason for each file that is not used, as left_out.csv has it."""
    with (save / "left_out.csv").open(newline="") as file:
        return {row["file"]: row["reason"] for row in csv.DictReader(file)}


def snapshot(folder):
    """When each file below a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
