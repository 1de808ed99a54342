"""Checks the constraints of requests before anything is queued: they are compiled, and their first mask is computed.

Both can take tenths of a second for a hostile constraint, so they run in a thread of their own, sizes are bounded, and
verdicts are kept: clients send one schema over and over. llguidance lets the event loop go on meanwhile (measured: a
regex of 0.7 s made a ticker of 1 ms late by 20 ms at most, a schema of 2,000 properties, 0.25 s, by 5 ms; idle: 2 ms).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from common.constraint_grammar import grammar_of, parser_limits
from common.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation, Unsupported
from common.types import Constraint, ConstraintKind

MAX_BYTES = 64 * 1024
MAX_WAITING = 64
_MAX_VERDICTS = 512
_RETRY_S = 1.0
_MAX_WORDS = 400
# What llguidance says, and what a client can do about it. The first that is found is told.
_PLAINER = (
    (r"Unimplemented keys: \[(.*)\]", r"uses keywords that cannot be enforced: \1; leave them out"),
    (r"oneOf constraints are not supported", "uses oneOf whose options may overlap; use anyOf, or make them differ"),
    (r"NoExtension", "allows no output at all"),
    (r"(?s)invalid regex (\".*?\") .*^error: (.*?)$", r"is wrong: \2; in the expression \1"),
    (r"(?s)regex parse error.*^error: (.*?)$", r"is wrong in a pattern: \1"),
    (r"invalid regex (\".*?\") \(in regex\): (.*?)( in regex.*)?$", r"is wrong: \2; in the expression \1"),
    (r"increase limits|[Tt]oo complex|TooComplex|grammar size", "is too complex to be followed; make it smaller"),
    (r"recursion limit", "is nested too deeply; make it flatter"),
    (r"Expecting object schema", 'is no JSON object; expected a schema such as {"type": "object"}'),
)
_LANGUAGE = {
    ConstraintKind.JSON_SCHEMA: "a JSON schema",
    ConstraintKind.REGEX: "a regular expression without look-around and back-references",
    ConstraintKind.GRAMMAR: "a grammar in Lark's notation with the rule `start`",
}


class ConstraintChecker:
    """Says whether constraints can be enforced, with the tokenizer.json of a checkpoint; for one event loop."""

    def __init__(self, tokenizer_json: Path, eos_token_ids: tuple[int, ...] = ()) -> None:
        """The tokenizer is read at the first constraint: a second for a large vocabulary, and not everyone needs it."""
        self._path, self._eos = tokenizer_json, eos_token_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="constraints")
        # By digest; what is wrong with it, or nothing.
        self._verdicts: OrderedDict[bytes, asyncio.Future[str]] = OrderedDict()

    @classmethod
    def load(cls, directory: Path, eos_token_ids: tuple[int, ...]) -> ConstraintChecker | None:
        """Return the checker of a checkpoint; None where it has no tokenizer.json."""
        path = directory / "tokenizer.json"
        return cls(path, eos_token_ids) if path.is_file() else None

    async def check(self, constraint: Constraint) -> None:
        """Raise InvalidRequest that says what is wrong, Unsupported if nothing can be enforced here, or Overloaded."""
        wrong = _size(constraint) or await asyncio.shield(self._verdict(constraint))
        if wrong:
            raise InvalidRequest(FieldViolation(constraint.kind.value, wrong))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _verdict(self, constraint: Constraint) -> asyncio.Future[str]:
        """Return the verdict or the work on it, one for all that ask for the same at once."""
        digest = hashlib.sha256(f"{constraint.kind.value} {constraint.text}".encode()).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            self._refuse_if_busy()
            verdict = asyncio.get_running_loop().run_in_executor(self._thread, self._examine, constraint)
            self._verdicts[digest] = verdict
        self._verdicts.move_to_end(digest)
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _refuse_if_busy(self) -> None:
        """Raise Overloaded when so many wait that another one would only wait too long."""
        waiting = sum(not verdict.done() for verdict in self._verdicts.values())
        if waiting >= MAX_WAITING:
            what = f"{waiting} of {MAX_WAITING} constraints wait to be examined"
            raise Overloaded(QuotaViolation("router.constraints", what), _RETRY_S)

    def _examine(self, constraint: Constraint) -> str:
        try:
            grammar = grammar_of(constraint)
        except ValueError as error:
            return _words(constraint.kind, str(error))
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return _words(constraint.kind, matcher.get_error()) if matcher.is_error() else ""

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(str(self._path), eos_token=list(self._eos) or None)
        except ValueError as error:
            what = f"the tokenizer of this checkpoint cannot be constrained: {error}"
            raise Unsupported(f"{what}; it must spell its tokens as bytes") from None


def _size(constraint: Constraint) -> str:
    size = len(constraint.text.encode())
    return f"has {size} bytes; expected at most {MAX_BYTES}" if size > MAX_BYTES else ""


def _words(kind: ConstraintKind, message: str) -> str:
    """Return in a sentence what is wrong; llguidance's own words where nothing plainer is known."""
    for pattern, words in _PLAINER:
        if found := re.search(pattern, message, re.MULTILINE):
            return found.expand(words)[:_MAX_WORDS]
    first = message.strip().partition("\n")[0][:_MAX_WORDS]
    return f"is not valid: {first}; expected {_LANGUAGE[kind]}"
