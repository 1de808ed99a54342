"""The child process that examines constraints, one a line, for `router/constraints/checker.py`.

`python -m router.constraints.examiner TOKENIZER_JSON [EOS_ID ...]` reads lines `[kind, text]` in JSON. It answers
each with `[unsupported, wrong]`, which are sentences or empty. A constraint that takes too much processor time or
overflows the stack ends the process: llguidance can catch neither.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from common.constraint_grammar import grammar_of, parser_limits
from common.types import Constraint, ConstraintKind

# Processor time, so that a busy machine refuses no more than an idle one. Memory grows by about 100 MB a second
# (measured).
_MOST_SECONDS = 3.0
_MAX_WORDS = 400
# Error texts of llguidance, and what a client can do about them. The first match counts.
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


def _tokenizer(path: Path, eos_token_ids: list[int]) -> LLTokenizer | str:
    """Return the tokenizer, or why it cannot be used."""
    try:
        return LLTokenizer(str(path), eos_token=eos_token_ids or None)
    except ValueError as error:
        what = f"the tokenizer of this checkpoint cannot be constrained: {error}"
        return f"{what}; it must spell its tokens as bytes"


def _wrong(tokenizer: LLTokenizer, constraint: Constraint) -> str:
    try:
        grammar = grammar_of(constraint)
    except ValueError as error:
        return _words(constraint.kind, str(error))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return _words(constraint.kind, matcher.get_error()) if matcher.is_error() else ""


def _words(kind: ConstraintKind, message: str) -> str:
    """Return the mistake as a sentence: one of _PLAINER, else the first line of llguidance's own text."""
    for pattern, words in _PLAINER:
        if found := re.search(pattern, message, re.MULTILINE):
            return found.expand(words)[:_MAX_WORDS]
    first = message.strip().partition("\n")[0][:_MAX_WORDS]
    return f"is not valid: {first}; expected {_LANGUAGE[kind]}"


def main() -> None:
    """Answer each line until the input ends."""
    tokenizer = _tokenizer(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the router ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        kind, text = json.loads(line)
        unsupported, wrong = (tokenizer, "") if isinstance(tokenizer, str) else ("", "")
        if isinstance(tokenizer, LLTokenizer):
            signal.setitimer(signal.ITIMER_PROF, _MOST_SECONDS)  # its signal ends the process
            wrong = _wrong(tokenizer, Constraint(ConstraintKind(kind), text))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps([unsupported, wrong]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
