"""``logra train --dry-run``: what it counts and lists, and that nothing is written."""

from __future__ import annotations

import pytest

from scaled.config_file import load_config
from scaled.plan import engine_bytes


def test_dry_run_shows_the_counts_and_writes_nothing(logra, recipe, tmp_path):
    code, out, err = logra("train", recipe, "--dry-run")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    # By hand: 258 · 16 tied, a layer of 16·16·2 + 16·8·2 + 3·16·24 weights and two norms of 16, a last norm.
    assert "LlamaForCausalLM, 8,048 parameters" in words
    assert "trained 3,840 parameters (47.7%); 14 matrices are selected" in words
    assert "data arithmetic: 604 problems, 6 held out" in words
    assert "2 updates take 8 responses, 0.0 epochs" in words
    assert words.endswith("missing nothing")
    assert not (tmp_path / "run").exists()


def test_dry_run_counts_the_memory_of_both_methods(logra, smollm2_path):
    code, out, _ = logra("train", "smollm2-demo", f"model.path={smollm2_path}", "run=nowhere", "--dry-run")
    assert code == 0
    words = " ".join(out.split())
    # 30 layers; outputs 576·2 + 192·2 + 1536·2 + 576, inputs 576·6 + 1536, at rank 64; 4 bytes and a bit.
    sketches, projections = 30 * 5184 * 64 * 4 / 2**20, 30 * 4992 * 64 / 8 / 2**20
    assert f"sketches {sketches:.1f} MiB, projections {projections:.1f} MiB" in words
    weights = 30 * (576 * 576 * 2 + 576 * 192 * 2 + 3 * 576 * 1536)
    assert f"gradients {4 * weights / 2**20:.1f} MiB, Adam's moments {8 * weights / 2**20:.1f} MiB" in words


def test_a_bf16_engine_keeps_54_gb_of_low_halves_at_27b_and_others_none(logra, recipe):
    bf16 = ["rollout.backend=vllm", "engine.dtype=bfloat16"]
    naive = [*bf16, "engine.rounding=naive", "engine.verify_every=0"]
    host = [*bf16, "engine.low_halves=host"]
    found = [engine_bytes(27 * 10**9, load_config(recipe, given)) for given in (bf16, naive, bf16[:1], host)]
    assert found == [
        {"weights": 54 * 10**9, "low halves": 54 * 10**9},
        {"weights": 54 * 10**9},
        {"weights": 108 * 10**9},
        {"weights": 54 * 10**9, "low halves on the host": 54 * 10**9},
    ]
    code, out, _ = logra("train", recipe, *bf16, "--dry-run")
    assert code == 0
    assert "engines each, over its workers: weights" in " ".join(out.split())


@pytest.mark.parametrize(
    ("method", "trained", "kept"),
    [
        # Adapters of rank 2: 2 (inputs + outputs) of each matrix.
        ("lora", 2 * 2 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24)), "LoRA, rank 2: adapters"),
        ("dense", 3840, "dense Adam: gradients"),
        ("logra", 3840, "LoGRA, rank 4: sketches"),
    ],
)
def test_dry_run_counts_what_the_method_of_the_run_trains_and_keeps(logra, recipe, method, trained, kept):
    code, out, _ = logra("train", recipe, f"method={method}", "lora.rank=2", "logra.rank=4", "--dry-run")
    assert code == 0
    words = " ".join(out.split())
    assert f"trained {trained:,} parameters" in words
    assert f"memory {kept}" in words


def test_dry_run_lists_all_that_is_missing(logra, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    code, out, err = logra(
        "train", recipe, "--dry-run", "data.held_out=610", "reward=nowhere:score", "logra.targets=[c_attn]"
    )
    assert (code, err) == (2, "")
    words = " ".join(out.split())
    for part in ("exists already", "no layer is named c_attn", "data.held_out=610", "reward='nowhere:score'"):
        assert f"missing {part}" in words or part in words.partition("missing")[2]


def test_dry_run_says_that_smollm2_is_fetched_later(logra, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_MODELS", str(tmp_path))
    code, out, _ = logra("train", "smollm2-demo", f"run={tmp_path / 'run'}", "--dry-run")
    assert code == 0
    assert "not here yet" in out
    assert list(tmp_path.iterdir()) == []
