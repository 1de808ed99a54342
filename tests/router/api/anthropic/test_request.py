"""Bodies of the Messages API as requests of a chat, and errors in the words of the body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from router.answers.dialects.grammar import ToolChoice
from router.api.anthropic.request import PRIORITY, Asked, asked
from router.api.anthropic.types import CountRequest, MessagesRequest

HI = [{"role": "user", "content": "Hi"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object"},
    "cache_control": {"type": "ephemeral"},
}


def made(**fields: Any) -> Asked:
    body = {"max_tokens": 2000, "messages": HI, "cache_control": {"type": "ephemeral"}} | fields
    return asked(MessagesRequest.model_validate(body), {})


def test_sampling_has_the_names_of_a_chat() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["a", "b"], "seed": 3}
    sampling = made(**given, metadata={"user_id": "me"}).order.common.sampling
    assert [sampling.temperature, sampling.top_p] == pytest.approx([0.5, 0.9])
    assert (sampling.top_k, list(sampling.stop), sampling.seed) == (5, ["a", "b"], 3)
    assert sampling.max_tokens == 2000


def test_tools_reach_the_template_in_openais_form() -> None:
    chat = made(tools=[ADD]).order.prompts[0].chat
    function = {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}
    assert json.loads(chat.tools_json) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (1, ToolChoice.AUTO, False, True)),
        ({"type": "auto"}, (1, ToolChoice.AUTO, False, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (1, ToolChoice.AUTO, False, False)),
        ({"type": "any"}, (1, ToolChoice.REQUIRED, False, True)),
        ({"type": "tool", "name": "add"}, (1, ToolChoice.REQUIRED, True, False)),
        ({"type": "none"}, (0, ToolChoice.AUTO, False, True)),
    ],
)
def test_choices_of_tools(choice: dict[str, Any] | None, expected: tuple[int, ToolChoice, bool, bool]) -> None:
    tools = made(tools=[ADD], tool_choice=choice).order.tools
    assert tools is not None
    assert (len(tools.use.tools), tools.use.choice, tools.use.named, tools.use.parallel) == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking: dict[str, Any], expected: dict[str, bool]) -> None:
    assert json.loads(made(thinking=thinking).order.prompts[0].chat.template_kwargs_json) == expected
    assert made().order.prompts[0].chat.template_kwargs_json == ""


def test_the_budget_of_a_thought_is_that_of_the_chat() -> None:
    assert made(thinking={"type": "enabled", "budget_tokens": 70}, max_tokens=100).order.thinking_budget == 70
    assert made(thinking={"type": "adaptive"}).order.thinking_budget is None
    assert made().order.thinking_budget is None


def test_the_budget_of_a_turn_may_exceed_an_answer_where_thoughts_are_between_tools() -> None:
    fields = {"max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 100}}
    body = MessagesRequest.model_validate({"messages": HI} | fields)
    betas = {"anthropic-beta": "effort-2025-11-24, interleaved-thinking-2025-05-14"}
    assert asked(body, betas).order.thinking_budget == 100
    for others in ({}, {"anthropic-beta": "effort-2025-11-24"}):
        with pytest.raises(InvalidRequest, match="is 100; expected less than max_tokens, which is 100"):
            asked(body, others)


def test_marks_retain_the_prompt_up_to_their_items() -> None:
    """The tool is before the first message, the system prompt the first one; the result of a tool is a turn."""
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    given = asked(
        MessagesRequest.model_validate(
            {
                "max_tokens": 10,
                "tools": [ADD],
                "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", **marked}],
                "messages": [
                    *HI,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [{"type": "text", "text": "3", **marked}],
                            },
                            {"type": "text", "text": "Go on."},
                        ],
                    },
                ],
                "cache_control": {"type": "ephemeral", "ttl": "5m"},
            }
        ),
        {},
    )
    ranges = given.order.common.cache_retention.ranges
    assert [(each.messages, each.duration, each.priority) for each in ranges] == [
        (0, 300.0, PRIORITY), (1, 3600.0, PRIORITY), (4, 3600.0, PRIORITY), (5, 300.0, PRIORITY),
    ]  # fmt: skip
    assert not asked(MessagesRequest.model_validate({"max_tokens": 10, "messages": HI}), {}).order.common.HasField(
        "cache_retention"
    )


@pytest.mark.parametrize(
    ("control", "field", "what"),
    [
        ({"type": "lasting"}, "cache_control.type", "is 'lasting'; expected ephemeral"),
        ({"type": "ephemeral", "ttl": "2h"}, "cache_control.ttl", "is '2h'; expected 5m or 1h"),
    ],
)
def test_a_wrong_mark_is_named(control: dict[str, str], field: str, what: str) -> None:
    block = {"type": "text", "text": "Hi", "cache_control": control}
    with pytest.raises(InvalidRequest) as caught:
        made(messages=[{"role": "user", "content": [block]}], cache_control=None)
    assert caught.value.violations == (FieldViolation(f"messages[0].content[0].{field}", what),)


def test_a_body_has_four_marks_at_most() -> None:
    block = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(InvalidRequest) as caught:
        made(messages=[{"role": "user", "content": [block] * 5}])
    what = "is one mark too many; expected at most 4 in a body"
    assert caught.value.violations == (FieldViolation("messages[0].content[4].cache_control", what),)


def test_thoughts_can_be_left_out() -> None:
    assert made().shows_thoughts
    assert not made(thinking={"type": "adaptive", "display": "omitted"}).shows_thoughts


def test_a_form_of_output_is_a_constraint() -> None:
    config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert json.loads(made(output_config=config).order.common.json_schema)["type"] == "object"


def test_an_assistants_last_words_are_continued() -> None:
    chat = made(messages=[*HI, {"role": "assistant", "content": "I"}]).order.prompts[0].chat
    assert chat.continue_final_message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [ADD | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [ADD | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "every"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_what_is_wrong_is_named_as_in_the_body(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(**fields)
    assert [each.field for each in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers: not offered; leave it out"),
        ({"tools": [{"type": "crystal_ball", "name": "see"}]}, r"tools\[0\].type: 'crystal_ball'"),
        ({"tools": [ADD | {"allowed_callers": ["code"]}]}, r"tools\[0\]: allowed_callers is not offered"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(Unsupported, match=what):
        made(**fields)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("sampling.stop[1]", "stop_sequences[1]"),
        ("sampling.top_p", "top_p"),
        ("prompt.chat.messages[0].role", "system.role"),
        ("prompt.chat.messages[1].content", "messages[0].content"),
        ("prompt.chat.template_kwargs_json.x", "chat_template_kwargs.x"),
        ("prompt", "messages"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
    ],
)
def test_fields_of_other_apis_have_the_bodys_names(field: str, expected: str) -> None:
    given = asked(CountRequest.model_validate({"messages": HI, "system": "Be brief."}), {})
    with pytest.raises(InvalidRequest) as caught, given.in_its_words():
        raise InvalidRequest(FieldViolation(field, "is odd"))
    assert [each.field for each in caught.value.violations] == [expected]
