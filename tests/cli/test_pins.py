"""The words of `quire pin` and `quire pins`, and what the flags ask."""

from __future__ import annotations

import pytest

from cli.commands import pins
from cli.commands.pin import in_words, parser, question_of
from common.contracts.errors import InvalidRequest
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2 as kv

LATE = (
    "  the KV manager at 10.0.0.9:50052 has not answered since the router's start; if it leads another group, "
    "it keeps the pin once it answers"
)


def test_the_flags_become_a_request() -> None:
    words = ["--system", "Be brief.", "--tenant", "acme", "--salt", "s", "--for", "60", "--compute", "2", "--name", "n"]
    asked = question_of(parser().parse_args(words))
    (message,) = asked.prompt.chat.messages
    assert (message.role, message.content) == ("system", "Be brief.")
    assert (asked.tenant, asked.cache.salt, asked.duration, asked.compute_on, asked.name) == ("acme", "s", 60.0, 2, "n")
    forever = question_of(parser().parse_args(["--token-ids", "1 2 3"]))
    assert (list(forever.prompt.token_ids.ids), forever.HasField("duration")) == ([1, 2, 3], False)


@pytest.mark.parametrize("words", [[], ["--text", "a", "--system", "b"], ["--text", "a", "--compute", "-1"]], ids=str)
def test_wrong_flags_are_refused_in_words(words: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        question_of(parser().parse_args(words))


def test_an_answer_in_words() -> None:
    answer = pb.PinResponse(name="n", num_tokens=40, num_blocks=2, expires=130.0, computed_on=["w0"])
    answer.not_computed = "there are 1 workers"
    answer.unheard_managers.append("10.0.0.9:50052")
    assert in_words(answer, 2, 100.0).splitlines() == [
        "pinned n: 2 blocks of 40 tokens, for 30 s",
        "  computed on w0",
        "  not on more: there are 1 workers",
        "  there is no Redis: the pin ends with the KV manager",
        LATE,
    ]
    assert in_words(pb.PinResponse(name="n", durable=True), 0, 0.0).endswith("until it is unpinned")


def test_a_list_in_words() -> None:
    workers = [kv.PinAtWorker(worker_id="w0", blocks_there=2), kv.PinAtWorker(worker_id="w1", left_out="too small")]
    pin = kv.PinnedPrefix(name="n", tenant="acme", num_tokens=40, num_blocks=2, expires=130.0, workers=workers)
    pin.missing_groups.extend(["", "b"])
    pin.differing_groups.append("c")
    assert pins.in_words(kv.ListPinsResponse(pins=[pin], durable=True), 100.0).splitlines() == [
        "n: 2 blocks of 40 tokens, for 30 s more, tenant acme",
        "  w0: 2 there",
        "  w1: 0 there; not pinned there: too small",
        "  not kept by the managers without a group: pin it again",
        "  not kept by group b: pin it again",
        "  group c keeps something else of this name: pin it again",
    ]
    assert pins.in_words(kv.ListPinsResponse(), 0.0) == "nothing is pinned"
