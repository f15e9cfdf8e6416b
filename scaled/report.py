"""The report of a run: one page that holds all it needs, for a reader who has never heard of LoGRA."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scaled.config import RunConfig
from scaled.config_file import dump_config
from scaled.figures import Rows, number
from scaled.files import save_text
from scaled.log_rows import samples_log
from scaled.logged import read_run
from scaled.metrics import EVALUATION_FIELDS, UPDATE_FIELDS
from scaled.page import render
from scaled.plots import evaluation_plots, kl_ratios, median_ratio, update_plots

COLUMNS = {
    "update": ("update", "{:.0f}"),
    "batch": ("batch", "{:.0f}"),
    "reward": ("reward", "{:+.3f}"),
    "right": ("right", "{:.1%}"),
    "well_formed": ("well-formed", "{:.1%}"),
    "response_tokens": ("tokens", "{:.1f}"),
    "truncated": ("cut", "{:.1%}"),
    "alpha": ("α", "{:.2f}"),
    "q": ("q", "{:.2e}"),
    "q_se": ("± s.e.", "{:.1e}"),
    "budget": ("budget", "{:.2e}"),
    "predicted_kl": ("predicted", "{:.2e}"),
    "realised_kl": ("realised", "{:.2e}"),
    "ratio": ("ratio", "{:.2f}"),
    "seconds": ("seconds", "{:.1f}"),
}
FORMS = {
    "right, of all": ("pass_at_1", "interval"),
    "well-formed, of all": ("well_formed", "well_formed_interval"),
    "right, of the well-formed": ("accuracy_of_well_formed", "accuracy_of_well_formed_interval"),
}
# Shares that only some graders know.
GRADED = {
    "mean score over tasks": ("macro_score", "macro_score_interval"),
    "no answer to be read, of all": ("unparseable", "unparseable_interval"),
}
SHOWN_SAMPLES = 16


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the report of a run, finished or not, and return its path: ``output``, or ``report.html`` in its folder.

    Raises ``UserError`` for a folder without a log or with a broken one.
    """
    _, config, batches, updates, evaluations = read_run(run)
    plots = (evaluation_plots(evaluations) if evaluations else []) + (
        update_plots(updates, config.control.alpha_max) if updates else []
    )
    text = render(
        "report.html.jinja",
        title=f"{Path(config.model.path).name} on {_task(config)}",
        status=_status(run, config, batches, updates),
        cards=_cards(evaluations),
        forms=_shares(evaluations, FORMS, lambda row: row["well_formed"] is not None),
        form_headings=list(FORMS),
        graded=_shares(evaluations, GRADED, lambda row: any(row.get(share) for share, _ in GRADED.values())),
        graded_headings=list(GRADED),
        sources=_sources(evaluations),
        facts=_facts(config, batches, updates),
        story=_story(config),
        plots=plots,
        samples=_samples(samples_log(run).rows()),
        columns=[heading for heading, _ in COLUMNS.values()],
        table=_table(batches),
        legends=[
            ("Updates and skipped batches", _legend(UPDATE_FIELDS, batches)),
            ("Evaluations", _legend(EVALUATION_FIELDS, evaluations)),
        ],
        commands=_commands(run, config),
        yaml=dump_config(config),
        config=config,
    )
    path = output or run / "report.html"
    save_text(path, text)
    return path


def _legend(fields: dict[str, str], rows: Rows) -> list[tuple[str, str, str]]:
    """Name, last value and meaning of each field."""
    last = rows[-1] if rows else {}
    return [(name, json.dumps(last[name]) if name in last else "", meaning) for name, meaning in fields.items()]


def _task(config: RunConfig) -> str:
    return config.data.task or config.data.file.name


def _status(run: Path, config: RunConfig, batches: Rows, updates: Rows) -> str:
    done = max((row["update"] for row in updates), default=0)
    state = "finished" if done >= config.updates else "not finished"
    skipped = len(batches) - len(updates)
    batches_skipped = f", {skipped} of {len(batches)} batches skipped" if skipped else ""
    return f"{run}: {done} of {config.updates} updates, {state}{batches_skipped}"


def _first_and_last(rows: Rows) -> list[dict[str, Any]]:
    rows = sorted(rows, key=lambda row: row["update"])
    return [rows[0], rows[-1]] if rows[0]["update"] < rows[-1]["update"] else rows[-1:]


def _when(update: int) -> str:
    return f"after update {update}" if update else "before training"


def _by_kind(evaluations: Rows) -> dict[str, list[dict[str, Any]]]:
    """The first and the last evaluation of each kind."""
    kinds = dict.fromkeys(row["eval"] for row in evaluations)
    return {kind: _first_and_last([row for row in evaluations if row["eval"] == kind]) for kind in kinds}


def _cards(evaluations: Rows) -> list[dict[str, Any]]:
    cards = []
    for kind, rows in _by_kind(evaluations).items():
        moments = [
            {
                "class": "before" if row["update"] == 0 or (i == 0 and len(rows) == 2) else "after",
                "when": _when(row["update"]),
                "right": row["pass_at_1"],
                "low": row["interval"][0],
                "high": row["interval"][1],
            }
            for i, row in enumerate(rows)
        ]
        cards.append({"name": kind, "moments": moments, "verdict": _verdict(moments)})
    return cards


def _verdict(moments: Sequence[dict[str, Any]]) -> str:
    if len(moments) < 2:
        return ""
    before, after = moments
    if after["low"] > before["high"]:
        return "The intervals do not overlap: it became better."
    if after["high"] < before["low"]:
        return "The intervals do not overlap: it became worse."
    return "The intervals overlap: this does not show a change."


def _shares(
    evaluations: Rows, measures: dict[str, tuple[str, str]], wanted: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The shares and intervals of the first and the last evaluations, where they are wanted."""
    return [
        {
            "name": f"{kind}, {_when(row['update'])}",
            "measures": [(row.get(share), row.get(interval)) for share, interval in measures.values()],
        }
        for kind, rows in _by_kind(evaluations).items()
        for row in rows
        if wanted(row)
    ]


def _sources(evaluations: Rows) -> dict[str, Any]:
    """Mean score of each task at the first and the last evaluations, where there are several tasks."""
    found = [
        (f"{kind}, {_when(row['update'])}", row.get("by_source") or {})
        for kind, rows in _by_kind(evaluations).items()
        for row in rows
    ]
    names = dict.fromkeys(name for _, scores in found for name in scores)
    return {
        "columns": [when for when, _ in found],
        "rows": [(name, [scores.get(name) for _, scores in found]) for name in names],
    }


def _facts(config: RunConfig, batches: Rows, updates: Rows) -> list[tuple[str, str]]:
    facts = [("updates", str(len(updates)))]
    if config.method == "logra":
        facts.append(("rank of the sketches", str(config.logra.rank)))
    if updates:
        seconds = [number(row["seconds"]) for row in batches]
        facts += [
            ("seconds an update (median)", f"{median(seconds):.1f}"),
            ("time in updates", _duration(sum(seconds))),
            ("peak memory", f"{max(number(row['peak_bytes']) for row in batches) / 2**30:.2f} GiB"),
        ]
    if (ratio := median_ratio(updates)) is not None:
        facts.append(("realised / predicted KL (median)", f"{ratio:.2f}"))
    return facts


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _story(config: RunConfig) -> list[str]:
    """What was done, told without a term that is not explained."""
    rollout = config.rollout
    each = "one answer" if rollout.responses_per_prompt == 1 else f"{rollout.responses_per_prompt} answers"
    rewarded = (
        f"A right answer is rewarded with 1, a wrong one with {config.rewards.failure_reward:g}"
        if config.reward == "exact_match"
        else f"A function of the user's own, {config.reward}, gives each answer its reward"
    )
    learning = (
        f"This is reinforcement learning of a pretrained language model, {config.model.path}. For each update it is "
        f"given {rollout.prompts} problems ({_task(config)}) and samples {each} to each, of "
        f"{rollout.limit}. {rewarded}. Answers that do better than usual are made likelier, the "
        "others less likely. No example of a right answer is ever shown to it."
    )
    if config.method == "dense":
        return [
            learning,
            "The method here is dense Adam, the baseline that LoGRA is compared with: it keeps the whole gradient and "
            "two running averages for every weight, 12 bytes beside the 4 of the weight. It does not predict how far "
            "an update moves the policy, which is what the model answers and how likely; it is measured afterwards.",
        ]
    control = config.control
    step = (
        f"Before a step is made, its effect on the model's answers is predicted, as a KL divergence (how far the "
        f"probabilities of the next token move, in nats a token), and the step is multiplied by α ≤ "
        f"{control.alpha_max:g} such that the prediction meets a budget, which falls from {control.budget_max:g} to "
        f"{control.budget_min:g} over {control.horizon} updates. Afterwards the KL is measured: the plots show how "
        "good the prediction was."
        if control.enabled
        else "Here step control is switched off: each step is made as proposed (α = 1), whatever its predicted effect."
    )
    return [
        learning,
        "The method is LoGRA, low-rank gradient sketches. Training commonly keeps a gradient as large as the model's "
        "weights and two averages of it: with the weights, four times the memory of the weights. LoGRA never forms "
        "that gradient: for each weight matrix W with d rows and k columns, it gathers the gradient's product with a "
        f"random k × r matrix, here r = {config.logra.rank}, a sketch of d × r numbers. The sketch is turned into an "
        "update of W, through the same random matrix, and added to W. No adapter stays, and the next update draws a "
        "new random matrix.",
        step,
    ]


def _samples(rows: Rows) -> dict[str, Any] | None:
    """Answers to the same problems at the first and the last evaluation; without any, those of training."""
    evaluated = [row for row in rows if row["kind"].startswith("eval")]
    kind = evaluated[-1]["kind"] if evaluated else "train"
    rows = [row for row in rows if row["kind"] == kind]
    if not rows:
        return None
    updates = [row["update"] for row in _first_and_last(rows)]
    answers: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["update"] in updates:
            answers.setdefault(row["id"], {})[row["update"]] = row
    # Problems with an answer at both times come first.
    shown = sorted(answers.values(), key=lambda by_update: -len(by_update))[:SHOWN_SAMPLES]
    return {
        "about": "Some of the problems that were never trained on."
        if evaluated
        else "Some of the problems of the first and of the last batch.",
        "moments": [_when(update) if evaluated else f"in update {update}" for update in updates],
        "rows": [
            {**next(iter(by_update.values())), "answers": [by_update.get(update) for update in updates]}
            for by_update in shown
        ],
    }


def _table(batches: Rows) -> list[dict[str, Any]]:
    table = []
    for row, ratio in zip(batches, kl_ratios(batches), strict=True):
        # Of a skipped batch the row ends early, for its reason.
        fields = list(COLUMNS)[:5] if row["skipped"] else list(COLUMNS)
        found = [number({**row, "ratio": ratio}.get(field)) for field in fields]
        cells = ["–" if math.isnan(n) else COLUMNS[field][1].format(n) for field, n in zip(fields, found, strict=True)]
        table.append({"cells": cells, "skipped": row["skipped"]})
    return table


def _commands(run: Path, config: RunConfig) -> str:
    verb = "train" if config.rollout.backend == "hf" else "launch"
    file, again = shlex.quote(str(run / "config.yaml")), shlex.quote(f"{run}-again")
    return f"logra {verb} {file} run={again}\nlogra report {again}"
