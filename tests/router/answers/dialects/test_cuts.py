"""The parts of an output do not depend on how it is cut, and no output makes a parser fail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.answers.dialects.reader import FORMS, reader, tool_parser
from router.contracts.answer_parts import CallBegun, Words
from tests.router.answers.dialects.reading import TOOLS, read, text_of

PAIRS = [
    ("qwen3", "hermes"), ("deepseek_r1", "llama3_json"), (None, "pythonic"), ("mistral", "mistral"),
    ("deepseek_r1", "deepseek_v3"),
    (None, "deepseek_v31"), ("glm45", "glm45"), ("gpt_oss", "gpt_oss"), (None, "generic"), (None, "qwen3_coder"),
]  # fmt: skip
MARKS = """
    <think> </think> [THINK] [/THINK]
    <tool_call> </tool_call> <|python_tag|> [TOOL_CALLS] [ARGS] [CALL_ID]
    <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>
    ```json ```
    <function=f> </function> <parameter=s> <parameter=any> </parameter>
    <arg_key> </arg_key> <arg_value> </arg_value> <|channel|> <|message|> <|start|> <|end|> <|constrain|>json
"""
FRAGMENTS = """
    function assistant analysis final "arguments": "parameters":{ "function":{ "name":"f", "name":"g" {"name":"f",
    f g s a f( [f(s= ** = ( ) [ ] { } " ' \\ \\u d83d \\ude00 , : ; 1 - true None null é 😀 x
"""
BLANK = [" ", "\n", "commentary to=functions.f "]
outputs = st.lists(st.sampled_from([*MARKS.split(), *FRAGMENTS.split(), *BLANK]), max_size=25).map("".join)


@given(
    output=outputs,
    pair=st.sampled_from(PAIRS),
    is_open=st.booleans(),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_cuts_change_nothing(output: str, pair: tuple[str | None, str], is_open: bool, cuts: list[int]) -> None:
    reasoning, tools = pair
    expected = read(reader(reasoning, tools, TOOLS, is_open), [output])
    at, cut = 0, list[str]()
    while at < len(output):
        size = cuts[len(cut) % len(cuts)]
        cut.append(output[at : at + size])
        at += size
    assert read(reader(reasoning, tools, TOOLS, is_open), cut) == expected


@given(output=outputs, dialect=st.sampled_from(sorted(FORMS)))
def test_an_output_without_a_call_is_given_back_whole(output: str, dialect: str) -> None:
    parts = read(tool_parser(dialect, TOOLS), [output])
    if not any(isinstance(part, CallBegun) for part in parts):
        assert text_of(parts, Words) == output
