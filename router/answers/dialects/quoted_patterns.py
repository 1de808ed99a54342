r"""Patterns of single tokens of a grammar, as JSON spells their texts: a line break is `\n`, a quote is `\"`.

Every character has one spelling: those of `ESCAPES` begin with a backslash, all others stand for themselves. So the
spelling of a pattern is the pattern of the spellings, part by part. `Patterns.tail` leaves out a leading backslash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# How each character that JSON escapes is spelled after its backslash.
ESCAPES: Final[Mapping[str, str]] = {
    each: json.dumps(each)[2:-1] for each in (*map(chr, range(0x20)), '"', "\\")
}  # fmt: skip
# In a class: what stands for itself.
_MOST_OPTIONAL: Final = 64
_PLAIN: Final = r'[^"\\\x00-\x1f]'


@dataclass(frozen=True, slots=True)
class Text:
    """A text, spelled."""

    spelled: str


@dataclass(frozen=True, slots=True)
class Character:
    """One character: of the class `plain`, in the syntax of Rust, or one that is escaped. `led`: by its backslash."""

    plain: str
    escapes: frozenset[str]
    led: bool = True


@dataclass(frozen=True, slots=True)
class Named:
    """Another terminal of the grammar, or its tail."""

    name: str
    is_tail: bool = False


@dataclass(frozen=True, slots=True)
class Common:
    """A terminal of the library that needs no escapes."""

    name: str


@dataclass(frozen=True, slots=True)
class Row:
    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Pattern
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class All:
    """What each of these patterns matches."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: Pattern


Pattern = Text | Character | Named | Common | Row | Choice | Repeat | All | Not
EMPTY: Final = Text("")
NOTHING: Final = Choice(())
_ANY: Final = Repeat(Character(_PLAIN, frozenset(ESCAPES)), 0, None)
# Any text but the empty one.
SOME: Final = Repeat(_ANY.part, 1, None)


def text(plain: str) -> Pattern:
    """Return the pattern of one text."""
    return Text(json.dumps(plain, ensure_ascii=False)[1:-1])


def character(source: str, holds: Iterable[str], folds: bool = False) -> Pattern:
    """Return the pattern of one character of a class: its source, and those that it holds of the escaped ones."""
    escapes = frozenset(holds)
    plain = f"[{source}&&{_PLAIN}]" if escapes else source
    return Character(f"(?i:{plain})" if folds else plain, escapes)


def any_character(but: Iterable[str] = ()) -> Pattern:
    """Return the pattern of one character that is none of these escaped ones."""
    return Character(_PLAIN, frozenset(ESCAPES) - frozenset(but))


def sequence(parts: Sequence[Pattern]) -> Pattern:
    """Return one pattern after another."""
    flat: list[Pattern] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        if isinstance(part, Text) and flat and isinstance(flat[-1], Text):
            flat[-1] = Text(flat[-1].spelled + part.spelled)
        elif part != EMPTY:
            flat.append(part)
    return flat[0] if len(flat) == 1 else Row(tuple(flat)) if flat else EMPTY


def choice(options: Iterable[Pattern]) -> Pattern:
    """Return any of these patterns."""
    found = tuple(dict.fromkeys(option for option in options if option != NOTHING))
    return found[0] if len(found) == 1 else Choice(found)


def excluded(part: Pattern) -> Pattern:
    """Return every text that a pattern does not match."""
    return All((_ANY, Not(part)))


class Patterns:
    """The terminals of a grammar by their names. Raises ValueError for unknown ones, and those that hold themselves."""

    def __init__(self, terminals: Mapping[str, Pattern]) -> None:
        self._terminals = terminals
        self._empty: dict[str, bool] = {}
        self._tails: dict[str, Pattern] = {}
        self._open: set[str] = set()

    def named(self, name: str, is_tail: bool = False) -> Pattern:
        """Return the pattern of a terminal, or of its tail."""
        if name not in self._terminals:
            raise ValueError(f"{name} is not defined; define it, or import it from common")
        if not is_tail:
            return self._terminals[name]
        if name not in self._tails:
            self._enter(name)
            self._tails[name] = self.tail(self._terminals[name])
            self._open.remove(name)
        return self._tails[name]

    def matches_empty(self, part: Pattern) -> bool:
        """Return whether a pattern matches the empty text."""
        match part:
            case Text():
                found = not part.spelled
            case Named():
                found = not part.is_tail and self._named_matches_empty(part.name)
            case Row() | All():
                found = all(map(self.matches_empty, part.parts))
            case Choice():
                found = any(map(self.matches_empty, part.options))
            case Repeat():
                found = part.least == 0 or self.matches_empty(part.part)
            case Not():
                found = not self.matches_empty(part.part)
            case Character() | Common():
                found = False
        return found

    def tail(self, part: Pattern) -> Pattern:
        """Return what follows the backslash in the spellings that begin with one; NOTHING where none does."""
        found: Pattern = NOTHING
        match part:
            case Text() if part.spelled[:1] == "\\":
                found = Text(part.spelled[1:])
            case Character() if part.escapes:
                found = Character("", part.escapes, led=False)
            case Named() if self.named(part.name, True) != NOTHING:
                found = Named(part.name, True)
            case Row():
                found = choice(self._tails_of(part.parts))
            case Choice():
                found = choice([self.tail(each) for each in part.options])
            case Repeat():
                most = None if part.most is None else part.most - 1
                found = sequence([self.tail(part.part), Repeat(part.part, max(part.least - 1, 0), most)])
            case All():
                tails = [self.tail(each) for each in part.parts]
                found = NOTHING if NOTHING in tails else All(tuple([each for each in tails if each != Not(NOTHING)]))
            case Not():
                found = Not(self.tail(part.part))
        return found

    def _tails_of(self, parts: Sequence[Pattern]) -> Iterable[Pattern]:
        for at, part in enumerate(parts):
            if at == _MOST_OPTIONAL:
                raise ValueError(f"a token begins with {at} parts that may be missing; expected fewer")
            yield sequence([self.tail(part), *parts[at + 1 :]])
            if not self.matches_empty(part):
                return

    def _named_matches_empty(self, name: str) -> bool:
        if name not in self._empty:
            self._enter(name)
            self._empty[name] = self.matches_empty(self.named(name))
            self._open.remove(name)
        return self._empty[name]

    def _enter(self, name: str) -> None:
        if name in self._open:
            raise ValueError(f"{name} contains itself; make it a rule, in small letters")
        self._open.add(name)


def names_in(part: Pattern) -> Iterable[Named | Common]:
    """Yield the other terminals that a pattern names."""
    waiting = [part]
    while waiting:
        match found := waiting.pop():
            case Named() | Common():
                yield found
            case Row() | All():
                waiting += found.parts
            case Choice():
                waiting += found.options
            case Repeat() | Not():
                waiting.append(found.part)


def written(part: Pattern) -> str:
    """Return a pattern as an expression of a terminal in llguidance's form of Lark."""
    match part:
        case Text():
            # The one character that JSON leaves as it is and this form does not take.
            found = json.dumps(part.spelled, ensure_ascii=False).replace("\x7f", r"\u007f")
        case Character():
            found = _written_character(part)
        case Named():
            found = f"{'T' if part.is_tail else 'N'}_{part.name}"
        case Common():
            found = f"C_{part.name}"
        case Row():
            found = f"({' '.join(map(written, part.parts))})"
        case Choice():
            found = f"({' | '.join(map(written, part.options))})"
        case Repeat():
            found = _written_repeat(part)
        case All():
            found = f"({' & '.join(map(written, part.parts))})"
        case Not():
            found = f"~({written(part.part)})"
    return found


def _written_character(part: Character) -> str:
    short = "".join(sorted(each[0] for each in map(ESCAPES.__getitem__, part.escapes) if len(each) == 1))
    options = [part.plain] if part.plain else []
    lead = r"\\" if part.led else ""
    if short:
        options.append(f"{lead}[{_in_class(short)}]")
    for high in "01":
        digits = sorted(each[4] for each in map(ESCAPES.__getitem__, part.escapes) if each[:4] == f"u00{high}")
        if digits:
            options.append(f"{lead}u00{high}[{''.join(digits)}]")
    return f"/{options[0]}/" if len(options) == 1 else f"/(?:{'|'.join(options)})/"


def _in_class(letters: str) -> str:
    return letters.replace("\\", r"\\")


def _written_repeat(part: Repeat) -> str:
    inner = written(part.part)
    match part.least, part.most:
        case 0, None:
            return f"({inner})*"
        case 1, None:
            return f"({inner})+"
        case least, None:
            return f"({inner}){{{least},}}"
        case _, 0:
            return '""'
        case least, most:
            return f"({inner}){{{least},{most}}}"
