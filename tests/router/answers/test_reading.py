"""What a request must ask for, so that its answer can be read: the mark for which a model's early end stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.contracts.types import Constraint, ConstraintKind
from quire.inference.v1 import inference_pb2 as pb
from router.answers.dialects.grammar import ToolChoice
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.reader import reader, thought_marks
from router.answers.reading import AnswerReader, AskedConstraint, Dialects, Reading, ToolUse
from router.api.openai.request import chat_order
from router.api.openai.types import ChatRequest

FORM = AskedConstraint("response_format", Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}'))
CALL = ToolUse((OfferedTool("now", {"type": "object"}),), ToolChoice.REQUIRED)


class Rendered:
    """A template that opens no thought."""

    async def rendered(self, chat: pb.Chat) -> str:
        return "Hi"


@pytest.mark.parametrize(
    ("dialect", "tools"), [("qwen3", "hermes"), ("mistral", "mistral"), ("gpt_oss", "gpt_oss"), ("glm45", "glm45")]
)
async def test_the_mark_that_ends_a_thought_stands_for_an_end_that_is_forbidden(dialect: str, tools: str) -> None:
    """Where it is one token: a model that ends its text within the thought ends the thought, and answers."""
    marks = {thought_marks(dialect)[1]: 77}
    for whole, expected in ((marks, 77), ({}, None)):
        by = AnswerReader(Dialects(tools, dialect, whole), Rendered())
        for use, form in ((ToolUse(), FORM), (CALL, None)):
            asked = (await by.reading(pb.Chat(), use, form)).asked
            assert asked is not None
            assert asked.closing_token == expected, (use, form)


def test_the_order_of_a_body_carries_it() -> None:
    reading = Reading(lambda: reader(None, None), frozenset(), replace(FORM, closing_token=77))
    order = chat_order(ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}]}))
    assert not order.common.sampling.HasField("closing_token_id")
    assert order.read_by(reading).common.sampling.closing_token_id == 77


async def test_without_a_thought_nothing_stands_for_an_end() -> None:
    by = AnswerReader(Dialects("hermes", None, {"</think>": 77}), Rendered())
    assert (await by.reading(pb.Chat(), ToolUse(), FORM)).asked == FORM
