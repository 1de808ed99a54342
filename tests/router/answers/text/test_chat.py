"""Chat templates with tools, documents and variables, compared with transformers; and what hostile ones may cost."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from common.contracts.errors import InvalidRequest
from quire.inference.v1 import inference_pb2 as pb
from router.answers.text.chat import ChatTemplate, PromptTooLong
from router.answers.text.chat_input import chat_input
from router.answers.text.message_forms import Arguments, Calls, Ids, MessageForm, System, Tools
from tests.support.router.tokenizers import byte_level

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|end|>"}

# In the manner of Hermes and Qwen: tools in the system message, calls in tags, results in a message of the user, a
# thought that only the last answer keeps, and a switch against thinking.
TAGS = """{%- if tools %}
    {{- '<|im|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools><|/im|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im|>system\\n' + messages[0].content + '<|/im|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im|>' + message.role + '\\n' + message.content + '<|/im|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {%- if message.content %}{{- message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|/im|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|/im|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# In the manner of Llama 3.1: an environment, tools in the first message of the user, one call an answer, trimmed text.
HEADERS = """{{- bos_token }}
{%- if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}
{%- set first = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set messages = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<|head|>system<|/head|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Today: ' + (date_string if date_string is defined else 'unknown') + '\\n\\n' + first + '<|eot|>' }}
{%- if tools_in_user_message and tools is not none %}
    {%- set asked = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|head|>user<|/head|>\\n\\nGiven these functions:\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{% endfor %}
    {{- asked + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['ipython', 'tool'] %}
        {{- '<|head|>ipython<|/head|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}
        {{- '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if documents %}{% for each in documents %}{{- each.title ~ ': ' ~ each.text ~ '\\n' }}{% endfor %}{% endif %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# In the manner of Mistral: tools before the last message of the user, ids of nine characters, roles that alternate.
BRACKETS = """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}{{- '"' + key + '": "' + value + '"' }}
                    {%- else %}{{- '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{- ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{% if not loop.last %}{{- ', ' }}{% endif %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set text = call.function | tojson %}{{- text[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('an id has nine characters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content ~ ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('no role ' + message.role) }}{% endif %}
{%- endfor %}"""

# In the manner of DeepSeek: a call is there only where the content is none, and its arguments are a text.
JOINED = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for call in message['tool_calls'] %}
            {{- '<call>' + call['function']['name'] + '\\n' + call['function']['arguments'] + '</call>' }}
        {%- endfor %}
    {%- elif message['role'] == 'tool' %}{{- '<out>' + message['content'] + '</out>' }}
    {%- else %}{{- '<' + message['role'] + '>' + message['content'] }}{% endif %}
{%- endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_town",
            "description": 'Finds "a" town \u2014 by name & river <x>.',
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "limit": {"type": "integer", "enum": [1, 2]}},
                "required": ["name"],
            },
        },
    },
    {"type": "function", "function": {"description": "Now.", "name": "now", "parameters": {"type": "object"}}},
]
ID = "a1b2c3d4e"
ARGUMENTS = {"name": "Zürich \u201cx\u201d", "limit": 2}
ASKED = {"role": "user", "content": " Where is it? "}
CALLED = {
    "role": "assistant", "content": None,
    "tool_calls": [{"id": ID, "type": "function", "function": {"name": "find_town", "arguments": ARGUMENTS}}],
}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": ID, "name": "find_town", "content": '{"lake": true}'}
THOUGHT = {"role": "assistant", "content": "By a lake. ", "reasoning_content": "Look.\nThere."}
BRIEF = {"role": "system", "content": "Be brief."}
SOURCES = {"tags": TAGS, "headers": HEADERS, "brackets": BRACKETS}
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [ASKED],
    "call": [ASKED, CALLED],
    "result": [ASKED, CALLED, RESULT],
    "thought": [ASKED, CALLED, RESULT, THOUGHT],
    "again": [ASKED, CALLED, RESULT, THOUGHT, ASKED],
}
DOCUMENTS = [{"title": "Towns", "text": "Zürich has a lake."}]


def message_of(given: dict[str, Any]) -> pb.ChatMessage:
    """Return a message of a template as a client sends it."""
    calls = [
        pb.ToolCall(
            id=call["id"],
            name=call["function"]["name"],
            arguments_json=json.dumps(call["function"]["arguments"], ensure_ascii=False),
        )
        for call in given.get("tool_calls", ())
    ]
    texts = {key: value for key, value in given.items() if key != "tool_calls" and value is not None}
    return pb.ChatMessage(tool_calls=calls, **texts)


def chat_of(*messages: dict[str, Any], **fields: Any) -> pb.Chat:
    """Return a chat; values other than texts and flags become JSON."""
    ready: dict[str, Any] = {
        key: value if isinstance(value, str | bool) else json.dumps(value) for key, value in fields.items()
    }
    return pb.Chat(messages=map(message_of, messages), **ready)


def rendered(source: str, chat: pb.Chat, most: int | None = None) -> str:
    return ChatTemplate(source, dict(SPECIAL)).render(chat_input(chat), most)


def reference(source: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return what transformers renders."""
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=source, **SPECIAL)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **fields)
    return text


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("source", SOURCES)
def test_tools_calls_and_results_render_as_in_transformers(source: str, name: str, tools: Any) -> None:
    messages = CHATS[name]
    ours = rendered(SOURCES[source], chat_of(*messages, **({"tools_json": tools} if tools else {})))
    assert ours == reference(SOURCES[source], messages, tools=tools, add_generation_prompt=True)


def test_a_template_that_joins_arguments_gets_their_text() -> None:
    """transformers drops content that is none, so that such a template fails there."""
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    called = f"<call>find_town\n{arguments}</call>"
    assert rendered(JOINED, chat_of(ASKED, CALLED, RESULT)) == (
        f'<|bos|><user> Where is it? {called}<out>{{"lake": true}}</out>'
    )


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("tags", {"enable_thinking": False}),
        ("tags", {"enable_thinking": True}),
        ("headers", {"date_string": "22 Nov", "tools_in_user_message": False}),
        ("headers", {"unknown": {"a": [1, 2.5, None, "x"]}}),
    ],
)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["none", "documents"])
def test_variables_and_documents_reach_a_template_or_are_refused(source: str, variables: Any, documents: Any) -> None:
    given: dict[str, Any] = {"template_kwargs_json": variables, "tools_json": TOOLS}
    if documents:
        given["documents_json"] = documents
    if documents and source == "tags":
        said = r"prompt\.chat\.documents_json: is of no use: the chat template shows no documents; put their text into"
        with pytest.raises(InvalidRequest, match=said):
            rendered(SOURCES[source], chat_of(BRIEF, ASKED, **given))
        return
    ours = rendered(SOURCES[source], chat_of(BRIEF, ASKED, **given))
    assert ours == reference(
        SOURCES[source], [BRIEF, ASKED], tools=TOOLS, documents=documents, add_generation_prompt=True, **variables
    )


@pytest.mark.parametrize("source", ["tags", "headers"])
@pytest.mark.parametrize("last", ["By a", " By a lake, \n"])
def test_the_last_message_is_continued_as_in_transformers(source: str, last: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": last}]
    ours = rendered(SOURCES[source], chat_of(*messages, continue_final_message=True))
    assert ours == reference(SOURCES[source], messages, continue_final_message=True)
    assert ours.endswith(last.strip() if source == "headers" else last)


def test_without_a_generation_prompt_the_chat_ends_with_its_last_message() -> None:
    ours = rendered(TAGS, chat_of(ASKED, add_generation_prompt=False))
    assert ours == reference(TAGS, [ASKED], add_generation_prompt=False)
    assert "assistant" not in ours


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (TAGS, MessageForm(arguments=Arguments.EITHER)),
        (HEADERS, MessageForm(arguments=Arguments.EITHER, calls=Calls.SINGLE, words_apart=True)),
        (BRACKETS, MessageForm(ids=Ids.SHORT, arguments=Arguments.EITHER, words_apart=True, system=System.NOWHERE)),
        (JOINED, MessageForm(arguments=Arguments.TEXT, words_apart=True, tools=Tools.NOWHERE)),
    ],
)
def test_each_template_gets_messages_in_its_form(source: str, form: MessageForm) -> None:
    assert ChatTemplate(source, dict(SPECIAL)).form == form


def test_ids_of_any_length_fit_templates_that_want_nine_characters() -> None:
    called = pb.ChatMessage(
        role="assistant", tool_calls=[pb.ToolCall(id="call_0123456789abcdef01234567", name="now", arguments_json="")]
    )
    result = pb.ChatMessage(role="tool", tool_call_id="call_0123456789abcdef01234567", content="12")
    text = rendered(BRACKETS, pb.Chat(messages=[message_of(ASKED), called, result]))
    assert '"id": "f01234567"' in text
    assert '"call_id": "call_' not in text
    assert '"arguments": {}' in text


@pytest.mark.parametrize(
    ("effort", "source", "found"),
    [
        ("none", TAGS, "<think>\n\n</think>"),
        ("high", TAGS, "<|im|>assistant\n"),
        ("high", "{{ messages[0].content }}{{ reasoning_effort }}", "high"),
        ("high", "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{{ enable_thinking }}", "high"),
    ],
)
def test_an_effort_becomes_what_the_template_takes(effort: str, source: str, found: str) -> None:
    assert rendered(source, chat_of(ASKED, reasoning_effort=effort)).endswith((found, found + "\n\n"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        (
            "{% if reasoning_effort and reasoning_effort not in ('low', 'high') %}"
            "{{ raise_exception('no such effort') }}{% endif %}{{ messages[0].content }}"
        ),
    ],
    ids=["none", "words of its own"],
)
@pytest.mark.parametrize("effort", ["none", "xhigh"])
def test_an_effort_that_a_template_does_not_take_is_left_out(
    source: str, effort: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    template = ChatTemplate(source, dict(SPECIAL))
    for _ in range(3):
        assert template.render(chat_input(chat_of(ASKED, reasoning_effort=effort))) == ASKED["content"]
    said = "the chat template takes no reasoning effort, or other words for it: requests go without theirs"
    assert [each for each in caplog.messages if "effort" in each] == [said]


def test_variables_of_the_client_win_over_its_effort() -> None:
    asked = chat_of(ASKED, reasoning_effort="none", template_kwargs_json={"enable_thinking": True})
    assert rendered("{{ enable_thinking }}", asked) == "True"


@pytest.mark.parametrize(
    ("fields", "violation"),
    [
        ({"reasoning_effort": "<|x|>"}, "reasoning_effort: is '<|x|>'; expected a word such as low"),
        ({"tools_json": "{"}, "tools_json: is not valid JSON"),
        ({"tools_json": "[NaN]"}, "tools_json: is not valid JSON: NaN is not a JSON number"),
        ({"tools_json": "[" * 100_000}, "tools_json: has 100000 lists and objects; expected at most 8192"),
        (
            {"tools_json": "[" * 65 + "]" * 65},
            "tools_json: is nested too deeply; expected at most 64 lists and objects",
        ),
        ({"tools_json": {"a": 1}}, "tools_json: must be a list"),
        ({"tools_json": [1]}, "tools_json[0]: must be an object"),
        ({"tools_json": [{"function": {"name": "a", "x": "b" * 262144}}]}, "tools_json: has 262"),
        ({"documents_json": {"title": 1}}, "documents_json: must be a list of objects"),
        ({"documents_json": [1]}, "documents_json: must be a list of objects"),
        ({"template_kwargs_json": [1]}, "template_kwargs_json: must be an object"),
        ({"template_kwargs_json": {"self": 1}}, "template_kwargs_json.self: has another meaning"),
        ({"template_kwargs_json": {"bos_token": "x"}}, "template_kwargs_json.bos_token: has another meaning"),
        ({"template_kwargs_json": {"a b": 1}}, "template_kwargs_json: has 'a b'; expected names of letters"),
        ({"template_kwargs_json": {"a": [{"b": 1e300}]}}, "template_kwargs_json: has a number beyond 1000000"),
        ({"template_kwargs_json": {"a": "b" * 65536}}, "template_kwargs_json: has 655"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: contradicts add_generation_prompt",
        ),
        ({"continue_final_message": True}, "continue_final_message: cannot be followed"),
    ],
)
def test_what_cannot_be_rendered_is_named(fields: dict[str, Any], violation: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered("{{ messages[-1].content[:30] }}", chat_of(ASKED, **fields))
    assert str(caught.value).startswith(f"prompt.chat.{violation}")


def test_a_text_that_grows_without_end_is_given_up() -> None:
    source = "{% for i in range(n) %}{% for j in range(n) %}{{ text }}{% endfor %}{% endfor %}"
    given = {"n": 100_000, "text": "b" * 1000}
    with pytest.raises(PromptTooLong, match="makes more than 5000 characters"):
        rendered(source, chat_of(ASKED, template_kwargs_json=given), most=5000)


def test_variables_are_data_and_open_no_way_out_of_the_sandbox() -> None:
    source = "{{ given.x.format(messages) }}{{ given.__class__ }}"
    given = {"given": {"x": "{0.__class__.__mro__}"}}
    with pytest.raises(InvalidRequest, match="does not accept these messages"):
        rendered(source, chat_of(ASKED, template_kwargs_json=given))
