"""Dialects are told by the marks of chat templates."""

from __future__ import annotations

import pytest

from router.answers.dialects.detect import detect_reasoning, detect_tools, opens_thought
from router.answers.dialects.names import REASONING_DIALECTS, TOOL_DIALECTS, reasoning_dialect, tool_dialect
from router.answers.dialects.reader import REASONING_MARKS, TOOL_MARKS, reader

# The marks as they stand in the templates of released checkpoints.
TEMPLATES = [
    (
        "hermes",
        "qwen3",
        "{%- if tools %}<tool_call>{% endif %}{%- if enable_thinking is false %}</think>",
    ),
    ("hermes", None, "{%- if tools %}within <tool_call></tool_call> XML tags"),
    ("hermes", "deepseek_r1", "{%- if tools %}<tool_call>{% endif %}<|im_start|>assistant\n<think>\n{{ '</think>' }}"),
    ("qwen3_coder", None, "{%- if tools %}<tool_call>\\n<function=name>\\n<parameter=key>"),
    ("llama3_json", None, "{%- if tools is not none %}{{- '<|python_tag|>' }}"),
    (
        "llama3_json",
        None,
        'Respond in the format {"name": function name, "parameters": dictionary}',
    ),
    ("pythonic", None, "{% if tools %}[func_name1(params_name1=params_value1, params_name2=params_value2)]"),
    ("mistral", None, "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"),
    ("mistral", "mistral", "[TOOL_CALLS]{{ '[THINK]' }}"),
    ("deepseek_v3", "deepseek_r1", "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '```json' }}{{ '</think>' }}"),
    ("deepseek_v31", "deepseek_r1", "<｜tool▁call▁begin｜>{{ '<｜Assistant｜></think>' if enable_thinking }}"),
    (
        "glm45",
        "glm45",
        "{%- if tools -%}<tool_call><arg_key>{% endif %}<think></think>{{ enable_thinking }}",
    ),
    ("gpt_oss", "gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>"),
    ("generic", None, "{% if tools %}{{ tools | tojson }}{% endif %}"),
    (None, None, "{% for message in messages %}{{ message.content }}{% endfor %}"),
]


@pytest.mark.parametrize(("tools", "reasoning", "template"), TEMPLATES)
def test_a_template_tells_its_dialects(tools: str | None, reasoning: str | None, template: str) -> None:
    assert (detect_tools(template), detect_reasoning(template)) == (tools, reasoning)


def test_a_prompt_may_end_inside_a_thought() -> None:
    assert opens_thought("deepseek_r1", "<|im_start|>assistant\n<think>\n")
    assert opens_thought("mistral", "[/INST][THINK]")
    assert not opens_thought("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thought("gpt_oss", "<|start|>assistant")


def test_every_name_has_a_parser() -> None:
    assert set(TOOL_DIALECTS.values()) == set(TOOL_MARKS)
    assert set(REASONING_DIALECTS.values()) == set(REASONING_MARKS)
    for name in TOOL_DIALECTS:
        assert reader(None, tool_dialect(name)).feed("x" * 9)
    for name in REASONING_DIALECTS:
        assert reader(reasoning_dialect(name), None).feed("x" * 99)
