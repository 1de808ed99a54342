r"""Grammars of JSON spellings against llguidance's own matcher of the grammars that they come from.

A text is allowed by the one exactly when its spelling is allowed by the other.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from common.contracts.limits import MAX_TOOL_GRAMMAR_BYTES
from router.answers.dialects.quoted_lark import quoted_lark
from tests.support.examples import up_to

BYTES = LLTokenizer("byte")
ALPHABET = 'ab"\\\n\t\x01é '


@cache
def compiled(lark: str) -> LLMatcher:
    made = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    assert not made.is_error(), (made.get_error(), lark)
    return made


def allows(lark: str, text: str) -> bool:
    at, given_bytes = compiled(lark).deep_copy(), list(text.encode())
    return at.try_consume_tokens(given_bytes) == len(given_bytes) and at.is_accepting()


def spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def walk(lark: str, draw: random.Random) -> str:
    """Return a text that begins as the grammar wants, and ends where it may or after some characters."""
    at, text = compiled(lark).deep_copy(), ""
    for _ in range(12):
        if at.is_stopped() or (at.is_accepting() and draw.random() < 0.2):
            break
        following: list[str] = [
            each for each in ALPHABET if at.validate_tokens(list(each.encode())) == len(each.encode())
        ]
        if not following:
            break
        text = text + draw.choice(following)
        at.consume_tokens(list(text[-1].encode()))
    return text


def mutated(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    put: str = draw.choice(["", *ALPHABET])
    return text[:at] + put + text[at + draw.randrange(2) :]


PIECES = st.one_of(
    st.text(ALPHABET, min_size=1, max_size=2).map(json.dumps),
    st.sampled_from(
        (
            "/a+/", "/./", "/.*/", "/[^b]+/", r"/[a\n]*/", r"/[ \n]+/", r'/["\\]/', r"/[^\n]*\n/", "/(?s:.)/", "/a?/i",
            r"/\\+a?/",
            r"/[\t\x01a]{1,2}/", r"/b|\n\n/", '"ab"i', r'" ".."b"', r"/\W/", r"/[^\"]*\"/", r"/(a\n)+/", r"/\x01*b/",
        )
    ),
)  # fmt: skip


def composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    row = st.lists(inner, min_size=1, max_size=3).map(" ".join)
    grouped = st.lists(row, min_size=1, max_size=3).map(lambda options: f"({' | '.join(options)})")
    return st.one_of(
        grouped, st.tuples(grouped, st.sampled_from(("*", "+", "?", "{2}", "{1,3}", "~0..2"))).map("".join)
    )


TERMINALS = st.one_of(
    st.recursive(PIECES, composed, max_leaves=4),
    st.tuples(PIECES, PIECES).map(" & ".join),
    PIECES.map(lambda piece: f"/(?s:.{{0,3}})/ & ~{piece}"),
)
BODIES = st.recursive(st.one_of(PIECES, st.sampled_from(("A", "B", "C", "first", "second"))), composed, max_leaves=6)


@st.composite
def grammars(draw: st.DrawFn) -> str:
    lines = [f"start: {draw(BODIES)}", f'first: {draw(BODIES)} | "a"', f'second: "b" | {draw(BODIES)}']
    lines += [f"A: {draw(TERMINALS)}", f"B: {draw(TERMINALS)} | A /b/", "%import common.LF -> C"]
    return "\n".join([*lines, ""])


def is_usable(lark: str) -> bool:
    return not LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0).is_error()


@given(grammars(), st.randoms(use_true_random=False), st.lists(st.text(ALPHABET, max_size=5), max_size=5))
@settings(max_examples=up_to(300), deadline=None)
def test_a_text_is_allowed_exactly_when_its_spelling_is(lark: str, draw: random.Random, texts: list[str]) -> None:
    if not is_usable(lark):
        return
    rewritten = quoted_lark(lark)
    walks = [walk(lark, draw) for _ in range(8)]
    for text in [*texts, "", *walks, *(mutated(each, draw) for each in walks)]:
        assert allows(rewritten, spelled(text)) == allows(lark, text), (lark, rewritten, text)


# ---------------------------------------------------------------- grammars as they are sent

# The form of patches that Codex CLI sends, in other words for the same.
PATCH = r"""
start: opening file+ closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?
file: added | deleted | updated
added: "*** Add File: " path LF new_line+
deleted: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? changes?
moved: "*** Move to: " path LF
changes: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF
path: /(.+)/
new_line: "+" /(.*)/ LF -> line
%import common.LF
"""
PATCHED = (
    '*** Begin Patch\n*** Add File: a/"b".py\n+print("hi\\n")\n+\n+\tx\n*** Update File: é.py\n*** Move to: c.py\n'
    "@@ def f():\n-\told\n+new\n ctx\n*** End of File\n*** Delete File: z\n*** End Patch"
)
ARITHMETIC = r"""
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: factor (SP MUL SP factor)* -> mul
    | factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
TIMESTAMP = r"""
start: /^(?P<month>May|June)\s+(?P<day>\d{1,2})(?:th)?\s+(?P<year>\d{4})\s+at\s+(?P<h>0?[1-9]|1[0-2])(?P<m>AM|PM)$/
"""
CASES = [
    (PATCH, [PATCHED, PATCHED + "\n", PATCHED.replace("@@ def f():", "@@")],
     ["", PATCHED[:-1], PATCHED + "\n\n", PATCHED.replace("\n+\n", "\n\n"), "*** Begin Patch\n*** End Patch"]),
    (ARITHMETIC, ["1", "4 + 4", "12 * 3 + 4"], ["", "4+4", "4 +", "a"]),
    (TIMESTAMP, ["May 7th 2025 at 10AM", "May\n\t7 2025 at 01PM"], ["May 7 2025", "^May 7th 2025 at 10AM"]),
    ('start: QUOTED ("," QUOTED)*\n%import common.ESCAPED_STRING -> QUOTED\n%import common (WS, INT)\n%ignore WS\n',
     ['"a"', '"a" ,\n"\\"\\n"', '"\\\\","b"'], ['"a', '"a"b', ' "a"', '"\\"']),
    ('start: "\\u0001" CTRL+\nCTRL: /[\\x00-\\x1f]/\n', ["\x01\x1f\x00\n"], ["\x01", "\x01 "]),
    ('start: "\\u007f" | "ſ"i | "\\ud83d\\ude00"\n', ["\x7f", "s", "S", "ſ", "😀"], ["\\u007f"]),
    ('start: head "!"\nhead[lazy]: /(?s:.*)/ "\\n"\n', ["a\n!", "\n!"], ["a\n\n!", "!"]),
    ('start: "\\n"{2,40}\n', ["\n" * 2, "\n" * 39, "\n" * 40], ["\n", "\n" * 41]),
    ('start: X | Y\nX: "a".."c"{2} & ~"bb"\nY: "\\t".."\\""~1..2\n', ["ab", "cc", '!"', "\n"], ["bb", "a", "dd"]),
    ('start: /[^\\n]+/ X\nX: "\\n" /\\/\\//\n%import common.CPP_COMMENT\n', ["a\\t\n//", "//\n//"], ["\n//", "a"]),
]  # fmt: skip


@pytest.mark.parametrize(("lark", "right", "wrong"), CASES)
def test_grammars_allow_the_spellings_of_their_texts(lark: str, right: list[str], wrong: list[str]) -> None:
    rewritten = quoted_lark(lark)
    for text in right:
        assert allows(lark, text), text
        assert allows(rewritten, spelled(text)), text
    for text in wrong:
        assert not allows(lark, text), text
        assert not allows(rewritten, spelled(text)), text


@pytest.mark.parametrize("text", [PATCHED, PATCHED.replace("*** Delete File: z\n", ""), PATCHED + "\n"])
def test_mutated_patches_are_allowed_exactly_when_their_spellings_are(text: str) -> None:
    draw, rewritten, right = random.Random(7), quoted_lark(PATCH), 0
    for _ in range(300):
        other = mutated(text, draw)
        right += allows(PATCH, other)
        assert allows(rewritten, spelled(other)) == allows(PATCH, other), other
    assert 50 < right < 250


@pytest.mark.parametrize("name", "C_COMMENT SH_COMMENT SQL_COMMENT CPP_COMMENT NEWLINE CR LF WS WS_INLINE".split())
def test_the_library_has_what_llguidance_imports(name: str) -> None:
    lark, draw = f"start: {name}\n%import common.{name}\n", random.Random(3)
    rewritten = quoted_lark(lark)
    for _ in range(400):
        text = "".join(draw.choice("/*#-\n\r\t\f a") for _ in range(draw.randrange(7)))
        text = draw.choice(("", "/*", "//", "#", "--")) + text + draw.choice(("", "*/", "\n"))
        assert allows(rewritten, spelled(text)) == allows(lark, text), text


def test_a_token_that_may_hold_some_rare_characters_hides_the_others() -> None:
    lark = 'start: /\\s+/ "\\u0001"\n'
    rewritten = quoted_lark(lark)
    for text in (" \x01", "\n\x01"):
        assert allows(lark, text)
        assert not allows(rewritten, spelled(text))


def test_ignored_text_stands_between_tokens() -> None:
    lark = 'start: "a" ("\\n" "b")*\n%ignore /[ \\n]+/\n%ignore "#"\n'
    for text in ("a", "a \n b", "a#\n#b", "a\n\nb", "a\nb\n b", " a", "ab", "a\n#b", "a#\nb"):
        assert allows(quoted_lark(lark), spelled(text)) == allows(lark, text), text


@given(grammars(), st.randoms(use_true_random=False), st.sampled_from((r"/[ \n]+/", "/b/", '"\\n" "a"?', r"/ */")))
@settings(max_examples=up_to(100), deadline=None)
def test_where_text_is_ignored_a_spelling_is_allowed_for_allowed_texts(
    lark: str, draw: random.Random, ignored: str
) -> None:
    lark += f"%ignore {ignored}\n"
    if not is_usable(lark):
        return
    rewritten, outer = quoted_lark(lark), re.compile("^[ab\n ]|[ab\n ]$")
    walks = [walk(lark, draw) for _ in range(8)]
    for text in [*walks, *(mutated(each, draw) for each in walks)]:
        is_right = allows(lark, text)
        # Before the first token and after the last one nothing is ignored here.
        if allows(rewritten, spelled(text)) != is_right:
            assert is_right, (lark, rewritten, text)
            assert outer.search(text), (lark, rewritten, text)


def test_a_grammar_without_escapes_has_one_rule_for_each() -> None:
    assert quoted_lark('start: "a" b\nb: "b" | INT\n%import common.INT\n') == (
        "start: r1_pp\nr1_pp: r3_pp\nr3_pp: X1_PP r2_pp\nr2_pp: r4_pp\nr4_pp: X2_PP | X3_PP\nX3_PP: N_INT\n"
        'X2_PP: "b"\nX1_PP: "a"\nN_INT: C_INT\n%import common.INT -> C_INT\n'
    )


# ---------------------------------------------------------------- what is refused

SCRAPS = (
    'start: "a" \n "\\n" /a/ /[^b]/ /( | & ~ ( ) [ ] { } * + ? {1,2} {,3} ~0..2 .. , -> x A B LF %import common . '
    '[lazy] # // 0 99999999999 <a> @a !x ?y _z " \\ = é /[a-/ /\\p{L}/ /a{2}/i /a$/s /^\\d/ /(?i)[^x]|/'
).split(" ")


@given(
    st.lists(
        st.sampled_from([*SCRAPS, "\ud800", "\n", "%import common.LF\n", "A: /./\n", 'x: "b" | x x\n']), max_size=20
    )
)
@settings(max_examples=up_to(500), deadline=None)
def test_whatever_is_sent_is_compiled_or_refused(scraps: list[str]) -> None:
    for lark in (" ".join(scraps), f"start: {' '.join(scraps)}\n"):
        try:
            rewritten = quoted_lark(lark)
        except ValueError:
            continue
        assert is_usable(rewritten), (lark, rewritten)


@pytest.mark.parametrize(
    ("lark", "what"),
    [
        ("", "no rule is named start"),
        ("start: 'a'\n", 'line 1: "\'" begins nothing that a grammar has'),
        ('start: "a\n', "line 1: '\"' begins nothing"),
        ('start: "\\ud800"\n', "expected a string as JSON has them"),
        ('start: ("a"\n', "line 2: found the end of the line, expected )"),
        ("start: a\n", "a is not defined; define this rule"),
        ("start: A\n", "A is not defined"),
        ("start: A\nA: B A\nB: A\n", "A contains itself; make it a rule"),
        ('start: A\nA: a\na: "x"\n', "the rule a stands in a terminal"),
        ('start: "a"\nstart: "b"\n', "line 2: start is defined twice"),
        ('start: "b"\nA.2: "b"\n', "line 2: A has a priority"),
        ('start: a{B}\na{x}: x\nB: "b"\n', "a is used as a template"),
        ('start: "b"\na{x}: x\n', "line 2: a has parameters"),
        ('start: a\na[stop="x"]: /.*/\n', "the option stop of a rule is not enforced"),
        ("start: a\na[lazy]: /.*/\n", "a is lazy and may be empty"),
        ('start: "a" -> "b"\n', 'found "b", expected an alias'),
        ('start: %json {"type": "object"}\n', "%json holds a schema; leave it out"),
        ('start: "a" %lark {\n', "%lark holds a grammar; leave it out"),
        ('%llguidance {}\nstart: "a"\n', "%llguidance sets options; leave it out"),
        ("%declare A\n", "%declare has no meaning here"),
        ("start: <|end|>\n", "<|end|> is a token or another grammar"),
        ("start: @other\n", "@other is a token or another grammar"),
        ("%import python.NAME\n", "python is not a library"),
        ("start: A\n%import common.A\n", "common.A is not known; expected one of CNAME,"),
        ('start: "a" & "b"\n', "a rule has & or ~"),
        ('start: "a"~3..2\n', "3 to 2 times"),
        ('start: "a"{9999999999}\n', "expected a number up to 2147483647"),
        ('start: "b".."a"\n', "must go from one character to a later one"),
        ("start: /a(?=b)/\n", r"the expression /a(?=b)/ has (?=b, a look-around"),
        ("start: /a\\b/\n", r"has \b, a look-around, a back-reference"),
        ("start: /(a)\\1/\n", r"has \1, a look-around, a back-reference"),
        ("start: /a^b/\n", "has ^ or $ within it"),
        ("start: /a b/x\n", "has the flag x"),
        ("start: /\\p{Klingon}/\n", r"has the class \p{Klingon}, which is not known here"),
        ("start: /[[:foo:]]/\n", "has the class [:foo:], which is not known here"),
        ("start: /[a/\n", "has a [ that is not closed"),
        ("start: /a{,2}/\n", "has a { without numbers"),
        ("start: a\na: a\n", "it allows no text at all"),
        ("start: " + "(" * 60 + '"a"' + ")" * 60, "groups are nested more than 40 deep"),
        ("start: /" + "(" * 60 + "a" + ")" * 60 + "/", "is nested more than 40 deep"),
        ("start: T0\n" + "".join(f"T{n}: T{n + 1}\n" for n in range(600)) + 'T600: "a"\n', "it is nested too deeply"),
        ("start: /a" + "*" * 8_000 + "/\n", "it is nested too deeply"),
        ("start: " + "/.+/ " * 1_600, "it is too large"),
        ('start: "' + "k" * 8_000 + '"i\n', "it is too large"),
        ("start: /" + "a?" * 4_000 + "/\n", "a token begins with 64 parts that may be missing"),
        ("start: " + " ".join(f'"{n}"{{2,{9**9 + n}}}' for n in range(300)), "it is too large"),
        ("#" * MAX_TOOL_GRAMMAR_BYTES + "\n", "it has 8193 bytes; expected at most 8192"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(lark: str, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        quoted_lark(lark)
