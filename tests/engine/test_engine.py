"""A real vLLM engine that follows a trainer: bit for bit, and refusing what is amiss before it changes anything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from logra_ref.rl import token_log_probs
from scaled.errors import UserError
from scaled.policy_sync.client import EngineClient
from scaled.policy_sync.message_file import Origin, joint_digest, message_path, write_message
from scaled.policy_sync.server import EngineSettings, engine
from scaled.records import Response
from scaled.rollout.generation import Generation, Request
from scaled.rollout.prompts import EndOfResponse
from scaled.sync_check import Trainer
from tests.engine.setting import PYTHON, ROOT
from tests.tiny import asked, byte_tokenizer

RATIO, RUN = 1e-3, "sync-check"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[EngineClient]:
    """An engine for the tests of this file; of which nothing stays, though the last of them kills its server."""
    with engine(EngineSettings(PYTHON, model, model.parent / "engine.log", max_model_len=256)) as client:
        started = processes(client)
        assert len(started) > 1
        yield client
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


def processes(client: EngineClient) -> list[psutil.Process]:
    """The engine's server, and then what it has started."""
    port = client.url.rpartition(":")[2]
    alive = (p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE)
    server = next(p for p in alive if port in p.cmdline() and "guard.py" not in p.cmdline()[1])
    return [server, *server.children(recursive=True)]


class Pair:
    """An engine and a trainer with equal weights."""

    def __init__(self, client: EngineClient, model: Path, folder: Path, dtype: str = "float32") -> None:
        self.client, self.folder, self.update = client, folder, 0
        self.trainer = Trainer.of(model, 8, dtype, RATIO)
        client.follow(RUN, folder)
        client.send_full(0, model, "0")

    def write(self, run: str = RUN) -> str:
        """One update of the trainer, written and not sent; its digest."""
        self.update += 1
        return joint_digest([write_message(self.folder, self.trainer.step(), Origin(run))])

    def file(self) -> Path:
        return message_path(self.folder, self.update, 0, 1)

    def differing(self) -> list[str]:
        return self.client.differing(self.trainer.fingerprints())

    def log_prob_difference(self) -> float:
        found = torch.tensor(self.client.log_probs(self.trainer.sequences[0].tolist()))
        return float((found - self.trainer.log_probs()).abs().max())


@pytest.fixture
def pair(server: EngineClient, model: Path, tmp_path: Path) -> Pair:
    return Pair(server, model, tmp_path)


def test_after_every_update_the_engine_has_the_trainers_bits_and_its_log_probabilities(pair):
    assert pair.differing() == []
    for update in range(1, 11):
        pair.client.send_factors(update, pair.write(), str(update))
        assert pair.differing() == []
        assert pair.client.version() == str(update)
        assert pair.log_prob_difference() < 1e-4  # the prompt is cached under the weights before, if it is at all
    pair.write()  # control: one that is not sent
    assert len(pair.differing()) == 14  # seven matrices of two layers, and no other weight
    assert pair.log_prob_difference() > 1e-3


def gap(pair: Pair, prompt: tuple[int, ...]) -> float:
    """The largest difference of log-probabilities of four sampled tokens, engine against trainer."""
    model = pair.trainer.model
    ends = EndOfResponse(model, byte_tokenizer(), ())
    found: dict[int, Response] = {}
    generation = Generation(pair.client.version(), False, 300, 1.0, 1.0, 1, ends)
    assert generation.collect({pair.client: [Request(0, asked("?")[0], prompt, 4, 5)]}, found.__setitem__) == {}
    tokens = torch.tensor([prompt + found[0].token_ids])
    with torch.no_grad():
        trainers = token_log_probs(model(tokens).logits[:, len(prompt) - 1 : -1], tokens[:, len(prompt) :], 1.0)[0]
    return float((torch.tensor(found[0].log_probs) - trainers).abs().max())


def test_a_prompt_longer_than_a_block_of_the_cache_is_read_anew_after_an_update(pair):
    prompt = tuple(range(2, 202))  # a block has 128 tokens on a CPU
    assert max(gap(pair, prompt), gap(pair, prompt)) < 1e-4  # the second has the first's keys and values
    pair.client.send_factors(1, pair.write(), "1")
    assert gap(pair, prompt) < 1e-4
    # Control: an update without a pause, which empties the cache as well, and without emptying it.
    digest, post = pair.write(), pair.client._post
    post("/start_weight_update", {})
    post("/update_weights", {"update_info": {"kind": "factors", "update": 2, "digest": digest}})
    post("/finish_weight_update", {"weight_version": "2"})
    assert pair.differing() == []
    assert gap(pair, prompt) > 1e-3


def test_an_update_that_is_sent_again_is_not_applied_again_and_one_out_of_order_is_refused(pair):
    first = pair.write()
    pair.client.send_factors(1, first, "1")
    pair.client.send_factors(1, first, "1")
    assert pair.differing() == []
    pair.write()
    third = pair.write()
    with pytest.raises(UserError, match="update 3 does not follow 1, the last one applied here"):
        pair.client.send_factors(3, third, "3")
    assert pair.client.version() == "1"


@pytest.mark.parametrize("damage", ["bit", "cut", "missing"])
def test_a_damaged_message_is_refused_whole_and_the_right_one_is_applied_after_it(pair, damage):
    digest = pair.write()
    whole = pair.file().read_bytes()
    bad = {"bit": whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:], "cut": whole[:-3], "missing": None}[damage]
    pair.file().write_bytes(bad) if bad else pair.file().unlink()
    with pytest.raises(UserError, match="send it again"):
        pair.client.send_factors(1, digest, "1")
    before = Trainer.of(pair.trainer.model.config._name_or_path, 8, "float32", RATIO)
    assert pair.client.differing(before.fingerprints()) == []
    pair.file().write_bytes(whole)
    pair.client.send_factors(1, digest, "1")
    assert pair.differing() == []


def test_a_message_of_another_run_or_of_another_model_is_refused(pair, tmp_path):
    with pytest.raises(UserError, match="is of run 'another', and this engine follows run 'sync-check'"):
        pair.client.send_factors(1, pair.write("another"), "1")
    message = pair.trainer.step()
    pair.update += 1
    name = next(iter(message.levels))
    for change, said in (
        ({f"model.layers.9.{name}": message.levels[name]}, "which this model does not have"),
        ({name: message.levels[name][:-1]}, "not int8"),
    ):
        coefficients = {key: message.coefficients[name][: len(levels)] for key, levels in change.items()}
        wrong = type(message)(1, message.base_seed, message.kind, message.rank, change, coefficients)
        digest = joint_digest([write_message(pair.folder, wrong, Origin(RUN))])
        with pytest.raises(UserError, match=said):
            pair.client.send_factors(1, digest, "1")
    assert pair.client.version() == "0"


def test_an_engine_that_cannot_start_says_why(model, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = EngineSettings(PYTHON, model, tmp_path / "log", port=port)
        with pytest.raises(UserError, match=f"port {port} is taken"), engine(taken):
            pass
    with (
        pytest.raises(UserError, match="make it by: make engine"),
        engine(EngineSettings(tmp_path, model, tmp_path / "log")),
    ):
        pass
    with (
        pytest.raises(UserError, match="ended before it answered"),
        engine(EngineSettings(PYTHON, tmp_path, tmp_path / "log")),
    ):
        pass
    silent = EngineSettings(Path("/bin/false"), model, tmp_path / "silent")
    with pytest.raises(UserError, match=r"exit code 1.*is /bin/false of an environment with vLLM"), engine(silent):
        pass


def test_the_command_says_that_a_bf16_engine_of_two_workers_has_bf16_of_the_trainers_weights(model, tmp_path):
    command = [str(ROOT / ".venv/bin/logra"), "sync-check", str(model), "--updates", "10", "--rank", "8"]
    command += ["--dtype", "bfloat16", "--tensor-parallel", "2", "--transport", "broadcast"]
    command += ["--log", str(tmp_path / "log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "engine and trainer are equal, bit for bit; an update that was not sent is noticed" in words


def test_the_command_says_what_a_bf16_engine_loses_and_blurs_unless_it_is_exact(model, tmp_path):
    command = [str(ROOT / ".venv/bin/logra"), "bench", "rounding", str(model), "--updates", "20", "--rank", "8"]
    done = subprocess.run([*command, "--log", str(tmp_path / "log")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip(" %") for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    equal, way, off = ({row[0]: float(row[column]) for row in rows} for column in (1, 2, 3))
    assert list(equal) == ["exact", "naive", "stochastic"]
    assert equal["exact"] == 100 > 90 > max(equal["naive"], equal["stochastic"])
    assert way["naive"] < 20 < 90 < min(way["exact"], way["stochastic"])
    assert off["stochastic"] > off["exact"]
    assert "exact: every entry is bf16 of the trainer's; naive: some are not" in " ".join(done.stdout.split())


def test_without_its_token_an_engine_tells_its_health_and_nothing_else(server):
    with EngineClient(server.url, token="another") as stranger:
        assert stranger.healthy()
        with pytest.raises(UserError, match="the token is missing or wrong; LOGRA_ENGINE_TOKEN must be that of"):
            stranger.version()
        with pytest.raises(UserError, match="the token is missing or wrong"):
            stranger.log_probs([1, 2, 3])


def test_an_engine_whose_server_is_killed_is_one_error(server):
    """The last test: see ``server``."""
    os.kill(processes(server)[0].pid, signal.SIGKILL)
    with pytest.raises(UserError, match="does not answer"):
        server.log_probs([1, 2, 3])
