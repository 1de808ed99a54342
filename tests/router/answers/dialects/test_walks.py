"""Constrained outputs parse: hundreds of random walks through the masks of every dialect's grammars."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from common.contracts.types import Constraint, ConstraintKind
from router.answers.dialects.grammar import ThoughtPrefix, ToolChoice, tool_grammar
from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.reader import kept_tokens, reader
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words
from tests.router.answers.dialects.walks import Vocabulary, matcher, vocabulary, walk
from tests.support.gpuworker.random_schemas import NAMES, SchemaMaker

pytestmark = pytest.mark.searches

# Each dialect with the thoughts of its family.
FAMILIES = [
    ("hermes", "qwen3"), ("llama3_json", "deepseek_r1"), ("pythonic", None), ("mistral", "mistral"),
    ("deepseek_v3", "deepseek_r1"), ("deepseek_v31", "deepseek_r1"), ("glm45", "glm45"), ("gpt_oss", "gpt_oss"),
    ("generic", None), ("qwen3_coder", None),
]  # fmt: skip
GRAMMARS, WALKS = 4, 5


def random_tool(maker: SchemaMaker, rng: random.Random, name: str) -> OfferedTool:
    names = rng.sample(NAMES, rng.randint(0, 4)) if rng.random() < 0.5 else rng.sample(["a", "b_1", "city"], 2)
    schema: dict[str, Any] = {"type": "object", "properties": {key: maker.schema(rng.choice((1, 3))) for key in names}}
    if names and rng.random() < 0.5:
        schema["properties"][names[0]] = {"type": "string"}
    schema["required"] = [key for key in names if rng.random() < 0.6]
    if rng.random() < 0.3:
        schema |= {"$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}}}}
        schema["properties"]["at"] = {"$ref": "#/$defs/point"}
    return OfferedTool(name, schema | {"additionalProperties": False}, strict=rng.random() < 0.8)


def read(text: str, families: tuple[str, str | None], tools: list[OfferedTool], is_open: bool) -> list[Part]:
    parser = reader(families[1], families[0], tools, is_open)
    return [*parser.feed(text), *parser.finish()]


def calls(parts: list[Part]) -> list[tuple[str, str]]:
    found = [(part.index, part.name) for part in parts if isinstance(part, CallBegun)]
    pieces = [part for part in parts if isinstance(part, CallArguments)]
    return [(name, "".join(piece.text for piece in pieces if piece.index == index)) for index, name in found]


@pytest.mark.parametrize("marks", ["special", "added", "spelled"])
@pytest.mark.parametrize("families", FAMILIES, ids=lambda pair: pair[0])
def test_finished_outputs_parse_and_match(families: tuple[str, str | None], marks: str) -> None:
    rng, maker = random.Random(f"{families} {marks}"), SchemaMaker(seed=7)
    known = sorted(kept_tokens(families[1], families[0]))
    words = vocabulary([] if marks == "spelled" else known, marks == "special")
    ended = called = thought = 0
    for _ in range(GRAMMARS):
        tools = [random_tool(maker, rng, name) for name in ("f", "get_weather-2")]
        for choice in ToolChoice:
            found = follow(words, families, tools, choice, known, rng)
            ended += found[0]
            called += found[1]
            thought += found[2]
    assert ended >= 0.8 * 2 * GRAMMARS * WALKS
    assert called > ended / 2
    assert thought or families[1] is None


STARTS = ['{"name": "f", "arguments": {', '{"name": "f", "parameters": {', "[f("]
# Its strings may spell anything, marks included.
DOCUMENT: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "next": {"$ref": "#"}, "at": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("marks", ["special", "spelled"])
@pytest.mark.parametrize("families", FAMILIES, ids=lambda pair: pair[0])
def test_beside_a_form_an_answer_is_calls_or_a_document(families: tuple[str, str | None], marks: str) -> None:
    rng, maker = random.Random(f"{families} {marks} form"), SchemaMaker(seed=11)
    known = sorted(kept_tokens(families[1], families[0]))
    words = vocabulary([] if marks == "spelled" else known, marks == "special")
    if (families[0], marks) == ("gpt_oss", "spelled"):
        return  # Its marks are tokens wherever there is this family: no string of a document spells them.
    form = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(DOCUMENT))
    prefix = None if families[1] is None else ThoughtPrefix(families[1], False)
    texts = called = 0
    for _ in range(GRAMMARS):
        tools = [replace(random_tool(maker, rng, name), strict=True) for name in ("f", "get_weather-2")]
        grammar = matcher(words, tool_grammar(families[0], tools, ToolChoice.AUTO, True, prefix, words.special, form))
        for text in filter(None, (walk(words, grammar, [*known, *STARTS], rng) for _ in range(WALKS))):
            parser = reader(families[1], families[0], tools, calls_first=True)
            parts = [*parser.feed(text), *parser.finish()]
            found = calls(parts)
            check(found, tools, ToolChoice.REQUIRED, text)
            said = "".join(part.text for part in parts if isinstance(part, Words))
            assert bool(found) != bool(said), (text, parts)
            if said:
                jsonschema.Draft202012Validator(DOCUMENT).validate(json.loads(said))
            texts += 1
            called += bool(found)
    assert texts >= 0.7 * GRAMMARS * WALKS
    assert 0 < called < texts


def follow(
    words: Vocabulary,
    families: tuple[str, str | None],
    tools: list[OfferedTool],
    choice: ToolChoice,
    marks: list[str],
    rng: random.Random,
) -> tuple[int, int, int]:
    """Walk through one grammar; return how many outputs ended, how many calls they held, and how many thoughts."""
    parallel, is_open = rng.random() < 0.5, rng.random() < 0.5 and families[1] not in (None, "gpt_oss")
    prefix = None if families[1] is None else ThoughtPrefix(families[1], is_open)
    lark = tool_grammar(families[0], tools, choice, parallel, prefix, words.special)
    grammar = matcher(words, lark)
    others = ["```json", '{"name": "', "[f("] if choice is ToolChoice.AUTO else []
    favoured = [*marks, *others, *(["\n</parameter>"] if families[0] == "qwen3_coder" else [])]
    texts = [text for _ in range(WALKS) if (text := walk(words, grammar, favoured, rng)) is not None]
    counted = thoughts = 0
    for text in texts:
        parts = read(text, families, tools, is_open)
        found = calls(parts)
        check(found, tools, choice, text)
        assert choice is ToolChoice.AUTO or len(found) >= 1, (text, lark)
        assert parallel or len(found) <= 1, (text, lark)
        counted += len(found)
        thoughts += any(isinstance(part, Thought) for part in parts)
    return len(texts), counted, thoughts


def check(found: list[tuple[str, str]], tools: list[OfferedTool], choice: ToolChoice, text: str) -> None:
    schemas = {tool.name: tool.parameters if tool.strict or choice is ToolChoice.REQUIRED else {} for tool in tools}
    for name, arguments in found:
        try:
            jsonschema.Draft202012Validator({**schemas[name], "type": "object"}).validate(json.loads(arguments))
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError((text, name, arguments, schemas[name])) from error
