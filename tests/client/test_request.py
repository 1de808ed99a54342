"""What a call's arguments become on the wire, and what is refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import InvalidRequest
from quire.client.chat import Message
from quire.client.request import conversation_of, prompt_of, request_of
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types


def refused(prompt: Any = "x", **options: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as error:
        request_of(prompt, options)  # type: ignore[arg-type]
    return [(each.field, each.description) for each in error.value.violations]


def test_a_prompt_is_a_text_token_ids_or_messages() -> None:
    assert prompt_of("hello") == pb.Prompt(text="hello")
    assert prompt_of([1, 2]) == pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2]))
    messages = [Message(role="system", content="s"), Message(role="user", content="u")]
    chat = [pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u")]
    assert prompt_of(messages) == pb.Prompt(chat=pb.Chat(messages=chat))


def test_a_text_is_the_users_message_of_a_chat() -> None:
    assert conversation_of("hi") == [{"role": "user", "content": "hi"}]


def test_every_option_has_its_field() -> None:
    request = request_of(
        "x",
        {
            "temperature": 0.0,
            "stop": ["a", "b"],
            "logit_bias": {3: -1.5},
            "n": 2,
            "ignore_eos": True,
            "priority": -7,
            "no_cache": True,
            "salt": "s",
            "request_id": "r",
            "session_id": "talk",
            "traceparent": "00-1",
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "truncate_prompt_tokens": -1,
            "truncation_side": "right",
            "timeout": 3.0,
        },
    )
    sampling = types.SamplingParams(temperature=0.0, stop=["a", "b"], logit_bias={3: -1.5}, n=2, ignore_eos=True)
    assert request == pb.GenerateRequest(
        prompt=pb.Prompt(text="x"),
        sampling=sampling,
        priority=-7,
        cache=pb.CacheOptions(no_cache=True, salt="s"),
        request_id="r",
        session_id="talk",
        traceparent="00-1",
        skip_special_tokens=False,
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        truncation_side=pb.TRUNCATION_SIDE_RIGHT,
    )


def test_none_is_as_absent_and_zero_is_not() -> None:
    request = request_of("x", {"temperature": None, "top_k": 0, "regex": None})
    assert not request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert request.WhichOneof("constraint") is None


def test_one_stop_string_is_not_taken_letter_by_letter() -> None:
    assert list(request_of("x", {"stop": "end"}).sampling.stop) == ["end"]


@pytest.mark.parametrize(
    ("given", "sent"), [({"type": "object"}, '{"type": "object"}'), ('{"a":1}', '{"a":1}'), (True, "true")]
)
def test_a_json_schema_may_be_what_becomes_json(given: Any, sent: str) -> None:
    assert request_of("x", {"json_schema": given}).json_schema == sent


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(TypeError, match=r"there is no option max_token; known are .*max_tokens"):
        request_of("x", {"max_token": 3})  # type: ignore[typeddict-unknown-key]


def test_two_constraints_are_refused_where_the_wire_would_keep_the_last() -> None:
    assert refused(regex="a", grammar="b") == [("constraint", "is given as grammar and regex; expected one")]


def test_every_value_that_cannot_be_sent_is_named_at_once() -> None:
    assert [field for field, _ in refused(temperature="hot", max_tokens=2**40, priority=0.5)] == ["priority"]
    named = refused(temperature="hot", max_tokens=2**40)
    assert named == [
        ("sampling.max_tokens", "is 1099511627776; expected -2147483648 to 2147483647"),
        ("sampling.temperature", "is 'hot': must be real number, not str"),
    ]


def test_a_chat_has_options_of_its_own() -> None:
    call = {"id": "c1", "name": "add", "arguments": {"a": 1}}
    messages: list[Message] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},  # type: ignore[list-item]
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    request = request_of(
        messages,
        {
            "tools": [{"type": "function", "function": {"name": "add"}}],
            "documents": [{"text": "d"}],
            "chat_template_kwargs": {"enable_thinking": False},
            "add_generation_prompt": False,
            "continue_final_message": True,
            "reasoning_effort": "low",
            "kept_special_tokens": "<tool_call>",
            "thought_budget": {"max_tokens": 3, "opener": "<a>", "closer": "</a>", "end": "</a>", "is_open": True},
            "cache_retention": {"priority": 80, "ranges": [{"messages": 1, "priority": 90, "duration": 5.0}]},
        },
    )
    chat = request.prompt.chat
    assert chat.messages[1].tool_calls[0] == pb.ToolCall(id="c1", name="add", arguments_json='{"a": 1}')
    assert (chat.messages[1].reasoning_content, chat.messages[2].tool_call_id, chat.messages[2].name) == (
        "hm", "c1", "add",
    )  # fmt: skip
    assert chat.tools_json == '[{"type": "function", "function": {"name": "add"}}]'
    assert (chat.documents_json, chat.template_kwargs_json) == ('[{"text": "d"}]', '{"enable_thinking": false}')
    assert chat.HasField("add_generation_prompt")
    assert not chat.add_generation_prompt
    assert (chat.continue_final_message, chat.reasoning_effort) == (True, "low")
    assert list(request.kept_special_tokens) == ["<tool_call>"]
    budget = types.ThoughtBudget(max_tokens=3, opener="<a>", closer="</a>", end="</a>", is_open=True)
    assert request.thought_budget == budget


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ("x", {"tools": [{}]}, "prompt"),
        ([{"role": "user", "content": "u"}], {"tools": [{1, 2}]}, "prompt.chat.tools"),
        ([{"role": "user", "content": "u"}], {"reasoning_effort": 7}, "prompt.chat.reasoning_effort"),
        ([{"role": "user", "content": "u", "tool_calls": [{}]}], {}, "prompt.chat.messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "u", "name": 7}], {}, "prompt.chat.messages[0]"),
    ],
)
def test_options_of_a_chat_that_cannot_be_sent_are_named(messages: Any, options: Any, field: str) -> None:
    assert [name for name, _ in refused(messages, **options)] == [field]


def test_messages_with_other_keys_are_named_by_their_place() -> None:
    good, bad = {"role": "user", "content": "u"}, {"role": "user", "text": "u"}
    assert [field for field, _ in refused([good, bad, 7])] == [f"prompt.chat.messages[{n}]" for n in (1, 2)]


def test_ids_that_are_no_numbers_are_refused() -> None:
    assert [field for field, _ in refused([1, "2"])] == ["prompt.token_ids.ids"]
