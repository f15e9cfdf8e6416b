"""The memory planner: laws of bytes on small shapes, exact extrapolation over layers, verdicts and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config
from typer.testing import CliRunner

from scaled.cli import app
from scaled.config import RunConfig
from scaled.errors import UserError
from scaled.memory.architecture import architecture, shipped, with_layers
from scaled.memory.plan import (
    GIB,
    Plan,
    as_json,
    cheapest_changes,
    extrapolated,
    highest,
    peaks,
    plan_memory,
    sizes_of,
)
from scaled.memory.trace import PHASES, Sizes, trace

SIZES = Sizes(prompt=8, longest=40)
QWEN2 = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = [
    Qwen2Config(**QWEN2, vocab_size=304, num_hidden_layers=2, tie_word_embeddings=True),
    Qwen2Config(**QWEN2, vocab_size=512, num_hidden_layers=3, tie_word_embeddings=False),
    Qwen3Config(**QWEN2, vocab_size=256, num_hidden_layers=2, head_dim=32, tie_word_embeddings=False),
]


def config(method: str = "logra", ranks: int = 4, **settings: Any) -> RunConfig:
    base = {
        "run": "nowhere",
        "updates": 1,
        "method": method,
        "policy_sync": "full",
        "model": {"path": "tiny", "compute_dtype": "bfloat16"},
        "data": {"task": "arithmetic"},
        "rollout": {"backend": "vllm", "max_new_tokens": 32, "prompts": 16},
        "control": {"responses_per_rank": 4},
        "logra": {"rank": 8},
        "lora": {"rank": 8},
        "launch": {"ranks": ranks},
    }
    for key, value in settings.items():
        section, _, leaf = key.rpartition("__")
        (base[section] if section else base)[leaf] = value
    return RunConfig.model_validate(base)


def planned(settings: PreTrainedConfig, chosen: RunConfig, sizes: Sizes = SIZES) -> Plan:
    return Plan(highest(peaks(chosen, settings, sizes)))


def matrices(settings: PreTrainedConfig) -> list[tuple[int, int]]:
    """(d, k) of the seven matrices of all layers, by hand."""
    h, m = settings.hidden_size, settings.intermediate_size
    width = getattr(settings, "head_dim", None) or h // settings.num_attention_heads
    q, kv = width * settings.num_attention_heads, width * settings.num_key_value_heads
    return [(q, h), (kv, h), (kv, h), (h, q), (m, h), (m, h), (h, m)] * settings.num_hidden_layers


def parameters(settings: PreTrainedConfig) -> int:
    """All numbers of the model, by hand: matrices, tables, norms, biases (Qwen2) or norms of heads (Qwen3)."""
    h, layers = settings.hidden_size, settings.num_hidden_layers
    tables = (1 if settings.tie_word_embeddings else 2) * settings.vocab_size * h
    if isinstance(settings, Qwen3Config):
        beside = 2 * settings.head_dim
    else:
        beside = h + 2 * h // settings.num_attention_heads * settings.num_key_value_heads
    return sum(d * k for d, k in matrices(settings)) + tables + (2 * layers + 1) * h + layers * beside


@pytest.mark.parametrize("settings", SHAPES)
@pytest.mark.parametrize("ranks", [1, 4])
def test_weights_gradients_and_moments_are_the_bytes_of_their_numbers_shared_evenly(settings, ranks):
    idle = planned(settings, config("dense", ranks)).phases["rollout"]
    selected = sum(d * k for d, k in matrices(settings))
    assert idle["weights"] == pytest.approx(4 * parameters(settings) / ranks, abs=8 * 2**10)  # rotary frequencies
    assert idle["gradients"] == pytest.approx(4 * selected / ranks, abs=64)
    steps = 4 * len(matrices(settings))  # Adam counts them in fp32
    assert idle["moments"] == pytest.approx(8 * selected / ranks + steps, abs=64)


@pytest.mark.parametrize("rank", [4, 8, 16])
def test_sketches_are_linear_in_rank_and_shared_and_no_gradient_is_kept(rank):
    settings = SHAPES[0]
    found = planned(settings, config(logra__rank=rank)).phases
    assert found["rollout"]["sketches"] == 4 * rank * sum(d for d, _ in matrices(settings)) / 4
    assert all(phase.get("moments", 0) <= 4 * sum(d for d, _ in matrices(settings)) for phase in found.values())
    assert found["rollout"].get("gradients", 0) == 0


def test_activations_are_linear_in_tokens():
    short, middle, long = (
        planned(SHAPES[0], config(), Sizes(8, length)).phases["forward"]["activations"] for length in (264, 520, 776)
    )
    assert long - middle == pytest.approx(middle - short, rel=0.01)
    assert middle > 1.5 * short


@pytest.mark.parametrize("settings", SHAPES)
def test_dense_needs_more_than_logra_where_matrices_are_larger_than_the_rank(settings):
    dense, logra = planned(settings, config("dense", 2)), planned(settings, config("logra", 2, logra__rank=4))
    assert sum(dense.phases["backward"].values()) > sum(logra.phases["backward"].values())


@pytest.mark.parametrize("method", ["logra", "dense"])
def test_what_four_and_five_layers_say_of_six_is_what_six_show(method):
    settings = Qwen2Config(**QWEN2, vocab_size=304, num_hidden_layers=6, tie_word_embeddings=True)
    four, five, six = (trace(config(method), with_layers(settings, count), SIZES) for count in (4, 5, 6))
    foretold = {place: items for place, items in extrapolated(four, five, 6).items() if place[0] in PHASES}
    assert {place: {k: v for k, v in items.items() if v} for place, items in foretold.items()} == {
        place: {k: v for k, v in six.peaks[place].items() if v} for place in foretold
    }


def test_the_whole_copy_that_writes_responses_in_process_counts_on_several_ranks_alone():
    copy = planned(SHAPES[0], config("logra", 2, rollout__backend="hf")).phases["rollout"]["rollout copy"]
    assert copy == pytest.approx(4 * parameters(SHAPES[0]), rel=0.1)
    assert "rollout copy" not in planned(SHAPES[0], config("logra", 1, rollout__backend="hf")).phases["rollout"]


# Verdicts


def test_a_plan_that_does_not_fit_names_the_cheapest_changes_in_turn_until_it_does():
    chosen = config("dense", model__path="tiny", model__logit_rows=4096, microbatch=4)
    before = plan_memory(chosen, prompt=8)
    card = 0.8 * before.peak
    assert not before.fits(card)
    changes = cheapest_changes(chosen, before, card, prompt=8)
    assert changes
    assert [c.peak for c in changes] == sorted((c.peak for c in changes), reverse=True)
    assert changes[0].peak < before.peak
    assert changes[-1].peak <= card


def test_a_plan_as_json_has_its_keys_and_its_items_add_up():
    found = plan_memory(config(), prompt=8)
    data = as_json(found, 80.0, [])
    assert {"peak_gib_per_gpu", "phases", "items", "fits"} <= set(data)
    assert data["fits"] is True
    assert set(data["phases"]) == set(PHASES)
    assert data["peak_gib_per_gpu"] == max(data["phases"].values())
    assert sum(data["items"].values()) == pytest.approx(data["peak_gib_per_gpu"], abs=1e-3)
    assert found.peak < GIB


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-Math-7B", "27b-stand-in"])
def test_the_recipes_models_are_known_without_the_hub(name):
    assert architecture(name).num_hidden_layers in (28, 77)
    assert len(shipped()) == 3


def write(folder: Path, method: str = "logra", path: str = "tiny") -> str:
    file = folder / "run.yaml"
    file.write_text(
        f"run: {folder}/run\nupdates: 1\nmethod: {method}\nmodel: {{path: {path}}}\ndata: {{task: arithmetic}}\n"
        "rollout: {max_new_tokens: 32, prompts: 4}\nlogra: {rank: 4}\nlora: {rank: 4}\n"
    )
    return str(file)


def test_the_command_prints_json_and_ends_by_one_if_it_does_not_fit(tmp_path, monkeypatch):
    done = CliRunner().invoke(app, ["plan", write(tmp_path, "lora"), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["fits"]
    monkeypatch.setattr("scaled.memory.plan.CHANGES", ())
    done = CliRunner().invoke(app, ["plan", write(tmp_path), "--card-gib", "0.001"])
    assert done.exit_code == 1
    assert "does not fit" in done.stdout
    assert "none of the settings" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_card_of_no_memory_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["plan", write(tmp_path), "--card-gib", "0"])
    assert done.exit_code == 2


def test_an_unknown_model_names_the_shipped_ones():
    with pytest.raises(UserError, match=r"no/such-model is no folder here.*qwen2\.5-math-1\.5b"):
        plan_memory(config(model__path="no/such-model"))


def test_a_prompt_as_long_as_the_context_is_refused():
    with pytest.raises(UserError, match="leaves no room in 64"):
        sizes_of(config(rollout__context=64), SHAPES[0], 64)
