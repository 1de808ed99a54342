r"""Rewrites a grammar in Lark into one of its texts as JSON spells them, between the quotes of a string.

llguidance splits an output into tokens as it comes: a token ends before the byte with which no token can go on, and
nothing is taken back. In the spelling that byte is often too late. After `abc` a backslash may belong to `\t`, with
which a word of blanks and letters goes on, or to `\n`, with which the next token begins:

    grammar     WORD: /[a-z\t]+/     LF: "\n"          text        abc | LF
    spelling    abc  \n              a token that takes the backslash cannot end before the n

So a token may take the backslash of its successor along, and the successor is written without it. Every rule exists for
each pair of states, before and after it: `p`, between two characters, and `e`, behind a backslash that is taken. A rule
with two parts goes from state to state by all that is between them. Those that lead nowhere are left out, so that a
grammar whose tokens begin with no escaped character stays as it is. Where it ignores blanks, these are tokens between
the others; `b` is the state before the first token. Before that and after the last token none is ignored.

A character that JSON spells with \u00 is told from its like too late as well: a token that may go on with some of these
characters and not with others does not end before one of the others. Nothing wrong is allowed by that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Final

from common.contracts.limits import MAX_CONSTRAINT_BYTES, MAX_TOOL_GRAMMAR_BYTES
from router.answers.dialects.lark_source import (
    Both,
    Expression,
    Grammar,
    Literal,
    Name,
    Negation,
    Options,
    Parts,
    Range,
    Regex,
    Times,
    read_grammar,
)
from router.answers.dialects.quoted_patterns import (
    EMPTY,
    ESCAPES,
    NOTHING,
    SOME,
    All,
    Common,
    Named,
    Pattern,
    Patterns,
    Repeat,
    character,
    choice,
    excluded,
    names_in,
    sequence,
    text,
    written,
)
from router.answers.dialects.quoted_regex import read_regex

_BEGIN, _PLAIN, _ESCAPED = "b", "p", "e"
_LATER: Final = _PLAIN + _ESCAPED
# The name of what is ignored, which no terminal of a grammar has.
_IGNORED: Final = "0"
# What the library of terminals has that JSON escapes; its other terminals are spelled as they are.
_LIBRARY: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
        "WS_INLINE": r"[ \t]+",
        "WS": r"[ \t\f\r\n]+",
        "CR": r"\r",
        "LF": r"\n",
        "NEWLINE": r"(\r?\n)+",
        "SH_COMMENT": r"#[^\n]*",
        "CPP_COMMENT": r"\/\/[^\n]*",
        "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
        "SQL_COMMENT": r"--[^\n]*",
    }
)
_PLAIN_LIBRARY: Final = frozenset(
    "DIGIT HEXDIGIT INT SIGNED_INT DECIMAL _EXP FLOAT SIGNED_FLOAT NUMBER SIGNED_NUMBER LCASE_LETTER UCASE_LETTER "
    "LETTER WORD CNAME".split()
)


def quoted_lark(grammar: str) -> str:
    """Return the grammar of the JSON spellings of a grammar's texts, without the quotes around them.

    Raises ValueError that names what is wrong with the grammar, or what in it cannot be enforced.
    """
    size = len(grammar.encode())
    if size > MAX_TOOL_GRAMMAR_BYTES:
        raise ValueError(f"it has {size} bytes; expected at most {MAX_TOOL_GRAMMAR_BYTES}")
    return _rewritten(grammar)


@lru_cache(maxsize=32)
def _rewritten(grammar: str) -> str:
    """Rewrite a grammar; an agent sends the same one with each request."""
    try:
        return _Writer(_Rules(read_grammar(grammar))).source()
    except RecursionError as error:
        raise ValueError("it is nested too deeply; make it flatter") from error


# ---------------------------------------------------------------- rules of at most two parts

_Symbol = str
_Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of the parser. A `lazy` one ends where it first can, so that it takes no backslash along.

    `begins` are the states before which it may stand.
    """

    pattern: Pattern
    lazy: bool = False
    begins: str = _BEGIN + _PLAIN + _ESCAPED


@dataclass(slots=True)
class _Rules:
    """The rules that `start` needs, as alternatives of at most two symbols: rules `r1`, tokens `X1`, lazy ones `z1`."""

    grammar: Grammar
    start: _Symbol = ""
    alternatives: dict[_Symbol, list[tuple[_Symbol, ...]]] = field(default_factory=dict)
    tokens: dict[_Symbol, _Token] = field(default_factory=dict)
    patterns: Patterns = field(init=False)
    terminals: dict[str, Pattern] = field(default_factory=dict)
    _symbols: dict[object, _Symbol] = field(default_factory=dict)
    _waiting: list[str] = field(default_factory=list)
    _gap: _Symbol = ""

    def __post_init__(self) -> None:
        self.terminals |= {name: _common(library) for name, library in self.grammar.common.items()}
        self.terminals |= {name: self._pattern(body) for name, body in self.grammar.terminals.items()}
        self.patterns = Patterns(self.terminals)
        if self.grammar.ignored:
            self.terminals[_IGNORED] = choice([self._pattern(each) for each in self.grammar.ignored])
            token = self._new_token(_Token(Named(_IGNORED), begins=_LATER))
            self._gap = self._rule(("gap",), [(token,)])
            self.alternatives[self._gap].append((self._gap, token))
        self.start = self._named("start")
        while self._waiting:
            name = self._waiting.pop()
            self.alternatives[self._symbols[name]] = [(self._body(name),)]

    # ------------------------------------------------------------ rules

    def _named(self, name: str) -> _Symbol:
        """Return the symbol of a rule, whose body is made later."""
        if name not in self.grammar.rules:
            raise ValueError(f"{name} is not defined; define this rule")
        if name not in self._symbols:
            self._symbols[name] = self._number()
            self.alternatives[self._symbols[name]] = []
            self._waiting.append(name)
        return self._symbols[name]

    def _body(self, name: str) -> _Symbol:
        if name not in self.grammar.lazy:
            return self._symbol(self.grammar.rules[name])
        pattern = self._pattern(self.grammar.rules[name])
        if self.patterns.matches_empty(pattern):
            raise ValueError(f"{name} is lazy and may be empty, so that it always is; let it end with a mark")
        return self._token(pattern, lazy=True)

    def _symbol(self, found: Expression) -> _Symbol:
        match found:
            case Name() if found.is_rule:
                return self._named(found.name)
            case Options():
                return self._rule(("any", found), [(self._symbol(each),) for each in found.options])
            case Parts():
                return self._row([self._symbol(each) for each in found.parts])
            case Times():
                return self._times(self._symbol(found.part), found.least, found.most)
            case Both() | Negation():
                raise ValueError("a rule has & or ~; put them into a terminal, in capitals")
        return self._token(self._pattern(found))

    def _row(self, symbols: list[_Symbol]) -> _Symbol:
        if not symbols:
            return self._rule(("empty",), [()])
        row = symbols[-1]
        for symbol in reversed(symbols[:-1]):
            row = self._rule(("row", symbol, row), [(symbol, row)])
        return row

    def _times(self, part: _Symbol, least: int, most: int | None) -> _Symbol:
        if most is not None:
            more = [self._up_to(part, most - least)] if most > least else []
            return self._row([self._exactly(part, least), *more] if least else more)
        any_times = self._rule(("star", part), [()])
        if len(self.alternatives[any_times]) == 1:
            self.alternatives[any_times].append((any_times, part))
        if least <= 1:
            return any_times if not least else self._rule(("plus", part), [(any_times, part)])
        return self._row([any_times, self._exactly(part, least)])

    def _exactly(self, part: _Symbol, times: int) -> _Symbol:
        """Return a rule of so many parts; halves are shared, so that it takes few rules."""
        if times == 1:
            return part
        if (key := ("exactly", part, times)) not in self._symbols:
            self._rule(key, [(self._exactly(part, times // 2), self._exactly(part, times - times // 2))])
        return self._symbols[key]

    def _up_to(self, part: _Symbol, times: int) -> _Symbol:
        if times == 1:
            return self._rule(("maybe", part), [(), (part,)])
        if (key := ("up to", part, times)) not in self._symbols:
            self._rule(key, [(self._up_to(part, times // 2), self._up_to(part, times - times // 2))])
        return self._symbols[key]

    def _rule(self, key: object, alternatives: list[tuple[_Symbol, ...]]) -> _Symbol:
        """Return the rule of these alternatives, which has this key."""
        if key not in self._symbols:
            self._symbols[key] = self._number()
            self.alternatives[self._symbols[key]] = alternatives
        return self._symbols[key]

    def _number(self) -> _Symbol:
        if len(self.alternatives) == _MOST_RULES:
            raise ValueError(_TOO_LARGE)
        return f"r{len(self.alternatives) + 1}"

    # ------------------------------------------------------------ tokens

    def _token(self, pattern: Pattern, lazy: bool = False) -> _Symbol:
        """Return the symbol of a token, with what is ignored before it; one that may be empty may be missing."""
        if pattern == EMPTY:
            return self._row([])
        symbol = self._after_gap(pattern, lazy) if self._gap else self._new_token(_Token(pattern, lazy))
        may_be_missing = self.patterns.matches_empty(pattern)
        return self._rule(("maybe", symbol), [(), (symbol,)]) if may_be_missing else symbol

    def _after_gap(self, pattern: Pattern, lazy: bool) -> _Symbol:
        """Return the rule of a token that is the first one, or has before it what is ignored.

        What is ignored is not a token, whatever else matches it; before the first token nothing is ignored.
        """
        first = All((pattern, SOME))
        later = first if lazy else All((first, excluded(Named(_IGNORED))))
        one = self._new_token(_Token(first, lazy, _BEGIN))
        other = self._new_token(_Token(later, lazy, _LATER))
        return self._rule(("after gap", one), [(one,), (other,), (self._gap, other)])

    def _new_token(self, token: _Token) -> _Symbol:
        if token not in self._symbols:
            # llguidance has lazy tokens with names of rules.
            self._symbols[token] = f"{'z' if token.lazy else 'X'}{len(self.tokens) + 1}"
            self.tokens[self._symbols[token]] = token
        return self._symbols[token]

    def _pattern(self, found: Expression) -> Pattern:
        match found:
            case Options():
                made = choice([self._pattern(each) for each in found.options])
            case Parts():
                made = sequence([self._pattern(each) for each in found.parts])
            case Times():
                made = Repeat(self._pattern(found.part), found.least, found.most)
            case Both():
                made = All(tuple([self._pattern(each) for each in found.parts]))
            case Negation():
                made = excluded(self._pattern(found.part))
            case Name():
                made = self._terminal(found.name)
            case Regex():
                made = read_regex(found.source, found.flags)
            case Range():
                made = _range(found)
            case Literal():
                made = _folded(found.text) if found.folds else text(found.text)
        return made

    def _terminal(self, name: str) -> Pattern:
        if name in self.grammar.rules:
            raise ValueError(f"the rule {name} stands in a terminal; name it in capitals")
        if name not in self.grammar.terminals and name not in self.grammar.common:
            raise ValueError(f"{name} is not defined; define it, or import it from common")
        return Named(name)


def _folded(folded: str) -> Pattern:
    return sequence([text(each) if each in ESCAPES else character(_code(each), (), True) for each in folded])


def _common(name: str) -> Pattern:
    if name in _LIBRARY:
        return read_regex(_LIBRARY[name])
    if name not in _PLAIN_LIBRARY:
        known = ", ".join(sorted(_PLAIN_LIBRARY | {*_LIBRARY}))
        raise ValueError(f"common.{name} is not known; expected one of {known}")
    return Common(name)


def _range(found: Range) -> Pattern:
    held = [each for each in ESCAPES if found.first <= each <= found.last]
    return character(f"[{_code(found.first)}-{_code(found.last)}]", held)


def _code(one: str) -> str:
    return f"\\x{{{ord(one):x}}}"


_TOO_LARGE: Final = "it is too large; expected fewer rules and repetitions"
# Rules of at most two parts.
_MOST_RULES: Final = 4096


# ---------------------------------------------------------------- from state to state


class _Writer:
    """Writes the rules for each pair of states that leads from the start to the end of a text."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        self._states = (_BEGIN, _PLAIN, _ESCAPED) if rules.grammar.ignored else (_PLAIN, _ESCAPED)
        self._pairs: dict[_Symbol, set[_Pair]] = defaultdict(set)
        self._lines: list[str] = []
        self._size = 0
        self._tails = {symbol: rules.patterns.tail(token.pattern) for symbol, token in rules.tokens.items()}
        self._follow()

    def source(self) -> str:
        """Return the grammar."""
        start, begin = self._rules.start, self._states[0]
        starts = [
            (start, pair) for pair in dict.fromkeys([(begin, begin), (begin, _PLAIN)]) if pair in self._pairs[start]
        ]
        if not starts:
            raise ValueError("it allows no text at all")
        self._write(f"start: {' | '.join([_name(*each) for each in starts])}")
        seen, waiting = set(starts), starts
        while waiting:
            symbol, pair = waiting.pop()
            options = self._token_lines(symbol, pair) if symbol in self._rules.tokens else self._rule_line(symbol, pair)
            for each in options:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        self._write_terminals(seen)
        return "\n".join([*self._lines, ""])

    def _write(self, line: str) -> None:
        self._size += len(line)
        if self._size > MAX_CONSTRAINT_BYTES:
            raise ValueError(_TOO_LARGE)
        self._lines.append(line)

    # ------------------------------------------------------------ what leads where

    def _follow(self) -> None:
        """Find the pairs of states that each symbol leads between. Each new pair is tried where its symbol stands."""
        users: dict[_Symbol, list[tuple[_Symbol, tuple[_Symbol, ...]]]] = defaultdict(list)
        waiting: list[tuple[_Symbol, _Pair]] = []
        for symbol, token in self._rules.tokens.items():
            waiting += [(symbol, pair) for pair in self._pairs_of(symbol, token)]
        for rule, alternatives in self._rules.alternatives.items():
            for parts in alternatives:
                for part in dict.fromkeys(parts):
                    users[part].append((rule, parts))
                if not parts:
                    waiting += [(rule, (state, state)) for state in self._states]
        while waiting:
            symbol, pair = waiting.pop()
            if pair in self._pairs[symbol]:
                continue
            self._pairs[symbol].add(pair)
            for rule, parts in users[symbol]:
                waiting += [(rule, found) for found in self._through(parts) if found not in self._pairs[rule]]

    def _through(self, parts: tuple[_Symbol, ...]) -> set[_Pair]:
        if len(parts) == 1:
            return self._pairs[parts[0]]
        return {(a, d) for (a, b), (c, d) in product(self._pairs[parts[0]], self._pairs[parts[1]]) if b == c}

    def _pairs_of(self, symbol: _Symbol, token: _Token) -> Iterator[_Pair]:
        ends = (_PLAIN,) if token.lazy else (_PLAIN, _ESCAPED)
        for before in self._states:
            rest = token.pattern if before != _ESCAPED else self._tails[symbol]
            if rest != NOTHING and before in token.begins:
                yield from ((before, after) for after in ends)

    # ------------------------------------------------------------ lines

    def _rule_line(self, symbol: _Symbol, pair: _Pair) -> list[tuple[_Symbol, _Pair]]:
        """Write a rule for a pair of states; return what it needs."""
        needed: list[tuple[_Symbol, _Pair]] = []
        options: list[str] = []
        for parts in self._rules.alternatives[symbol]:
            for found in self._ways(parts, pair):
                needed += found
                options.append(" ".join([_name(*each) for each in found]) or '""')
        self._write(f"{_name(symbol, pair)}: {' | '.join(options)}")
        return needed

    def _ways(self, parts: tuple[_Symbol, ...], pair: _Pair) -> Iterator[list[tuple[_Symbol, _Pair]]]:
        """Yield the symbols of an alternative with their states, for each state between two of them."""
        before, after = pair
        if not parts:
            if before == after:
                yield []
        elif len(parts) == 1:
            if pair in self._pairs[parts[0]]:
                yield [(parts[0], pair)]
        else:
            first, second = parts
            for state in self._states:
                if (before, state) in self._pairs[first] and (state, after) in self._pairs[second]:
                    yield [(first, (before, state)), (second, (state, after))]

    def _token_lines(self, symbol: _Symbol, pair: _Pair) -> list[tuple[_Symbol, _Pair]]:
        token, (before, after) = self._rules.tokens[symbol], pair
        pattern = self._tails[symbol] if before == _ESCAPED else token.pattern
        taken = r' "\\"' if after == _ESCAPED else ""
        lazy = "[lazy]" if token.lazy else ""
        self._write(f"{_name(symbol, pair)}{lazy}: {written(pattern)}{taken}")
        return []

    def _write_terminals(self, used: set[tuple[_Symbol, _Pair]]) -> None:
        """Write the terminals that these tokens name, and those that they name."""
        waiting = [
            self._tails[symbol] if before == _ESCAPED else self._rules.tokens[symbol].pattern
            for symbol, (before, _) in sorted(used)
            if symbol in self._rules.tokens
        ]
        seen: set[Pattern] = set()
        while waiting:
            for each in names_in(waiting.pop()):
                if each in seen:
                    continue
                seen.add(each)
                if isinstance(each, Common):
                    self._write(f"%import common.{each.name} -> {written(each)}")
                else:
                    body = self._rules.patterns.named(each.name, each.is_tail)
                    self._write(f"{written(each)}: {written(body)}")
                    waiting.append(body)


def _name(symbol: _Symbol, pair: _Pair) -> str:
    """Return the name of a rule or token for a pair of states."""
    states = "".join(pair)
    return f"{symbol}_{states.upper() if symbol[0] == 'X' else states}"
