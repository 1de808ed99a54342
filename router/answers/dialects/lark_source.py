"""Reads a grammar in llguidance's form of Lark: its rules, its terminals and what is ignored between tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

# Groups within groups.
MAX_DEPTH: Final = 40
_MOST_TIMES: Final = 2**31 - 1
_TOKENS: Final = re.compile(
    r"(?P<line>(?:\r?\n)+[ \t]*)"
    r"|(?P<blank>[ \t]+|(?:#|//)[^\n]*)"
    r'|(?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[a-z]*)"
    r"|(?P<keyword>%[a-z]+)"
    r"|(?P<rule>[!?]*_?[a-z][_a-z0-9-]*)"
    r"|(?P<terminal>_?[A-Z][_A-Z0-9-]*)"
    r"|(?P<number>[0-9]+)"
    r"|(?P<special><[^<>\s]+>|@[a-zA-Z0-9_-]*)"
    r"|(?P<sign>->|\.\.|[:,.(){}\[\]~|&=+*?])"
)
_REFUSED: Final = {
    "json": "%json holds a schema", "lark": "%lark holds a grammar", "regex": "%regex holds a text",
    "declare": "%declare has no meaning here", "override": "%override has no meaning here",
    "llguidance": "%llguidance sets options",
}  # fmt: skip
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Literal:
    """A text; `folds`: in small letters and capitals alike."""

    text: str
    folds: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Regex:
    source: str
    flags: str


@dataclass(frozen=True, slots=True)
class Name:
    """A rule, in small letters, or a terminal, in capitals."""

    name: str

    @property
    def is_rule(self) -> bool:
        return self.name.strip("_")[:1].islower()


@dataclass(frozen=True, slots=True)
class Options:
    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Times:
    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Both:
    """What all of these match; in terminals alone."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Negation:
    """What this does not match; in terminals alone."""

    part: Expression


Expression = Literal | Range | Regex | Name | Options | Parts | Times | Both | Negation


@dataclass(slots=True)
class Grammar:
    """`common` has the names of imported terminals, by the names that they have here. `lazy` rules end early."""

    rules: dict[str, Expression] = field(default_factory=dict)
    terminals: dict[str, Expression] = field(default_factory=dict)
    common: dict[str, str] = field(default_factory=dict)
    ignored: list[Expression] = field(default_factory=list)
    lazy: set[str] = field(default_factory=set)


def read_grammar(source: str) -> Grammar:
    """Return a grammar. Raises ValueError that names what is wrong, or cannot be enforced, and its line."""
    return _Reader([*_tokens(source)]).read()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(source: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(source):
        found = _TOKENS.match(source, at)
        if found is None:
            raise ValueError(f"line {line}: {source[at]!r} begins nothing that a grammar has")
        assert found.lastgroup is not None
        if found.lastgroup != "blank":
            yield _Token(found.lastgroup, found[0], line)
        line += found[0].count("\n")
        at = found.end()
    yield _Token("line", "\n", line)
    yield _Token("end", "", line)


class _Reader:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._at, self._depth, self._found = tokens, 0, 0, Grammar()

    def read(self) -> Grammar:
        while self._skip_lines().kind != "end":
            token = self._next()
            match token.kind:
                case "rule":
                    self._rule(token.text.lstrip("!?"))
                case "terminal":
                    self._define(self._found.terminals, token.text)
                case "keyword":
                    self._statement(token.text[1:])
                case _:
                    raise self._wrong(token, "a rule, a terminal or a statement")
            if self._next().kind != "line":
                raise self._wrong(self._tokens[self._at - 1], "the end of the line")
        if "start" not in self._found.rules:
            raise ValueError("no rule is named start; a grammar begins with it")
        return self._found

    # ---------------------------------------------------------------- lines

    def _rule(self, name: str) -> None:
        if self._take("["):
            option = self._next()
            if option.text != "lazy":
                raise self._refused(
                    f"the option {option.text} of a rule is not enforced in the input of a tool; leave it out"
                )
            self._found.lazy.add(name)
            self._expect("]")
        self._define(self._found.rules, name)

    def _define(self, where: dict[str, Expression], name: str) -> None:
        for sign, what in ((".", "a priority"), ("{", "parameters")):
            if self._peek().text == sign:
                raise self._refused(f"{name} has {what}, which no grammar can have here; leave it out")
        self._expect(":")
        self._check_new(name)
        where[name] = self._options()

    def _check_new(self, name: str) -> None:
        if name in self._found.rules or name in self._found.terminals or name in self._found.common:
            raise self._refused(f"{name} is defined twice")

    def _statement(self, name: str) -> None:
        if name == "ignore":
            self._found.ignored.append(self._options())
        elif name == "import":
            self._import()
        else:
            raise self._refused_keyword(name)

    def _refused_keyword(self, name: str) -> ValueError:
        return self._refused(f"{_REFUSED.get(name, f'%{name} is not known')}; leave it out")

    def _import(self) -> None:
        library = self._next()
        if library.text != "common":
            raise self._refused(f"{library.text} is not a library; terminals can be imported from common only")
        if self._take("("):
            self._imported(self._next())
            while self._take(","):
                self._imported(self._next())
            self._expect(")")
            return
        self._expect(".")
        name = self._next()
        self._imported(name, self._next() if self._take("->") else name)

    def _imported(self, name: _Token, alias: _Token | None = None) -> None:
        alias = alias or name
        for each in (name, alias):
            if each.kind != "terminal":
                raise self._wrong(each, "the name of a terminal")
        self._check_new(alias.text)
        self._found.common[alias.text] = name.text

    # ---------------------------------------------------------------- expressions

    def _options(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"groups are nested more than {MAX_DEPTH} deep; make the grammar flatter")
        options = [self._both()]
        while self._bar():
            options.append(self._both())
        self._depth -= 1
        return options[0] if len(options) == 1 else Options(tuple(options))

    def _bar(self) -> bool:
        """Take a bar, which may stand on the next line."""
        if self._peek().kind == "line" and self._tokens[self._at + 1].text == "|":
            self._at += 1
        return self._take("|")

    def _both(self) -> Expression:
        parts = [self._row()]
        while self._take("&"):
            parts.append(self._row())
        if self._take("->") and (alias := self._next()).kind != "rule":  # it names a node of a tree, and there is none
            raise self._wrong(alias, "an alias, in small letters")
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def _row(self) -> Expression:
        parts: list[Expression] = []
        while self._peek().kind not in ("line", "end") and self._peek().text not in ("|", "->", ")", "]", "}", "&"):
            parts.append(self._times(self._atom()))
        return parts[0] if len(parts) == 1 else Parts(tuple(parts))

    def _times(self, part: Expression) -> Expression:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(sign):
                return Times(part, least, most)
        if self._take("~"):
            first = self._number()
            return self._bounded(part, first, self._number() if self._take("..") else first)
        if not self._take("{"):
            return part
        first = 0 if self._peek().text == "," else self._number()
        last: int | None = first
        if self._take(","):
            last = None if self._peek().text == "}" else self._number()
        self._expect("}")
        return self._bounded(part, first, last)

    def _bounded(self, part: Expression, least: int, most: int | None) -> Expression:
        if most is not None and (most < least or most == 0):
            raise self._refused(f"a part comes {least} to {most} times; the second number must be the larger one")
        return Times(part, least, most)

    def _number(self) -> int:
        token = self._next()
        if token.kind != "number" or len(token.text) > len(str(_MOST_TIMES)) or int(token.text) > _MOST_TIMES:
            raise self._wrong(token, f"a number up to {_MOST_TIMES}")
        return int(token.text)

    def _atom(self) -> Expression:
        token = self._next()
        match token.kind, token.text:
            case _, "~":
                return Negation(self._nested(self._atom))
            case _, "(":
                return self._closed(")")
            case _, "[":
                return Times(self._closed("]"), 0, 1)
            case "string", _:
                return self._string(token)
            case "regex", _:
                source, _, flags = token.text[1:].rpartition("/")
                return Regex(source, flags)
            case "rule" | "terminal", name:
                return self._name(name)
            case "special", _:
                raise self._refused(f"{token.text} is a token or another grammar; the input of a tool is a text")
            case "keyword", _:
                raise self._refused_keyword(token.text[1:])
        raise self._wrong(token, "a string, an expression, a name or a group")

    def _name(self, name: str) -> Expression:
        if self._peek().text == "{" and self._tokens[self._at + 1].kind in ("string", "regex", "rule", "terminal"):
            raise self._refused(f"{name} is used as a template, which no grammar can have here; write it out")
        return Name(name.lstrip("!?"))

    def _nested(self, read: Callable[[], ResultT]) -> ResultT:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"groups are nested more than {MAX_DEPTH} deep; make the grammar flatter")
        found = read()
        self._depth -= 1
        return found

    def _closed(self, closer: str) -> Expression:
        found = self._options()
        if self._peek().kind == "line":
            self._at += 1
        self._expect(closer)
        return found

    def _string(self, token: _Token) -> Expression:
        folds = token.text[-1] == "i"
        found = self._text(token, token.text[:-1] if folds else token.text)
        if folds or not self._take(".."):
            return Literal(found, folds)
        following = self._next()
        if following.kind != "string":
            raise self._wrong(following, "a string, the end of the range")
        last = self._text(following, following.text)
        if len(found) != 1 or len(last) != 1 or last < found:
            raise self._refused(f'the range "{found}".."{last}" must go from one character to a later one')
        return Range(found, last)

    def _text(self, token: _Token, source: str) -> str:
        try:
            found = str(json.loads(source))
            found.encode()
        except ValueError:  # of JSON, and of half a pair of surrogates
            raise self._wrong(token, "a string as JSON has them") from None
        return found

    # ---------------------------------------------------------------- tokens

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _skip_lines(self) -> _Token:
        while self._peek().kind == "line":
            self._at += 1
        return self._peek()

    def _take(self, sign: str) -> bool:
        if self._peek().kind != "sign" or self._peek().text != sign:
            return False
        self._at += 1
        return True

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise self._wrong(self._peek(), sign)

    def _wrong(self, token: _Token, expected: str) -> ValueError:
        shown = token.text[:40].strip() or "the end of the line"
        return ValueError(f"line {token.line}: found {shown}, expected {expected}")

    def _refused(self, what: str) -> ValueError:
        return ValueError(f"line {self._tokens[max(self._at - 1, 0)].line}: {what}")
