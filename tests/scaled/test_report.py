"""Reports of made-up logs, read back by the parsers of the standard library."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scaled.config_file import dump_config, load_config
from scaled.errors import UserError
from scaled.metrics import EVALUATION_FIELDS, UPDATE_FIELDS, JsonLines
from scaled.plots import median_ratio, update_plots
from scaled.report import write_report
from tests.pages import Page, evaluation_row, labels, sample, update_row

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} & \x00\x1b[31m\u202e \ud800"


@pytest.fixture
def report(tmp_path):
    def of(rows: list, samples: list = (), recipe: str = "smollm2-demo", overrides: tuple[str, ...] = ()) -> Page:
        config = load_config(Path(recipe), ["updates=3", *overrides])
        (tmp_path / "config.yaml").write_text(dump_config(config))
        for name, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
            (tmp_path / name).unlink(missing_ok=True)
            for row in lines:
                JsonLines(tmp_path / name).append(row)
        path = write_report(tmp_path)
        assert path == tmp_path / "report.html"
        return Page(path)

    return of


FULL = [
    evaluation_row(0, "greedy", 0.29),
    evaluation_row(0, "sampled", 0.16),
    update_row(1, reward=0.1),
    update_row(2, 2, skipped="every advantage is 0"),
    update_row(2, 3, reward=0.2),
    update_row(3, 4, reward=0.3, alpha=1.25),
    evaluation_row(3, "greedy", 0.3),
    evaluation_row(3, "sampled", 0.75),
]


def test_the_page_holds_all_it_needs_and_its_ids_do_not_clash(report):
    page = report(FULL, [sample(0, "a"), sample(3, "a")])
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert max(ids.values()) == 1
    targets = re.findall(r"url\(([^)]*)\)", page.html) + re.findall(r'(?:href|src)="([^"]*)"', page.html)
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert not re.search(r"@import|@font-face|DejaVu", page.html)
    assert "http" not in page.html.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert len(page.plots()) == 14


def test_the_first_screen_says_what_was_gained_and_whether_it_is_shown(report):
    page = report(FULL)
    text = " ".join(page.text.split())
    assert "Held-out accuracy, greedy 29.0% → 30.0%" in text
    assert "The intervals overlap: this does not show a change." in text
    assert "Held-out accuracy, sampled 16.0% → 75.0%" in text
    assert "before training: 10.0% to 22.0% · after update 3: 69.0% to 81.0%" in text
    assert "The intervals do not overlap: it became better." in text
    assert "3 of 3 updates, finished, 1 of 4 batches skipped" in text
    worse = report([evaluation_row(0, "sampled", 0.7), evaluation_row(2, "sampled", 0.1)])
    assert "The intervals do not overlap: it became worse." in " ".join(worse.text.split())


def test_form_is_reported_apart_from_content(report):
    rows = [
        evaluation_row(0, "sampled", 0.16, well_formed=0.6, accuracy_of_well_formed=0.27),
        evaluation_row(3, "sampled", 0.75, well_formed=0.99, accuracy_of_well_formed=None)
        | {"accuracy_of_well_formed_interval": None},
    ]
    page = report(rows)
    assert [
        "sampled, before training",
        "16.0% [10.0%, 22.0%]",
        "60.0% [25.0%, 75.0%]",
        "27.0% [25.0%, 75.0%]",
    ] in page.rows
    assert ["sampled, after update 3", "75.0% [69.0%, 81.0%]", "99.0% [25.0%, 75.0%]", "–"] in page.rows


def test_shares_that_only_some_graders_know_are_shown_where_they_are(report):
    assert "What the graders say besides" not in report(FULL).text
    known = {"unparseable": 0.125, "macro_score": 0.0625, "macro_score_interval": [0.03, 0.09]}
    page = report([*FULL, evaluation_row(3, "sampled", 0.7, **known)])
    assert ["sampled, after update 3", "6.2% [3.0%, 9.0%]", "12.5%"] in page.rows
    by_source = [
        evaluation_row(0, "greedy", 0.1),
        evaluation_row(3, "greedy", 0.2, by_source={"maze": 0.25, "sudoku": None}),
    ]
    rows = report(by_source).rows
    assert ["task", "greedy, before training", "greedy, after update 3"] in rows
    assert ["maze", "–", "25.0%"] in rows
    assert ["sudoku", "–", "–"] in rows


def test_without_an_engine_there_is_no_mismatch_to_show(report):
    alone = {"log_prob_difference": None, "mismatch_kl": None}
    assert "Mismatch of engine and trainer" in report([update_row(1)]).plots()
    assert "Mismatch of engine and trainer" not in report([update_row(1, **alone)]).plots()


def test_what_a_model_or_a_grader_wrote_is_text_and_nothing_else(report):
    rows = [update_row(1), update_row(2, skipped=HOSTILE)]
    changes = dict.fromkeys(("id", "prompt", "text", "answer"), HOSTILE)
    page = report(rows, [sample(1, "x", kind="train", **changes)])
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>") == 5  # three of the sample, and the reason twice
    assert "{{ 7*7 }}" in page.text
    assert r"\x00\x1b[31m\u202e \ud800" in page.text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", page.html)


def test_every_update_is_a_row_and_a_skipped_batch_says_why(report):
    rows = [row for row in report(FULL).rows if row and row[0] in "123" and len(row) > 5]
    assert [row[:3] for row in rows] == [
        ["1", "1", "+0.100"],
        ["2", "2", "+0.500"],
        ["2", "3", "+0.200"],
        ["3", "4", "+0.300"],
    ]
    assert rows[1][5:] == ["skipped: every advantage is 0"]
    assert {len(row) for row in rows} == {6, 15}
    assert rows[3][7] == "1.25"


def test_each_field_of_the_log_is_explained(report):
    rows = report(FULL).rows
    for fields, last in ((UPDATE_FIELDS, FULL[5]), (EVALUATION_FIELDS, FULL[-1])):
        for name, meaning in fields.items():
            assert [name, json.dumps(last[name]), meaning] in rows


def test_answers_to_the_same_problem_stand_side_by_side(report):
    samples = [sample(update, name) for update in (0, 2, 3) for name in ("a", "b")]
    samples += [sample(0, "only before"), sample(3, "c", kind="train")]
    page = report(FULL, samples)
    assert ["problem", "right answer", "before training", "after update 3"] in page.rows
    shown = [row for row in page.rows if row[0].startswith("user: problem")]
    assert [row[0] for row in shown] == ["user: problem a", "user: problem b", "user: problem only before"]
    assert [cell.split("\n")[0].removesuffix("right") for cell in shown[0][2:]] == [
        "answer at 0 to a",
        "answer at 3 to a",
    ]
    assert shown[2][3] == "–"


def test_an_answer_that_was_cut_says_so(report):
    page = report([update_row(1)], [sample(1, "a", kind="train", outcome="wrong", stop_reason="length", tokens=6)])
    assert "wrong, cut at 6 tokens" in page.text
    assert ["problem", "right answer", "in update 1"] in page.rows


WITHOUT_VALUES = {name: None for name in UPDATE_FIELDS if name not in ("update", "batch", "method", "skipped")}
FEW_FIELDS = {"update": 1, "batch": 1, "skipped": "nothing was graded", "seconds": 1.0, "peak_bytes": 1}


@pytest.mark.parametrize(
    ("rows", "plots"),
    [
        ([evaluation_row(0, "sampled", 0.2)], 1),
        ([update_row(1)], 13),
        ([FEW_FIELDS], 0),
        ([update_row(1, q=math.nan, realised_kl=math.inf, alpha=-math.inf, q_se=math.nan)], 9),
        ([update_row(1), update_row(2, q=math.nan, q_se=math.nan, realised_kl=math.nan)], 13),
        ([update_row(1, q_se=None), update_row(2, q=0.0, predicted_kl=0.0, realised_kl=0.0)], 13),
        ([update_row(1, **WITHOUT_VALUES) | {"seconds": 1.0, "peak_bytes": 1}], 3),
        ([update_row(1, well_formed=None), evaluation_row(1, "greedy", 0.1, well_formed=None)], 14),
        ([update_row(1), evaluation_row(1, "greedy", 0.1, pass_at_1=None, interval=None)], 13),
    ],
    ids=["begun", "single", "skipped", "infinite", "gap", "zero", "empty", "formless", "ungraded"],
)
def test_a_log_with_little_in_it_is_reported_as_far_as_it_goes(report, rows, plots):
    assert len(report(rows).plots()) == plots


def test_dense_adam_has_no_alpha_and_no_predicted_kl(report):
    logra_only = ["q", "q_se", "predicted_kl", "alpha", "budget", "budget_scheduled", "update_norm", "weight_norm"]
    nothing = dict.fromkeys([*logra_only, "sketch_norm"])
    page = report([update_row(u, method="dense", **nothing) for u in (1, 2)], recipe="smollm2-demo-dense")
    assert set(page.plots()) == {
        "Reward",
        "Right and well-formed answers in training",
        "How far each update moved the policy",
        "Length of the responses",
        "Responses cut by the limit of tokens",
        "Mismatch of engine and trainer",
        "Seconds by phase",
        "Peak memory",
    }
    assert "dense Adam" in page.text
    assert "sketch" not in page.text.split("The run in plots")[0]


def test_step_control_that_is_off_is_told_as_such(report):
    assert "step control is switched off" in report([update_row(1)], recipe="smollm2-demo-control").text


@pytest.mark.parametrize("names", [[], ["config.yaml"], ["config.yaml", "metrics.jsonl"]])
def test_a_folder_without_a_log_is_an_error_and_stays_as_it_is(tmp_path, names):
    for name in names:
        (tmp_path / name).touch()
    for run in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=f"{re.escape(str(run))} has no metrics"):
            write_report(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_log_without_its_configuration_is_an_error(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl").append(update_row(1))
    with pytest.raises(UserError, match=r"config\.yaml"):
        write_report(tmp_path)


def test_the_same_log_gives_the_same_bytes_and_a_row_being_written_is_left_out(report, tmp_path):
    first = report(FULL).html
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "ba')
    assert Page(write_report(tmp_path)).html == first


def test_a_folder_with_blanks_in_its_name_gives_commands_that_a_shell_takes(tmp_path):
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_config(load_config(Path("smollm2-demo"))))
    JsonLines(run / "metrics.jsonl").append(update_row(1))
    assert f"logra train '{run}/config.yaml' run='{run}-again'" in Page(write_report(run)).text


def test_the_median_of_the_ratio_counts_only_updates_that_have_one():
    pairs = [(2.0, 1.0), (1.0, 2.0), (3.0, 1.0), (1.0, 0.0), (1.0, None), (None, 1.0), ("NaN", 1.0), (1.0, "NaN")]
    assert median_ratio([{"realised_kl": r, "predicted_kl": p} for r, p in pairs]) == 2.0
    assert median_ratio([]) is None


def test_an_axis_has_numbers_also_where_all_values_lie_within_a_decade_or_are_one():
    for values in ([0.036, 0.037], [0.036], [1e-9, 1.0]):
        rows = [update_row(i + 1, realised_kl=v, predicted_kl=v, budget=v) for i, v in enumerate(values)]
        svg = next(plot.svg for plot in update_plots(rows, 3.0) if "moved the policy" in plot.title)
        numbers = [label for label in labels(ElementTree.fromstring(svg)) if re.fullmatch(r"[\d.e-]+", label)]
        at_updates = {str(row["update"]) for row in rows}
        on_axis = {float(label) for label in set(numbers) - at_updates}
        assert len(on_axis) >= 3
        assert {f"{value:e}"[0] for value in on_axis} <= set("125")
        assert at_updates <= set(numbers)


def test_a_long_run_makes_a_page_that_a_browser_takes(report):
    page = report([update_row(u + 1, q=0.5 + u % 7, realised_kl=0.1 + u % 5) for u in range(400)])
    assert len(page.html) < 1_500_000
    assert len([row for row in page.rows if len(row) == 15]) == 401
