"""What is saved comes back to the bit, and the right ones are kept."""

from __future__ import annotations

import re
import shutil
import stat
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from logra_ref.sketch import attach_sketches
from scaled.checkpoint import latest_checkpoint, load_tensors
from tests.checkpoints import load_state, names, same

# What is saved comes back


def test_the_model_of_a_sketched_run_is_an_ordinary_folder_with_equal_logits_and_tied_embeddings(
    save, model, tokenizer
):
    attach_sketches(model, 4, seed=1)
    model.generation_config.eos_token_id = [1, 7]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    folder = save(10) / "model"
    assert folder.parent.name == "update-000010"
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_id == [1, 7]
    assert type(loaded.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    again = AutoTokenizer.from_pretrained(folder)
    assert again("w3 w9")["input_ids"] == [3, 9]
    assert again.chat_template == tokenizer.chat_template


def test_generation_settings_that_save_pretrained_refuses_do_not_cost_a_run_its_checkpoint(save, model):
    """A greedy model with a temperature loads with a warning, and would fail only hours later, at the first save."""
    wanted = GenerationConfig(do_sample=False, temperature=0.6, top_p=0.9, eos_token_id=5)
    with pytest.raises(ValueError, match="temperature"):
        wanted.validate(strict=True)
    model.generation_config = wanted
    folder = save(1) / "model"
    assert model.generation_config is wanted
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.to_dict() == wanted.to_dict()


def test_saving_leaves_the_progress_bars_of_transformers_as_they_were_and_writes_none(save, capfd):
    transformers_logging.enable_progress_bar()
    save(1)
    assert transformers_logging.is_progress_bar_enabled()
    assert "shards" not in capfd.readouterr().err


def test_everyone_who_may_read_the_config_may_read_the_weights(save):
    """safetensors writes for its owner alone; an engine of another user could not load the folder."""
    modes = {stat.S_IMODE(path.stat().st_mode) for path in save(1).rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_a_state_comes_back_bit_for_bit(save):
    state = {
        "number": 0.1 + 0.2,
        "nan": float("nan"),
        "large": 2**63 + 1,
        "flag": True,
        "none": None,
        "text": "é\n",
        "list": [1, [2.5, {"betas": [0.9, 0.95]}]],
        "special": torch.tensor([float("nan"), -0.0, 1e-45]),
        "bf16": torch.randn(3, 4).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "generator": torch.Generator().manual_seed(5).get_state(),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(6).reshape(2, 3).T,
    }
    found = load_state(save(1, state))
    assert same({name: found[name] for name in state}, state)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
states = st.dictionaries(st.text(), st.recursive(leaves, lambda s: st.lists(s) | st.dictionaries(st.text(), s)))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
def test_any_state_of_plain_values_comes_back(save, state):
    found = load_state(save(1, state))
    assert same({name: found[name] for name in state}, state)


def test_a_view_is_saved_without_the_storage_around_it(save):
    large = torch.zeros(1_000_000)
    checkpoint = save(1, {"view": large[:3], "parameter": torch.nn.Parameter(torch.ones(2))})
    assert sum(path.stat().st_size for path in (checkpoint / "state").iterdir()) < 10_000
    assert load_state(checkpoint)["view"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("into", "text"),
    [
        ({}, "`a` is (3,) there and None here"),
        ({"a": torch.ones(4)}, "`a` is (3,) there and (4,) here"),
        ({"a": torch.ones(3), "b": torch.ones(1)}, "`b` is None there and (1,) here"),
    ],
)
def test_tensors_of_another_name_or_shape_are_refused_and_nothing_is_read(save, into, text):
    checkpoint = save(1, {"a": torch.zeros(3)})
    with pytest.raises(ValueError, match=re.escape(text)):
        load_tensors(checkpoint, into)
    assert all((tensor == 1).all() for tensor in into.values())


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": {"b": [0, {1, 2}]}}, r"state\.a\.b\[1\] is a set"),
        (
            {"loss": np.float64(1)},
            r"state\.loss is a float64",
        ),  # a float to isinstance, an object of numpy's in a pickle
        ({"rng": np.random.default_rng(0)}, r"state\.rng is a Generator"),
        ({"path": Path("x")}, r"state\.path"),
        ({"raw": b"x"}, r"state\.raw is a bytes"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)}, r"state\.optimizer is a SGD"),
        ({"a": {(1, 2): 3}}, r"state\.a has a key \(1, 2\)"),
        ({"a": {1: 3}}, r"state\.a has a key 1"),
        ({"a": [torch.zeros(1)]}, r"state\.a\[0\] is a Tensor"),
    ],
)
def test_what_does_not_load_safely_is_named_before_anything_is_written(save, tmp_path, state, key):
    with pytest.raises(TypeError, match=key):
        save(1, state)
    assert not (tmp_path / "checkpoints").exists()


def test_an_ordered_dict_comes_back_as_a_dict(save):
    assert load_state(save(1, {"weights": OrderedDict(a=1)})) == {"weights": {"a": 1}}


# Which ones are kept


def test_older_checkpoints_go_and_the_newest_is_found_by_number_not_by_name(save, tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for update in (5, 10, 999_999, 1_000_000):
        assert latest_checkpoint(tmp_path) != save(update) == latest_checkpoint(tmp_path)
    assert names(tmp_path) == ["update-1000000", "update-999999"]


def test_the_checkpoint_just_saved_is_never_the_one_removed(save, tmp_path):
    """A run that went back to an older checkpoint has later ones of another future in its folder."""
    for update in (10, 20, 30):
        save(update, keep_last=3)
    save(15, keep_last=1)
    assert names(tmp_path) == ["update-000015", "update-000020", "update-000030"]


def test_the_same_update_can_be_saved_again(save, tmp_path):
    """After skipped batches an interrupted run has the same update and another state."""
    save(10, {"batch": 11})
    save(10, {"batch": 15})
    assert load_state(latest_checkpoint(tmp_path)) == {"batch": 15}
    assert names(tmp_path) == ["update-000010"]


def test_leftovers_of_broken_saves_are_not_found_and_are_cleaned_at_the_next_save(save, tmp_path):
    good = save(10)
    folder = good.parent
    shutil.copytree(good, folder / ".partial-update-000020")
    shutil.copytree(good, folder / "update-000030")
    (folder / "update-000030" / "state" / "files.json").unlink()  # as a copy by hand that was broken off
    (folder / "notes").mkdir()
    (folder / "update-40.txt").touch()
    assert latest_checkpoint(tmp_path) == good
    save(20)
    assert ".partial-update-000020" not in names(tmp_path)
    assert latest_checkpoint(tmp_path).name == "update-000020"


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(save, tmp_path):
    good = save(10, {"batch": 11}, keep_last=1)
    good.rename(good.with_name(".old-update-000010"))
    assert load_state(latest_checkpoint(tmp_path)) == {"batch": 11}
    save(10, {"batch": 12}, keep_last=1)
    assert names(tmp_path) == ["update-000010"]
    shutil.copytree(good, good.with_name(".old-update-000010"))
    assert latest_checkpoint(tmp_path) == good
    save(10, {"batch": 13}, keep_last=1)
    assert names(tmp_path) == ["update-000010"]
