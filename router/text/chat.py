"""The checkpoint's own chat template: messages to the text of a prompt.

Templates run in Jinja2's sandbox, with the settings and helpers that templates on the Hugging Face hub expect. The
router needs no transformers, which takes seconds to import; tests compare with its `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import FieldViolation, InvalidConfig, InvalidRequest
from router.text.checkpoint import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """Compile a template. Raises InvalidConfig when it is not valid Jinja2."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            what = f"the checkpoint's chat template is not valid, line {error.lineno}: {error.message}"
            raise InvalidConfig(FieldViolation("--model", what)) from None
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Return the default template of a checkpoint, or None when it has none. Raises InvalidConfig."""
        config = read_json(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else _default(config.get("chat_template"))
        if source is None:
            return None
        named = {**read_json(directory / "special_tokens_map.json"), **config}
        special = {key: _content(named[key]) for key in _SPECIAL_TOKENS if named.get(key) is not None}
        return cls(source, special)

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return the prompt of (role, content) messages, ending where the assistant's answer begins.

        Raises InvalidRequest when the template refuses them (roles that must alternate, no system message, ...).
        """
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(
                messages=chat, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        # Python errors come from expressions of the template: an index, a filter, an undefined name.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            what = f"the checkpoint's chat template does not accept these messages: {error}"
            raise InvalidRequest(FieldViolation("prompt.chat.messages", what)) from None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja2's own filter escapes <, > and & for HTML, and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _default(templates: str | list[dict[str, str]] | None) -> str | None:
    """Return the default template; older checkpoints have a list of named templates."""
    if isinstance(templates, list):
        return next((each["template"] for each in templates if each["name"] == "default"), None)
    return templates


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
