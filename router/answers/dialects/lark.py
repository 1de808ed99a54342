"""Writes grammars in llguidance's form of Lark.

A mark such as `<tool_call>` is one token in some checkpoints and plain text in others. llguidance compares a token that
it takes for special as a whole: text that spells it is something else. `whole_tokens` says which tokens these are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from common.contracts.json_schema import enforceable
from router.answers.dialects.annotations import without_annotations
from router.answers.dialects.offered import Schema
from router.answers.dialects.quoted_lark import quoted_lark

# As in other constraints: one space between the parts of a document, and no keyword is ignored silently.
_OPTIONS = {"x-guidance": {"whitespace_pattern": " ", "lenient": False}}
TOO_DEEP = "a JSON schema is nested too deeply; make it flatter"


def whole_tokens(added: Iterable[tuple[str, int, bool]]) -> dict[str, int]:
    """Return those of a tokenizer's added tokens, (text, id, special), that llguidance compares as a whole."""
    return {text: token for text, token, special in added if special or (text[:1] == "<" and text[-1:] == ">")}


def literal(text: str) -> str:
    """Return a string as it stands in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def one_of(options: Sequence[str]) -> str:
    """Return an expression for one of these expressions."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


class Lark:
    """The rules of one grammar. Terminals have names in capitals."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        # The name of each rule, by the name that was asked for and its text; and how often each name was asked for.
        self._made: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}
        self.any = self.define("ANY", "/(?s:.*)/")

    def define(self, name: str, body: str, options: str = "") -> str:
        """Define a rule; return its name, which carries a number where another rule has it already."""
        rule = f"{options}: {body}"
        if (name, rule) not in self._made:
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
            self._made[name, rule] = name if number == 1 else f"{name}_{number}"
        return self._made[name, rule]

    def mark(self, text: str) -> str:
        """Return the expression of a mark: its token, or its text."""
        return f"<[{self._special[text]}]>" if text in self._special else literal(text)

    def json(self, schema: Schema) -> str:
        """Return a rule for the JSON documents that a schema allows."""
        return self.define("json", self.json_body(schema))

    def quoted(self, grammar: str) -> str:
        """Return an expression for a JSON string whose text another grammar allows."""
        text = self.define("text", f"%lark {{\n{quoted_lark(grammar)}}}")
        return f'"\\"" {text} "\\""'

    @staticmethod
    def json_body(schema: Schema) -> str:
        """Return the expression for the JSON documents that a schema allows."""
        try:
            plain = enforceable(without_annotations(schema))
            return f"%json {json.dumps(plain | _OPTIONS, separators=(',', ':'))}"
        except RecursionError as error:
            raise ValueError(TOO_DEEP) from error

    def text(self, without: Sequence[str], start: str = "") -> str:
        """Return a terminal for text in which none of these marks is spelled; `start` limits how it begins."""
        limits = [self.any, *(f"~({self.any} {literal(mark)} {self.any})" for mark in without)]
        return self.define("TEXT", " & ".join([start, *limits] if start else limits))

    def until(self, mark: str, without: Sequence[str] = (), start: str = "") -> str:
        """Return an expression for text up to a mark, and the mark."""
        if mark in self._special:
            return f"{self.text((mark, *without), start)} {self.mark(mark)}"
        limits = [f"({self.any} {literal(mark)})", *(f"~({self.any} {literal(other)} {self.any})" for other in without)]
        head = self.define("HEAD", " & ".join([start, *limits] if start else limits))
        return self.define("head", head, "[lazy]")

    def source(self, start: str) -> str:
        """Return the grammar whose outputs match the expression `start`."""
        return "\n".join([f"start: {start}", *(f"{name}{rule}" for (_, rule), name in self._made.items()), ""])
