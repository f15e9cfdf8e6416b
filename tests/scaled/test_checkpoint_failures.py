"""Failures are real ones: a limit on the size of files fills the disk, SIGKILL ends a save, bytes are flipped."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)

from scaled.checkpoint import latest_checkpoint, verify
from scaled.errors import UserError
from scaled.files import save_text
from tests.checkpoints import full_disk, load_state, names, same, save_state

TENSORS = "state/shard-00001-model-00001-of-00001.safetensors"


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
        save_state(tmp_path / "file" / "run", 1, model, tokenizer, {})


def test_a_full_disk_at_the_first_save_does_not_promise_a_resumed_run(save, tmp_path):
    with full_disk(100), pytest.raises(UserError) as caught:
        save(1)
    assert "resume" not in str(caught.value)
    assert f"Make room and remove {tmp_path}, or set run=FOLDER on another disk, and start anew" in str(caught.value)


@pytest.mark.parametrize("name", [".partial-update-000001", ".partial-mine", ".old-update-000001", "update-000001"])
@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("missing"), lambda p: p.symlink_to("..")])
def test_a_file_or_a_link_under_a_name_of_ours_does_not_keep_a_run_from_saving(save, tmp_path, name, make):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "mine").touch()
    make(tmp_path / "checkpoints" / name)
    for _ in range(3):
        save(1, keep_last=1)
    assert names(tmp_path) == ["update-000001"]
    assert load_state(latest_checkpoint(tmp_path)) == {"update": 1}
    assert (tmp_path / "mine").exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12, of a process with threads
def test_a_process_killed_at_any_moment_of_saving_leaves_a_whole_checkpoint(tmp_path, model, tokenizer):
    def keep_saving(start: int) -> None:
        for step in range(start, 10**6):
            state = {"step": step, "tensor": torch.full((1000,), float(step))}
            # Every second save replaces one of the same update.
            save_state(tmp_path, step // 2, model, tokenizer, state)

    def saved_step() -> int:
        checkpoint = latest_checkpoint(tmp_path)
        state = load_state(checkpoint)
        assert (state["tensor"] == state["step"]).all()
        AutoModelForCausalLM.from_pretrained(checkpoint / "model")
        return state["step"]

    save_state(tmp_path, 0, model, tokenizer, {"step": 0, "tensor": torch.zeros(1)})
    step, attempt = 0, 0
    while attempt < 12 or step <= 12:  # on a busy machine a process may be killed before it has saved anything
        saver = multiprocessing.get_context("fork").Process(target=keep_saving, args=(step + 1,))
        saver.start()
        time.sleep(0.1 + 0.017 * attempt)
        saver.kill()
        saver.join()
        before, step = step, saved_step()
        assert step >= before
        attempt += 1
        assert attempt < 500


@pytest.mark.parametrize("name", ["state/numbers.json", TENSORS, "model/model.safetensors", "model/config.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "removed"])
def test_a_damaged_file_is_named_and_so_is_the_older_checkpoint(save, name, damage):
    """safetensors takes a flipped bit of a tensor without a word."""
    state = {"number": 5, "tensor": torch.zeros(1000)}
    older, newer = save(1, state), save(2, state)
    content = bytearray((newer / name).read_bytes())
    content[len(content) // 2] ^= 1
    replacement = {"cut": content[:-10], "flipped": content, "emptied": b"", "removed": b""}[damage]
    (newer / name).write_bytes(replacement)
    if damage == "removed":
        (newer / name).unlink()
    with pytest.raises(UserError):
        verify(newer)
    with pytest.raises(UserError) as caught:
        load_state(newer)
    assert f"{newer / name} is damaged" in str(caught.value)
    assert f"resumes from {older}" in str(caught.value)
    assert ("bytes" in str(caught.value)) == (damage in ("cut", "emptied"))
    assert same(load_state(older), state)
    with pytest.raises(UserError, match="start the run anew"):
        (older / name).write_bytes(replacement)
        load_state(older)


def test_to_verify_reads_the_files_and_loads_no_state(save, monkeypatch):
    monkeypatch.setattr("scaled.checkpoint.dcp.load", None)
    assert verify(save(1)) is None


def test_nothing_of_a_checkpoint_is_a_pickle(save):
    """Its files are JSON and safetensors, which run no code whoever wrote them."""
    files = {path.name for path in (save(1, {"tensor": torch.zeros(3), "x": 1}) / "state").iterdir()}
    assert files == {"numbers.json", "files.json", Path(TENSORS).name}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"state/numbers.json": [1, ""]}',
        '{"state/numbers.json": 3}',
        '{"state/numbers.json": ["a", "b"]}',
    ],
)
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
