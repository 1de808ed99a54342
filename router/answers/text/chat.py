"""The checkpoint's own chat template: messages to the text of a prompt.

Templates run in Jinja2's sandbox, with the settings and helpers that templates on the Hugging Face hub expect. The
router needs no transformers, which takes seconds to import; tests compare with its `apply_chat_template`.

Templates disagree about how messages look: `form_probes.py` finds what a template wants.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.checkpoint.bounded_json import shown
from common.contracts.errors import FieldViolation, InvalidConfig, InvalidRequest
from router.answers.text.chat_input import ChatInput
from router.answers.text.checkpoint import read_json
from router.answers.text.control_texts import NO_TEXTS, ControlTexts, parted
from router.answers.text.form_probes import TEMPLATE_ERRORS, Probes
from router.answers.text.message_forms import MessageForm, System, Tools, Turns
from router.answers.text.turn_ends import AddedToken, end_mark

# A file of this name in a folder of more templates is that for chats with tools.
TOOL_USE: Final = "additional_chat_templates/tool_use.jinja"
_DEFAULT, _TOOL_USE = "default", "tool_use"


# The files that hold the chat templates of a checkpoint; which one counts is as in transformers.
@dataclass(frozen=True, slots=True)
class TemplateSources:
    """The template of a checkpoint, and the one for chats with tools where it has one of its own for them."""

    default: str
    tool_use: str | None = None


def template_sources(directory: Path, tokenizer_config: Mapping[str, Any]) -> TemplateSources | None:
    """Return the templates of files of their own, of the tokenizer, or of the processor's older file."""
    of_tokenizer = _named(directory / "tokenizer_config.json", tokenizer_config)
    older = directory / "chat_template.json"
    of_processor = _named(older, read_json(older))
    named = _of_files(directory)
    if _DEFAULT not in named:
        named = (of_tokenizer or of_processor) | named
    tool_use = named.get(_TOOL_USE)
    default = named.get(_DEFAULT, tool_use)
    if default is None:
        return None
    return TemplateSources(default, tool_use if tool_use != default else None)


def read_template(file: Path) -> str:
    """Return the text of a template. Raises InvalidConfig for a file that is none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidConfig(FieldViolation("--chat-template", f"{file} must be text in UTF-8: {error}")) from None
    except OSError as error:
        raise InvalidConfig(FieldViolation("--chat-template", f"{file} cannot be read: {error.strerror}")) from None


def _of_files(directory: Path) -> dict[str, str]:
    files = {_DEFAULT: directory / "chat_template.jinja", _TOOL_USE: directory / TOOL_USE}
    return {name: read_template(file) for name, file in files.items() if file.is_file()}


def _named(file: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a file by name; checkpoints have one text, or a list of named ones."""
    given = config.get("chat_template")
    if given is None:
        return {}
    pairs = [(_DEFAULT, given)]
    if isinstance(given, dict):
        pairs = [*given.items()]
    elif isinstance(given, list) and all(isinstance(each, dict) for each in given):
        pairs = [(each.get("name"), each.get("template")) for each in given]
    if not all(isinstance(each, str) for pair in pairs for each in pair):
        what = f"{file}: chat_template is {shown(given)}; expected a text, or a list of objects of name and template"
        raise InvalidConfig(FieldViolation("--model", what))
    return dict(pairs)


log = logging.getLogger(__name__)

# Variables by which templates let a model think or not.
_THINKING_FLAGS: Final = ("enable_thinking", "thinking")
# Marks the end of a message that is continued. The last space shows whether the template trims the message.
_MARK: Final = f"<{secrets.token_hex(16)}> "
# Made-up roles that are remembered at once.
_MOST_ROLES: Final = 64
# A template of these takes 2 s to compile. The longest ones of published models have 30,000 characters.
_LONGEST_TEMPLATE, _MOST_MARKS = 128 << 10, 4096
_MOST_FACTOR, _MOST_POWER, _MOST_BITS = 1 << 20, 64, 1 << 14
_MOST_CHARACTERS: Final = 100  # of an error of Python
# What compiling a template raises besides: Jinja2 goes down with the levels of a template, and so does Python, which
# compiles what Jinja2 makes of it, and whose blocks and indentation have a limit.
_TOO_DEEP: Final = (RecursionError, MemoryError, SyntaxError, ArithmeticError, TypeError, ValueError, LookupError)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptTooLong(Exception):
    """The prompt is longer than any that the context holds."""


class Refusal(TemplateError):
    """What a template itself says against the messages."""


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        now: Callable[[], datetime] = datetime.now,
        origin: str = "--model",
        tool_use: ChatTemplate | None = None,
    ) -> None:
        """Compile a template. Raises InvalidConfig, with the option that it came by, when it is not valid Jinja2."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        del environment.globals["lipsum"]  # makes any number of paragraphs
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        whose = "the checkpoint's" if origin == "--model" else "this"
        marks = source.count("{{") + source.count("{%")
        for count, most, kind in ((len(source), _LONGEST_TEMPLATE, "characters"), (marks, _MOST_MARKS, "statements")):
            if count > most:
                what = f"{whose} chat template has {count} {kind}; expected at most {most}"
                raise InvalidConfig(FieldViolation(origin, what))
        try:
            self._template = environment.from_string(source)
            self.source, self._names = source, meta.find_undeclared_variables(environment.parse(source))
        except TemplateSyntaxError as error:
            what = f"{whose} chat template is not valid, line {error.lineno}: {error.message}"
            raise InvalidConfig(FieldViolation(origin, what)) from None
        except _TOO_DEEP as error:
            why = f"{type(error).__name__}: {str(error)[:_MOST_CHARACTERS]}"
            what = f"{whose} chat template cannot be compiled ({why}); expected blocks and expressions of few levels"
            raise InvalidConfig(FieldViolation(origin, what)) from None
        self._special_tokens = special_tokens
        self.tool_use = tool_use
        """The template for chats with tools, where it is another one."""
        self._probes = Probes(self._probed)
        self._effort_left_out = False
        # Roles that clients made up, and whether the template shows their text.
        self._roles: dict[str, bool] = {}

    @classmethod
    def load(cls, directory: Path, replaced_by: Path | None = None) -> ChatTemplate | None:
        """Return the templates of a tokenizer's folder, or that of a file; None where there is none.

        The special tokens are the tokenizer's. Raises InvalidConfig for a template that is not valid.
        """
        config = read_json(directory / "tokenizer_config.json")
        replacing = None if replaced_by is None else TemplateSources(read_template(replaced_by))
        sources = replacing or template_sources(directory, config)
        if sources is None:
            return None
        named = {**read_json(directory / "special_tokens_map.json"), **config}
        special = {key: _content(directory, key, named[key]) for key in _SPECIAL_TOKENS if named.get(key) is not None}
        origin = "--model" if replaced_by is None else "--chat-template"
        tool_use = None if sources.tool_use is None else cls(sources.tool_use, special, origin=origin)
        return cls(sources.default, special, origin=origin, tool_use=tool_use)

    def takes(self, variable: str) -> bool:
        """Return whether the template reads a variable of this name."""
        return variable in self._names

    def render(self, chat: ChatInput, most: int | None = None) -> str:
        """Return the prompt of a chat as one text; arguments and errors as for `parts`."""
        return "".join(self.parts(chat, most))

    def parts(self, chat: ChatInput, most: int | None = None, control: ControlTexts = NO_TEXTS) -> tuple[str, ...]:
        """Return the prompt of a chat, cut within each text of the client that spells one of the `control` texts.

        By default it ends where the assistant's answer begins. Raises InvalidRequest when the template refuses the chat
        (roles that must alternate, no system message, ...), and PromptTooLong when the prompt has more than `most`
        characters.
        """
        if chat.tools and self.tool_use is not None:
            return self.tool_use.parts(chat, most, control)
        if chat.documents and not self.takes("documents"):
            what = "is of no use: the chat template shows no documents; put their text into a message"
            raise InvalidRequest(FieldViolation("prompt.chat.documents_json", what))
        try:
            return self._rendered(chat, most, control)
        except (Refusal, SecurityError) as refusal:
            if chat.reasoning_effort:  # a template may have words of its own for it
                found = self.parts(replace(chat, reasoning_effort=""), most, control)
                self._leave_out_effort()
                return found
            what = f"the checkpoint's chat template does not accept these messages: {refusal}"
            raise InvalidRequest(FieldViolation("prompt.chat.messages", what)) from None
        except TEMPLATE_ERRORS:
            place = self._first_wrong(chat, most)
            what = "the checkpoint's chat template does not accept these messages: it fails at this one"
            raise InvalidRequest(FieldViolation(f"prompt.chat.messages[{place}]", what)) from None

    @cached_property
    def form(self) -> MessageForm:
        """The form in which the template wants messages."""
        return self._probes.form(self.source)

    @property
    def for_tools(self) -> ChatTemplate:
        """The template that shows tools, if any does."""
        return self.tool_use or self

    @property
    def sees_tools(self) -> bool:
        return self.for_tools.form.tools is not Tools.NOWHERE

    def end_marks(self, added: Sequence[AddedToken]) -> list[AddedToken]:
        """Return the tokens among `added` by which this template and that for tools end an answer."""
        templates = dict.fromkeys((self, self.for_tools))
        found = [end_mark(each._probes.marks(each.form), added) for each in templates]
        return [each for each in found if each is not None]

    def remarks(self) -> Iterator[str]:
        """Yield what this template does with messages that others show as they are."""
        form = self.form
        if form.parts:
            yield "the chat template takes content in parts; texts are given to it as one part each"
        if form.system is System.NOWHERE:
            yield "the chat template shows no message of the system; its text becomes part of the user's next message"
        if form.turns is not Turns.ALL:
            yield f"the chat template shows the user's {form.turns.value} message alone; chats with others are refused"
        for role in sorted(form.hidden):
            yield f"the chat template shows no text of role {role}; chats with one are refused"

    def _rendered(self, chat: ChatInput, most: int | None, control: ControlTexts) -> tuple[str, ...]:
        given = chat.messages
        if chat.continue_final_message:
            given = [*given[:-1], given[-1]._replace(content=given[-1].content + _MARK)]
        variables = dict(chat.variables) | {
            "messages": self.form.with_tools(self.form.of(given, self._shows), chat.tools),
            "tools": chat.tools,
            "documents": chat.documents,
        }
        try:
            variables, cut = control.cut(variables)
        except ValueError as error:
            _refuse("messages", f"cannot be told from control tokens: {error}; leave out one of them")
        own = self._special_tokens | self._effort(chat) | {"add_generation_prompt": chat.add_generation_prompt}
        text = self._text(variables | own, most)
        return parted(_before_mark(text) if chat.continue_final_message else text, cut)

    def _probed(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, answer: bool) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": answer}
        return self._template.render(self._special_tokens | given)

    def _shows(self, role: str) -> bool:
        """Return whether the text of a role that a client made up is shown."""
        if role not in self._roles:
            if len(self._roles) >= _MOST_ROLES:
                self._roles.clear()
            self._roles[role] = self._probes.shows(role, self.form)
        return self._roles[role]

    def _first_wrong(self, chat: ChatInput, most: int | None) -> int:
        """Return the place of the first message with which rendering fails, found by halves."""
        good, bad = 0, len(chat.messages)
        while bad - good > 1:
            middle = (good + bad) // 2
            head = replace(chat, messages=chat.messages[:middle], continue_final_message=False)
            try:
                self._rendered(head, most, NO_TEXTS)
                good = middle
            except Refusal:
                good = middle
            except TEMPLATE_ERRORS:
                bad = middle
        return bad - 1

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
        """Return the variable for `reasoning_effort`. Templates that can think or not take a flag in its place.

        An effort is a hint: agents send one whatever the model. The variables that a client names itself win.
        """
        if not chat.reasoning_effort:
            return {}
        flags = [name for name in _THINKING_FLAGS if self.takes(name)]
        values: dict[str, Any] = dict.fromkeys(flags, chat.reasoning_effort != "none")
        if self.takes("reasoning_effort"):
            values = {"reasoning_effort": chat.reasoning_effort}
        if not values:
            self._leave_out_effort()
        return {name: value for name, value in values.items() if name not in chat.variables}

    def _leave_out_effort(self) -> None:
        if not self._effort_left_out:
            log.info("the chat template takes no reasoning effort, or other words for it: requests go without theirs")
        self._effort_left_out = True


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, where products are bounded: those of constants are computed when a template is compiled."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power. Raises SecurityError for one that may take gigabytes or minutes."""
        if operator == "**" and (abs(right) > _MOST_POWER or abs(left) > _MOST_FACTOR):
            raise SecurityError(f"a power of more than {_MOST_FACTOR} ** {_MOST_POWER}")
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MOST_BITS:
            raise SecurityError(f"a number of more than {_MOST_BITS} bits")
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and len(one) * int(times) > _LONGEST_TEMPLATE:
                raise SecurityError(f"a text or list of more than {_LONGEST_TEMPLATE} parts")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    raise Refusal(message)


def _content(directory: Path, key: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        what = (
            f"{key} of the tokenizer in {directory} is {shown(token)}; expected a text, or an object with its content"
        )
        raise InvalidConfig(FieldViolation("--model", what))
    return text
