"""Tables of embeddings as Parquet files. pyarrow is imported here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_FINGERPRINT = b"fingerprint"


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            "Parquet files need pyarrow, which cannot be imported here: pip install "
            "'speechbrain_rev[parquet]', or give a name that ends in .npz."
        ) from error
    return pyarrow, parquet


def check_pyarrow() -> None:
    """Refuse to begin work whose results could not be written.

    Raises
    ------
    ImportError
        If there is no pyarrow.
    """
    _pyarrow()


def parquet_errors() -> tuple[type[Exception], ...]:
    """Give what reading raises of a file that is damaged or of another kind."""
    pyarrow, _ = _pyarrow()
    return (pyarrow.ArrowException, AttributeError)


def write_parquet(file: IO[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write names, embeddings, sources and the fingerprint.

    Parameters
    ----------
    file : binary file
        To write to.
    arrays : mapping of str to numpy.ndarray
        names [n], embeddings [n, dim], fingerprint [], and sources, [n] or [0].
    """
    pyarrow, parquet = _pyarrow()
    embeddings = np.ascontiguousarray(arrays["embeddings"], dtype=np.float32)
    sources = arrays["sources"].tolist() or [None] * len(embeddings)
    table = pyarrow.table(
        {
            "name": pyarrow.array(arrays["names"].tolist(), pyarrow.string()),
            "embedding": pyarrow.FixedSizeListArray.from_arrays(
                pyarrow.array(embeddings.ravel()), embeddings.shape[1]
            ),
            "source": pyarrow.array(sources, pyarrow.string()),
        }
    ).replace_schema_metadata({_FINGERPRINT: str(arrays["fingerprint"])})
    parquet.write_table(table, file, write_page_checksum=True)


def read_parquet(path: Path) -> dict[str, NDArray[Any]]:
    """Read what ``write_parquet`` wrote, as it was given.

    Parameters
    ----------
    path : pathlib.Path
        The file.

    Returns
    -------
    dict of str to numpy.ndarray
        names, embeddings, fingerprint and sources.

    Raises
    ------
    Exception
        One of ``parquet_errors`` if it is something else.
    """
    pyarrow, parquet = _pyarrow()
    with path.open("rb") as file:
        told = parquet.ParquetFile(file).metadata.num_rows
        table = parquet.read_table(file, page_checksum_verification=True)
    if len(table) != told:
        raise ValueError(f"it has {len(table)} rows, and says that there are {told}")
    metadata = table.schema.metadata or {}
    rows = table["embedding"].combine_chunks()
    dim = getattr(rows.type, "list_size", None)
    if dim is None or rows.type.value_type != pyarrow.float32():
        raise ValueError(
            f"its embeddings are {rows.type}, not lists of float32 of one size"
        )
    values = rows.flatten()
    if rows.null_count or values.null_count:
        raise ValueError("an embedding, or a number of one, is missing")
    names, sources = (_texts(table[name], name) for name in ("name", "source"))
    if None in names:
        raise ValueError(f"the name of row {names.index(None)} is missing")
    sources = [one for one in sources if one is not None]
    return {
        "names": np.array(names, dtype=str),
        "embeddings": values.to_numpy().reshape(-1, dim),
        "fingerprint": np.array(metadata[_FINGERPRINT].decode()),
        "sources": np.array(sources, dtype=str),
    }


def _texts(column: Any, name: str) -> list[Any]:
    """Read a column of texts, which numpy would not all give back."""
    if str(column.type) not in ("string", "large_string"):
        raise ValueError(f"its column {name} is of {column.type}, not of texts")
    texts: list[Any] = column.to_pylist()
    if any("\0" in text for text in texts if text):
        raise ValueError(f"its column {name} has a text with a NUL character")
    return texts
