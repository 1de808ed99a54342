"""Constraints are checked before a request is queued: what is wrong is said in words, and hostile ones cost little."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cli.demo_model import CHECKPOINT
from common.contracts.errors import InvalidRequest, Overloaded, Unavailable, Unsupported
from common.contracts.limits import (
    COSTLY_CONSTRAINT_SECONDS,
    MAX_CONSTRAINTS_A_PEER,
    MAX_COSTLY_VERDICTS,
)
from common.contracts.limits import (
    MAX_CONSTRAINT_BYTES as MOST,
)
from common.contracts.types import Constraint, ConstraintKind
from router.answers.constraints.checker import ConstraintChecker, Verdict, _Verdicts
from router.answers.text.checkpoint import read_checkpoint
from tests.support.router.tokenizers import word_piece
from tests.support.turns import until_blocked

JSON, REGEX, GRAMMAR = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR
DEADLINE_S = 120.0
# In a JSON schema the pattern becomes a name (common/contracts/json_schema.py). Here a comma may follow, then no name.
_NULL = {"type": "null"}
DEAD_END = json.dumps(
    {"properties": {"a": _NULL}, "additionalProperties": False, "patternProperties": {"^a$": _NULL}}
    | {"type": "object", "required": ["a"], "x-guidance": {"whitespace_pattern": " "}}
)


@asynccontextmanager
async def new_checker() -> AsyncIterator[ConstraintChecker]:
    made = ConstraintChecker.load(CHECKPOINT, read_checkpoint(CHECKPOINT).eos_token_ids)
    assert made is not None
    yield made
    await made.aclose()


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[ConstraintChecker]:
    """A checker of the test's own, whose process the test may stop or kill."""
    async with new_checker() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[ConstraintChecker]:
    """One checker for all verdicts: a process takes longer to start than to examine a constraint."""
    async with new_checker() as made:
        yield made


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {}


def optional(count: int, more: bool = False) -> str:
    """Return a schema of so many properties, none of which is required."""
    properties = {f"property{each}": {"type": "integer"} for each in range(count)}
    return json.dumps({"type": "object", "properties": properties, "additionalProperties": more})


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JSON, "{}"),
        (JSON, optional(500, more=True)),
        (JSON, json.dumps({"enum": [f"word {each}" for each in range(2000)]})),
        (JSON, "true"),
        (JSON, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        (JSON, '{"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}'),
        (REGEX, "[a-z]+(ü|ß)?"),
        (REGEX, ""),
        (GRAMMAR, 'start: "yes" | "no" reason\nreason: /[a-z]+/'),
    ],
)
async def test_what_can_be_enforced_is_accepted(shared: ConstraintChecker, kind: ConstraintKind, text: str) -> None:
    await shared.check_constraint(Constraint(kind, text))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (JSON, "{", "is not valid: EOF while parsing an object at line 1 column 1; expected a JSON schema"),
        (JSON, "[1]", 'must be a JSON object; expected a schema such as {"type": "object"}'),
        (JSON, '{"type": "text"}', "is not valid: Invalid type: text; expected a JSON schema"),
        (JSON, '{"not": {}, "if": {}}', 'uses keywords that cannot be enforced: "if", "not"; leave them out'),
        (
            JSON, '{"not": {}, "x-guidance": {"lenient": true}}',
            'uses keywords that cannot be enforced: "not"; leave them out',
        ),
        (JSON, '{"pattern": "(?=a)"}', "is wrong in a pattern: look-around, including look-ahead and look-behind"),
        (JSON, '{"$ref": "#/x"}', "is not valid: Pointer '/x' does not exist"),
        (JSON, '{"$ref": "#"}', "allows no output at all"),
        # These compile, and pass a limit with their first or their tenth token.
        (JSON, optional(1000), "is too complex to be followed; make it smaller"),
        (JSON, f'{{"type": "array", "items": {optional(1000)}}}', "is too complex to be followed; make it smaller"),
        (
            GRAMMAR, "start: " + " | ".join(f'"{each}"' for each in range(6000)),
            "is too complex to be followed; make it smaller",
        ),
        (
            JSON, '{"oneOf": [{"type": "string"}, {"minLength": 2}]}',
            "uses oneOf whose options may overlap; use anyOf, or make them differ",
        ),
        (JSON, json.dumps(nested(200)), "is nested too deeply; make it flatter"),
        (REGEX, "(", 'is wrong: unclosed group; in the expression "("'),
        (REGEX, r"(a)\1", "is wrong: backreferences are not supported"),
        (REGEX, r"[^\x00-\x{10FFFF}]", "allows no output at all"),
        (REGEX, "[a-z]*" * 3000, "is too complex to be followed; make it smaller"),
        (JSON, '{"type": "string", "minLength": 2, "pattern": "^x$"}', "allows no value: a pattern, a format and"),
        (JSON, '{"type": "integer", "minimum": 3, "maximum": 2}', "allows no value: "),
        (JSON, '{"properties": {"a": {}}, "minProperties": 2}', "uses minProperties or maxProperties beside optional"),
        (JSON, '{"patternProperties": {"^a": {}, "b$": {}}}', "has patternProperties /^a/ and /b$/ that overlap"),
        (JSON, '{"$ref": "http://a/b"}', "refers to another document, http://a/b; put it into $defs"),
        # As a dialect writes it for a tool: who sent the schema wrote no grammar.
        (GRAMMAR, 'start: "a" %json {"type": "text"}', "is not valid: Invalid type: text; expected a JSON schema"),
        (GRAMMAR, f"start: %json {DEAD_END}", "allows outputs that nothing can follow; make its patterns and lengths"),
        (GRAMMAR, "start: b", 'is not valid: at 1(8): unknown name: "b"; expected a grammar in Lark'),
        (GRAMMAR, "", "is not valid: no start rule found"),
        (GRAMMAR, "start: a\na: a", "allows no output at all"),
        (GRAMMAR, '{"grammars": []}', "is not valid: 1(1): expecting rule, token or statement"),
        (GRAMMAR, "ü" * MOST, f"has {2 * MOST} bytes; expected at most {MOST}"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said(shared: ConstraintChecker, kind: ConstraintKind, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await shared.check_constraint(Constraint(kind, text))
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
        await checker.check_constraint(Constraint(kind, text))
    await checker.check_constraint(Constraint(REGEX, "[a-z]+"))


async def test_modules_of_the_directory_in_which_the_router_runs_are_not_taken_for_its_own(
    checker: ConstraintChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    await checker.check_constraint(Constraint(REGEX, "[a-z]+"))


@asynccontextmanager
async def held(checker: ConstraintChecker) -> AsyncIterator[None]:
    """Stop the child process, so that nothing is examined, until the end of the block."""
    await checker.check_constraint(Constraint(REGEX, "started"))
    stopped = checker.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)


def checks(checker: ConstraintChecker, *texts: str, peer: str = "a") -> list[asyncio.Task[None]]:
    return [asyncio.create_task(checker.check_constraint(Constraint(REGEX, text), peer)) for text in texts]


async def test_a_constraint_is_examined_once(checker: ConstraintChecker) -> None:
    async with held(checker):
        waiting = checks(checker, *"aabbbaab")
        await until_blocked(*waiting)
        assert len(checker) == 2
    await asyncio.gather(*waiting)
    assert len(checker) == 0


async def test_who_stops_waiting_does_not_spoil_it_for_others(checker: ConstraintChecker) -> None:
    async with held(checker):
        first, second, other = checks(checker, "(", "(", "b")
        await until_blocked(first, second, other)
        first.cancel()
        other.cancel()
        await asyncio.wait([first, other])
        assert len(checker) == 1
    with pytest.raises(InvalidRequest, match="is wrong"):
        await second


async def test_an_examination_that_nobody_waits_for_is_withdrawn_before_and_after_it_begins(
    checker: ConstraintChecker,
) -> None:
    async with held(checker):
        gone = checks(checker, "a", "b", "c")
        await until_blocked(*gone)
        for each in gone:
            each.cancel()
        await asyncio.wait(gone)
        assert len(checker) == 0
        staying = checks(checker, "a")
    await asyncio.gather(*staying)


async def test_more_than_can_wait_must_try_again_and_others_are_served(checker: ConstraintChecker) -> None:
    most = MAX_CONSTRAINTS_A_PEER
    async with held(checker):
        # One is under examination, the others wait.
        waiting = checks(checker, *map(str, range(most + 1)))
        await until_blocked(*waiting)
        with pytest.raises(Overloaded, match=f"router.constraints.checker: {most} of {most} constraints wait"):
            await checker.check_constraint(Constraint(REGEX, "one more"), "a")
        other = checks(checker, "another's", peer="b")
    await asyncio.gather(*waiting, *other)
    await checker.check_constraint(Constraint(REGEX, "one more"), "a")


async def test_senders_together_are_bounded_too(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.answers.constraints.checker.MAX_CONSTRAINTS", 4)
    async with held(checker):
        waiting = [each for peer in "abcdef" for each in checks(checker, peer, peer=peer)]
        await until_blocked(*waiting)
        with pytest.raises(Overloaded, match=r"4 of 4 constraints wait"):
            await checker.check_constraint(Constraint(REGEX, "g"), "g")
    await asyncio.gather(*waiting)


async def test_few_verdicts_on_costly_constraints_are_kept() -> None:
    kept = _Verdicts()
    costly = Verdict("", "", COSTLY_CONSTRAINT_SECONDS * 2)
    kept.add(b"cheap", Verdict("", "", 0.01))
    for number in range(MAX_COSTLY_VERDICTS + 1):
        kept.add(bytes([number]), costly)
    assert (kept.get(b"\0"), kept.get(b"\1"), kept.get(b"cheap")) == (None, costly, Verdict("", "", 0.01))


async def test_a_child_that_ends_fails_what_waits_and_the_next_constraint_starts_another(
    checker: ConstraintChecker,
) -> None:
    async with held(checker):
        waiting = checks(checker, "a", "b")
        await until_blocked(*waiting)
        assert checker.pid is not None
        first = checker.pid
        os.kill(first, signal.SIGKILL)
        for each in waiting:
            with pytest.raises(Unavailable, match="the process that examines constraints ended"):
                await each
    await checker.check_constraint(Constraint(REGEX, "a"))
    assert checker.pid != first


async def test_a_tokenizer_that_spells_no_bytes_is_refused(tmp_path: Path) -> None:
    word_piece().save(str(tmp_path / "tokenizer.json"))
    checker = ConstraintChecker.load(tmp_path, ())
    assert checker is not None
    with pytest.raises(Unsupported, match="the tokenizer of this checkpoint cannot be constrained"):
        await checker.check_constraint(Constraint(REGEX, "a"))
    await checker.aclose()


def test_without_a_tokenizer_there_is_no_checker(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    assert ConstraintChecker.load(tmp_path, ()) is None
