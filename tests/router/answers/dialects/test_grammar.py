"""Grammars of calls and of other constraints: what they allow, exactly."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from common.contracts.types import Constraint, ConstraintKind
from router.answers.dialects.grammar import ThoughtPrefix, ToolChoice, after_thought, tool_grammar
from router.answers.dialects.json_text import quoted
from router.answers.dialects.lark import whole_tokens
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.reader import kept_tokens, reader
from router.answers.requested_tools import tools_of
from router.api.openai.responses.tool_kinds import tool_kinds
from router.contracts.answer_parts import CallArguments, Part, Thought, Words
from tests.router.answers.dialects.reading import read, text_of
from tests.router.answers.dialects.walks import Vocabulary, matcher, vocabulary, walk

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, CLOCK = OfferedTool("weather", CITY, strict=True), OfferedTool("clock")
SPELLED = vocabulary([], False)


def allows(words: Vocabulary, lark: str, text: str) -> bool:
    """Return whether a grammar allows a text as a whole output."""
    at = matcher(words, lark)
    tokens = words.encode(text)
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


def hermes(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_required_is_one_or_more_calls_and_nothing_else() -> None:
    lark = tool_grammar("hermes", [WEATHER, CLOCK], ToolChoice.REQUIRED, True)
    one, other = hermes('{"city": "Bern"}'), hermes("{}", "clock")
    assert allows(SPELLED, lark, one)
    assert allows(SPELLED, lark, f"{one}\n{other}")
    for wrong in ("", "Hello", hermes("{}"), hermes('{"city": 1}'), hermes("{}", "other"), f"{one} Done."):
        assert not allows(SPELLED, lark, wrong)


def test_without_parallel_there_is_one_call_at_most() -> None:
    one = hermes('{"city": "Bern"}')
    for choice in ToolChoice:
        lark = tool_grammar("hermes", [WEATHER], choice, False)
        assert allows(SPELLED, lark, one)
        assert not allows(SPELLED, lark, f"{one}\n{one}")


def test_auto_is_text_in_which_a_marker_begins_a_call_of_a_strict_tool() -> None:
    lark = tool_grammar("hermes", [WEATHER, CLOCK], ToolChoice.AUTO, True)
    one = hermes('{"city": "Bern"}')
    for right in ("", "Hello <b>", f"I look. {one} And {one} Done.", hermes('{"any": [1]}', "clock")):
        assert allows(SPELLED, lark, right)
    for wrong in (hermes("{}"), "Hello <tool_call>", f"{one} and <tool_call>x"):
        assert not allows(SPELLED, lark, wrong)


CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "B"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "B"}}',
    "pythonic": '[weather(city="B")]',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "B"}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "B"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>B</arg_value>\n</tool_call>",
    "generic": '{"name": "weather", "arguments": {"city": "B"}}',
    "gpt_oss": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "B"}',
}
NEAR = {
    "type": "object",
    "properties": {"near": {"$ref": "#/$defs/town"}, "name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"town": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}},
}


@pytest.mark.parametrize("dialect", CALLS)
def test_auto_with_a_form_is_a_call_or_a_text_of_that_form(dialect: str) -> None:
    before = "<|channel|>final<|message|>" if dialect == "gpt_oss" else ""
    tool = OfferedTool("place", {"properties": {"near": {"$ref": "#/$defs/town"}}, "$defs": NEAR["$defs"]}, strict=True)
    form = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(NEAR))
    lark = tool_grammar(dialect, [WEATHER, tool], ToolChoice.AUTO, False, form=form)
    assert allows(SPELLED, lark, CALLS[dialect])
    for right in ('{"name": "x"}', '{"near": {"n": 1}, "name": "weather"}', '{"name": "weather"}'):
        assert allows(SPELLED, lark, before + right)
    for wrong in ("", "Hello", '{"name": 1}', '{"near": {"m": 1}, "name": "x"}'):
        assert not allows(SPELLED, lark, before + wrong)


def test_calls_that_are_documents_keep_their_references() -> None:
    tool = OfferedTool("place", {"properties": {"near": {"$ref": "#/$defs/town"}}, "$defs": NEAR["$defs"]}, strict=True)
    form = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(NEAR))
    lark = tool_grammar("generic", [tool, CLOCK], ToolChoice.AUTO, True, form=form)
    one, other = '{"name": "place", "arguments": {"near": {"n": 1}}}', '{"name": "clock", "arguments": {}}'
    assert allows(SPELLED, lark, f"{one}; {other}")
    assert not allows(SPELLED, lark, one.replace('"n"', '"m"'))


def test_a_mark_that_is_a_token_is_not_spelled() -> None:
    words = vocabulary(["<tool_call>", "</tool_call>"], False)
    assert set(words.special) >= {"<tool_call>", "</tool_call>"}
    lark = tool_grammar("hermes", [WEATHER], ToolChoice.REQUIRED, False, special=words.special)
    at = matcher(words, lark)
    assert at.validate_tokens([words.special["<tool_call>"]]) == 1
    assert at.validate_tokens(words.spell("<")) == 0
    free = matcher(words, tool_grammar("hermes", [WEATHER], ToolChoice.AUTO, False, special=words.special))
    spelled = words.spell("<tool_call") + words.spell(">")
    assert free.validate_tokens(spelled) < len(spelled)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_thought_may_hold_what_the_answer_may_not(is_open: bool) -> None:
    lark = tool_grammar("hermes", [WEATHER], ToolChoice.AUTO, True, ThoughtPrefix("qwen3", is_open))
    begun = "" if is_open else "<think>"
    assert allows(SPELLED, lark, f"{begun}\na <tool_call> b\n</think>\n\nHello")
    assert allows(SPELLED, lark, f"{begun}x</think>" + hermes('{"city": "Bern"}'))
    assert not allows(SPELLED, lark, f"{begun}x</think><tool_call>b")
    assert allows(SPELLED, lark, "Hello") is not is_open


def test_mistral_has_two_forms() -> None:
    old, new = vocabulary(["[TOOL_CALLS]"], True), vocabulary(["[TOOL_CALLS]", "[ARGS]"], True)
    listed, marked = '[TOOL_CALLS][{"name": "clock", "arguments": {}}]', "[TOOL_CALLS]clock[ARGS]{}"
    for words, right, wrong in ((old, listed, marked), (new, marked, listed)):
        lark = tool_grammar("mistral", [CLOCK], ToolChoice.REQUIRED, False, special=words.special)
        assert allows(words, lark, right)
        assert not allows(words, lark, wrong)
    spaced = tool_grammar("mistral", [CLOCK], ToolChoice.REQUIRED, False, special=old.special)
    assert allows(old, spaced, listed.replace("][", "] ["))


def test_python_and_tags_write_parameters_one_by_one() -> None:
    tool = OfferedTool("f", {"properties": {"on": {"type": "boolean"}, "to": {"type": "string"}}, "required": ["to"]})
    python = tool_grammar("pythonic", [tool], ToolChoice.REQUIRED, False)
    assert allows(SPELLED, python, '[f(on=True, to="x")]')
    assert allows(SPELLED, python, '[f(to="x")]')
    for wrong in ("[f()]", '[f(on=true, to="x")]', '[f(to="x", on=True)]', '[f(, to="x")]'):
        assert not allows(SPELLED, python, wrong)
    tags = tool_grammar("glm45", [tool], ToolChoice.REQUIRED, False)
    pair = '<arg_key>to</arg_key>\n<arg_value>any "text"</arg_value>\n'
    assert allows(SPELLED, tags, f"<tool_call>f\n{pair}</tool_call>")
    assert not allows(SPELLED, tags, "<tool_call>f\n</tool_call>")


def test_a_schema_that_is_no_list_of_parameters_is_written_as_json() -> None:
    tool = OfferedTool("f", {"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]})
    assert allows(SPELLED, tool_grammar("pythonic", [tool], ToolChoice.REQUIRED, False), '[f(**{"a": 1})]')
    tags = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert allows(SPELLED, tool_grammar("glm45", [tool], ToolChoice.REQUIRED, False), tags)


def test_descriptions_cost_no_constraint() -> None:
    said = {"title": "T", "description": "d" * 999, "default": "x", "examples": ["y"]}
    plain = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "at": {"anyOf": [{"$ref": "#/$defs/d"}, {"const": {"title": 1}}]}},
        "$defs": {"d": {"type": "array", "items": {"type": "integer"}}},
    }
    wordy = said | {
        "type": "object",
        "properties": {
            "title": said | {"type": "string"},
            "at": said | {"anyOf": [said | {"$ref": "#/$defs/d"}, {"const": {"title": 1}}]},
        },
        "$defs": {"d": {"type": "array", "items": said | {"type": "integer"}}},
    }
    for dialect in ("hermes", "pythonic", "glm45"):
        made = [tool_grammar(dialect, [OfferedTool("f", one)], ToolChoice.REQUIRED, False) for one in (plain, wordy)]
        assert made[0] == made[1]


def test_tools_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(ValueError, match="no tool is offered"):
        tool_grammar("hermes", [], ToolChoice.AUTO, True)
    with pytest.raises(ValueError, match="cannot be called here"):
        tool_grammar("pythonic", [OfferedTool("a b")], ToolChoice.REQUIRED, True)
    with pytest.raises(ValueError, match="channels"):
        tool_grammar("hermes", [CLOCK], ToolChoice.REQUIRED, True, ThoughtPrefix("gpt_oss", False))


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(20_000):
        nested = {"properties": {"a": nested}}
    for dialect in ("hermes", "pythonic", "glm45"):
        with pytest.raises(ValueError, match="too deeply"):
            tool_grammar(dialect, [OfferedTool("f", nested)], ToolChoice.REQUIRED, False)
    text = '{"a":' * 20_000 + "1" + "}" * 20_000
    with pytest.raises(ValueError, match="too deeply"):
        after_thought(Constraint(ConstraintKind.JSON_SCHEMA, text), ThoughtPrefix("qwen3", True))


def test_whole_tokens_are_those_that_llguidance_takes_for_special() -> None:
    marks = ["<tool_call>", "[TOOL_CALLS]", "<a b>", "plain", "<x", "<think>\n"]
    for is_special in (True, False):
        words = vocabulary(marks, is_special)
        assert all(words.tokens.is_special_token(token) for token in words.special.values())
        assert set(marks) & set(words.special) == (set(marks) if is_special else {"<tool_call>", "<a b>"})
        others = set(range(words.tokens.vocab_size)) - set(words.special.values())
        # A token without bytes is never spelled.
        assert not any(words.tokens.is_special_token(token) and words.tokens.decode_bytes([token]) for token in others)
    assert whole_tokens([("<x>", 5, False), ("y", 6, True), ("z", 7, False)]) == {"<x>": 5, "y": 6}


CONSTRAINTS = [
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(CITY | {"additionalProperties": False})),
    Constraint(ConstraintKind.REGEX, r"[ab]{2}/\/\n(c|d)"),
    Constraint(ConstraintKind.GRAMMAR, 'start: "[" INT "]" | "{}" # a note }\nINT: /[0-9]{1,3}/\n'),
]


@pytest.mark.parametrize("reasoning", ["qwen3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.kind.value)
def test_a_constraint_begins_after_the_thought(reasoning: str, constraint: Constraint) -> None:
    marks, rng = sorted(kept_tokens(reasoning, None)), random.Random(5)
    answers = 0
    for words in (SPELLED, vocabulary(marks, True)):
        for is_open in (True, False) if reasoning != "gpt_oss" else (False,):
            made = after_thought(constraint, ThoughtPrefix(reasoning, is_open), words.special)
            assert made.kind is ConstraintKind.GRAMMAR
            for _ in range(4):
                text = walk(words, matcher(words, made.text), marks, rng)
                if text is not None:
                    parts = read(reader(reasoning, None, thought_open=is_open), [text])
                    fits(text_of(parts, Words), constraint)
                    answers += not is_open or isinstance(parts[0], Thought)
    assert answers >= 4


def fits(text: str, constraint: Constraint) -> None:
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        jsonschema.Draft202012Validator(json.loads(constraint.text)).validate(json.loads(text))
    elif constraint.kind is ConstraintKind.REGEX:
        assert text[:2].strip("ab") == ""
        assert text[2:] in ("//\nc", "//\nd")
    else:
        assert text == "{}" or text[1:-1].isdigit()


PATCH = 'start: "*** Patch" LF line+\nline: ("+" | "-") /(.*)/ LF\n%import common.LF\n'
PATCHED = '*** Patch\n+say "é"\\n\n-\t</arg_value> </tool_call>\n'
PATCHES = OfferedTool(
    "patch", {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
).held_to(PATCH)


@pytest.mark.parametrize("dialect", [*CALLS, "qwen3_coder", "deepseek_v31"])
@pytest.mark.parametrize("choice", ToolChoice)
def test_the_text_of_a_tool_with_a_grammar_follows_it(dialect: str, choice: ToolChoice) -> None:
    lark = tool_grammar(dialect, [PATCHES, CLOCK], choice, False)
    for text, is_right in ((PATCHED, True), (PATCHED[:-1], False), (PATCHED.replace("+", " "), False)):
        answer = patch_call(dialect, quoted(text))
        assert allows(SPELLED, lark, answer) is is_right
        (call,) = calls_of(read(reader(None, dialect, [PATCHES, CLOCK]), [*answer]))
        assert json.loads(call) == {"input": text}


@pytest.mark.parametrize("dialect", [*CALLS, "qwen3_coder", "deepseek_v31"])
def test_each_tool_has_the_grammar_that_it_came_with(dialect: str) -> None:
    """Their rules and terminals have the same names."""
    texts = {"a": "+", "b": "\n", "c": "a ::= b"}
    tools = [
        replace(PATCHES, name=name).held_to(f"start: line\nline: A\nA: {quoted(text)}\n")
        for name, text in texts.items()
    ]
    lark = tool_grammar(dialect, tools, ToolChoice.REQUIRED, False)
    for name in texts:
        for other, text in texts.items():
            answer = patch_call(dialect, quoted(text)).replace("patch", name)
            assert allows(SPELLED, lark, answer) is (name == other)


@pytest.mark.parametrize("dialect", [*CALLS, "qwen3_coder", "deepseek_v31"])
def test_what_the_masks_allow_is_a_text_of_the_grammar(dialect: str) -> None:
    rng, found, marks = random.Random(11), 0, sorted(kept_tokens(None, dialect))
    for words in (SPELLED, vocabulary(marks, True)):
        lark = tool_grammar(dialect, [PATCHES], ToolChoice.REQUIRED, False, special=words.special)
        for _ in range(12):
            text = walk(words, matcher(words, lark), [r"\n", '"'], rng)
            if text is not None:
                (call,) = calls_of(read(reader(None, dialect, [PATCHES]), [text]))
                assert allows(SPELLED, PATCH, json.loads(call)["input"]), text
                found += 1
    assert found >= 4


@pytest.mark.parametrize("dialect", [*CALLS, "qwen3_coder"])
def test_beside_a_json_schema_a_call_follows_its_grammar_unless_it_is_an_object_itself(dialect: str) -> None:
    before = "<|channel|>final<|message|>" if dialect == "gpt_oss" else ""
    form = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(NEAR))
    lark = tool_grammar(dialect, [PATCHES, CLOCK], ToolChoice.AUTO, False, form=form)
    assert allows(SPELLED, lark, before + '{"name": "patch"}')
    assert allows(SPELLED, lark, patch_call(dialect, quoted(PATCHED)))
    wrong = patch_call(dialect, quoted(PATCHED[:-1]))
    assert allows(SPELLED, lark, wrong) is (dialect in ("llama3_json", "generic"))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^(?P<month>May|June)\s+(?P<day>\d{1,2})(?:st|nd|th)?\s+(?P<year>\d{4})$", "May 7th 2025", "May 7th 25"),
        (r"(?i)yes|no", "YES", "yesno"),
        (r"(?s).+\n", 'a"b\n\n', "a"),
        (r"[\p{Lu}&&[^A]]\x41\u{42}", "ZAB", "AAB"),
    ],
)
def test_regular_expressions_of_a_custom_tool_are_those_of_rust(pattern: str, right: str, wrong: str) -> None:
    given = {"type": "grammar", "syntax": "regex", "definition": pattern}
    (found,) = tool_kinds([{"type": "custom", "name": "patch", "format": given}]).functions
    (tool,) = tools_of([found])
    for dialect in ("hermes", "glm45", "pythonic"):
        lark = tool_grammar(dialect, [tool], ToolChoice.REQUIRED, False)
        assert allows(SPELLED, lark, patch_call(dialect, quoted(right)))
        assert not allows(SPELLED, lark, patch_call(dialect, quoted(wrong)))


def calls_of(parts: Sequence[Part]) -> list[str]:
    return [part.text for part in parts if isinstance(part, CallArguments)]


def patch_call(dialect: str, text: str) -> str:
    tagged = f"<tool_call>\n<function=patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
    if dialect == "qwen3_coder":
        return tagged
    if dialect == "glm45":
        return f"<tool_call>patch\n<arg_key>input</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    if dialect == "pythonic":
        return f"[patch(input={text})]"
    called = CALLS["deepseek_v3"] if dialect == "deepseek_v31" else CALLS[dialect]
    if dialect == "deepseek_v31":
        called = (
            called.replace("function<｜tool▁sep｜>", "").replace("\n```json\n", "<｜tool▁sep｜>").replace("\n```", "")
        )
    return called.replace("weather", "patch").replace('{"city": "B"}', f'{{"input": {text}}}')
