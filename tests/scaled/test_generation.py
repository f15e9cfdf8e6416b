"""What an engine answers is checked: by a server that answers what it is told to. (Real engines: tests/engine.)"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scaled.errors import NumericalTrouble, UserError
from scaled.policy_sync.client import EngineClient, EngineGone
from scaled.rollout.generation import Generation, Request
from scaled.rollout.prompts import EndOfResponse
from tests.tiny import EOS, asked, make_tiny_model

TEXT = (*b"12", EOS)


def answer(tokens=TEXT, reason="stop", version="run/1", **changes) -> dict:
    told = [{"token_id": token, "logprob": -0.5 - i, "rank": 1} for i, token in enumerate(tokens)]
    choice = {
        "index": 0,
        "token_ids": list(tokens),
        "finish_reason": reason,
        "logprobs": {"content": told},
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
    }
    return {"request_id": "1", "choices": [choice | changes]}


@contextmanager
def serving(*replies: tuple[int, str | dict]) -> Iterator[tuple[EngineClient, list[dict]]]:
    """A server that gives each of the replies once, and the last of them from then on; and what it was asked."""
    left, bodies = list(replies), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, reply = left.pop(0) if len(left) > 1 else left[0]
            content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with EngineClient(f"http://127.0.0.1:{server.server_port}") as client:
            yield client, bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def collected(client: EngineClient, tokenizer, count: int = 1, **changes):
    settings = {
        "version": "run/1",
        "any_version": False,
        "vocabulary": 258,
        "temperature": 0.7,
        "top_p": 0.9,
        "in_flight": 2,
        "ends": EndOfResponse(make_tiny_model(), tokenizer, ["!"]),
    }
    found = {}
    requests = [Request(i, asked(f"q{i}")[0], (1, 2, 3), 4, 100 + i) for i in range(count)]
    gone = Generation(**settings | changes).collect({client: requests}, found.__setitem__)
    return found, gone


def test_a_response_has_the_engines_tokens_and_log_probabilities(tiny_tokenizer):
    with serving((200, answer())) as (client, bodies):
        found, gone = collected(client, tiny_tokenizer, 5)
    assert gone == {}
    assert sorted(found) == [0, 1, 2, 3, 4]
    response = found[3]
    assert (response.token_ids, response.log_probs) == (TEXT, (-0.5, -1.5, -2.5))
    assert response.text == tiny_tokenizer.decode(list(TEXT[:-1]))
    assert (response.stop_reason, response.other_version) == ("stop", False)
    assert sorted(body["sampling_params"]["seed"] for body in bodies) == [100, 101, 102, 103, 104]
    assert bodies[0]["token_ids"] == [1, 2, 3]
    asked_for = bodies[0]["sampling_params"]
    assert (asked_for["temperature"], asked_for["max_tokens"], asked_for["stop"]) == (0.7, 4, ["!"])
    assert asked_for["top_p"] == 0.9
    assert EOS in asked_for["stop_token_ids"]


def told(*tokens: int, logprob: float = -1.0) -> dict:
    return {"content": [{"token_id": token, "logprob": logprob} for token in tokens]}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("not JSON", "something else than a response"),
        ({"choices": []}, "something else than a response"),
        (answer(tokens=()), "something else than a response"),
        (answer(reason="because"), "something else than a response"),
        (answer(weight_versions=None), "something else than a response"),
        (answer(token_ids=["12"]), "something else than a response"),
        (answer(logprobs=told(*TEXT[:-1])), "log-probabilities of other tokens"),
        (answer(logprobs=told(7, 8, 9)), "log-probabilities of other tokens"),
        (answer(tokens=(1, 2, 3, 4, 5)), "5 tokens up to number 5"),
        (answer(tokens=(1, 258)), "2 tokens up to number 258, for at most 4 tokens of a vocabulary of 258"),
        (answer(version="run/0"), "by weights run/0 and not run/1: who else updates it"),
        (answer(version="other/1"), "by weights other/1 and not run/1"),
    ],
)
def test_an_answer_that_is_none_is_one_error_and_no_response(reply, said, tiny_tokenizer):
    found = {}
    with serving((200, reply)) as (client, _), pytest.raises(UserError, match=said) as error:
        found, _ = collected(client, tiny_tokenizer)
    assert not isinstance(error.value, EngineGone)
    assert found == {}


@pytest.mark.parametrize("number", [-9999.0, float("nan")])
def test_a_log_probability_that_is_no_number_spoils_no_update(number, tiny_tokenizer):
    with serving((200, answer(logprobs=told(*TEXT, logprob=number)))) as (client, _), pytest.raises(NumericalTrouble):
        collected(client, tiny_tokenizer)


def test_a_response_by_other_weights_is_marked_where_it_is_let_pass(tiny_tokenizer):
    with serving((200, answer(version="run/0"))) as (client, _):
        found, _ = collected(client, tiny_tokenizer, any_version=True)
    assert found[0].other_version


@pytest.mark.parametrize("bad", [(500, "dead"), (200, answer(reason="abort"))])
def test_an_engine_that_fails_keeps_what_it_has_answered_and_is_named(bad, tiny_tokenizer):
    with serving((200, answer()), bad) as (client, _):
        found, gone = collected(client, tiny_tokenizer, 4, in_flight=1)
    assert list(found) == [0]
    assert list(gone) == [client]


def test_a_request_that_is_refused_says_so_in_the_engines_words(tiny_tokenizer):
    refusal = {"error": {"message": "the prompt is too long"}}
    with (
        serving((400, refusal)) as (client, _),
        pytest.raises(UserError, match="refuses problem q0: the prompt is too"),
    ):
        collected(client, tiny_tokenizer)


def test_whatever_keeping_a_response_raises_takes_back_what_is_still_out(tiny_tokenizer):
    class Stop(Exception):
        pass

    def stop(number: int, response: object) -> None:
        raise Stop

    with serving((200, answer())) as (client, bodies):
        ends = EndOfResponse(make_tiny_model(), tiny_tokenizer, [])
        generation = Generation("run/1", False, 258, 1.0, 1.0, 1, ends)
        with pytest.raises(Stop):
            generation.collect({client: [Request(i, asked("q")[0], (1,), 4, i) for i in range(50)]}, stop)
    assert len(bodies) < 50
