"""What would hang, or be answered by a riddle, is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scaled.config_file import load_config
from scaled.errors import UserError
from scaled.report import write_report
from scaled.run import find_checkpoint
from scaled.section import MOST_COUNTED

COUNTS = (
    "updates",
    "microbatch",
    "rollout.prompts",
    "rollout.responses_per_prompt",
    "rollout.max_new_tokens",
    "rollout.batch",
    "evaluation.samples",
    "evaluation.every",
    "data.held_out",
    "control.horizon",
    "control.positions",
    "control.responses_per_rank",
    "dense.horizon",
    "dense.warmup",
    "checkpoint.every",
    "checkpoint.keep_last",
)


def refusal(*overrides: str, path: Path = Path("smollm2-demo")) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [MOST_COUNTED + 1, 10**14, 10**400])
def test_a_count_that_would_never_end_is_refused(key, value):
    more = ["control.positions=null"] if key == "control.responses_per_rank" else []
    message = refusal(f"{key}={value}", *more)
    assert f"{key} = {value} (command line): must be less than or equal to 1000000" in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["rollout.prompts=200000", "rollout.responses_per_prompt=6"], "`rollout.prompts` × `responses_per_prompt`"),
        (["data.held_out=200000", "evaluation.samples=6"], "`data.held_out` × `evaluation.samples`"),
    ],
)
def test_counts_that_only_together_would_never_end_are_refused(overrides, part):
    assert f"{part} is 200000 × 6 responses at once; make it 1000000 at most" in refusal(*overrides)
    assert load_config(Path("smollm2-demo"), [overrides[0], overrides[1].replace("6", "5")])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("logra.rank={}", "logra.rank = {} (command line): must be a valid integer"),
        ("logra.kind={}", "logra.kind = {} (command line): must be 'rademacher'"),
        ("updates={}", "updates = {} (command line): must be a valid integer"),
        ("logra.rank={a: 1}", "logra.rank.a (command line): no such key"),
    ],
)
def test_a_mapping_where_a_value_is_wanted_is_not_called_an_unknown_key(override, part):
    assert part in refusal(override)


def test_a_pipe_in_the_place_of_a_runs_configuration_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    expected = f"{tmp_path / 'config.yaml'} is no ordinary file"
    assert expected in refusal(path=tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"update": 1, "batch": 1, "skipped": "x", "seconds": 1, "peak_bytes": 1}\n'
    )
    with pytest.raises(UserError, match="is no ordinary file"):
        write_report(tmp_path)
    (tmp_path / "checkpoints/update-000001/state").mkdir(parents=True)
    (tmp_path / "checkpoints/update-000001/state/files.json").touch()
    with pytest.raises(UserError, match="is no ordinary file"):
        find_checkpoint(load_config(Path("smollm2-demo"), [f"run={tmp_path}"]))


@pytest.mark.parametrize("key", ["run", "data.file", "data.held_out_file"])
def test_an_empty_path_is_not_this_folder_and_a_user_that_is_not_there_no_riddle(key):
    assert "an empty text names none" in refusal("data.task=null", "data.file=x.jsonl", f"{key}=''")
    config = load_config(Path("smollm2-demo"), ["run=~nobody-of-that-name/x"])
    assert str(config.run) == "~nobody-of-that-name/x"
    assert load_config(Path("smollm2-demo"), ["run=~/x"]).run == Path.home() / "x"


@pytest.mark.parametrize("rounding", ["naive", "stochastic"])
def test_weights_that_an_engine_rounds_are_bf16_and_not_compared_by_their_bits(rounding):
    given = [f"engine.rounding={rounding}", "engine.dtype=bfloat16", "engine.verify_every=0"]
    assert load_config(Path("smollm2-demo"), given).engine.rounding == rounding
    assert f"`engine.rounding` {rounding} leaves bits that differ; set engine.verify_every=0" in refusal(*given[:2])
    expected = f"only bf16 engines round: `engine.rounding` {rounding} needs `engine.dtype` bfloat16"
    assert expected in refusal(given[0], given[2])


def test_engines_are_exact_unless_told_and_a_rounding_that_there_is_not_is_refused():
    assert load_config(Path("smollm2-demo"), ["engine.dtype=bfloat16"]).engine.rounding == "exact"
    assert "must be 'exact', 'naive' or 'stochastic'" in refusal("engine.rounding=up")


@pytest.mark.parametrize(
    "url", ["http://a:8000/v1", "http://a:8000/?x=1", "http://u:p@a:8000", "http://a:8000#x", "a:80"]
)
def test_an_engine_is_an_address_with_nothing_behind_it(url):
    assert "is no address such as http://127.0.0.1:8000, with nothing behind" in refusal(f"engine.urls=['{url}']")
    assert load_config(Path("smollm2-demo"), ["engine.urls=[http://a:8000/]"]).engine.urls == ("http://a:8000/",)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_engines_are_not_sent_to_all_addresses(host):
    assert "stands for all addresses" in refusal(f"engine.meet_at='{host}'")
