"""Reads regular expressions in Rust's syntax, as llguidance takes them, into patterns of their JSON spellings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from router.answers.dialects.quoted_patterns import (
    EMPTY,
    ESCAPES,
    Choice,
    Named,
    Pattern,
    Repeat,
    Row,
    any_character,
    character,
    choice,
    sequence,
    text,
)

MAX_DEPTH: Final = 40
# The largest number of repetitions that llguidance reads.
_MOST_TIMES: Final = 2**31 - 1
_SPECIAL: Final = frozenset(ESCAPES)
_CONTROLS: Final = _SPECIAL - {'"', "\\"}
_BLANKS: Final = frozenset("\t\n\v\f\r")
_NONE: Final[frozenset[str]] = frozenset()
_MARKS: Final = frozenset(('"', "\\"))
_LETTERS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_PERL: Final = {"d": _NONE, "w": _NONE, "s": _BLANKS}
_TIMES: Final = re.compile(r"\{\s*(\d{1,10})\s*(,)?\s*(\d{1,10})?\s*\}")
_CODE: Final = re.compile(r"x\{([0-9A-Fa-f]{1,8})\}|u\{([0-9A-Fa-f]{1,8})\}|U\{([0-9A-Fa-f]{1,8})\}|"
                          r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")  # fmt: skip
_PROPERTY: Final = re.compile(r"[pP](?:([A-Za-z])|\{(\^?)([A-Za-z0-9_ =:!-]{1,64})\})")
_FLAGS: Final = re.compile(r"\?([a-zA-Z-]*)([:)])")
_NAME: Final = re.compile(r"\?P?<([A-Za-z_][A-Za-z0-9_.\[\]]*)>")
_ASCII_CLASS: Final = re.compile(r"\[:(\^?)([a-z]+):\]")
_ASCII_CLASSES: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("alnum", "alpha", "digit", "lower", "upper", "word", "xdigit"), _NONE),
    "ascii": _SPECIAL,
    "blank": frozenset("\t"),
    "cntrl": _CONTROLS,
    "graph": _MARKS,
    "print": _MARKS,
    "punct": _MARKS,
    "space": _BLANKS,
}
# What Unicode's classes hold of the characters that JSON escapes, by names without blanks and hyphens.
_PROPERTIES: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("any", "ascii", "assigned", "common", "zyyy"), _SPECIAL),
    **dict.fromkeys(("c", "other", "cc", "control", "cntrl"), _CONTROLS),
    **dict.fromkeys(("p", "punctuation", "punct", "po", "otherpunctuation"), _MARKS),
    **dict.fromkeys(("whitespace", "wspace", "space"), _BLANKS),
    **dict.fromkeys(
        "l letter lu uppercaseletter ll lowercaseletter lt titlecaseletter lc casedletter lm modifierletter lo "
        "otherletter m mark mn nonspacingmark mc spacingmark me enclosingmark n number nd decimalnumber digit nl "
        "letternumber no othernumber s symbol sm mathsymbol sc currencysymbol sk modifiersymbol so othersymbol z "
        "separator zs spaceseparator zl lineseparator zp paragraphseparator pc connectorpunctuation pd "
        "dashpunctuation ps openpunctuation pe closepunctuation pi initialpunctuation pf finalpunctuation cf format "
        "co privateuse cn unassigned alphabetic alpha uppercase upper lowercase lower idstart ids idcontinue idc "
        "xidstart xids xidcontinue xidc ideographic emoji hexdigit asciihexdigit ahex latin greek cyrillic han "
        "hiragana katakana arabic hebrew hangul thai devanagari armenian georgian bengali tamil".split(),
        _NONE,
    ),
}  # fmt: skip
_START: Final = Named("^")
_END: Final = Named("$")
# Characters of an expression that an error shows.
_MOST_SHOWN: Final = 60


def read_regex(source: str, flags: str = "") -> Pattern:
    """Return the pattern of a regular expression. Raises ValueError that names what cannot be enforced."""
    return _without_anchors(_Reader(source, flags).read(), True, True)


class _Reader:
    """Reads one expression. `_flags` are those that hold where it reads: i and s count, the others change nothing."""

    def __init__(self, source: str, flags: str) -> None:
        self._source, self._at, self._depth = source, 0, 0
        self._flags: frozenset[str] = frozenset()
        self._set(flags)

    def read(self) -> Pattern:
        found = self._choice()
        if self._at < len(self._source):
            raise self._refused("has a ) that closes nothing")
        return found

    # ---------------------------------------------------------------- choices, rows, repetitions

    def _choice(self) -> Pattern:
        options = [self._row()]
        while self._take("|"):
            options.append(self._row())
        # An option that matches nothing but the empty text stays.
        return choice(options)

    def _row(self) -> Pattern:
        parts: list[Pattern] = []
        while (found := self._peek()) and found not in "|)":
            parts.append(self._repeated(self._atom()))
        return sequence(parts)

    def _repeated(self, part: Pattern) -> Pattern:
        """Read what says how often a part comes. That it comes as seldom as it can changes no language."""
        while found := self._peek():
            if found in "*+?":
                self._at += 1
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found]
            elif found == "{":
                least, most = self._times()
            else:
                break
            self._take("?")
            if part in (_START, _END):
                raise self._refused("repeats an anchor")
            part = EMPTY if most == 0 else Repeat(part, least, most)
        return part

    def _times(self) -> tuple[int, int | None]:
        found = _TIMES.match(self._source, self._at)
        if found is None:
            raise self._refused("has a { without numbers; write \\{ for the character")
        self._at = found.end()
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if least > _MOST_TIMES or (most is not None and not least <= most <= _MOST_TIMES):
            raise self._refused(f"repeats {found[0]}")
        return least, most

    # ---------------------------------------------------------------- atoms

    def _atom(self) -> Pattern:
        found = self._next()
        match found:
            case "(":
                return self._group()
            case "[":
                begin = self._at - 1
                holds = self._class()
                return character(self._source[begin : self._at], holds, "i" in self._flags)
            case ".":
                return any_character() if "s" in self._flags else any_character("\n")
            case "^" | "$":
                return self._anchor(_START if found == "^" else _END)
            case "*" | "+" | "?" | "{":
                raise self._refused(f"has a {found} after nothing")
            case "\\":
                return self._escape()
        return self._literal(found, found)

    def _group(self) -> Pattern:
        """Read a group after its bracket, or flags, which hold up to the end of the group around them."""
        flags, self._depth = self._flags, self._depth + 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"is nested more than {MAX_DEPTH} deep")
        if named := _NAME.match(self._source, self._at):
            self._at = named.end()
        elif switched := _FLAGS.match(self._source, self._at):
            self._at = switched.end()
            self._set(switched[1])
            if switched[2] == ")":
                self._depth -= 1
                return EMPTY
        elif self._peek() == "?":
            raise self._refused(
                f"has {self._source[self._at - 1 : self._at + 3]}, a look-around or what Rust does not know"
            )
        found = self._choice()
        if not self._take(")"):
            raise self._refused("has a ( that is not closed")
        self._flags, self._depth = flags, self._depth - 1
        return found

    def _set(self, flags: str) -> None:
        switched_on, _, switched_off = flags.partition("-")
        if wrong := set(switched_on + switched_off) - set("imsuU") or ({"u"} & set(switched_off)):
            raise self._refused(f"has the flag {min(wrong)}")
        self._flags = (self._flags | set(switched_on)) - set(switched_off)

    def _anchor(self, anchor: Pattern) -> Pattern:
        if "m" in self._flags:
            raise self._refused("has ^ or $ with the flag m, a look-around")
        return anchor

    def _escape(self) -> Pattern:
        begin = self._at - 1
        found = self._peek()
        if found in ("A", "z"):
            self._at += 1
            return _START if found == "A" else _END
        one, holds = self._escaped()
        if one is not None:
            return self._literal(one, self._source[begin : self._at])
        return character(self._source[begin : self._at], holds, "i" in self._flags)

    def _literal(self, one: str, source: str) -> Pattern:
        if "i" in self._flags and one not in ESCAPES:
            return character(source, (), folds=True)
        return text(one)

    def _escaped(self) -> tuple[str | None, frozenset[str]]:
        """Read what follows a backslash: one character, or what a class holds of the escaped ones."""
        if code := _CODE.match(self._source, self._at):
            self._at = code.end()
            number = int(next(filter(None, code.groups())), 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise self._refused(f"has \\{code[0]}, which is not a character")
            return chr(number), _NONE
        if named := _PROPERTY.match(self._source, self._at):
            self._at = named.end()
            holds = self._property(named[1] or named[3], named[0])
            return None, holds if (named[0][0] == "p") is not bool(named[2]) else _SPECIAL - holds
        found = self._next()
        if found.lower() in _PERL:
            holds = _PERL[found.lower()]
            return None, holds if found.islower() else _SPECIAL - holds
        if found in _LETTERS:
            return _LETTERS[found], _NONE
        if found.isascii() and not found.isalnum() and found not in "<>":
            return found, _NONE
        raise self._refused(f"has \\{found}, a look-around, a back-reference or what Rust does not know")

    def _property(self, name: str, given: str) -> frozenset[str]:
        kind, _, value = name.rpartition("=") if "=" in name else ("", "", name)
        plain = re.sub(r"[ _-]", "", value).lower()
        if re.sub(r"[ _-]", "", kind).lower() in ("script", "sc", "scriptextensions", "scx"):
            return _SPECIAL if plain in ("common", "zyyy") else _NONE
        if plain not in _PROPERTIES:
            raise self._refused(f"has the class \\{given}, which is not known here")
        return _PROPERTIES[plain]

    # ---------------------------------------------------------------- classes

    def _class(self) -> frozenset[str]:
        """Read a class after its bracket; return which of the escaped characters it holds."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._refused(f"is nested more than {MAX_DEPTH} deep")
        negated = self._take("^")
        holds = self._union(True)
        while (operator := self._source[self._at : self._at + 2]) in ("&&", "--", "~~"):
            self._at += 2
            other = self._union(False)
            holds = holds & other if operator == "&&" else holds - other if operator == "--" else holds ^ other
        if not self._take("]"):
            raise self._refused("has a [ that is not closed")
        self._depth -= 1
        return _SPECIAL - holds if negated else holds

    def _union(self, first: bool) -> frozenset[str]:
        holds: frozenset[str] = _NONE
        while found := self._peek():
            if (found == "]" and not first) or self._source.startswith(("&&", "--", "~~"), self._at):
                break
            holds |= self._item()
            first = first and found == "-"
        return holds

    def _item(self) -> frozenset[str]:
        if posix := _ASCII_CLASS.match(self._source, self._at):
            self._at = posix.end()
            if posix[2] not in _ASCII_CLASSES:
                raise self._refused(f"has the class {posix[0]}, which is not known here")
            found = _ASCII_CLASSES[posix[2]]
            return _SPECIAL - found if posix[1] else found
        if self._take("["):
            return self._class()
        low, holds = self._member()
        if low is None:
            return holds
        high = low
        if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("]", "-", ""):
            self._at += 1
            last, _ = self._member()
            if last is None or last < low:
                raise self._refused("has a range in a class that ends before it begins")
            high = last
        return frozenset(each for each in _SPECIAL if low <= each <= high)

    def _member(self) -> tuple[str | None, frozenset[str]]:
        found = self._next()
        return self._escaped() if found == "\\" else (found, _NONE)

    # ---------------------------------------------------------------- characters

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _next(self) -> str:
        if not (found := self._peek()):
            raise self._refused("ends too early")
        self._at += 1
        return found

    def _take(self, wanted: str) -> bool:
        if self._peek() != wanted:
            return False
        self._at += 1
        return True

    def _refused(self, what: str) -> ValueError:
        shown = self._source if len(self._source) <= _MOST_SHOWN else f"{self._source[:_MOST_SHOWN]}..."
        return ValueError(f"the expression /{shown}/ {what}")


def _without_anchors(found: Pattern, first: bool, last: bool) -> Pattern:
    """Leave out anchors where they say nothing: a token begins and ends where its expression does."""
    if (found == _START and first) or (found == _END and last):
        return EMPTY
    if found in (_START, _END):
        raise ValueError("an expression has ^ or $ within it, a look-around; leave it out")
    match found:
        case Choice():
            return choice([_without_anchors(each, first, last) for each in found.options])
        case Repeat():
            return Repeat(_without_anchors(found.part, False, False), found.least, found.most)
        case Row():
            return sequence(_row_without_anchors(found.parts, first, last))
    return found


def _row_without_anchors(parts: Sequence[Pattern], first: bool, last: bool) -> list[Pattern]:
    begin = next((at for at, each in enumerate(parts) if each != _START), len(parts))
    end = next((at for at in range(len(parts), begin, -1) if parts[at - 1] != _END), begin)
    return [_without_anchors(each, first and at <= begin, last and at >= end - 1) for at, each in enumerate(parts)]
