"""The words of `quire prefetch`, and what the flags ask."""

from __future__ import annotations

import pytest

from cli.commands.prefetch import in_words, parser, question_of
from common.contracts.errors import InvalidRequest
from quire.inference.v1 import inference_pb2 as pb


def test_the_flags_become_a_request() -> None:
    words = ["--system", "Be brief.", "--tenant", "acme", "--salt", "s", "--shared-domain", "d", "--worker", "w1"]
    asked = question_of(parser().parse_args(words))
    (message,) = asked.prompt.chat.messages
    assert (message.role, message.content) == ("system", "Be brief.")
    assert (asked.tenant, asked.cache.salt, asked.cache.shared_domain, asked.worker_id) == ("acme", "s", "d", "w1")
    plain = question_of(parser().parse_args(["--token-ids", "1 2 3", "--worker", "w1"]))
    assert list(plain.prompt.token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize("words", [[], ["--text", "a", "--system", "b"]], ids=str)
def test_a_prompt_is_given_in_one_way(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="expected one"):
        question_of(parser().parse_args([*words, "--worker", "w1"]))


def test_a_worker_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--text", "a"])
    assert "--worker" in capsys.readouterr().err


def test_an_answer_in_words() -> None:
    answer = pb.PrefetchResponse(
        outcome="clipped", num_blocks=9, blocks_there=2, blocks_coming=3, reason="nobody has it"
    )
    assert in_words(answer, "w1") == "clipped by w1: 2 of 9 blocks are there, 3 are to come; nobody has it"
    answer = pb.PrefetchResponse(outcome="accepted", num_blocks=9, blocks_coming=9)
    assert in_words(answer, "w1") == "accepted by w1: 0 of 9 blocks are there, 9 are to come"
