"""The checkpoint's own chat template: messages to the text of a prompt.

Templates run in Jinja2's sandbox, with the settings and helpers that templates on the Hugging Face hub expect. The
router needs no transformers, which takes seconds to import; tests compare with its `apply_chat_template`.

Templates disagree about calls in earlier answers: `call_forms.py` finds what a template wants.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import FieldViolation, InvalidConfig, InvalidRequest
from router.text.call_forms import CallForm, call_form
from router.text.chat_input import ChatInput
from router.text.checkpoint import read_json

# Variables by which templates let a model think or not.
_THINKING_FLAGS: Final = ("enable_thinking", "thinking")
# Marks the end of a message that is continued. The last space shows whether the template trims the message.
_MARK: Final = f"<{secrets.token_hex(16)}> "
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTooLong(Exception):
    """The prompt is longer than any that the context holds."""


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        now: Callable[[], datetime] = datetime.now,
        origin: str = "--model",
    ) -> None:
        """Compile a template. Raises InvalidConfig, with the option that it came by, when it is not valid Jinja2."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.source, self._names = source, meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            whose = "the checkpoint's" if origin == "--model" else "this"
            what = f"{whose} chat template is not valid, line {error.lineno}: {error.message}"
            raise InvalidConfig(FieldViolation(origin, what)) from None
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path, replaced_by: Path | None = None) -> ChatTemplate | None:
        """Return the default template of a tokenizer's folder, or that of a file; None where there is none.

        The special tokens are the tokenizer's. Raises InvalidConfig for a template that is not valid.
        """
        config = read_json(directory / "tokenizer_config.json")
        source = _source(directory, config) if replaced_by is None else _read(replaced_by)
        if source is None:
            return None
        named = {**read_json(directory / "special_tokens_map.json"), **config}
        special = {key: _content(named[key]) for key in _SPECIAL_TOKENS if named.get(key) is not None}
        return cls(source, special, origin="--model" if replaced_by is None else "--chat-template")

    def takes(self, variable: str) -> bool:
        """Return whether the template reads a variable of this name."""
        return variable in self._names

    def render(self, chat: ChatInput, most: int | None = None) -> str:
        """Return the prompt of a chat. By default it ends where the assistant's answer begins.

        Raises InvalidRequest when the template refuses the chat (roles that must alternate, no system message, ...),
        and PromptTooLong when the prompt has more than `most` characters.
        """
        try:
            return self._rendered(chat, self.call_form if _has_calls(chat) else CallForm(), most)
        # Python errors come from expressions of the template: an index, a filter, an undefined name.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            what = f"the checkpoint's chat template does not accept these messages: {error}"
            raise InvalidRequest(FieldViolation("prompt.chat.messages", what)) from None

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template wants calls."""
        return call_form(lambda chat, form: self._rendered(chat, form, None))

    def _rendered(self, chat: ChatInput, form: CallForm, most: int | None) -> str:
        messages = [form.of(message) for message in chat.messages]
        if chat.continue_final_message:
            messages[-1]["content"] = (messages[-1]["content"] or "") + _MARK
        variables = self._special_tokens | dict(chat.variables) | self._effort(chat)
        text = self._text(
            variables
            | {
                "messages": messages,
                "tools": chat.tools,
                "documents": chat.documents,
                "add_generation_prompt": chat.add_generation_prompt,
            },
            most,
        )
        return _before_mark(text) if chat.continue_final_message else text

    def _text(self, variables: Mapping[str, Any], most: int | None) -> str:
        """Return the whole text, which is given up once it is too long: a template may repeat what it is given."""
        if most is None:
            return self._template.render(variables)
        parts, length = list[str](), 0
        for part in self._template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > most:
                raise PromptTooLong(f"the chat makes more than {most} characters; shorten it")
        return "".join(parts)

    def _effort(self, chat: ChatInput) -> dict[str, Any]:
        """Return the variable for `reasoning_effort`. Templates that can think or not take a flag in its place."""
        if not chat.reasoning_effort:
            return {}
        flags = [name for name in _THINKING_FLAGS if self.takes(name)]
        values: dict[str, Any] = dict.fromkeys(flags, chat.reasoning_effort != "none")
        if self.takes("reasoning_effort"):
            values = {"reasoning_effort": chat.reasoning_effort}
        if not values:
            _refuse("reasoning_effort", f"is {chat.reasoning_effort}; this chat template takes none; leave it out")
        for name in values:
            if chat.variables.get(name, values[name]) != values[name]:
                _refuse("reasoning_effort", f"contradicts {name} of the template's variables; give one of them")
        return values


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _has_calls(chat: ChatInput) -> bool:
    return any(message.calls or message.call_id for message in chat.messages)


def _before_mark(text: str) -> str:
    """Return the text up to the end of the message that is continued."""
    place = text.rfind(_MARK.rstrip())
    if place < 0:
        _refuse("continue_final_message", "cannot be followed: the chat template leaves out the last message's text")
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _refuse(name: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(f"prompt.chat.{name}", what))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja2's own filter escapes <, > and & for HTML, and sorts keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _source(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Return a checkpoint's template: of a file of its own, of its tokenizer, or of its processor's older file."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    of_tokenizer = _default(tokenizer_config.get("chat_template"))
    if of_tokenizer is not None:
        return of_tokenizer
    return _default(read_json(directory / "chat_template.json").get("chat_template"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfig(FieldViolation("--chat-template", f"{file} is no text in UTF-8: {error}")) from None


def _default(templates: str | list[dict[str, str]] | None) -> str | None:
    """Return the default template; older checkpoints have a list of named templates."""
    if isinstance(templates, list):
        return next((each["template"] for each in templates if each["name"] == "default"), None)
    return templates


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])
