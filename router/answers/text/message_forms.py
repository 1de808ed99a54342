"""How messages look to a chat template, whose authors agree about little.

Some templates join the content as a text, others walk over its parts and show nothing of a text. Some know no message
of the system, or one at the beginning alone. Most want arguments of calls as an object and write them by `tojson`, some
join a text. Some see a call only where the content is none. Mistral's accept ids of nine characters alone, Llama's one
call a message. `form_probes.py` finds the form of a template; here a chat takes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from typing import Any, Final

from common.contracts.errors import FieldViolation, InvalidRequest
from common.untrusted import json_shape
from router.answers.text.chat_input import Call, Message

# Characters of an id that Mistral's templates accept.
_SHORT: Final = 9
# What a message without calls, ids, names and thoughts has behind its content.
_BARE: Final = ((), "", "", "")
_SYSTEM: Final = ("system", "developer")
_ROLES: Final = ("user", "assistant", "system", "tool")
_GAP: Final = "\n\n"


class System(Enum):
    """Where a template shows messages of the system: anywhere, as the first one, or nowhere."""

    ANYWHERE = "anywhere"
    FIRST = "first"
    NOWHERE = "nowhere"


class Tools(Enum):
    """Where a template reads the tools: in a variable, in the message of the system, or nowhere."""

    VARIABLE = "variable"
    MESSAGE = "message"
    NOWHERE = "nowhere"


class Calls(Enum):
    """How a template shows calls: several in one message, one a message, or none, so that the content holds them."""

    SEVERAL = "several"
    SINGLE = "single"
    WRITTEN = "written"


class Ids(Enum):
    """Which ids of calls a template takes: any, those of nine characters, or those that hold a call's name."""

    ANY = "any"
    SHORT = "short"
    NAMED = "named"


class Arguments(Enum):
    """What a template takes as arguments: an object, an object or a text, or a text."""

    OBJECT = "object"
    EITHER = "either"
    TEXT = "text"


class Turns(Enum):
    """Which messages of the user a template shows."""

    ALL = "all"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form of messages in which a template shows them.

    `parts` are the roles whose content is a list of parts, `hidden` those that are shown in no form. `results` is the
    role of what a tool returns. `words_apart`: a message shows its words or its calls, so that two messages hold both.
    `developer`: the template knows that role besides the system's.
    """

    ids: Ids = Ids.ANY
    empty_content: bool = False
    arguments: Arguments = Arguments.OBJECT
    calls: Calls = Calls.SEVERAL
    results: str = "tool"
    words_apart: bool = False
    thought_beside_words: bool = True
    tools: Tools = Tools.VARIABLE
    system: System = System.ANYWHERE
    developer: bool = False
    parts: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    turns: Turns = Turns.ALL
    free: frozenset[str] = field(init=False, compare=False)
    """The roles of messages that need no change wherever they stand."""

    def __post_init__(self) -> None:
        shown = {"user", "assistant"} if self.turns is Turns.ALL else set()
        if self.system is System.ANYWHERE:
            shown.add("system")
        object.__setattr__(self, "free", frozenset(shown - self.parts - self.hidden))

    def of(self, messages: Sequence[Message], shows: Callable[[str], bool] = lambda role: True) -> list[dict[str, Any]]:
        """Return messages as templates read them; keys that mean nothing for one are not there.

        `shows` says whether the template shows the text of a role that it was not probed with. Raises InvalidRequest
        for a message that is shown in no form.
        """
        first, free = messages[0], self.free
        rest = messages[1:] if first.role == "system" and self._takes_first and first[2:] == _BARE else messages
        if not [each for each in rest if each.role not in free or each[2:] != _BARE]:  # nearly all chats
            return [{"role": each.role, "content": each.content} for each in messages]
        self._check(messages, shows)
        return [self._dict(each) for each in self._arranged(messages)]

    def with_tools(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
        """Return messages with the tools in the first one, of the system, where the template reads them there."""
        if not tools or self.tools is not Tools.MESSAGE:
            return messages
        if messages[0]["role"] != "system":
            messages = [self._dict(Message("system", "")), *messages]
        return [messages[0] | {"tools": json.dumps(tools, ensure_ascii=False)}, *messages[1:]]

    @property
    def _takes_first(self) -> bool:
        return self.system is System.FIRST and "system" not in self.parts

    def _check(self, messages: Sequence[Message], shows: Callable[[str], bool]) -> None:
        """Refuse a message whose text would be left out."""
        asked = [place for place, each in enumerate(messages) if each.role == "user"]
        for place, each in enumerate(messages):
            role = each.role
            if each.content and (role in self.hidden or (role not in (*_ROLES, "developer") and not shows(role))):
                raise _hidden(place, f"has role {role}, and this chat template shows no text of that role")
            if role == "user" and self.turns is not Turns.ALL:
                which, shown = ("first", asked[0]) if self.turns is Turns.FIRST else ("last", asked[-1])
                if place != shown:
                    raise _hidden(place, f"would be left out: this chat template shows only the {which} question")

    def _arranged(self, messages: Sequence[Message]) -> Sequence[Message]:
        found: Sequence[Message] = messages
        if not self.developer:
            found = [each._replace(role="system") if each.role == "developer" else each for each in found]
        if any(each.calls or each.role == "tool" for each in found):
            found = self._with_calls(_matched(found))
        if self.system is not System.ANYWHERE:
            found = list(_systems_moved(found, self.system is System.FIRST))
        return found

    def _with_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.calls is Calls.SINGLE:
            messages = list(_one_by_one(messages))
        if self.calls is Calls.WRITTEN:
            messages = [_written(each) if each.calls else each for each in messages]
        if self.ids is Ids.NAMED:
            messages = list(_named(messages))
        if self.words_apart:
            messages = list(_words_apart(messages))
        if self.results != "tool":
            messages = [each._replace(role=self.results) if each.role == "tool" else each for each in messages]
        return list(_joined(messages)) if self.results == "user" else messages

    def _dict(self, message: Message) -> dict[str, Any]:
        found: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        if message.calls:
            found["tool_calls"] = [self._call(each) for each in message.calls]
            if not message.content and not self.empty_content:
                found["content"] = None
        if message.call_id:
            found["tool_call_id"] = self._id(message.call_id)
        if message.name:
            found["name"] = message.name
        if message.thought and (self.thought_beside_words or not (message.calls and message.content)):
            # gpt-oss reads the second name.
            found |= {"reasoning_content": message.thought, "thinking": message.thought}
        return found

    def _content(self, message: Message) -> Any:
        return [{"type": "text", "text": message.content}] if message.role in self.parts else message.content

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": self._arguments(call.arguments)}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _arguments(self, text: str) -> Any:
        found = _meant(text)
        if self.arguments is Arguments.TEXT:
            return "{}" if found == {} else text
        if isinstance(found, dict):
            return found
        return text if self.arguments is Arguments.EITHER else {"arguments": found}

    def _id(self, given: str) -> str:
        if self.ids is not Ids.SHORT:
            return given
        return "".join(filter(str.isalnum, given))[-_SHORT:].rjust(_SHORT, "0")


def _hidden(place: int, what: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(f"prompt.chat.messages[{place}]", f"{what}; leave it out"))


def _meant(arguments: str) -> Any:
    """Return the object that a text of JSON means, also one in quotes; the text where it means none, as when cut."""
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments)
        if isinstance(found, str) and not json_shape.BODY.excess(found.encode()):
            found = json.loads(found or "{}")
    except (ValueError, RecursionError):
        return arguments
    return {} if found is None else found


def _matched(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls all have ids; each result has the id and the name of a call that it answers."""
    found, waiting = list[Message](), dict[str, str]()
    for place, each in enumerate(messages):
        if each.calls:
            calls = [call if call.id else replace(call, id=f"call{place}{at}") for at, call in enumerate(each.calls)]
            waiting = {call.id: call.name for call in calls}
            found.append(each._replace(calls=tuple(calls)))
        elif each.role == "tool":
            answered = each.call_id or next((key for key, name in waiting.items() if each.name in ("", name)), "")
            name = each.name or waiting.get(answered, "")
            waiting.pop(answered, None)
            found.append(each._replace(call_id=answered, name=name))
        else:
            found.append(each)
    return found


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with one call each, in front of its result."""
    place = 0
    while place < len(messages):
        each, place = messages[place], place + 1
        if len(each.calls) < 2:
            yield each
            continue
        results = list(takewhile(lambda message: message.role == "tool", messages[place:]))
        place += len(results)
        for at, call in enumerate(each.calls):
            yield each._replace(calls=(call,)) if at == 0 else Message("assistant", "", (call,))
            yield from (result for result in results if result.call_id == call.id)
        ids = {call.id for call in each.calls}
        yield from (result for result in results if result.call_id not in ids)


def _named(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages whose calls have ids of their name and their number, as Kimi's have them."""
    known, count = dict[str, str](), 0
    for each in messages:
        calls = list[Call]()
        for call in each.calls:
            known[call.id] = f"functions.{call.name}:{count}"
            calls.append(replace(call, id=known[call.id]))
            count += 1
        yield each._replace(calls=tuple(calls), call_id=known.get(each.call_id, each.call_id))


def _words_apart(messages: Sequence[Message]) -> Iterator[Message]:
    for each in messages:
        if each.calls and each.content:
            yield Message(each.role, each.content, thought=each.thought)
            yield each._replace(content="", thought="")
        else:
            yield each


def _written(message: Message) -> Message:
    """Return an answer whose calls are words of its content, as the dialect of models without a form has them."""
    calls = [{"name": call.name, "arguments": _meant(call.arguments)} for call in message.calls]
    text = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
    fenced = f"```json\n{text}\n```"
    return message._replace(content=f"{message.content}\n{fenced}" if message.content else fenced, calls=())


def _joined(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages, those of the user that follow each other as one: many templates want roles that alternate."""
    kept: Message | None = None
    for each in messages:
        if each.role == "user":
            kept = each if kept is None else Message("user", _together(kept.content, each.content))
            continue
        if kept is not None:
            yield kept
            kept = None
        yield each
    if kept is not None:
        yield kept


def _systems_moved(messages: Sequence[Message], takes_first: bool) -> Iterator[Message]:
    """Yield messages, those of the system as one at the beginning, or as a part of the user's next one."""
    count = next((place for place, each in enumerate(messages) if each.role not in _SYSTEM), len(messages))
    waiting = [each.content for each in messages[:count]]
    if takes_first and count:
        yield messages[0]._replace(content=_together(*waiting))
        waiting = []
    for each in messages[count:]:
        if each.role in _SYSTEM:
            waiting.append(each.content)
        elif waiting and each.role == "user":
            yield each._replace(content=_together(*waiting, each.content))
            waiting = []
        else:
            yield each
    if any(waiting):
        yield Message("user", _together(*waiting))


def _together(*texts: str) -> str:
    return _GAP.join(filter(None, texts))
