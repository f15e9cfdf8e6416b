from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scaled.bench import phases
from scaled.config_file import load_config
from scaled.errors import UserError


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (-9, "", "exit code -9, killed, perhaps for its memory"),
        (3, " \n", "exit code 3, it wrote no reason"),
        (
            1,
            "model x cannot be loaded: HTTPError\nGive an existing folder\n",
            "model x cannot be loaded: HTTPError\nGive",
        ),
    ],
)
def test_a_child_that_fails_is_told_by_all_it_said_or_by_its_exit_code(monkeypatch, code, stderr, reason):
    monkeypatch.setattr(subprocess, "run", lambda job, **_: subprocess.CompletedProcess(job, code, "", stderr))
    with pytest.raises(UserError) as caught:
        phases.compare(load_config(Path("smollm2-demo")), 1)
    assert str(caught.value).startswith(f"measuring logra failed: {reason}")


def test_what_the_user_has_to_mend_comes_from_the_child_without_a_traceback(tmp_path):
    config = load_config(Path("smollm2-demo"), [f"model.path={tmp_path}"])
    with pytest.raises(UserError) as caught:
        phases.compare(config, 1)
    assert str(caught.value) == (
        f"measuring logra failed: model folder {tmp_path} has no config.json; give a folder in Hugging Face format"
    )
