"""Items of a conversation become the messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import InvalidRequest, QuireError, Unsupported
from common.contracts.limits import MAX_CHAT_MESSAGES
from router.api.openai.responses.items import items_of, messages_of
from router.api.openai.responses.routes import without_oldest

Item = dict[str, Any]
USER: Item = {"role": "user", "content": "Hi"}
THOUGHT: Item = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "so"}],
}
SAID: Item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]}
CALL: Item = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
OUTPUT: Item = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def said(instructions: str | None, *items: Item) -> list[tuple[str, str]]:
    return [(each.role, each.text) for each in messages_of(instructions, [], items)]


def test_a_text_is_a_message_of_the_user() -> None:
    assert items_of("Hi") == [{"type": "message", "role": "user", "content": "Hi"}]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
    assert said(None, {"role": "user", "content": parts}) == [("user", "Hi")]


def test_instructions_and_leading_system_messages_are_one_message() -> None:
    developer = {"role": "developer", "content": "Be kind."}
    assert said("Be brief.", developer, USER, developer) == [
        ("system", "Be brief.\n\nBe kind."), ("user", "Hi"), ("developer", "Be kind."),
    ]  # fmt: skip


def test_a_turn_of_the_assistant_is_one_message() -> None:
    _, turn, output = messages_of(None, [USER, THOUGHT, SAID], [CALL, CALL | {"call_id": "c2"}, OUTPUT])
    assert (turn.role, turn.reasoning_content, turn.text) == ("assistant", "so", "Yes")
    assert [(call.id, call.function.name, call.function.arguments) for call in turn.tool_calls or ()] == [
        ("c1", "add", "{}"), ("c2", "add", "{}"),
    ]  # fmt: skip
    assert (output.role, output.tool_call_id, output.text) == ("tool", "c1", "3")


def test_what_comes_after_a_call_is_another_turn() -> None:
    messages = messages_of(None, [], [USER, CALL, SAID, THOUGHT, SAID])
    assert [each.role for each in messages] == ["user", "assistant", "assistant", "assistant"]


def test_a_thought_without_text_is_left_out() -> None:
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}
    assert said(None, USER, hidden) == [("user", "Hi")]


@pytest.mark.parametrize(
    ("item", "kind", "words"),
    [
        ({"role": "tool", "content": "x"}, InvalidRequest, "input[1].role"),
        ({"role": "user"}, InvalidRequest, "input[1].content"),
        (
            {"role": "user", "content": [{"type": "input_smell"}]},
            Unsupported,
            "input[1].content[0].type: 'input_smell'",
        ),
        ({"type": "computer_call"}, Unsupported, "input[1].type: 'computer_call'"),
        ({"type": "function_call", "name": "add", "arguments": "{}"}, InvalidRequest, "input[1].call_id"),
        ({"type": "function_call", "name": 5, "arguments": "{}", "call_id": "c"}, InvalidRequest, "input[1].name"),
    ],
)
def test_a_wrong_item_is_named(item: Item, kind: type[QuireError], words: str) -> None:
    with pytest.raises(kind) as refused:
        messages_of(None, [], [USER, item])
    assert words in str(refused.value)


@pytest.mark.parametrize("count", [0, MAX_CHAT_MESSAGES + 1])
def test_items_are_bounded(count: int) -> None:
    with pytest.raises(InvalidRequest):
        items_of([USER] * count)


def test_truncation_drops_the_older_half_at_a_users_message() -> None:
    system = {"role": "system", "content": "x"}
    items = [system, USER, SAID, USER, CALL, OUTPUT, SAID, USER | {"content": "last"}]
    shorter = without_oldest(items)
    assert shorter == [system, items[-1]]
    assert without_oldest(shorter) is None


def test_a_long_conversation_is_truncated_in_few_steps() -> None:
    items: Any = [USER, SAID] * 2000
    steps = 0
    while (items := without_oldest(items)) is not None:
        steps += 1
    assert steps <= 13
