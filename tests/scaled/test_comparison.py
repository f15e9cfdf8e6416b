"""Pages about several runs, from made-up logs."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from scaled.comparison import differences, names_of, write_comparison
from scaled.comparison_plots import look
from scaled.config_file import dump_config, load_config
from scaled.errors import UserError
from scaled.metrics import JsonLines
from tests.pages import Page, evaluation_row, update_row

LOGRA_ONLY = ["q", "q_se", "predicted_kl", "alpha", "budget", "budget_scheduled", "update_norm", "weight_norm"]
DENSE = {"method": "dense"} | dict.fromkeys([*LOGRA_ONLY, "sketch_norm"])


@pytest.fixture
def run(tmp_path):
    def make(name: str, rows: list[dict], *overrides: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = load_config(Path("smollm2-demo"), ["updates=3", f"run={folder}", *overrides])
        (folder / "config.yaml").write_text(dump_config(config))
        for row in rows:
            JsonLines(folder / "metrics.jsonl").append(row)
        return folder

    return make


@pytest.fixture
def page(tmp_path):
    def of(*folders: Path) -> Page:
        path = tmp_path / "comparison.html"
        assert write_comparison(folders, path) == path
        return Page(path)

    return of


def lines(svg) -> list[tuple[str, int]]:
    """Colour and number of points of each line of a plot, in the order drawn."""
    colours = [look(i)["color"] for i in range(7)]
    found = []
    for path in svg.iter("{http://www.w3.org/2000/svg}path"):
        colour = re.search(r"fill: none;.* stroke: (#[0-9a-f]{6})", path.get("style", ""))
        if path.get("clip-path") and colour and colour[1] in colours:
            found.append((colour[1], len(re.findall("[ML]", path.get("d", "")))))
    return found


def test_runs_by_different_methods_and_of_different_length_lie_over_each_other(run, page):
    logra = run("logra", [update_row(u) for u in (1, 2, 3)])
    dense = run("dense", [update_row(u, **DENSE) for u in (1, 2)], "method=dense")
    drawn = page(logra, dense)
    assert lines(drawn.plots()["Reward"]) == [(look(0)["color"], 3), (look(1)["color"], 2)]
    assert lines(drawn.plots()["Step multiplier α"]) == [(look(0)["color"], 3)]
    # Without what the first run alone has, the second keeps its colour.
    assert lines(page(dense, logra).plots()["Step multiplier α"]) == [(look(1)["color"], 3)]
    assert [row[:3] for row in drawn.rows if row[0] in ("logra", "dense")] == [
        ["logra", "logra", "3 of 3"],
        ["dense", "dense", "2 of 3not finished"],
    ]


def test_final_figures_are_those_of_the_last_evaluation_with_intervals(run, page):
    rows = [evaluation_row(3, "greedy", 0.75), evaluation_row(0, "greedy", 0.25), update_row(3, realised_kl=1.0)]
    drawn = page(run("a", rows), run("b", [update_row(1)]))
    (a,) = [row for row in drawn.rows if row[0] == "a"]
    assert a[3:5] == ["75.0%[69.0%, 81.0%]of 0.5, update 3", "50.0%[25.0%, 75.0%]"]
    assert a[-3:] == ["2.00", "0.50", "3.00"]
    (b,) = [row for row in drawn.rows if row[0] == "b"]
    assert b[3:5] == ["–", "–"]


def test_only_what_differs_and_is_read_is_listed(run):
    def differing(*overrides: list[str]) -> dict[str, list[str]]:
        return dict(
            differences([load_config(Path("smollm2-demo"), [f"run=r{i}", *o]) for i, o in enumerate(overrides)])
        )

    assert differing([], []) == {}
    assert differing(["seed=1"], ["control.budget_max=0.1"]) == {
        "seed": ["1", "0"],
        "control.budget_max": ["0.04", "0.1"],
    }
    # A LoRA's rank is no setting of a LoGRA run; rank 64 of the recipe is not the default, and so is told.
    assert differing(["lora.rank=3"], ["lora.rank=5"]) == {}
    found = differing([], ["method=lora", "lora.rank=3"])
    assert (found["method"], found["logra.rank"], found["lora.rank"]) == (["logra", "lora"], ["64", "–"], ["–", "3"])
    assert not [key for key in found if key.startswith(("engine", "dense"))]


def test_other_problems_are_said_to_be_other_problems(run, page):
    rows = [update_row(1)]
    a, b, c = run("a", rows), run("b", rows, "seed=1", "data.held_out=8"), run("c", rows, "microbatch=1")
    assert "differ in seed, data.held_out, so that" in " ".join(page(a, b).text.split())
    assert "may not be the same" not in page(a, c).text


def test_runs_look_different_from_each_other_by_more_than_colour():
    looks = [look(i) for i in range(140)]
    assert len({(one["color"], one["linestyle"], one["marker"]) for one in looks}) == 140
    first = looks[:4]
    assert len({one["linestyle"] for one in first}) == len({one["marker"] for one in first}) == 4
    assert len({one["color"] for one in looks[:7]}) == 7


def test_the_page_holds_all_it_needs_and_names_are_text(run, page):
    hostile = "<script>alert(1)<"
    rows = [update_row(1), evaluation_row(1, '"><script>x', 0.5)]
    drawn = page(run("plain", rows), run(hostile, rows))
    assert not {"script", "link", "img"} & {tag for tag, _ in drawn.tags}
    ids = Counter(attributes["id"] for _, attributes in drawn.tags if "id" in attributes)
    assert max(ids.values()) == 1
    targets = re.findall(r"url\(([^)]*)\)", drawn.html) + re.findall(r'(?:href|src)="([^"]*)"', drawn.html)
    assert targets
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    assert hostile in drawn.text


def test_of_a_long_run_each_point_is_the_median_of_some_updates(run, page):
    long = run("long", [update_row(u + 1, reward=u + 1.0 if u % 5 else 1e6) for u in range(600)])
    short = run("short", [update_row(u + 1, reward=u + 1.0) for u in range(10)])
    drawn = page(long, short)
    assert "Each point is the median of 5 updates." in drawn.text
    assert [points for _, points in lines(drawn.plots()["Reward"])] == [120, 2]
    assert len(drawn.html) < 600_000


def test_a_run_without_a_number_to_show_is_in_the_tables_alone(run, page):
    begun = run("begun", [evaluation_row(0, "sampled", 0.2)])
    odd = run(
        "odd", [update_row(1, realised_kl=math.inf, q=math.nan, reward=-math.inf, alpha=0.0, seconds_train=1e308)]
    )
    skipped = {"update": 1, "batch": 1, "skipped": "no signal", "seconds": 1.0, "peak_bytes": 1}
    drawn = page(begun, odd, run("skipped", [skipped]))
    assert "Reward" not in drawn.plots()
    assert "Right answers to held-out problems, sampled" in drawn.plots()
    assert [row[0] for row in drawn.rows if row[0] in ("begun", "odd", "skipped")] == ["begun", "odd", "skipped"]


def test_the_same_folder_twice_or_one_that_is_no_run_is_one_error_and_nothing_is_written(run, tmp_path):
    a, output = run("a", [update_row(1)]), tmp_path / "out.html"
    with pytest.raises(UserError, match=r"a/\.\./a is given twice"):
        write_comparison([a, a / ".." / "a"], output)
    (tmp_path / "empty").mkdir()
    for other in ("empty", "missing"):
        with pytest.raises(UserError, match=f"{other} has no metrics"):
            write_comparison([a, tmp_path / other], output)
    assert not output.exists()


def test_names_are_as_short_as_tells_runs_apart():
    assert names_of([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names_of([Path("/x/a/run"), Path("/x/b/run"), Path("/y/c")]) == ["a/run", "b/run", "y/c"]
    assert names_of([Path("/run"), Path("/x/run")]) == ["//run", "x/run"]


def test_the_command_takes_one_run_or_several_and_overwrites_no_log(logra, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = run("a", [update_row(1)]), run("b", [update_row(1)])
    assert logra("report", a)[:2] == (0, f"report: {a}/report.html\n")
    assert logra("report", a, "--output", "one.html")[:2] == (0, "report: one.html\n")
    assert logra("report", a, b)[:2] == (0, "report: comparison.html\n")
    assert logra("report", a, b, "--output", "both.html")[:2] == (0, "report: both.html\n")
    assert "2 runs compared" in (tmp_path / "both.html").read_text()
    log = (a / "metrics.jsonl").read_bytes()
    code, out, err = logra("report", a, b, "--output", a / "metrics.jsonl")
    assert (code, out) == (2, "")
    assert "ends in .html" in err
    assert (a / "metrics.jsonl").read_bytes() == log
