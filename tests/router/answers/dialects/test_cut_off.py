"""An output that a limit cuts off leaves no marks of a call as words, wherever it is cut."""

from __future__ import annotations

import pytest

from router.answers.dialects.reader import reader
from router.contracts.answer_parts import CallArguments, CallBegun, Thought, Words
from tests.router.answers.dialects.reading import TOOLS, text_of

CALL = '{"name": "f", "arguments": {"s": "x"}}'
OUTPUTS = {
    ("hermes", None): f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    ("mistral", None): f"I look.[TOOL_CALLS][{CALL}, {CALL}]",
    ("deepseek_v31", None): (
        'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    ("qwen3_coder", None): (
        "I look.<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"
    ),
    ("glm45", "glm45"): (
        "<think>Hm.</think>I look.<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n"
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    ),
    ("generic", None): f"I look.\n```json\n[{CALL}, {CALL}]\n```",
    ("gpt_oss", "gpt_oss"): (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "x"}<|call|>'
    ),
}


@pytest.mark.parametrize(("tools", "reasoning"), OUTPUTS)
def test_an_output_that_is_cut_off_leaves_its_words_alone(tools: str, reasoning: str | None) -> None:
    output = OUTPUTS[tools, reasoning]
    for end in range(len(output)):
        for size in (1, 1000):
            parser = reader(reasoning, tools, TOOLS)
            parts = [part for at in range(0, end, size) for part in parser.feed(output[at : min(end, at + size)])]
            parts += parser.finish(cut=True)
            assert "I look.".startswith(text_of(parts, Words).strip()), output[:end]
            assert "Hm.".startswith(text_of(parts, Thought)), output[:end]


@pytest.mark.parametrize("tools", ["llama3_json", "generic"])
def test_a_call_without_a_mark_is_told_by_the_name_of_its_tool(tools: str) -> None:
    for text, words in ((CALL[:30], ""), ('{"name": "Oslo", "arg', '{"name": "Oslo", "arg'), ("{", "{")):
        parser = reader(None, tools, TOOLS)
        assert text_of([*parser.feed(text), *parser.finish(cut=True)], Words) == words


@pytest.mark.parametrize("text", ["<tool_ca", '<tool_call>{"name"'])
def test_an_output_that_ends_by_itself_keeps_what_is_no_call(text: str) -> None:
    parser = reader(None, "hermes", TOOLS)
    assert text_of([*parser.feed(text), *parser.finish()], Words) == text


def test_a_call_that_is_cut_off_is_given_as_far_as_it_came() -> None:
    parser = reader(None, "hermes", TOOLS)
    parts = [*parser.feed('<tool_call>\n{"name": "f", "arguments": {"s": "x'), *parser.finish(cut=True)]
    assert parts[0] == CallBegun(0, "f")
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"s": "x'


def test_words_keep_their_last_characters_where_no_mark_begins_with_them() -> None:
    parser = reader("deepseek_r1", "hermes", TOOLS)
    assert text_of([*parser.feed("1 > 0 and a<b"), *parser.finish(cut=True)], Words) == "1 > 0 and a<b"
