from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from scaled.chat import ask
from scaled.checkpoint import latest_checkpoint, load_numbers
from scaled.config_file import load_config
from scaled.metrics import JsonLines
from scaled.tasks import arithmetic

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def updates_of(run: Path) -> list[dict]:
    return [row for row in JsonLines(run / "metrics.jsonl").rows() if "reward" in row]


def test_help_is_instant_for_it_imports_no_torch():
    code = (
        "import sys, scaled.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "command", ["train", "model", "report", "eval", "chat", "doctor", "sync-check", "bench phases"]
)
def test_every_command_has_an_explanation_and_an_example(logra, command):
    code, out, _ = logra(*command.split(), "--help")
    assert code == 0
    assert f"Example: logra {command} " in out


def test_train_then_eval_report_and_chat_on_its_run(logra, recipe, tmp_path, monkeypatch):
    run = tmp_path / "run"
    code, out, err = logra("train", recipe)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"report: {run / 'report.html'}"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["update-000002"]

    code, out, err = logra("eval", run, "evaluation.samples=2")
    assert (code, err) == (0, "")
    shown = [line for line in out.splitlines() if line.startswith("held out")]
    assert [line.split("  ")[1].split()[0] for line in shown] == ["greedy", "sampled"]
    assert out.splitlines()[-1] == f"answers: {run / 'evaluations/update-000002.jsonl'}"
    assert out.count("held out after update 2/2") == 2

    (run / "report.html").unlink()
    assert logra("report", run)[:2] == (0, f"report: {run / 'report.html'}\n")
    assert (run / "report.html").is_file()

    with (tmp_path / "lines").open("w+") as lines:
        lines.write("7 + 5\nwhat is 19-4?\n\nnever asked\n")
        lines.seek(0)
        monkeypatch.setattr(sys, "stdin", lines)
        code, out, err = logra("chat", run)
    assert (code, err) == (0, "")
    assert out.startswith("7 + 5 =")
    assert "\n19 - 4 =" in out
    assert "never" not in out


def test_eval_of_a_recipe_takes_the_model_before_training(logra, recipe, tmp_path):
    code, out, _ = logra("eval", recipe, "evaluation.greedy=false")
    assert code == 0
    assert out.startswith("held out after update 0/2  sampled ")
    assert not (tmp_path / "run").exists()


def test_interrupt_saves_and_a_resumed_run_ends_as_if_there_had_been_none(logra, recipe, tmp_path):
    run = tmp_path / "run"

    def interrupt_after_the_first_update() -> None:
        while not (run / "metrics.jsonl").exists() or '"reward"' not in (run / "metrics.jsonl").read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt_after_the_first_update)
    helper.start()
    code, out, err = logra("train", recipe, "updates=300")
    helper.join()
    assert (code, err) == (130, "")
    assert f"logra train {run} --resume" in out
    done = int(next((run / "checkpoints").iterdir()).name.removeprefix("update-"))
    assert 0 < done < 300

    code, _, err = logra("train", run, f"updates={done + 1}", "--resume")
    assert (code, err) == (0, "")
    whole = tmp_path / "whole"
    assert logra("train", recipe, f"updates={done + 1}", f"run={whole}")[0] == 0
    rows, expected = updates_of(run), updates_of(whole)
    noise = ("peak_bytes",)
    for row in [*rows, *expected]:
        for key in [key for key in row if key in noise or key.startswith("seconds")]:
            del row[key]
    assert rows == expected


def test_error_of_the_user_is_red_text_and_not_a_traceback(logra, recipe):
    code, out, err = logra("train", recipe, "rank=[8]")
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error: {recipe} has a problem:\n  rank (command line): no such key; did you mean logra.rank or lora.rank?"
    )
    assert "Traceback" not in err


def test_unfinished_run_has_nothing_to_evaluate_or_to_talk_to(logra, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(recipe.read_text())
    for command in ("eval", "chat"):
        code, _, err = logra(command, tmp_path / "run")
        assert code == 2
        assert "has no checkpoint" in err


def test_a_reader_that_goes_away_ends_a_run_as_ctrl_c_does_with_everything_saved(recipe, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "scaled.cli", "train", str(recipe), "updates=300"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        while not process.stdout.readline().startswith("update 1/"):
            pass
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (130, "")
    assert load_numbers(latest_checkpoint(run))["update"] == len(updates_of(run)) > 0


def test_what_was_changed_in_a_run_is_found_before_anything_else_is(logra, recipe, tmp_path):
    run = tmp_path / "run"
    assert logra("train", recipe)[0] == 0
    before = (run / "metrics.jsonl").read_text()
    samples = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").write_text(samples.replace('"id"', '"name"', 1))
    for command in (["train", run, "--resume", "updates=3"], ["report", run]):
        code, out, err = logra(*command)
        assert (code, out) == (2, "")
        assert f"{run / 'samples.jsonl'}, line 1: the row has no `id`" in err
    (run / "samples.jsonl").write_text(samples)
    weights = next(run.glob("checkpoints/*/model/model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    for command in (["train", run, "--resume", "updates=3"], ["eval", run], ["chat", run]):
        code, out, err = logra(*command)
        assert (code, out) == (2, "")
        assert f"{weights} is damaged: its content is not what was saved" in err
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("temperature", ["nan", "inf"])
def test_a_temperature_that_is_no_number_is_refused(logra, tiny_model, temperature):
    code, _, err = logra("chat", tiny_model, "--temperature", temperature)
    assert code == 2
    assert "temperature" in err
    assert "Traceback" not in err


def test_a_configuration_may_come_through_a_pipe_and_data_may_not(logra, recipe, tmp_path):
    text = yaml.safe_load(recipe.read_text())
    read, write = os.pipe()
    os.write(write, yaml.safe_dump(text).encode())
    os.close(write)
    assert logra("train", f"/dev/fd/{read}", "--dry-run")[0] == 0
    os.close(read)
    os.mkfifo(tmp_path / "rows.jsonl")
    code, _, err = logra("train", recipe, "data.task=null", f"data.file={tmp_path / 'rows.jsonl'}")
    assert code == 2
    assert "is no ordinary file" in err
    code, _, err = logra("train", recipe, 'model.path="a\\0b"', 'data.file="a\\0b"')
    assert code == 2
    assert err.count("must not hold the character NUL") == 2


def test_a_model_whose_settings_are_of_a_wrong_type_is_one_error(logra, recipe, tiny_model, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    settings = json.loads((model / "config.json").read_text())
    for broken in ([], settings | {"num_attention_heads": "two"}, settings | {"hidden_size": None}):
        (model / "config.json").write_text(json.dumps(broken))
        code, out, err = logra("train", recipe, f"model.path={model}")
        assert (code, out) == (2, "")
        assert err.startswith(f"error: model {model} cannot be loaded: ")
    code, _, err = logra("model", "", tmp_path / "new")
    assert code == 2
    assert "the model's name is empty" in err


def test_what_the_machine_cannot_hold_is_one_error_and_not_a_process_that_the_kernel_kills(
    logra, recipe, smollm2_path, tmp_path
):
    huge = 2**20  # 600 GB of sketches
    for command in (
        ("train", recipe, f"model.path={smollm2_path}", f"logra.rank={huge}"),
        ("sync-check", smollm2_path, "--rank", huge, "--log", tmp_path / "log"),
    ):
        code, out, err = logra(*command)
        assert (code, out) == (2, "")
        assert re.fullmatch(r"error: .* needs \d{3}\.\d\d GiB of host memory at least, and .* take a smaller .*\n", err)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    # What was not foreseen: a limit that is not counted, and 7 GB beyond it.
    command = ["-m", "scaled", "train", recipe, f"logra.rank={huge}"]
    limited = lambda: resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))  # noqa: E731
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, preexec_fn=limited
    )
    assert done.returncode == 1
    assert re.search(r"error: memory ran out: .*you tried to allocate \d+ bytes.*; take a smaller .*\n$", done.stderr)


def test_chat_asks_sums_as_training_does(recipe):
    config = load_config(recipe)
    for problem in arithmetic():
        question = problem.messages[0]["content"]
        short = question.removeprefix("What is ").rstrip("?")
        for line in (question, question.lower(), short, short.replace(" ", ""), f"{short} ="):
            assert ask(line, config) == problem.messages
    assert ask("How are you?", config) == ({"role": "user", "content": "How are you?"},)
    assert ask("7 + 5", None) == ({"role": "user", "content": "7 + 5"},)
