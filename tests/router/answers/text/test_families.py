"""What the chat templates of released families do with messages: no text vanishes, and no earlier turn is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from common.contracts.errors import InvalidRequest
from router.answers.text.chat import ChatTemplate
from router.answers.text.chat_input import Call, ChatInput, Message
from router.answers.text.message_forms import Arguments, Calls, MessageForm, System, Tools, Turns
from tests.support.router.families import FAMILIES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER, ANSWER, AGAIN = Message("user", "Where is Oslo?"), Message("assistant", "Up north."), Message("user", "How far?")
SYSTEM, LATER = Message("system", "Be brief."), Message("system", "Be kind.")
DEVELOPER = Message("developer", "Use metres.")
CALLED = Message("assistant", "", (Call("call_a1", "find_town", '{"name": "Oslo"}'),))
RESULT = Message("tool", "59 degrees", call_id="call_a1")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_town",
            "description": "Finds.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
]
CHATS: dict[str, Sequence[Message]] = {
    "question": (USER,),
    "turns": (USER, ANSWER, AGAIN),
    "system": (SYSTEM, USER, ANSWER, AGAIN),
    "developer": (DEVELOPER, USER),
    "two systems": (SYSTEM, LATER, USER),
    "system and developer": (SYSTEM, DEVELOPER, USER),
    "later system": (SYSTEM, USER, ANSWER, LATER, AGAIN),
    "last system": (USER, ANSWER, SYSTEM),
    "call": (USER, CALLED, RESULT),
    "call and answer": (SYSTEM, USER, CALLED, RESULT, ANSWER, AGAIN),
    "words and call": (USER, CALLED._replace(content="I look."), RESULT),
    "thought and call": (USER, CALLED._replace(content="I look.", thought="Hm."), RESULT),
    "two calls": (
        USER,
        CALLED._replace(calls=(*CALLED.calls, Call("call_b2", "find_lake", '{"name": "Mjosa"}'))),
        Message("tool", "365 km2", call_id="call_b2"),
        RESULT,
    ),
    "no ids": (
        USER,
        CALLED._replace(calls=(Call("", "find_town", '{"name": "Oslo"}'),)),
        Message("tool", "59 degrees"),
    ),
}
# The families whose templates see tools; the others are served with a note.
SEE_TOOLS = {
    "qwen2.5", "qwen3", "qwen3.5", "qwen3-coder", "llama3.1", "llama4", "mistral-nemo", "phi4-mini", "glm4", "glm4.5",
    "granite", "gpt-oss", "kimi-k2", "functionary", "hermes2-pro",
}  # fmt: skip


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, SPECIAL)


def rendered(source: str, messages: Sequence[Message], **fields: Any) -> str:
    return template(source).render(ChatInput(messages, **fields))


def words(messages: Sequence[Message]) -> list[str]:
    """Return the texts that a model must see: contents, and names and values of calls."""
    called = [part for each in messages for call in each.calls for part in (call.name, call.arguments.split('"')[3])]
    return [*filter(None, (each.content for each in messages)), *called]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_of_a_chat_is_in_the_prompt(family: str) -> None:
    for name, chat in CHATS.items():
        text = rendered(FAMILIES[family], chat)
        assert [each for each in words(chat) if each not in text] == [], name
        assert "None" not in text, name
        assert "{'" not in text, name


def rendered_call(family: str, arguments: str) -> str:
    called = CALLED._replace(calls=(Call("call_a1", "find_town", arguments),))
    return rendered(FAMILIES[family], (Message("user", "Where?"), called, RESULT))


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_say_nothing_are_an_empty_object(family: str) -> None:
    empty = rendered_call(family, "{}")
    for arguments in ("null", '""', "", " ", '"{}"'):
        assert rendered_call(family, arguments) == empty, arguments


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_are_no_object_stay_in_the_prompt(family: str) -> None:
    for arguments in ('{"name": "Oslo', '["Oslo"]', "Oslo", '"Oslo"', "[" * 5000 + "Oslo"):
        assert "Oslo" in rendered_call(family, arguments), arguments[:20]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_sees_tools_or_is_known_not_to(family: str) -> None:
    text = rendered(FAMILIES[family], (USER,), tools=TOOLS)
    assert ("find_town" in text) is (family in SEE_TOOLS) or family == "glm4"
    assert (template(FAMILIES[family]).form.tools is not Tools.NOWHERE) is (family in SEE_TOOLS)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("chatml", MessageForm(calls=Calls.WRITTEN, tools=Tools.NOWHERE)),
        ("qwen3.5", MessageForm(arguments=Arguments.EITHER, system=System.FIRST)),
        ("glm4.5", MessageForm()),
        ("gemma2", MessageForm(calls=Calls.WRITTEN, results="user", tools=Tools.NOWHERE, system=System.NOWHERE)),
        ("glm4", MessageForm(calls=Calls.WRITTEN, results="observation", tools=Tools.VARIABLE)),
        (
            "gpt-oss",
            MessageForm(
                arguments=Arguments.EITHER,
                calls=Calls.SINGLE,
                thought_beside_words=False,
                system=System.FIRST,
                developer=True,
            ),
        ),
    ],
)
def test_a_family_gets_messages_in_its_form(family: str, form: MessageForm) -> None:
    assert template(FAMILIES[family]).form == form


def test_a_later_message_of_the_system_becomes_part_of_the_next_question() -> None:
    text = rendered(FAMILIES["qwen3.5"], (SYSTEM, LATER, USER, ANSWER, LATER, AGAIN))
    assert "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>" in text
    assert "<|im_start|>user\nBe kind.\n\nHow far?<|im_end|>" in text
    text = rendered(FAMILIES["gemma2"], (SYSTEM, USER))
    assert "<start_of_turn>user\nBe brief.\n\nWhere is Oslo?<end_of_turn>" in text


def test_calls_stand_one_by_one_before_their_results_where_a_template_shows_one_a_message() -> None:
    text = rendered(FAMILIES["llama3.1"], CHATS["two calls"])
    head = "<|start_header_id|>%s<|end_header_id|>\n\n"
    called = head % "assistant" + '{"name": "find_%s", "parameters": {"name": "%s"}}<|eot_id|>'
    result = head % "ipython" + "%s<|eot_id|>"
    turns = called % ("town", "Oslo"), result % '"59 degrees"', called % ("lake", "Mjosa"), result % '"365 km2"'
    assert text.endswith("".join([*turns, head % "assistant"]))


def test_calls_that_a_template_does_not_show_are_words_of_the_answer() -> None:
    text = rendered(FAMILIES["chatml"], (USER, CALLED._replace(content="I look."), RESULT))
    assert 'assistant\nI look.\n```json\n{"name": "find_town", "arguments": {"name": "Oslo"}}\n```<|im_end|>' in text


@pytest.mark.parametrize(
    ("source", "messages", "refusal"),
    [
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            (USER,),
            "messages[0]: has role user, and this chat template shows no text of that role; leave it out",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            (USER, ANSWER, AGAIN),
            "messages[1]: has role assistant, and this chat template shows no text of that role; leave it out",
        ),
        (
            "{{ messages[-1].content }}",
            (USER, ANSWER, AGAIN),
            "messages[0]: would be left out: this chat template shows only the last question; leave it out",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' or loop.last %}{{ m.content }}{% endif %}{% endfor %}",
            (USER, ANSWER, AGAIN),
            "messages[0]: would be left out: this chat template shows only the last question; leave it out",
        ),
        (
            "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}",
            (Message("judge", "Guilty."), USER),
            "messages[0]: has role judge, and this chat template shows no text of that role; leave it out",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.content == 'x' %}{{ m.x.y }}{% endif %}{% endfor %}",
            (USER, ANSWER, Message("user", "x"), ANSWER, AGAIN),
            "messages[2]: the checkpoint's chat template does not accept these messages: it fails at this one",
        ),
        (
            FAMILIES["llama2"],
            (USER, USER),
            "messages: the checkpoint's chat template does not accept these messages: roles must alternate",
        ),
    ],
)
def test_a_message_that_shows_in_no_form_is_refused_by_its_place(
    source: str, messages: Sequence[Message], refusal: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered(source, messages)
    assert str(caught.value) == f"prompt.chat.{refusal}"


def test_a_single_message_is_served_by_a_template_that_shows_one() -> None:
    assert rendered("{{ messages[-1].content }}", (USER,)) == "Where is Oslo?"
    assert template("{{ messages[-1].content }}").form.turns is Turns.LAST
