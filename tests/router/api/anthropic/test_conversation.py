"""Messages of Anthropic's form as the chat that a template gets."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, Unsupported
from router.api.anthropic.request import Conversation, conversation
from router.api.anthropic.types import MessageBody

CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}


def chat(*messages: tuple[str, Any], system: Any = None) -> Conversation:
    return conversation(system, [MessageBody(role=role, content=content) for role, content in messages])


def shown(made: Conversation) -> list[tuple[str, str]]:
    return [(each.role, each.text) for each in made.messages]


def test_blocks_of_text_and_the_system_prompt_are_joined() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    system = MessageBody.model_validate({"role": "x", "content": parts}).content
    made = chat(("user", parts), system=system)
    assert shown(made) == [("system", "Be brief."), ("user", "Be brief.")]
    assert made.places == ["system", "messages[0]"]


def test_a_call_its_result_and_what_the_user_adds() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    made = chat(
        ("user", "1 + 2?"),
        ("assistant", [thought, {"type": "text", "text": "Wait."}, CALL]),
        ("user", [RESULT, {"type": "text", "text": "Well?"}]),
    )
    assert shown(made) == [("user", "1 + 2?"), ("assistant", "Wait."), ("tool", "3"), ("user", "Well?")]
    called, result = made.messages[1:3]
    assert called.tool_calls is not None
    (call,) = called.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("toolu_1", "add", '{"a": 1}')
    assert called.reasoning_content == "Hm."
    assert (result.tool_call_id, result.name) == ("toolu_1", "add")
    assert made.places == ["messages[0]", "messages[1]", "messages[2]", "messages[2]"]
    assert not made.continued


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"content": None}, ""),
        ({"is_error": True, "content": "no such file"}, "Error: no such file"),
    ],
)
def test_results_of_every_form(result: dict[str, Any], text: str) -> None:
    made = chat(("user", "go"), ("assistant", [CALL]), ("user", [RESULT | result]))
    assert shown(made)[-1] == ("tool", text)


def test_turns_of_one_role_count_as_one() -> None:
    second = {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}}
    made = chat(
        ("user", "a"),
        ("user", "b"),
        ("assistant", [CALL]),
        ("assistant", [second]),
        ("user", [RESULT]),
        ("user", [RESULT | {"tool_use_id": "toolu_2"}]),
    )
    assert shown(made) == [("user", "a\n\nb"), ("assistant", ""), ("tool", "3"), ("tool", "3")]
    assert len(made.messages[1].tool_calls or ()) == 2


def test_an_answer_goes_on_with_the_assistants_last_words() -> None:
    assert chat(("user", "Sun?"), ("assistant", "The answer is (")).continued


def test_a_thought_of_another_server_is_left_out() -> None:
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    assert shown(chat(("user", "a"), ("assistant", [hidden, {"type": "text", "text": "b"}]), ("user", "c")))[1:2] == [
        ("assistant", "b")
    ]


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([("user", [{"type": "smell", "source": {}}])], r"messages\[0\].content\[0\].type: 'smell' is not offered"),
        (
            [("user", [{"type": "redacted_thinking"}])],
            "'redacted_thinking' is not offered in a message of role user; expected text, image",
        ),
        ([("assistant", [RESULT])], "'tool_result' is not offered in a message of role assistant"),
        ([("user", [RESULT | {"content": [{"type": "tool_use"}]}])], r"content\[0\].content\[0\].type: 'tool_use'"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(messages: list[tuple[str, Any]], what: str) -> None:
    with pytest.raises(Unsupported, match=what):
        chat(*messages)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([("tool", "a")], "messages[0].role"),
        ([("user", [{"type": "text"}])], "messages[0].content[0].text"),
        (
            [("user", "a"), ("assistant", [{"type": "tool_use", "id": "1", "name": "f"}])],
            "messages[1].content[0].input",
        ),
        ([("user", [{"type": "tool_result"}])], "messages[0].content[0].tool_use_id"),
        ([("user", "a"), ("assistant", [CALL])], "messages[1]"),
        ([("user", "a"), ("assistant", " ")], "messages[1]"),
        ([("user", "a"), ("assistant", [CALL | {"id": str(each)} for each in range(129)])], "messages[1].content[128]"),
    ],
)
def test_what_is_wrong_is_named(messages: list[tuple[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(*messages)
    assert [each.field for each in caught.value.violations] == [field]
