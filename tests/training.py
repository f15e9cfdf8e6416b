"""What the tests of training share: settings for a model of two layers, and what a run left."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from scaled.config import RunConfig

VARIES = ("seconds", "seconds_rollout", "seconds_train", "seconds_probe", "seconds_update", "peak_bytes")


def settings(model: Path, run: Path, compute_dtype: str = "float32", **changes) -> RunConfig:
    base = {
        "run": run,
        "updates": 4,
        "microbatch": 3,
        "seed": 5,
        "reward": "tests.checksum:score",
        "model": {"path": str(model), "compute_dtype": compute_dtype},
        "data": {"task": "arithmetic", "held_out": 4},
        "rollout": {"prompts": 8, "max_new_tokens": 5},
        "logra": {"rank": 4, "update_ratio": 0.1},
        "control": {"positions": 12, "budget_max": 1e-4, "budget_min": 1e-5, "horizon": 4},
        "checkpoint": {"every": 1, "keep_last": 5},
    }
    return RunConfig.model_validate(base | changes)


def log(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in VARIES} for row in rows]


def weights(run: Path, update: int) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/update-{update:06d}/model/model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
