"""The recipes: the paper's numbers, siblings that differ by their method alone, and dry runs without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from warnings import catch_warnings

import pytest

from scaled.config_file import SHIPPED, load_config, settings_of

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
PAPER = [name for name in NAMES if name.startswith(("qwen", "27b"))]
BASES = ("qwen2.5-math-1.5b", "qwen2.5-math-7b", "27b-reasoning-gym")
OF_A_METHOD = ("run", "method", "policy_sync", "engine.low_halves")
# Typed from the paper's Table 4, C.1, C.2, D.2 and D.4, apart from the files.
MAIN = {
    "seed": 1,
    "rollout.prompts": 128,
    "rollout.responses_per_prompt": 1,
    "rollout.temperature": 1.0,
    "microbatch": 1,
    "model.compute_dtype": "bfloat16",
    "model.gradient_checkpointing": True,
    "engine.dtype": "bfloat16",
    "engine.tensor_parallel": 1,
    "launch.ranks": 4,
    "launch.engines": 4,
    "rollout.context": 4096,
    "rollout.max_new_tokens": None,
    "evaluation.every": 5,
    "evaluation.samples": 4,
    "evaluation.temperature": 0.7,
    "evaluation.top_p": 0.7,
    "reward": "verifier",
}
LOGRA = {
    "logra.rank": 256,
    "logra.kind": "rademacher",
    "logra.refresh": "every_update",
    "logra.direction": "row_adam",
    "logra.beta2": 0.95,
    "logra.epsilon": 1e-8,
    "logra.update_ratio": 6e-5,
    "control.enabled": True,
    "control.budget_max": 2e-4,
    "control.budget_min": 2e-5,
    "control.horizon": 300,
    "control.mismatch": True,
    "control.probe": "jvp",
    "control.responses_per_rank": 2,
    "control.alpha_max": 3.0,
    "loss.kind": "ppo",
    "loss.baseline_weight": 0.1,
    "loss.importance_cap": 2.0,
    "rewards.failure_reward": -0.01,
}
DENSE = {"dense.lr": 1e-6, "dense.lr_min": 1e-7, "dense.warmup": 9, "dense.horizon": 300}
DENSE |= {"dense.betas": (0.9, 0.95), "dense.epsilon": 1e-8, "dense.parameters": "all"}
LORA = {"lora.rank": 256, "lora.lr": 2e-4, "lora.betas": (0.9, 0.95), "lora.epsilon": 1e-8}
LONG = {"seed": 42, "rollout.context": 16384, "evaluation.every": 20, "evaluation.samples": 1, "evaluation.top_p": 0.95}
LONG_LOGRA = {"logra.direction": "sgd", "control.horizon": 1000, "control.probe": "finite_difference"}
WANTED = {
    "qwen2.5-math-1.5b": MAIN | LOGRA,
    "qwen2.5-math-1.5b-dense": MAIN | DENSE,
    "qwen2.5-math-1.5b-lora": MAIN | LORA,
    "qwen2.5-math-7b": MAIN | LOGRA,
    "qwen2.5-math-7b-dense": MAIN | DENSE,
    "qwen2.5-math-7b-lora": MAIN | LORA,
    "27b-dapo-math": MAIN | LOGRA | {"evaluation.every": 10, "updates": 200},
    "27b-reasoning-gym": MAIN | LOGRA | LONG | LONG_LOGRA,
    "27b-reasoning-gym-dense": MAIN | DENSE | LONG | {"dense.horizon": 1000},
    "27b-reasoning-gym-lora": MAIN | LORA | LONG,
}


def settings(name: str) -> dict[str, object]:
    return dict(settings_of(load_config(Path(name)).model_dump()))


def test_every_recipe_of_the_paper_is_looked_at():
    assert sorted(WANTED) == PAPER


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_has_the_papers_numbers(name):
    found = settings(name)
    assert {key: found[key] for key in WANTED[name]} == WANTED[name]


@pytest.mark.parametrize("name", PAPER)
def test_every_number_of_a_recipe_has_its_source_beside_it(name):
    lines = (SHIPPED / f"{name}.yaml").read_text().splitlines()
    numbers = [line for line in lines if re.match(r"\s*\w+: \[?-?[\d.]", line)]
    alone = [
        line
        for line in numbers
        if "#" not in line and line.split(":")[0].strip() not in ("ranks", "engines", "responses_per_rank", "seed")
    ]
    assert alone == []


@pytest.mark.parametrize("method", ["dense", "lora"])
@pytest.mark.parametrize("base", BASES)
def test_a_sibling_differs_by_its_method_alone(base, method):
    ours, its = settings(base), settings(f"{base}-{method}")
    apart = {key for key in ours if ours[key] != its[key]}
    assert {"run", "method", "policy_sync"} <= apart
    assert {
        key
        for key in apart
        if key not in OF_A_METHOD and key.split(".")[0] not in ("logra", "dense", "lora", "control")
    } == set()
    assert its["method"] == method and its["policy_sync"] == "full"


def test_the_7b_recipes_are_those_of_1_5b_by_another_model():
    for tail in ("", "-dense", "-lora"):
        small, large = settings(f"qwen2.5-math-1.5b{tail}"), settings(f"qwen2.5-math-7b{tail}")
        assert {key for key in small if small[key] != large[key]} == {"run", "model.path"}


@pytest.mark.parametrize("name", PAPER)
def test_a_dry_run_of_a_large_recipe_lists_what_is_missing_and_fetches_nothing(logra, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was made"))
    code, out, err = logra("launch", name, "--dry-run")
    assert (code, err) == (2, "")
    words = " ".join(out.split())
    assert "4 ranks of the trainer and 4 engines on 1 GPU each: 8 GPUs" in words
    found = load_config(Path(name))
    for file in (found.data.file, found.data.held_out_file):
        assert f"missing {file} is not here; make it by: make data; logra data" in words
    said = "shapes alone" if name.startswith("27b") else f"get it by: logra model {found.model.path} DIR"
    assert said in words
    assert "parameters" in words and "FLOPs" in words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tiny-math", "smollm2-math"])
def test_the_small_siblings_turn_on_what_the_recipes_do(name):
    small, large = settings(name), settings("qwen2.5-math-1.5b")
    for key in (
        "method",
        "reward",
        "policy_sync",
        "rollout.backend",
        "logra.kind",
        "logra.refresh",
        "logra.direction",
        "control.mismatch",
        "control.probe",
        "control.responses_per_rank",
        "evaluation.samples",
        "evaluation.temperature",
        "evaluation.top_p",
    ):
        assert small[key] == large[key], key
    assert (small["launch.ranks"], small["launch.engines"]) == (2, 1)


def test_the_examples_of_other_launchers_can_be_read():
    with catch_warnings(action="ignore"):
        from accelerate.commands.config.config_args import load_config_from_file
    found = load_config_from_file(str(ROOT / "examples/accelerate.yaml"))
    assert (found.distributed_type.value, found.num_processes, found.mixed_precision) == ("MULTI_GPU", 4, "no")
    script = ROOT / "examples/slurm/logra.sbatch"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    known = {option for command in ("engine", "train") for option in re.findall(r"--[a-z-]+", help_of(command))}
    ours = re.findall(r"logra engine .*?&\n", script.read_text(), re.DOTALL)[0]
    assert set(re.findall(r"--[a-z-]+", ours)) <= known


def help_of(command: str) -> str:
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
    shown = subprocess.run(
        [sys.executable, "-m", "scaled.cli", command, "--help"], env=environment, capture_output=True
    )
    return shown.stdout.decode()
