"""Failures are real ones: a limit on the size of files fills the disk, SIGKILL ends a save, bytes are flipped."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import shutil
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from logra_ref.sketch import attach_sketches
from scaled.checkpoint import latest_checkpoint, load_state, save_checkpoint, save_text
from scaled.errors import UserError


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", chat_template="{{ messages }}"
    )


@pytest.fixture
def save(tmp_path, model, tokenizer):
    def save_update(update: int, state: dict | None = None, keep_last: int = 2) -> Path:
        state = {"update": update} if state is None else state
        return save_checkpoint(tmp_path, update, model=model, tokenizer=tokenizer, state=state, keep_last=keep_last)

    return save_update


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can grow beyond ``room`` bytes: writing fails as it does on a full disk, in every library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def same(left, right) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and pickle_bytes(left) == pickle_bytes(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or repr(left) == repr(right))


def pickle_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_state_comes_back_bit_for_bit(save):
    state = {
        "number": 0.1 + 0.2,
        "nan": float("nan"),
        "large": 2**63 + 1,
        "flag": True,
        "none": None,
        "text": "é\n",
        "list": [1, [torch.tensor([float("nan"), -0.0, 1e-45])]],
        "adam": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "bf16": torch.randn(3, 4).bfloat16(),
        "double": torch.randn(2, dtype=torch.float64),
        "generator": torch.Generator().manual_seed(5).get_state(),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(6).reshape(2, 3).T,
    }
    assert same(load_state(save(1, state)), state)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
states = st.dictionaries(st.text(), st.recursive(leaves, lambda s: st.lists(s) | st.dictionaries(st.integers(), s)))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
def test_any_state_of_plain_values_comes_back(save, state):
    assert same(load_state(save(1, state)), state)


def test_a_view_is_saved_without_the_storage_around_it(save):
    large = torch.zeros(1_000_000)
    path = save(1, {"view": large[:3], "parameter": torch.nn.Parameter(torch.ones(2))}) / "state" / "state.pt"
    assert path.stat().st_size < 10_000
    assert type(load_state(path.parent.parent)["parameter"]) is torch.Tensor


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


# Failures


@pytest.mark.parametrize("room", [0, 100, 2_000, 40_000])
def test_a_full_disk_leaves_the_last_checkpoint_good_and_says_what_is_needed(save, tmp_path, room):
    """The limits stop the save in its config, its weights and its state, which fail by classes of their own."""
    good = save(1, {"mark": 1}, keep_last=1)
    with full_disk(room), pytest.raises(UserError) as caught:
        save(2, {"large": torch.zeros(30_000)}, keep_last=1)
    text = str(caught.value)
    for part in ("update-000002", "It takes about", "are free", "Make room", f"last good checkpoint is {good}"):
        assert part in text
    assert names(tmp_path) == ["update-000001"]
    assert load_state(latest_checkpoint(tmp_path)) == {"mark": 1}
    assert load_state(save(2)) == {"update": 2}


def test_a_full_disk_at_the_second_save_of_an_update_keeps_the_first(save, tmp_path):
    save(1, {"mark": 1})
    with full_disk(2_000), pytest.raises(UserError):
        save(1, {"mark": 2})
    assert load_state(latest_checkpoint(tmp_path)) == {"mark": 1}


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path, model, tokenizer):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="there is no earlier checkpoint"):
        save_checkpoint(tmp_path / "file" / "run", 1, model=model, tokenizer=tokenizer, state={}, keep_last=1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12, of a process with threads
def test_a_process_killed_at_any_moment_of_saving_leaves_a_whole_checkpoint(tmp_path, model, tokenizer):
    def keep_saving(start: int) -> None:
        for step in range(start, 10**6):
            state = {"step": step, "tensor": torch.full((1000,), float(step))}
            # Every second save replaces one of the same update.
            save_checkpoint(tmp_path, step // 2, model=model, tokenizer=tokenizer, state=state, keep_last=1)

    def saved_step() -> int:
        checkpoint = latest_checkpoint(tmp_path)
        state = load_state(checkpoint)
        assert (state["tensor"] == state["step"]).all()
        AutoModelForCausalLM.from_pretrained(checkpoint / "model")
        return state["step"]

    save_checkpoint(
        tmp_path, 0, model=model, tokenizer=tokenizer, state={"step": 0, "tensor": torch.zeros(1)}, keep_last=1
    )
    step = 0
    for attempt in range(12):
        saver = multiprocessing.get_context("fork").Process(target=keep_saving, args=(step + 1,))
        saver.start()
        time.sleep(0.1 + 0.017 * attempt)
        saver.kill()
        saver.join()
        before, step = step, saved_step()
        assert step >= before
    assert step > 12


@pytest.mark.parametrize("name", ["state/state.pt", "model/model.safetensors", "model/config.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "removed"])
def test_a_damaged_file_is_named_and_so_is_the_older_checkpoint(save, name, damage):
    """``torch.load`` and safetensors both take a flipped bit of a tensor without a word."""
    state = {"tensor": torch.zeros(1000)}
    older, newer = save(1, state), save(2, state)
    content = bytearray((newer / name).read_bytes())
    content[len(content) // 2] ^= 1
    replacement = {"cut": content[:-10], "flipped": content, "emptied": b"", "removed": b""}[damage]
    (newer / name).write_bytes(replacement)
    if damage == "removed":
        (newer / name).unlink()
    with pytest.raises(UserError) as caught:
        load_state(newer)
    assert f"{newer / name} is damaged" in str(caught.value)
    assert f"resumes from {older}" in str(caught.value)
    assert ("bytes" in str(caught.value)) == (damage in ("cut", "emptied"))
    assert same(load_state(older), state)
    with pytest.raises(UserError, match="start the run anew"):
        (older / name).write_bytes(replacement)
        load_state(older)


def test_a_state_that_would_run_code_is_refused_and_leaves_no_trace(save, tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "trace",)

    checkpoint = save(1)
    files = checkpoint / "state" / "files.json"
    files.write_text("{}")  # an attacker writes fitting digests, or none
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, protocol=2))):
        write({"x": Payload()}, checkpoint / "state" / "state.pt")
        with pytest.raises(UserError, match=r"state\.pt is damaged"):
            load_state(checkpoint)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"state/state.pt": 3}', '{"state/state.pt": ["a", "b"]}'])
def test_a_list_of_files_that_is_broken_is_a_clear_error(save, content):
    checkpoint = save(1)
    (checkpoint / "state" / "files.json").write_text(content)
    with pytest.raises(UserError, match="is damaged"):
        load_state(checkpoint)


# Texts


def test_a_text_is_replaced_whole_and_kept_as_it_was_on_a_full_disk(tmp_path):
    path = tmp_path / "config.yaml"
    save_text(path, "a: é\r\nb: 1\n")
    assert path.read_bytes() == "a: é\r\nb: 1\n".encode()
    with full_disk(50), pytest.raises(UserError, match=r"config\.yaml cannot be written: File too large"):
        save_text(path, "x" * 100)
    assert path.read_bytes() == "a: é\r\nb: 1\n".encode()
    assert list(tmp_path.iterdir()) == [path]
    (tmp_path / "reader").hardlink_to(path)  # whoever has the old file open keeps all of it
    save_text(path, "new")
    assert path.read_text() == "new"
    assert (tmp_path / "reader").read_bytes() == "a: é\r\nb: 1\n".encode()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(UserError, match="missing"):
        save_text(tmp_path / "missing" / "report.html", "x")
