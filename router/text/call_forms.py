"""How messages look to a chat template, whose authors disagree about calls of tools in earlier answers.

Most templates want arguments as an object and write them by `tojson`; some join a text. Some see a call only where the
content is none, others join the content in any case. Mistral's accept ids of nine characters alone. For each template a
short conversation is rendered in every form, and the first form counts in which the call shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, TypeAlias

from jinja2 import TemplateError

from router.text.chat_input import Call, ChatInput, Message

Render: TypeAlias = "Callable[[ChatInput, CallForm], str]"
# Characters of an id that Mistral's templates accept.
_SHORT: Final = 9


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of messages in which a template shows calls."""

    short_ids: bool = False
    empty_content: bool = False
    arguments_as_text: bool = False

    def of(self, message: Message) -> dict[str, Any]:
        """Return a message as templates read it; keys that mean nothing for it are not there."""
        found: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.calls:
            found["tool_calls"] = [self._call(each) for each in message.calls]
            if not message.content and not self.empty_content:
                found["content"] = None
        if message.call_id:
            found["tool_call_id"] = self._id(message.call_id)
        if message.name:
            found["name"] = message.name
        if message.thought:
            # gpt-oss reads the second name.
            found |= {"reasoning_content": message.thought, "thinking": message.thought}
        return found

    def _call(self, call: Call) -> dict[str, Any]:
        arguments = call.arguments if self.arguments_as_text else _object_of(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _id(self, given: str) -> str:
        if not self.short_ids:
            return given
        return "".join(filter(str.isalnum, given))[-_SHORT:].rjust(_SHORT, "0")


def call_form(render: Render) -> CallForm:
    """Return the form for a template; that of most templates where it shows calls in no form."""
    forms = [CallForm(*flags) for flags in product((False, True), repeat=3)]
    for accepts in (_shows_plainly, _shows, _renders):
        for form in forms:
            if any(accepts(text) for text in _texts(render, form)):
                return form
    return CallForm()


_CALLED: Final = Message("assistant", "", (Call("call_0123456789abcdef01234567", "probed_tool", '{"probed": 71}'),))
_ANSWERED: Final = Message("tool", "72", call_id=_CALLED.calls[0].id, name="probed_tool")
_TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": "probed_tool", "description": "", "parameters": {"type": "object", "properties": {}}},
    }
]
_ASKED: Final = Message("user", "70")
_PROBE: Final = ChatInput([_ASKED, _CALLED, _ANSWERED], tools=_TOOLS)
# Some templates want a question at the end.
_PROBES: Final = (_PROBE, replace(_PROBE, messages=[*_PROBE.messages, Message("assistant", "73"), _ASKED]))


def _texts(render: Render, form: CallForm) -> Iterator[str]:
    """Yield what a template makes of the probes, those left out that it refuses."""
    for probe, tools in product(_PROBES, (_TOOLS, None)):
        with suppress(TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
            yield render(replace(probe, tools=tools), form)


def _shows_plainly(text: str) -> bool:
    # Content that is none may be written as a word.
    return _shows(text) and "None" not in text


def _shows(text: str) -> bool:
    """Return whether the call is there, with its arguments: as the JSON that was sent, or word for word."""
    compact = text.replace(" ", "")
    spoilt = "{'probed'" in compact or '{\\"probed' in compact
    return "probed_tool" in text and "probed" in text.replace("probed_tool", "") and not spoilt


def _renders(text: str) -> bool:
    return bool(text)


def _object_of(arguments: str) -> Any:
    """Return the object that a text of JSON means; the text itself where it means none, as after a call cut short."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
