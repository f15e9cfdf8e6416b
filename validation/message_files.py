"""The files of a message as ranks write them, and their sizes worked out from the format that they have (C05)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from logra_ref.sync import FactorMessage
from scaled.policy_sync.message_file import Origin, message_path, write_message

RUN = "0123456789ab"  # a run's name has twelve characters
NAME = 48  # characters of a canonical weight name, at most
DIGITS = 12  # of a dimension or an offset, at most

ENTRIES = (
    '"coefficients|":{"dtype":"F32","shape":[],"data_offsets":[,]},',
    '"levels|":{"dtype":"I8","shape":[,],"data_offsets":[,]},',
)
MOST_A_MATRIX = sum(map(len, ENTRIES)) + 2 * NAME + 7 * DIGITS
MOST_A_FILE = 350  # the length of the header, its padding, and what a part says of itself, with numbers of 20 digits


def file_sizes(message: FactorMessage, parts: int) -> list[int]:
    """Bytes of the files that so many ranks write, each its rows of every matrix."""
    levels = {name: tensor.tensor_split(parts) for name, tensor in message.levels.items()}
    coefficients = {name: tensor.tensor_split(parts) for name, tensor in message.coefficients.items()}
    sizes = []
    with tempfile.TemporaryDirectory(prefix="logra-message-") as name:
        folder = Path(name)
        for part in range(parts):
            own = replace(
                message,
                levels={name: rows[part] for name, rows in levels.items()},
                coefficients={name: rows[part] for name, rows in coefficients.items()},
            )
            write_message(folder, own, Origin(RUN, part, parts))
            sizes.append(message_path(folder, message.update, part, parts).stat().st_size)
    return sizes


def renamed(message: FactorMessage, prefix: str) -> FactorMessage:
    """The same with longer names, as matrices have them in a model."""
    return replace(
        message,
        levels={prefix + name: levels for name, levels in message.levels.items()},
        coefficients={prefix + name: numbers for name, numbers in message.coefficients.items()},
    )


def in_fp32(message: FactorMessage) -> FactorMessage:
    """The same with factors of four bytes."""
    return replace(message, levels={name: levels.float() for name, levels in message.levels.items()})


def sizes_by_format(rows: Mapping[str, int], rank: int, parts: int, base_seed: int) -> list[int]:
    """What the files of update 1 should have, by safetensors' format: eight bytes, a header in JSON that is padded to
    a multiple of eight, and the tensors end to end, those of wider numbers first and then by name.

    ``rows`` are d of each matrix, by its weight's name. Nothing of the writer's code is used.
    """
    sizes = []
    for part in range(parts):
        said = {
            **{"format": "logra-factors/1", "run": RUN, "update": 1, "base_seed": base_seed, "kind": "rademacher"},
            **{"rank": rank, "part": part, "parts": parts, "digest": "0" * 64},
        }
        header: dict[str, object] = {"__metadata__": {"logra": json.dumps(said, separators=(",", ":"))}}
        own = {name: d // parts + (part < d % parts) for name, d in sorted(rows.items())}
        tensors = [(f"coefficients|{name}", "F32", [d], 4 * d) for name, d in own.items()]
        tensors += [(f"levels|{name}", "I8", [d, rank], d * rank) for name, d in own.items()]
        end = 0
        for key, dtype, shape, size in tensors:
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = len(json.dumps(header, separators=(",", ":")))
        sizes.append(8 + -(-text // 8) * 8 + end)
    return sizes
