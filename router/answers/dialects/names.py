"""The names of dialects: ours, and those that other servers have taught their users."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TOOL_DIALECTS: Mapping[str, str] = MappingProxyType(
    {
        "hermes": "hermes",
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3": "hermes",
        "llama3_json": "llama3_json",
        "llama4_json": "llama3_json",
        "llama3": "llama3_json",
        "pythonic": "pythonic",
        "llama4_pythonic": "pythonic",
        "mistral": "mistral",
        "deepseek_v3": "deepseek_v3",
        "deepseekv3": "deepseek_v3",
        "deepseek_v31": "deepseek_v31",
        "deepseekv31": "deepseek_v31",
        "glm45": "glm45",
        "glm": "glm45",
        "qwen3_coder": "qwen3_coder",
        "qwen3_xml": "qwen3_coder",
        "gpt_oss": "gpt_oss",
        "gpt-oss": "gpt_oss",
        "openai": "gpt_oss",
        "generic": "generic",
    }
)
REASONING_DIALECTS: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_r1": "deepseek_r1",
        "deepseek-r1": "deepseek_r1",
        "deepseek_v3": "deepseek_r1",
        "deepseek-v3": "deepseek_r1",
        "qwen3": "qwen3",
        "qwen3-thinking": "qwen3",
        "glm45": "glm45",
        "mistral": "mistral",
        "gpt_oss": "gpt_oss",
        "gpt-oss": "gpt_oss",
        "openai_gptoss": "gpt_oss",
    }
)


def tool_dialect(name: str) -> str:
    """Return our name of a dialect of tool calls; KeyError for an unknown one."""
    return TOOL_DIALECTS[name]


def reasoning_dialect(name: str) -> str:
    """Return our name of a dialect of thoughts; KeyError for an unknown one."""
    return REASONING_DIALECTS[name]
