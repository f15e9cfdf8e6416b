from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scaled.config import RunConfig, Section
from scaled.config_file import SHIPPED, dump_config, load_config
from scaled.errors import UserError

SMALLEST = "run: runs/x\nupdates: 2\nmodel: {path: smollm2}\ndata: {task: arithmetic}\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_every_key_has_an_explanation():
    def check(section: type[Section]) -> None:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                check(field.annotation)

    check(RunConfig)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("control.budget_max=1e-3", 1e-3),  # YAML 1.1 reads 1e-3 as a string
        ("control.budget_max=1", 1.0),
        ("control.responses_per_rank=2", 2),
        ("rewards.answer_pattern=null", None),
        ("threads=null", None),
        ("rollout.stop=[a, '#']", ("a", "#")),
        ('rollout.stop=["\\n"]', ("\n",)),
        ("dense.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("control.enabled=false", False),
        ("model.path=a=b", "a=b"),
        ("data.held_out_file=some/file.jsonl", Path("some/file.jsonl")),
    ],
)
def test_override_is_read_as_yaml(write, override, value):
    found = load_config(write(SMALLEST), [override])
    for part in override.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_exponent_without_a_point_in_the_file_is_a_number(write):
    assert load_config(write(SMALLEST + "logra: {update_ratio: 6e-5}")).logra.update_ratio == 6e-5


def test_last_of_two_equal_overrides_wins_and_keeps_its_section(write):
    config = load_config(write(SMALLEST + "logra: {kind: gaussian}"), ["logra.rank=4", "logra.rank=8"])
    assert (config.logra.rank, config.logra.kind) == (8, "gaussian")


@settings(max_examples=50, deadline=None)
@example(texts=["\x85", "no", "1e-3", "\r\n", "ü"], number=-1e-300, ratio=6e-5, seed=-1)
@given(
    texts=st.lists(st.text(st.characters(exclude_characters="\0"), min_size=1), min_size=1, max_size=4),
    number=st.floats(min_value=-1e6, max_value=1e6),
    ratio=st.floats(min_value=0, max_value=1e6, exclude_min=True),
    seed=st.integers(),
)
def test_dump_round_trips_whatever_the_text_looks_like(tmp_path_factory, texts, number, ratio, seed):
    config = RunConfig.model_validate(
        {
            "run": "runs/no",
            "seed": seed,
            "updates": 3,
            "model": {"path": texts[0]},
            "data": {"file": "1e-3", "held_out_file": "null"},
            "rollout": {"stop": texts},
            "rewards": {"failure_reward": number},
            "logra": {"update_ratio": ratio, "targets": texts},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_shipped_recipes_differ_only_where_they_say():
    demo, dense, control = (
        load_config(Path(name)).model_dump() for name in ("smollm2-demo", "smollm2-demo-dense", "smollm2-demo-control")
    )
    own = {"run", "method", "logra", "control", "dense", "updates", "evaluation"}
    for key in demo.keys() - own:
        assert demo[key] == dense[key] == control[key], key
    assert demo["evaluation"] == dense["evaluation"] == control["evaluation"] | {"greedy": True}
    assert demo["control"] == control["control"] | {"enabled": True}
    assert demo["logra"] == control["logra"] | {"update_ratio": 6e-5}
    assert (demo["control"]["positions"], demo["updates"]) == (dense["control"]["positions"], dense["updates"])
    assert len({demo["run"], dense["run"], control["run"]}) == 3


def test_recipe_is_found_by_its_bare_name_but_a_file_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("smollm2-demo")) == load_config(Path("smollm2-demo.yaml"))
    assert load_config(Path("smollm2-demo")) == load_config(SHIPPED / "smollm2-demo.yaml")
    Path("smollm2-demo.yaml").write_text(SMALLEST)
    assert load_config(Path("smollm2-demo.yaml")).updates == 2


def test_run_folder_stands_for_its_config(tmp_path, write):
    (tmp_path / "config.yaml").write_text(SMALLEST)
    assert load_config(tmp_path, ["updates=9"]).updates == 9


def test_a_run_that_was_moved_is_not_taken_for_the_one_that_has_its_old_name(tmp_path, write):
    (tmp_path / "config.yaml").write_text(SMALLEST)
    assert load_config(tmp_path).run == tmp_path
    assert load_config(tmp_path, ["run=elsewhere"]).run == Path("elsewhere")
    assert load_config(tmp_path / "config.yaml").run != tmp_path


def test_missing_file_names_near_files_and_recipes(tmp_path, write):
    write(SMALLEST)
    message = refusal(tmp_path / "runs.yaml")
    assert f"Did you mean {tmp_path / 'run.yaml'}?" in message
    assert "smollm2-demo, smollm2-demo-control, smollm2-demo-dense" in message
    assert "Did you mean smollm2-demo" in refusal(Path("smolm2-demo"))
    assert "in the folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("rank=8", "logra.rank"),
        ("logra.rnk=8", "logra.rank"),
        ("logra.budget_max=1", "control.budget_max"),
        ("contrl.budgt_max=1", "control.budget_max"),
        ("temperature=1", "rollout.temperature or evaluation.temperature"),
        ("reward.failure_reward=0", "rewards.failure_reward"),
        ("Updates=3", "updates"),
        ("=3", ""),
    ],
)
def test_unknown_override_names_the_nearest_key(write, override, nearest):
    message = refusal(write(SMALLEST), override)
    key = override.partition("=")[0]
    assert f"{key} (command line): no such key; did you mean {nearest}" in message


def test_unknown_key_of_the_file_names_the_nearest_even_in_a_wrong_section(write):
    text = SMALLEST + "rank: 8\n3: 4\nlogra: {budgt_max: 1}\nrolout: {stop: [a], batch: 3}\nreward: {failure_reward: 0}"
    message = refusal(write(text))
    for line in (
        "rank: no such key; did you mean logra.rank or lora.rank?",
        "logra.budgt_max: no such key; did you mean control.budget_max?",
        "rolout.stop: no such key; did you mean rollout.stop?",
        "rolout.batch: no such key; did you mean rollout.batch?",
        "reward.failure_reward: no such key; did you mean rewards.failure_reward?",
        "3: no such key",
    ):
        assert f"\n  {line}" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("logra: {rank: 0}", ["logra.rank = 0", "greater than 0", "columns of a sketch"]),
        ("logra: {rank: true}", ["logra.rank = true", "must not be true or false"]),
        ("logra: {rank: 2.5}", ["logra.rank = 2.5", "valid integer"]),
        ("logra: {rank: many}", ["logra.rank = 'many'", "valid integer"]),
        ("logra: {rank: null}", ["logra.rank = null", "valid integer"]),
        ("logra: {kind: hadamrd}", ["logra.kind = 'hadamrd'", "'gaussian'", "'hadamard'"]),
        ("logra: {targets: []}", ["logra.targets = []", "at least 1 item"]),
        ("logra: {update_ratio: .nan}", ["logra.update_ratio = nan", "finite"]),
        ("rollout: {temperature: 1e300}", ["rollout.temperature = '1e300'", "less than or equal to 1000000"]),
        ("threads: 100000", ["threads = 100000", "less than or equal to 1024"]),
        ("rewards: {failure_reward: .inf}", ["rewards.failure_reward = inf", "finite"]),
        ("rewards: {failure_reward: yes}", ["rewards.failure_reward = true", "yes"]),
        ("rewards: {answer_pattern: '('}", ["rewards.answer_pattern = '('", "regular expression"]),
        ("dense: {betas: [true, 0.9]}", ["dense.betas", "must not be true or false"]),
        ("dense: {betas: [0.9, 1]}", ["dense.betas = 1", "less than 1"]),
        ("dense: {lr: 1e-8}", ["dense", "`lr_min` 1e-07 is above `lr` 1e-08"]),
        ("rollout: {stop: ['']}", ["rollout.stop = ''", "at least 1 character"]),
        ("rollout: {stop: a}", ["rollout.stop = 'a'", "must be a list"]),
        ("model: {path: x, device: meta}", ["model.device = 'meta'", "`cpu`, `cuda`"]),
        ("rollout: 3", ["rollout = 3", "must be a section"]),
        ("rollout:", ["rollout = null", "must be a section"]),
        ("control: {positions: 8, responses_per_rank: 2}", ["control", "not both"]),
        ("control: {budget_max: 1e-9}", ["control", "`budget_min` 2e-05 is above `budget_max` 1e-09"]),
        ("loss: {advantage: group_relative}", ["rollout.responses_per_prompt", "2 or more"]),
        ("run: 2024-01-01", ["run = datetime.date(2024, 1, 1)", "path"]),
    ],
)
def test_bad_value_is_named_with_its_key_and_what_is_allowed(write, text, parts):
    others = [line for line in SMALLEST.splitlines() if line.partition(":")[0] != text.partition(":")[0]]
    message = refusal(write("\n".join([*others, text])))
    assert "run.yaml has a problem:" in message
    for part in parts:
        assert part in message


def test_all_problems_are_listed_at_once_with_their_origin(write):
    message = refusal(
        write("updates: 0\nmodel: {}\ndata: {task: sums}\nlogra: {rank: 1, rank: 2}\nmicrobtch: 1\n"),
        "rollout.prompts=-1",
        "logra=3",
        "seeds=1",
    )
    assert "run.yaml has 9 problems:" in message
    for line in (
        "rank: given twice, in lines 4 and 4",
        "logra (command line): is a section; set one of its keys, e.g. logra.rank",
        "seeds (command line): no such key; did you mean seed?",
        "run: is missing. The folder of the run.",
        "updates = 0: must be greater than 0",
        "model.path: is missing. A folder in Hugging Face format",
        "data.task = 'sums': must be 'arithmetic'",
        "rollout.prompts = -1 (command line): must be greater than 0",
        "microbtch: no such key; did you mean microbatch?",
    ):
        assert f"\n  {line}" in message


def test_both_or_no_source_of_data_is_refused(write):
    assert "one of `task` and `file`" in refusal(write(SMALLEST), "data.file=x.jsonl")
    assert load_config(write(SMALLEST), ["data.file=x.jsonl", "data.task=null"]).data.task is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "is a list"),
        ("just words\n", "is a str"),
        ("a: [1\n", "is no valid YAML"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("\tupdates: 3\n", "line 1"),
        ("run: !!python/object/apply:os.getcwd []\n", "is no valid YAML"),
        ("run: 2024-13-45\n", "is no valid YAML"),
        ("? [a]\n: 3\n", "unhashable key"),
        ("a: " + 5000 * "[" + "\n", "is no valid YAML"),
    ],
)
def test_file_that_is_no_mapping_is_refused(write, text, part):
    message = refusal(write(text))
    assert "run.yaml" in message
    assert part in message


def test_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"updates: \xff\n")
    assert "cannot be read" in refusal(tmp_path / "run.yaml")


def test_merge_keys_are_no_duplicates(write):
    text = SMALLEST + "logra: &base {rank: 4}\n"
    assert load_config(write(text)).logra.rank == 4
    merged = (
        "run: runs/x\nupdates: 2\nmodel: {path: &p smollm2}\ndata: {<<: {held_out: 3}, task: arithmetic, held_out: 4}\n"
    )
    assert load_config(write(merged)).data.held_out == 4


@pytest.mark.parametrize("override", ["updates", "logra.rank", "--rank"])
def test_override_without_a_value_is_refused(write, override):
    assert "write key=value" in refusal(write(SMALLEST), override)


def test_dump_names_every_key(write):
    dumped = yaml.safe_load(dump_config(load_config(write(SMALLEST))))
    assert dumped.keys() == RunConfig.model_fields.keys()
    assert dumped["logra"]["epsilon"] == 1e-8
