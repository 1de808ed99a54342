"""Thoughts of each family, and where they end."""

from __future__ import annotations

import pytest

from router.answers.dialects.reader import kept_tokens, reader, thought_end
from router.answers.dialects.tape import MOST_HELD
from router.contracts.answer_parts import CallBegun, Part, Thought, Words
from tests.router.answers.dialects.reading import TOOLS, call, pieces, read

ANALYSIS = "<|channel|>analysis<|message|>"
HELLO: list[Part] = [Thought("Hm,\n\nhi."), Words("Hello\n")]
OUTPUTS: list[tuple[str, bool, str, list[Part]]] = [
    ("deepseek_r1", False, "<think>\nHm,\n\nhi.\n</think>\n\nHello\n", HELLO),
    ("deepseek_r1", True, "Hm,\n\nhi.\n</think>\n\nHello\n", HELLO),
    ("deepseek_r1", True, "<think>\nHm,\n\nhi.</think>Hello\n", HELLO),
    ("deepseek_r1", False, "Hello, <think> is a tag</think>", [Words("Hello, <think> is a tag</think>")]),
    ("deepseek_r1", True, "without an end\n", [Thought("without an end\n")]),
    ("qwen3", False, "<think>\n\n</think>\n\nHello", [Words("Hello")]),
    ("qwen3", False, "<think>a</think> b <think>c</think>", [Thought("a"), Words("b <think>c</think>")]),
    ("glm45", False, "\n<think>Hm,\n\nhi.</think>\nHello\n", HELLO),
    ("mistral", False, "[THINK]Hm,\n\nhi.[/THINK]Hello\n", HELLO),
    (
        "gpt_oss",
        False,
        f"{ANALYSIS}Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>",
        [Thought("Hm"), Words("Hello")],
    ),
    ("gpt_oss", False, "<|channel|>final<|message|>Hel", [Words("Hel")]),
    ("gpt_oss", False, "no channel at all", [Words("no channel at all")]),
    # A call where no tools are read belongs to the model, not to the user.
    ("gpt_oss", False, "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", [Thought("{}")]),
]


@pytest.mark.parametrize(("dialect", "is_open", "output", "expected"), OUTPUTS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_thoughts_are_told_from_the_answer(
    dialect: str, is_open: bool, output: str, expected: list[Part], size: int
) -> None:
    assert read(reader(dialect, None, thought_open=is_open), pieces(output, size)) == expected


def test_a_call_follows_a_thought() -> None:
    output = '<think>\n<tool_call>?\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    parts = read(reader("qwen3", "hermes", TOOLS), pieces(output, 3))
    assert parts == [Thought("<tool_call>?"), *call(0, "f", '{"a": 1}')]


def test_channels_hold_thoughts_words_and_calls() -> None:
    output = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
        '{"s": "<|call|>"}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|><|call|>'
    )
    parts = read(reader("gpt_oss", "gpt_oss", TOOLS), pieces(output, 4))
    assert parts == [Thought("Hm"), Words("Wait."), *call(0, "f", '{"s": "<|call|>"}'), *call(1, "g", "{}")]


@pytest.mark.parametrize("dialect", ["deepseek_r1", "qwen3", "glm45", "mistral", "gpt_oss"])
def test_a_thought_that_is_ended_by_force_is_followed_by_the_answer(dialect: str) -> None:
    begun = "<|channel|>analysis<|message|>Hm" if dialect == "gpt_oss" else "Hm"
    parts = read(reader(dialect, None, thought_open=True), [begun, thought_end(dialect), "Hello"])
    assert parts == [Thought("Hm"), Words("Hello")]


@pytest.mark.parametrize("dialect", ["qwen3", "gpt_oss"])
def test_a_call_follows_a_thought_that_is_ended_by_force(dialect: str) -> None:
    tools = "gpt_oss" if dialect == "gpt_oss" else "hermes"
    begun = "<|channel|>analysis<|message|>Hm" if dialect == "gpt_oss" else "Hm"
    rest = "f <|constrain|>json<|message|>{}" if dialect == "gpt_oss" else '<tool_call>{"name": "f"}</tool_call>'
    parts = read(reader(dialect, tools, TOOLS, True), [begun, thought_end(dialect, True), rest])
    assert parts == [Thought("Hm"), *call(0, "f", "{}")]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("dialect", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(
    "unit", [" ", "\n", "<think", "<think>", "</think>", "<|channel|>", "<|channel|>a<|message|>", "<|en"]
)
def test_hostile_outputs_are_not_hoarded(unit: str, dialect: str, is_open: bool) -> None:
    parser, came, given = reader(dialect, "hermes", TOOLS, is_open), 0, 0
    for piece in pieces(unit * (100_000 // len(unit)), 1_000):
        came += len(piece)
        given += sum(len(part.text) for part in parser.feed(piece) if not isinstance(part, CallBegun))
        assert unit.isspace() or unit.startswith("<|channel|>a") or came - given < MOST_HELD + 2_000
    parser.finish()


def test_marks_that_the_detokenizer_must_keep() -> None:
    assert kept_tokens("qwen3", "hermes") == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert {"<tool_call>", "<arg_key>", "<arg_value>", "</arg_value>"} <= kept_tokens(None, "glm45")
    assert {"<|channel|>", "<|message|>", "<|end|>"} <= kept_tokens("gpt_oss", None)
    assert kept_tokens(None, None) == frozenset()
