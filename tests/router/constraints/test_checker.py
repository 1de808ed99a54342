"""Constraints are checked before a request is queued: what is wrong is said in words, and hostile ones cost little."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from common.errors import InvalidRequest, Overloaded, Unsupported
from common.types import Constraint, ConstraintKind
from router.constraints.checker import MAX_BYTES, MAX_WAITING, ConstraintChecker
from router.text.checkpoint import read_checkpoint
from tests.support.router.tokenizers import word_piece

JSON, REGEX, GRAMMAR = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR
DEADLINE_S = 120.0


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[ConstraintChecker]:
    made = ConstraintChecker.load(CHECKPOINT, read_checkpoint(CHECKPOINT).eos_token_ids)
    assert made is not None
    yield made
    made.close()


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JSON, "{}"),
        (JSON, "true"),
        (JSON, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        (JSON, '{"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}'),
        (REGEX, "[a-z]+(ü|ß)?"),
        (REGEX, ""),
        (GRAMMAR, 'start: "yes" | "no" reason\nreason: /[a-z]+/'),
    ],
)
async def test_what_can_be_enforced_is_accepted(checker: ConstraintChecker, kind: ConstraintKind, text: str) -> None:
    await checker.check(Constraint(kind, text))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (JSON, "{", "is not valid: EOF while parsing an object at line 1 column 1; expected a JSON schema"),
        (JSON, "[1]", 'is no JSON object; expected a schema such as {"type": "object"}'),
        (JSON, '{"type": "text"}', "is not valid: Invalid type: text; expected a JSON schema"),
        (JSON, '{"not": {}, "if": {}}', 'uses keywords that cannot be enforced: "if", "not"; leave them out'),
        (
            JSON, '{"not": {}, "x-guidance": {"lenient": true}}',
            'uses keywords that cannot be enforced: "not"; leave them out',
        ),
        (JSON, '{"pattern": "(?=a)"}', "is wrong in a pattern: look-around, including look-ahead and look-behind"),
        (JSON, '{"$ref": "#/x"}', "is not valid: Pointer '/x' does not exist"),
        (JSON, '{"$ref": "#"}', "allows no output at all"),
        (
            JSON, '{"oneOf": [{"type": "string"}, {"minLength": 2}]}',
            "uses oneOf whose options may overlap; use anyOf, or make them differ",
        ),
        (JSON, json.dumps(nested(200)), "is nested too deeply; make it flatter"),
        (REGEX, "(", 'is wrong: unclosed group; in the expression "("'),
        (REGEX, r"(a)\1", "is wrong: backreferences are not supported"),
        (REGEX, r"[^\x00-\x{10FFFF}]", "allows no output at all"),
        (REGEX, "[a-z]*" * 3000, "is too complex to be followed; make it smaller"),
        (GRAMMAR, "start: b", 'is not valid: at 1(8): unknown name: "b"; expected a grammar in Lark'),
        (GRAMMAR, "", "is not valid: no start rule found"),
        (GRAMMAR, "start: a\na: a", "allows no output at all"),
        (GRAMMAR, '{"grammars": []}', "is not valid: 1(1): expecting rule, token or statement"),
        (GRAMMAR, "ü" * MAX_BYTES, f"has {2 * MAX_BYTES} bytes; expected at most {MAX_BYTES}"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said(checker: ConstraintChecker, kind: ConstraintKind, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(Constraint(kind, text))
    (violation,) = caught.value.violations
    assert violation.field == kind.value
    assert violation.description.startswith(words)
    assert len(violation.description) < 600


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GRAMMAR, "start: T\nT: " + " & ".join(rf"/(.|\n)*a.{{{each}}}/" for each in range(40))),  # of time
        (
            GRAMMAR,
            "start: a0\n" + "".join(f"a{each}: a{each + 1}\n" for each in range(5000)) + 'a5000: "x"',
        ),  # of stack
    ],
    ids=["time", "stack"],
)
async def test_what_costs_too_much_is_refused_and_others_go_on(
    checker: ConstraintChecker, kind: ConstraintKind, text: str
) -> None:
    with pytest.raises(InvalidRequest, match="is too complex to be followed; make it smaller"):
        await checker.check(Constraint(kind, text))
    await checker.check(Constraint(REGEX, "[a-z]+"))


async def test_modules_of_the_directory_in_which_the_router_runs_are_not_taken_for_its_own(
    checker: ConstraintChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    await checker.check(Constraint(REGEX, "[a-z]+"))


async def test_a_constraint_is_examined_once(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[str] = []

    def examine(constraint: Constraint) -> str:
        examined.append(constraint.text)
        return ""

    monkeypatch.setattr(checker, "_examine", examine)
    await asyncio.gather(*(checker.check(Constraint(REGEX, text)) for text in "aabbbaab"))
    assert sorted(examined) == ["a", "b"]


async def test_who_stops_waiting_does_not_spoil_it_for_others(
    checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def examine(constraint: Constraint) -> str:
        assert go_on.wait(DEADLINE_S)
        return "is wrong"

    monkeypatch.setattr(checker, "_examine", examine)
    first, second = [asyncio.create_task(checker.check(Constraint(REGEX, "a"))) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(InvalidRequest, match="is wrong"):
        await second


async def test_more_than_can_wait_are_told_to_try_again(
    checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def examine(constraint: Constraint) -> str:
        assert go_on.wait(DEADLINE_S)
        return ""

    monkeypatch.setattr(checker, "_examine", examine)
    waiting = [asyncio.create_task(checker.check(Constraint(REGEX, str(each)))) for each in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(
        Overloaded, match=f"router.constraints.checker: {MAX_WAITING} of {MAX_WAITING} constraints wait"
    ):
        await checker.check(Constraint(REGEX, "one more"))
    go_on.set()
    await asyncio.gather(*waiting)
    await checker.check(Constraint(REGEX, "one more"))


async def test_a_tokenizer_that_spells_no_bytes_is_refused(tmp_path: Path) -> None:
    word_piece().save(str(tmp_path / "tokenizer.json"))
    checker = ConstraintChecker.load(tmp_path, ())
    assert checker is not None
    with pytest.raises(Unsupported, match="the tokenizer of this checkpoint cannot be constrained"):
        await checker.check(Constraint(REGEX, "a"))
    checker.close()


def test_without_a_tokenizer_there_is_no_checker(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    assert ConstraintChecker.load(tmp_path, ()) is None
