"""The first lines of `quire explain` for each outcome, and how a prompt comes from its flags."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cli.commands.explain import named_by_flags, parser, question_of
from cli.views.explain import ExplainView
from common.contracts.errors import FieldViolation, InvalidRequest
from quire.decision.v1 import decision_pb2 as pb


def shown(**fields: object) -> list[str]:
    base = {"prompt_tokens": 100, "block_size": 16, "shareable_tokens": 96, "index_answered": True}
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(ExplainView(pb.ExplainResponse(**{**base, **fields})))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    return lines


def test_workers_that_cost_the_same_are_all_named() -> None:
    (first, second, *_) = shown(outcome="placed", worker_id="a", tied=["a", "b"], first_token_seconds=0.5)
    assert first.startswith("a or b would get it at once (they cost the same, chance takes one): none of")
    assert "its 100 prompt tokens is cached there" in f"{first} {second}"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outcome": "queued", "reason": "no worker has a free slot", "requests_before": 1},
         "It would wait for a worker, 1 request before it: no worker has a free slot."),
        ({"outcome": "refused", "reason": "router.queue: 9 requests wait"},
         "It would be refused: router.queue: 9 requests wait."),
        ({"outcome": "too_large", "reason": "it fits none"}, "It would be refused for its size: it fits none."),
        ({"outcome": "too_late", "reason": "0.1 s are left"}, "It would be refused for its deadline: 0.1 s are left."),
        ({"outcome": "no_worker", "reason": "none is known"}, "No worker could take it: none is known."),
        ({"outcome": "of a newer router", "reason": "x"}, "of a newer router: x."),
    ],
)  # fmt: skip
def test_each_outcome_has_its_first_line(fields: dict[str, object], words: str) -> None:
    assert shown(**fields)[0] == words


def test_what_cannot_be_cached_is_said() -> None:
    short = shown(outcome="placed", worker_id="a", tied=["a"], prompt_tokens=7, shareable_tokens=0)
    assert "No worker can have it cached: the prompt is shorter than a block of 16 tokens." in short
    off = shown(outcome="placed", worker_id="a", tied=["a"], shareable_tokens=0)
    assert "No worker can have it cached: the request does not use the cache." in off
    assert any(line.startswith("The router has no answer of the prefix index") for line in shown(index_answered=False))


def test_a_better_hit_that_loses_is_explained() -> None:
    workers = [
        pb.Candidate(name="a", cost=0.1, figures={"hit_blocks": 1.0}),
        pb.Candidate(name="b", cost=0.9, figures={"hit_blocks": 6.0}),
    ]
    lines = shown(outcome="placed", worker_id="a", tied=["a"], workers=workers, cached_tokens=16)
    assert "b has 96 prompt tokens cached, but costs 900 ms against 100 ms: its wait" in lines


def test_a_worker_that_would_fetch_the_hit_says_so() -> None:
    fetch = {"queue_delay": 0.0, "fetch": 0.015, "prefill": 0.02}
    workers = [
        pb.Candidate(name="a", cost=0.1, figures={"hit_blocks": 1.0, "fetched_blocks": 5.0}, terms=fetch),
        pb.Candidate(name="b", cost=0.9, figures={"hit_blocks": 6.0}, terms={"queue_delay": 0.9}),
    ]
    lines = shown(outcome="placed", worker_id="a", tied=["a"], workers=workers, cached_tokens=16)
    words = "b has 96 prompt tokens cached, and a, which costs 100 ms, fetches 80 of them in 15 ms."
    assert words in " ".join(lines)
    assert [line.split() for line in lines if "  " in line] == [
        ["worker", "predicted", "wait", "fetch", "prompt", "output", "cached"],
        ["▸", "a", "100", "ms", "0.0", "ms", "15", "ms", "20", "ms", "0.0", "ms", "16"],
        ["b", "900", "ms", "900", "ms", "0.0", "ms", "0.0", "ms", "0.0", "ms", "96"],
    ]


def asked(*words: str) -> pb.ExplainRequest:
    return question_of(parser().parse_args(words))


def test_prompts_from_flags(tmp_path: Path) -> None:
    file = tmp_path / "it"
    file.write_text("12, 7\n530")
    assert list(asked("--token-ids", f"@{file}").request.prompt.token_ids.ids) == [12, 7, 530]
    assert asked("--raw", "as it is").request.prompt.text == "as it is"
    chat = asked("Why?", "--system", "Be brief.", "--max-tokens", "3", "--tenant", "red", "--deadline", "2")
    assert [each.role for each in chat.request.prompt.chat.messages] == ["system", "user"]
    assert (chat.request.sampling.max_tokens, chat.tenant, chat.deadline_seconds) == (3, "red", 2.0)
    file.write_text(json.dumps([{"role": "user", "content": "a"}]))
    assert asked("--chat", str(file), "--no-cache").request.cache.no_cache


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ((), "PROMPT: is missing"),
        (("a", "--token-ids", "1"), "PROMPT: is given 2 times"),
        (("--token-ids", "1 x"), "--token-ids: has 'x'; expected numbers"),
        (("--token-ids", ""), "--token-ids: is empty"),
        (("--chat", "/nowhere"), "--chat: /nowhere cannot be read: No such file"),
        (("@/nowhere",), "PROMPT: /nowhere cannot be read"),
    ],
)
def test_wrong_flags_are_said_in_one_line(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(*words)
    assert what in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "m"}', "3"])
def test_a_file_without_messages_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"--chat: (is not valid JSON|has no messages)"):
        asked("--chat", str(file))


def test_fields_of_a_refusal_have_the_names_of_flags() -> None:
    fields = ("sampling.max_tokens", "prompt.token_ids.ids[0]", "tenant", "deadline_seconds", "cache.salt", "other")
    named = named_by_flags(InvalidRequest(*(FieldViolation(field, "is wrong") for field in fields)))
    flags = ["--max-tokens", "the prompt", "--tenant", "--deadline", "--salt", "other"]
    assert [each.field for each in named.violations] == flags
