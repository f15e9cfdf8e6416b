"""Ranks that were not started as they should: one clear error, soon, and nothing is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scaled.config_file import dump_config
from scaled.errors import UserError
from scaled.ranks import joined_ranks
from tests.ranks.launch import ROOT, torchrun
from tests.tiny import byte_tokenizer, make_tiny_model
from tests.training import settings


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathering")
    make_tiny_model().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    path = folder / "run.yaml"
    path.write_text(dump_config(settings(folder / "model", folder / "run", threads=1)))
    return path


def test_ranks_with_other_settings_are_told_which_and_no_run_begins(recipe):
    done = torchrun(2, "tests.ranks.faulty", "train", recipe, check=False, FAULT="settings")
    assert done.returncode
    assert done.stderr.count("rank 0 has seed = 5 and rank 1 7; start all ranks alike") == 2
    assert not recipe.with_name("run").exists()


def test_a_rank_that_waits_alone_gives_up_with_one_error(recipe):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871", "FAULT": "alone"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks.faulty", "train", str(recipe)],
        cwd=ROOT,
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "rank 0 of 2 waited in vain for the others at 127.0.0.1:29871 (Timed out" in done.stderr
    assert "Traceback" not in done.stderr
    assert not recipe.with_name("run").exists()


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29872"}


@pytest.mark.parametrize(
    "wrong",
    [{"WORLD_SIZE": x} for x in ("0", "-1", "abc", "")]
    + [{"RANK": x} for x in ("2", "-1", "x", "")]
    + [{"MASTER_PORT": x} for x in ("abc", "0", "65536", "")]
    + [{"MASTER_ADDR": ""}],
)
def test_variables_that_are_no_place_among_ranks_are_named(monkeypatch, wrong):
    for name, value in (PLACE | wrong).items():
        monkeypatch.setenv(name, value)
    (name, value), *_ = wrong.items()
    expected = pytest.raises(UserError, match=f"{name}='{value}'.*are no place among ranks")
    with expected, joined_ranks(torch.device("cpu")):
        pass
