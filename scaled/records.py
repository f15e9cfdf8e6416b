"""What travels along the data's path: a problem, the response to it, and its score."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]
VERIFIERS = ("math", "exact", "reasoning-gym")


@dataclass(frozen=True)
class Problem:
    """One row of data.

    ``messages`` is a chat as transformers takes it (``role`` and ``content``). If the last message is the
    assistant's, it is the beginning of the answer, and the model continues it. ``verifier`` names the grader that
    the row asks for (one of ``VERIFIERS``; empty if it asks for none), and ``metadata`` is what that grader needs
    beyond the answer, of JSON's types.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str
    source: str = ""
    verifier: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Response:
    """One sampled response.

    ``token_ids`` are the sampled tokens, the stopping one included; ``log_probs`` their log-probabilities at the
    sampling temperature (natural logarithm, one a token; at temperature 0, greedy, those at temperature 1);
    ``text`` is the decoded response without the stop token or the stop string; ``stop_reason`` is ``stop`` for the
    end of the turn or a stop string, ``length`` for a response cut by the limit of tokens;
    ``other_version`` whether an engine sampled any of it from other weights than the trainer's last.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    stop_reason: Literal["stop", "length"]
    other_version: bool = False

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.token_ids)

    @property
    def truncated(self) -> bool:
        return self.stop_reason == "length"


@dataclass(frozen=True)
class Score:
    """A grader's verdict.

    ``reward`` is what RL is given; ``outcome`` says why. ``unparseable``: no answer could be read from the response,
    which counts as wrong. A grader that failed (raised, ran out of time, returned no number) gives ``failed`` and a
    reward of None: such a response is shown and left out, never trained on as wrong. ``credit`` is the verifier's own
    score in [0, 1], by default 1 for ``right`` and 0 else; None where it failed.
    """

    reward: float | None
    outcome: Literal["right", "wrong", "unparseable", "failed"]
    well_formed: bool | None = field(default=None)
    reason: str = ""
    credit: float | None = None

    def __post_init__(self) -> None:
        if self.credit is None and self.outcome != "failed":
            object.__setattr__(self, "credit", float(self.outcome == "right"))
