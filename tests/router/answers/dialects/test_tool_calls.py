"""What the parsers read from outputs of each family, well formed or not."""

from __future__ import annotations

import pytest

from router.answers.dialects.reader import FORMS, tool_parser
from router.answers.dialects.tape import MOST_HELD
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Words
from tests.router.answers.dialects.reading import TOOLS, call, pieces, read

WELL_FORMED: list[tuple[str, str, list[Part]]] = [
    (
        "hermes",
        (
            'Let me see. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'
        ),
        [Words("Let me see. "), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    # Keys in any order, other keys, arguments within a string, no arguments, no end mark, blanks before.
    (
        "hermes",
        '\n\n<tool_call>{"arguments": {"s": "}\\" </tool_call>"}, "id": [1, "}"], "name": "f"}</tool_call>',
        call(0, "f", '{"s": "}\\" </tool_call>"}'),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"\\ud83d\\ude00\\"}"}', call(0, "f", '{"s": "😀"}')),
    ("hermes", '<tool_call>{"name": "g"}</tool_call> Done.', [*call(0, "g", "{}"), Words(" Done.")]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', call(0, "g", "{}")),
    ("hermes", '<tool_call>{"name": "unknown", "parameters": {}}</tool_call>', call(0, "unknown", "{}")),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
    (
        "llama3_json",
        '\n{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}; {"name": "g", "parameters": {}}',
        [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    (
        "llama3_json",
        'Yes. <|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        [Words("Yes. "), *call(0, "f", '{"a": 1}')],
    ),
    (
        "pythonic",
        "[f(a=-1.5e3, s='it\"s\\n\\x41', o={'k': (True, None), \"l\": []}), g()]",
        [*call(0, "f", '{"a": -1.5e3, "s": "it\\"s\\nA", "o": {"k": [true, null], "l": []}}'), *call(1, "g", "{}")],
    ),
    (
        "pythonic",
        '[f(**{"x y": true}),\n g(a="""q"uo\nte""",)]',
        [*call(0, "f", '{"x y": true}'), *call(1, "g", '{"a": "q\\"uo\\nte"}')],
    ),
    ("pythonic", "<|python_start|>[g(s='')]<|python_end|>", call(0, "g", '{"s": ""}')),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    (
        "mistral",
        'So: [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc123456[ARGS]{}',
        [Words("So: "), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
    (
        "deepseek_v3",
        (
            "One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"s": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        [Words("One moment."), *call(0, "f", '{"s": "```"}'), *call(1, "g", "{}")],
    ),
    (
        "deepseek_v31",
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        [*call(0, "f", '{"a": 1}'), *call(1, "function", "{}")],
    ),
    (
        "glm45",
        (
            '\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>12 <b>\n"q"</arg_value>\n<arg_key>a</arg_key>\n'
            "<arg_value>12</arg_value>\n</tool_call>\n<tool_call>g</tool_call>"
        ),
        [*call(0, "f", '{"s": "12 <b>\\n\\"q\\"", "a": 12}'), *call(1, "g", "{}")],
    ),
    # The schema decides what is text: an object, a text that may be null, any value, and an unknown parameter.
    (
        "glm45",
        (
            '<tool_call>f<arg_key>o</arg_key><arg_value>{"k": "</arg_value>"}</arg_value>'
            "<arg_key>n</arg_key><arg_value>null</arg_value><arg_key>any</arg_key><arg_value>x y</arg_value>"
            "<arg_key>new</arg_key><arg_value>[1]</arg_value><arg_key>a</arg_key><arg_value>many</arg_value></tool_call>"
        ),
        call(0, "f", '{"o": {"k": "</arg_value>"}, "n": null, "any": "x y", "new": [1], "a": "many"}'),
    ),
    ("glm45", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', call(0, "f", "{}")),
    (
        "qwen3_coder",
        (
            "Now: <tool_call>\n<function=f>\n<parameter=s>\n\nx = {'a': 1}\n</parameter>\n"
            "<parameter=o>\n{}\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=g>\n</function>\n</tool_call>"
        ),
        [Words("Now: "), *call(0, "f", '{"s": "\\nx = {\'a\': 1}", "o": {}}'), *call(1, "g", "{}")],
    ),
    ("generic", '{"name": "f", "arguments": {"a": 1}}', call(0, "f", '{"a": 1}')),
    (
        "generic",
        '[{"name": "f", "parameters": {}}, {"name": "g", "arguments": {}}] done',
        [*call(0, "f", "{}"), *call(1, "g", "{}"), Words(" done")],
    ),
    (
        "generic",
        'Sure!\n```json\n{"name": "f", "arguments": {}}\n```\nWait.',
        [Words("Sure!\n"), *call(0, "f", "{}"), Words("\nWait.")],
    ),
]


@pytest.mark.parametrize(("dialect", "output", "expected"), WELL_FORMED)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_calls_are_read(dialect: str, output: str, expected: list[Part], size: int) -> None:
    assert read(tool_parser(dialect, TOOLS), pieces(output, size)) == expected


MALFORMED = [
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", "the tag <tool_call> begins a call, <tool_c does not"),
    ("llama3_json", '{"name": "Bob", "parameters": {}} is how it looks'),
    ("llama3_json", '{"name": "f"}'),
    ("llama3_json", 'text {"name": "f", "parameters": {}}'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[f](https://example.org)"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]oops"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>nothing"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ("glm45", "<tool_call></tool_call>"),
    ("glm45", "<tool_call>f and more</tool_cal"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nno parameter"),
    ("generic", '{"name": "f", "value": 1}'),
    ("generic", "```json\n[1, 2, 3]\n```"),
    ("generic", " \n\t "),
]


@pytest.mark.parametrize(("dialect", "output"), MALFORMED)
def test_what_is_no_call_stays_words(dialect: str, output: str) -> None:
    assert read(tool_parser(dialect, TOOLS), pieces(output, 3)) == [Words(output)]


def test_text_after_a_broken_call_may_hold_a_call() -> None:
    output = '<tool_call>oops</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read(tool_parser("hermes", TOOLS), [output]) == [
        Words("<tool_call>oops</tool_call> "), *call(0, "g", "{}")
    ]  # fmt: skip


CUT_OFF = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "ab', '{"s": "ab'),
    ("llama3_json", '{"name": "f", "parameters": {"s": "ab', '{"s": "ab'),
    ("pythonic", '[f(s="ab', '{"s": "ab'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "ab', '{"s": "ab'),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "ab',
        '{"s": "ab',
    ),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>ab", '{"s": "ab'),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>ab</arg_value>", '{"s": "ab"'),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nab", '{"s": "ab'),
    ("generic", '```json\n{"name": "f", "arguments": {"s": "ab', '{"s": "ab'),
]


@pytest.mark.parametrize(("dialect", "output", "arguments"), CUT_OFF)
def test_a_call_that_is_cut_off_comes_as_far_as_it_came(dialect: str, output: str, arguments: str) -> None:
    parser = tool_parser(dialect, TOOLS)
    assert read(parser, pieces(output, 4)) == call(0, "f", arguments)


def test_arguments_come_as_they_are_written() -> None:
    parser = tool_parser("hermes", TOOLS)
    assert parser.feed('<tool_call>{"name": "f"') == []
    assert parser.feed(', "arguments": {"s"') == [CallBegun(0, "f"), CallArguments(0, '{"s"')]
    assert parser.feed(': "a') == [CallArguments(0, ': "a')]


def test_words_come_at_once_except_what_may_be_a_mark() -> None:
    parser = tool_parser("hermes", TOOLS)
    assert parser.feed("Hi <") == [Words("Hi ")]
    assert parser.feed("b> <tool") == [Words("<b> ")]
    assert parser.finish() == [Words("<tool")]


HOSTILE = """
    <tool_call> <tool_cal <tool_call>{"arguments":{" <tool_call>{"name":"f","arguments":{" <tool_call>f<arg_key>
    <tool_call>f<arg_key>any</arg_key><arg_value> [TOOL_CALLS] [TOOL_CALLS][ [TOOL_CALLS]f[ARGS]{
    <tool_call><function=f><parameter=any>
    <|python_tag|>{ <|python_tag| {"name":"f","parameters":{" [f(a= [f(a=[ { [ " \\ ```json ```json[{
    <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>f<｜tool▁sep｜>{ < {}
"""


@pytest.mark.searches
@pytest.mark.parametrize("dialect", FORMS)
def test_hostile_outputs_are_neither_hoarded_nor_read_again(dialect: str) -> None:
    """A parser that read what it holds again at each opener would need hours; the suite's time limit ends the test."""
    for unit in [*HOSTILE.split(), " "]:
        assert most_held(dialect, unit, 100_000) <= MOST_HELD + 2_000, unit


@pytest.mark.searches
@pytest.mark.parametrize(
    ("dialect", "unit"),
    [("hermes", '<tool_call>{"arguments": "'), ("glm45", "<tool_call>f<arg_key>"), ("generic", "```json[")],
)
def test_a_megabyte_of_openers_is_read(dialect: str, unit: str) -> None:
    assert most_held(dialect, unit, 1 << 20) <= MOST_HELD + 2_000


def most_held(dialect: str, unit: str, length: int) -> int:
    """Return how many characters a parser held at most; all of them come back, as words or arguments."""
    parser, came, given, most = tool_parser(dialect, TOOLS), 0, 0, 0
    for piece in pieces(unit * (length // len(unit)), 1_000):
        came += len(piece)
        given += sum(len(part.text) for part in parser.feed(piece) if not isinstance(part, CallBegun))
        most = max(most, came - given)
    parser.finish()
    return most
