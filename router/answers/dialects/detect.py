"""Which dialect a checkpoint speaks: told by the marks in its chat template."""

from __future__ import annotations

import re

# The first line whose marks all occur in the template decides.
_TOOLS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "gpt_oss"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
)
_TAKES_TOOLS = re.compile(r"\{%-?[^%]*\btools\b")
_REASONING: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>"), "gpt_oss"),
    (("[THINK]",), "mistral"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "<｜Assistant｜>"), "deepseek_r1"),
    (("</think>", "enable_thinking"), "qwen3"),
    (("</think>",), "deepseek_r1"),
)
_OPENERS = {"deepseek_r1": "<think>", "qwen3": "<think>", "glm45": "<think>", "mistral": "[THINK]"}


def detect_tools(chat_template: str) -> str | None:
    """Return the dialect in which a template writes tool calls.

    "generic" stands for a template that takes tools in no known form, None for one that takes none.
    """
    for marks, dialect in _TOOLS:
        if all(mark in chat_template for mark in marks):
            return dialect
    return "generic" if _TAKES_TOOLS.search(chat_template) else None


def detect_reasoning(chat_template: str) -> str | None:
    """Return the dialect in which a template writes thoughts; None for a template without thoughts."""
    return next((name for marks, name in _REASONING if all(mark in chat_template for mark in marks)), None)


def opens_thought(reasoning: str, prompt: str) -> bool:
    """Return whether a rendered prompt ends inside a thought, so that the output begins there."""
    opener = _OPENERS.get(reasoning)
    return opener is not None and prompt.rstrip().endswith(opener)
