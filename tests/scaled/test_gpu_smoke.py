from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from scaled.bench import gpu_smoke, smoke_run
from scaled.bench.smoke_run import PHASES, SHAPES, made_up, measure, settings
from validation.shapes import QWEN_1_5B

METHODS = ("logra", "dense", "lora")
SMALL = ("--model", "tiny", "--device", "cpu", "--tokens", "32", "--updates", "2")


def test_every_method_takes_its_updates_on_a_cpu(tmp_path):
    file = tmp_path / "smoke.json"
    command = [sys.executable, "-m", "scaled.bench.gpu_smoke", *SMALL, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(file.read_text())
    assert (found["device"], found["model"], found["tokens"]) == ("cpu", "tiny", 64)
    assert tuple(found["methods"]) == METHODS
    for method, row in found["methods"].items():
        assert (row["finite"], row["trouble"], row["updates"]) == (True, None, 2)
        assert all(row[name].keys() == set(PHASES) for name in ("seconds", "seconds_first"))
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert row["peak_bytes"] > 2**20
        assert all(kl > 0 for kl in row["realised_kl"])
        alphas = row["alpha"]
        assert all(0 < alpha <= 3 for alpha in alphas) if method == "logra" else alphas == [None, None]
        assert method in done.stdout
    assert done.stdout.count("yes") == 3


def test_the_shape_is_that_of_the_paper():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES["1.5b"], tie_word_embeddings=True))
    assert sum(parameter.numel() for parameter in model.parameters()) == QWEN_1_5B.parameters


def test_batches_are_made_up_from_their_seed():
    responses, advantages = made_up(512, 40, seed=3)
    again, same = made_up(512, 40, seed=3)
    other, _ = made_up(512, 40, seed=4)
    assert (responses, advantages.tolist()) == (again, same.tolist())
    assert responses != other
    assert [(len(r.prompt_ids), len(r.token_ids), len(r.log_probs)) for r in responses] == [(5, 35, 35)] * 2
    assert responses[0].log_probs[0] == pytest.approx(-math.log(512))
    assert responses[0].prompt_ids != responses[1].prompt_ids


def test_a_loss_that_is_not_finite_ends_the_method_and_keeps_what_was_measured(monkeypatch):
    batches = []

    def spoilt_at_the_second(*arguments):
        responses, advantages = made_up(*arguments)
        batches.append(responses)
        return responses, advantages * (math.nan if len(batches) == 2 else 1)

    monkeypatch.setattr(smoke_run, "made_up", spoilt_at_the_second)
    row = measure(settings("dense", "tiny", 3, "cpu"), "tiny", 16)
    assert (row["finite"], row["updates"], len(batches)) == (False, 1, 2)
    assert row["trouble"] == "NumericalTrouble: the loss of a microbatch is nan; the update was refused"
    assert len(row["realised_kl"]) == 1


def test_a_realised_kl_that_is_not_finite_is_trouble(monkeypatch):
    monkeypatch.setattr(smoke_run.Probe, "realised_kl", lambda self: math.nan)
    row = measure(settings("logra", "tiny", 2, "cpu"), "tiny", 16)
    assert (row["finite"], row["updates"], row["seconds"]) == (False, 0, {})
    assert row["trouble"] == "NumericalTrouble: the realised KL of update 1 is nan"


def test_a_method_that_is_killed_or_late_fails_the_smoke_and_not_the_rest(monkeypatch, capsys, tmp_path):
    row = {
        "updates": 2,
        "seconds": dict.fromkeys(PHASES, 1.0),
        "peak_bytes": 2**30,
        "alpha": [None, None],
        "realised_kl": [1e-6, 1e-6],
        "finite": True,
        "trouble": None,
    }

    def pretends(job: list[str], **options) -> subprocess.CompletedProcess[str]:
        method = job[job.index("--measure") + 1]
        if method == "lora":
            raise subprocess.TimeoutExpired(job, options["timeout"])
        return subprocess.CompletedProcess(job, -9 if method == "logra" else 0, json.dumps(row))

    monkeypatch.setattr(subprocess, "run", pretends)
    file = tmp_path / "smoke.json"
    assert gpu_smoke.main([*SMALL, "--json", str(file)]) == 1
    found = json.loads(file.read_text())["methods"]
    assert [found[method]["finite"] for method in METHODS] == [False, True, False]
    out = capsys.readouterr().out
    assert "logra: exit code -9" in out
    assert "lora: not done when the 600 seconds" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "logra,sgd"], "no method 'sgd'; there are logra, dense, lora"),
        (["--updates", "0"], "must be a number of 1 or more"),
        (["--tokens", "x"], "must be a number of 2 or more"),
    ],
)
def test_a_wrong_option_is_one_clear_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        gpu_smoke.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
