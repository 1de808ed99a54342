"""The child process that examines constraints, one a line, for `router/answers/constraints/checker.py`.

`python -m router.answers.constraints.examiner TOKENIZER_JSON [EOS_ID ...]` reads lines in JSON: `[number, kind, text]`
begins an examination, `[number]` ends it. It answers each with `[number, unsupported, wrong, seconds]`: two sentences,
which may be empty, and processor time. A process of its own examines each constraint. A constraint that takes too much
processor time or overflows the stack ends this process; llguidance can catch neither. A fork costs a few milliseconds;
a new process would read the tokenizer again.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from llguidance import LLMatcher, LLTokenizer

from common.constraint_grammar import grammar_of, parser_limits, passes_a_limit
from common.contracts.limits import CONSTRAINT_CPU_SECONDS, CONSTRAINT_SECONDS, CONSTRAINT_TRIAL_SECONDS
from common.contracts.types import Constraint, ConstraintKind

_OUTPUTS: Final = 8
_TOKENS: Final = 48
_MARKS: Final = '"{}[],:0a '


# Tries whether outputs of a grammar can be followed: some pass a limit of llguidance, or end nowhere, after a
# while.
# A worker would find that when the request runs. A few random outputs find it before the request is queued. Each
# takes what the grammar forces, else a mark such as a quote or a comma, or any allowed token.
def fault_of(matcher: LLMatcher, tokenizer: LLTokenizer, seconds: float = CONSTRAINT_TRIAL_SECONDS) -> str:
    """Return llguidance's words where an output cannot go on, "" where all could for so many seconds of the CPU."""
    until, marks = time.process_time() + seconds, _marks(tokenizer)
    for number in range(_OUTPUTS):
        fault = _fault_of_one(matcher.deep_copy(), random.Random(number), marks, until)
        if fault:
            return fault
    return ""


def _fault_of_one(matcher: LLMatcher, draw: random.Random, marks: Sequence[int], until: float) -> str:
    for _ in range(_TOKENS):
        if matcher.is_stopped() or time.process_time() > until:
            break
        forced = matcher.compute_ff_tokens()
        token = None if forced or matcher.is_error() else _any_of(matcher.compute_bitmask(), draw, marks)
        if not forced and token is None:
            return matcher.get_error() if matcher.is_error() else "no token is allowed"
        matcher.consume_tokens(forced if token is None else [token])
    return matcher.get_error() if matcher.is_error() else ""


def _any_of(mask: bytes, draw: random.Random, marks: Sequence[int]) -> int | None:
    """Return an allowed token; None when no token is allowed. Bit i of word w of the mask allows token 32 w + i."""
    words = memoryview(mask).cast("I")
    if draw.random() < 0.5:
        for mark in draw.sample(marks, len(marks)):
            if words[mark >> 5] >> (mark & 31) & 1:
                return mark
    begin = draw.randrange(len(words))
    for word in (*range(begin, len(words)), *range(begin)):
        if words[word]:
            found: int = 32 * word + draw.choice([bit for bit in range(32) if words[word] >> bit & 1])
            return found
    return None


def _marks(tokenizer: LLTokenizer) -> list[int]:
    spelt = [tokenizer.tokenize_str(mark) for mark in _MARKS]
    return [tokens[0] for tokens in spelt if len(tokens) == 1]


_TOO_COMPLEX = "is too complex to be followed; make it smaller"
_MAX_WORDS = 400
# Error texts of llguidance, and what a client can do about them. The first match counts.
_PLAINER = (
    (r"Unimplemented keys: \[(.*)\]", r"uses keywords that cannot be enforced: \1; leave them out"),
    (r"Unsatisfiable schema: Regex is empty", "allows no value: a pattern, a format and lengths contradict each other"),
    (r"Unsatisfiable schema: (.*)", r"allows no value: \1"),
    (r"min/maxProperties only", "uses minProperties or maxProperties beside optional properties; leave them out"),
    (r"patternProperty regexes (.*) are not disjoint", r"has patternProperties \1 that overlap; make them differ"),
    (r"Failed to generate regex for (\w+) range", r"has bounds of a \1 that cannot be enforced; make them smaller"),
    (r"Resource '(.*?)' is not present", r"refers to another document, \1; put it into $defs"),
    (r"oneOf constraints are not supported", "uses oneOf whose options may overlap; use anyOf, or make them differ"),
    (r"NoExtension", "allows no output at all"),
    (r"(?s)invalid regex (\".*?\") .*^error: (.*?)$", r"is wrong: \2; in the expression \1"),
    (r"(?s)regex parse error.*^error: (.*?)$", r"is wrong in a pattern: \1"),
    (r"invalid regex (\".*?\") \(in regex\): (.*?)( in regex.*)?$", r"is wrong: \2; in the expression \1"),
    (r"increase limits|[Tt]oo complex|TooComplex|grammar size|[Tt]oo many items|max is \d+", _TOO_COMPLEX),
    (r"recursion limit", "is nested too deeply; make it flatter"),
    (r"Expecting object schema", 'must be a JSON object; expected a schema such as {"type": "object"}'),
)
_DEAD_END = "allows outputs that nothing can follow; make its patterns and lengths agree"
_IN_GRAMMAR = re.compile(r"(?s).*?failed to compile JSON schema: ")
_LANGUAGE = {
    ConstraintKind.JSON_SCHEMA: "a JSON schema",
    ConstraintKind.REGEX: "a regular expression without look-around and back-references",
    ConstraintKind.GRAMMAR: "a grammar in Lark's notation with the rule `start`",
}


def _tokenizer(path: Path, eos_token_ids: list[int]) -> LLTokenizer | str:
    """Return the tokenizer, or why it cannot be used."""
    try:
        return LLTokenizer(str(path), eos_token=eos_token_ids or None)
    except ValueError as error:
        what = f"the tokenizer of this checkpoint cannot be constrained: {error}"
        return f"{what}; it must spell its tokens as bytes"


def _compiled(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Compile as the worker does. Raises ValueError."""
    matcher = LLMatcher(tokenizer, grammar_of(constraint), log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _words(kind: ConstraintKind, message: str) -> str:
    """Return the mistake as a sentence: one of _PLAINER, else the first line of llguidance's own text.

    A grammar for calls of tools has JSON schemas in it. Who sent these wrote no grammar.
    """
    if found := _IN_GRAMMAR.match(message):
        kind, message = ConstraintKind.JSON_SCHEMA, message[found.end() :]
    for pattern, words in _PLAINER:
        if found := re.search(pattern, message, re.MULTILINE):
            return found.expand(words)[:_MAX_WORDS]
    first = message.strip().partition("\n")[0][:_MAX_WORDS]
    return f"is not valid: {first}; expected {_LANGUAGE[kind]}"


class Examiner:
    """Runs a process for each examination. Each answers by itself; this one answers for those that a signal ended."""

    def __init__(self, tokenizer: LLTokenizer | str) -> None:
        self._tokenizer = tokenizer
        # The number of the examination that a process does.
        self._numbers: dict[int, int] = {}

    def begin(self, number: int, kind: str, text: str) -> None:
        if isinstance(self._tokenizer, str):
            _answer(number, self._tokenizer, "")
            return
        with _no_reaping():
            if child := os.fork():
                self._numbers[child] = number
                return
        _examine(self._tokenizer, number, Constraint(ConstraintKind(kind), text))

    def end(self, number: int) -> None:
        """Kill the process of an examination; it needs no answer."""
        with _no_reaping():
            for child in [child for child, its in self._numbers.items() if its == number]:
                del self._numbers[child]
                os.kill(child, signal.SIGKILL)

    def reap(self, *_: object) -> None:
        """Take the statuses of processes that have ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                number = self._numbers.pop(ended[0], None)
                if number is not None and ended[1]:
                    _answer(number, "", _TOO_COMPLEX)


@contextmanager
def _no_reaping() -> Iterator[None]:
    """Hold back the signal of ended processes; it comes afterwards."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _examine(tokenizer: LLTokenizer, number: int, constraint: Constraint) -> NoReturn:
    """Examine a constraint in a process that ends with it, at the latest by one of its timers."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, CONSTRAINT_CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, CONSTRAINT_SECONDS)
        _answer(number, "", *_verdict(tokenizer, constraint))
        status = 0
    finally:
        os._exit(status)


def _verdict(tokenizer: LLTokenizer, constraint: Constraint) -> tuple[str, float]:
    """Return what is wrong with a constraint, and the seconds of processor time to compile it."""
    began = time.process_time()
    try:
        matcher = _compiled(tokenizer, constraint)
    except ValueError as error:
        return _words(constraint.kind, str(error)), time.process_time() - began
    seconds = time.process_time() - began
    fault = fault_of(matcher, tokenizer)
    return ("" if not fault else _TOO_COMPLEX if passes_a_limit(fault) else _DEAD_END), seconds


def _answer(number: int, unsupported: str, wrong: str, seconds: float = 0.0) -> None:
    """Write a line at once; a pipe keeps lines whole that have less than 4096 bytes."""
    os.write(sys.stdout.fileno(), json.dumps([number, unsupported, wrong, seconds]).encode() + b"\n")


def main() -> None:
    """Examine until the input ends."""
    examiner = Examiner(_tokenizer(Path(sys.argv[1]), list(map(int, sys.argv[2:]))))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the router ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, examiner.reap)
    for line in sys.stdin:
        number, *constraint = json.loads(line)
        if constraint:
            examiner.begin(number, *constraint)
        else:
            examiner.end(number)


if __name__ == "__main__":
    main()
