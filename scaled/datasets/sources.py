"""Rows of parquet and jsonl files, or of a data set on the hub, one after the other and never all at once."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scaled.data import RowError, parse_row
from scaled.datasets.rows import Row, library
from scaled.errors import UserError

ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+")
BATCH = 256  # rows of a parquet file that are in memory at once


def rows(source: str, columns: Iterable[str], split: str) -> Iterator[Row]:
    """The rows of a file, of a folder's files in the order of their names, or of a split of a data set on the hub.

    Raises ``UserError`` where there is no such thing, and where a file breaks off or lacks one of the columns.
    """
    path, number = Path(source), 0
    if not path.exists() and ON_THE_HUB.fullmatch(source) and path.suffix not in READERS:
        yield from _of_hub(source, split)
        return
    for file in files(source):
        for place, value, fault in READERS[file.suffix](file, list(columns)):
            yield Row(place, number, value, fault)
            number += 1


def files(source: str) -> list[Path]:
    """The files of a local source."""
    path = Path(source)
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in READERS and file.is_file())
        if not found:
            raise UserError(
                f"{path} holds no {' or '.join(READERS)} file; name the folder that holds them, or one file"
            )
        return found
    if not path.is_file():
        raise UserError(f"there is no {path}; give a file, a folder of files, or a name on the hub such as owner/name")
    if path.suffix not in READERS:
        raise UserError(f"{path} is neither {' nor '.join(READERS)}; give the data set as it is published")
    return [path]


def _of_jsonl(path: Path, columns: list[str]) -> Iterator[tuple[str, Any, str]]:
    # The keys of each row are its own: one that is missing is that row's fault, not the file's.
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", parse_row(line), ""
                except RowError as error:
                    yield f"{path}:{number}", None, str(error)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a readable file") from error


def _of_parquet(path: Path, columns: list[str]) -> Iterator[tuple[str, Any, str]]:
    arrow, parquet = library("pyarrow"), library("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise UserError(
                    f"{path} has no column {', '.join(missing)}, only {', '.join(file.schema_arrow.names)}; "
                    "give the data set as it is published"
                )
            for batch in file.iter_batches(batch_size=BATCH, columns=columns):
                for value, fault in _cells(batch):
                    number += 1
                    yield f"{path}, row {number}", value, fault
    except (arrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read after row {number}: {' '.join(str(error).split())}; download it again"
        ) from error


def _cells(batch: Any) -> Iterator[tuple[Any, str]]:
    try:
        yield from ((value, "") for value in batch.to_pylist())
    except UnicodeDecodeError:  # one bad text fails the whole batch
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0], ""
            except UnicodeDecodeError as error:
                yield None, f"byte {error.start + 1} of a text is not UTF-8"


READERS = {".parquet": _of_parquet, ".jsonl": _of_jsonl}


def _of_hub(name: str, split: str) -> Iterator[Row]:
    number = 0
    try:
        for value in library("datasets").load_dataset(name, split=split, streaming=True):
            yield Row(f"{name}, row {number + 1}", number, value)
            number += 1
    except UserError:
        raise
    except Exception as error:  # whatever network, hub and the formats of files raise
        raise UserError(
            f"{name} cannot be read from the hub after row {number}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}\nWithout a network, download its files elsewhere and give their folder"
        ) from error
