"""Finds what a chat template shows, and in which form, by short conversations whose words are looked for in its text.

Each question is asked once, when the template is compiled. A template that refuses a probe keeps its own words for the
client. One that leaves words out in silence is what must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product, takewhile
from typing import Any, Final, TypeAlias

from jinja2 import TemplateError

from common.contracts.errors import InvalidRequest
from router.answers.text.chat_input import Call, Message
from router.answers.text.message_forms import Arguments, Calls, Ids, MessageForm, System, Tools, Turns
from router.answers.text.turn_ends import TurnMarks

# Renders messages as they are, with tools or none, and with the beginning of an answer or without.
Render: TypeAlias = "Callable[[Sequence[dict[str, Any]], list[Any] | None, bool], str]"
# Jinja2's errors, and those of Python that expressions of a template raise: an index, a filter, an undefined name.
TEMPLATE_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)

# Words of the probes, which templates cannot contain by themselves. A template may trim them.
ASKED, AGAIN, SAID, BRIEF, BRIEFER, THOUGHT = (
    f"probed{word}" for word in ("asked", "again", "said", "brief", "more", "thought")
)
_USER, _USER_AGAIN = Message("user", ASKED), Message("user", AGAIN)
_ANSWER = Message("assistant", SAID)
_FIRST, _SECOND = Message("system", BRIEF), Message("system", BRIEFER)
_DEVELOPER = Message("developer", BRIEFER)
_VALUE, _OTHER_VALUE = "717171", "747474"
_CALL: Final = Call("call_0123456789abcdef01234567", "probed_tool", f'{{"probed": {_VALUE}}}')
_OTHER: Final = Call("call_0123456789abcdef01234568", "other_tool", f'{{"other": {_OTHER_VALUE}}}')
_CALLED: Final = Message("assistant", "", (_CALL,))
# As after an answer that was cut short.
_CUT: Final = _CALLED._replace(calls=(replace(_CALL, arguments=_CALL.arguments[:-1]),))
_RESULT: Final = Message("tool", "probed72", call_id=_CALL.id, name=_CALL.name)
_OTHER_RESULT: Final = Message("tool", "probed75", call_id=_OTHER.id, name=_OTHER.name)
# Roles that templates have for what a tool returns, most usual first.
_RESULTS: Final = ("tool", "ipython", "observation", "function", "tool_response", "user")


def _tool(name: str) -> dict[str, Any]:
    value = {"type": "string", "description": "A value."}
    parameters = {"type": "object", "properties": {"value": value}, "required": ["value"]}
    return {"type": "function", "function": {"name": name, "description": "Probed.", "parameters": parameters}}


TOOLS: Final = [_tool("offered_tool")]


class Probes:
    """A template that is asked questions."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def form(self, source: str) -> MessageForm:
        """Return the form in which the template shows most."""
        form = self._with_contents(MessageForm())
        form = self._with_systems(form, "developer" in source)
        return self._with_calls(self._with_tools(form))

    def shows(self, role: str, form: MessageForm) -> bool:
        """Return whether the template shows the text of a role, or refuses the role in its own words."""
        texts = [self.text(chat, form) for chat in ([Message(role, SAID), _USER], [_USER, Message(role, SAID), _USER])]
        return not any(texts) or any(SAID in text for text in texts)

    def marks(self, form: MessageForm) -> TurnMarks:
        """Return what the template writes around the words of a turn."""
        before, _, rest = self.text([_USER, _ANSWER, _USER_AGAIN], form).partition(ASKED)
        to_answer, _, between = rest.partition(AGAIN)[0].rpartition(SAID)
        behind_user = self.text([_USER], form, answer=False).rpartition(ASKED)[2]
        asks = to_answer if to_answer.strip() == behind_user.strip() else ""
        thoughtful = self.text([_USER, Message("assistant", SAID, thought=THOUGHT)], form, answer=False)
        to_words, found, behind = thoughtful.rpartition(SAID)
        if not found:  # it wants the user's message last
            return TurnMarks(_without_end(between, before), asks=asks)
        _, thought, inside = to_words.rpartition(THOUGHT)
        return TurnMarks(behind, inside if thought else "", asks, between)

    def text(self, chat: Sequence[Message], form: MessageForm, tools: Any = None, answer: bool = True) -> str:
        """Return what the template makes of a chat in a form; "" where it refuses it."""
        with suppress(InvalidRequest, *TEMPLATE_ERRORS):
            return self._render(form.with_tools(form.of(chat), tools), tools, answer)
        return ""

    def _taken_for_answer(self, form: MessageForm, role: str) -> bool:
        """Return whether the template takes a later message of a role for one of the assistant."""
        chats = ([_USER, _ANSWER, Message(each, BRIEFER), _USER_AGAIN] for each in (role, "assistant"))
        of_role, of_assistant = (self.text(chat, replace(form, system=System.ANYWHERE)) for chat in chats)
        return bool(of_role) and of_role == of_assistant

    def _texts(self, chat: Sequence[Message], form: MessageForm, tools: Sequence[Any]) -> Iterator[str]:
        return (self.text(chat, form, each) for each in tools)

    # ------------------------------------------------------------ text of users and assistants

    def _with_contents(self, form: MessageForm) -> MessageForm:
        """Choose text or parts for each of the two roles."""
        forms = [replace(form, parts=frozenset(parts)) for parts in ((), ("user",))]
        alone = [_USER], [_FIRST, _USER], [_USER, _ANSWER, _USER_AGAIN]
        for chat in alone:
            shown = [each for each in forms if _plain(self.text(chat, each), ASKED)]
            if shown:
                return self._with_turns(shown[0])
        rendered = any(self.text(chat, each) for chat in alone for each in forms)
        if any(AGAIN in self.text(alone[2], each) for each in forms):
            return self._with_turns(form)
        return replace(form, hidden=frozenset({"user"})) if rendered else form

    def _with_turns(self, form: MessageForm) -> MessageForm:
        chat = [_USER, _ANSWER, _USER_AGAIN]
        forms = [form, replace(form, parts=form.parts ^ {"assistant"})]
        if "user" in form.parts:
            forms.reverse()
        texts = [self.text(chat, each) for each in forms]
        if not any(texts):
            return form
        best = next((place for place, text in enumerate(texts) if _plain(text, SAID)), None)
        if best is None:
            text = next(filter(None, texts))
            return replace(form, hidden=frozenset({"assistant"}), turns=_turns(text))
        return replace(forms[best], turns=_turns(texts[best]))

    # ------------------------------------------------------------ messages of the system

    def _with_systems(self, form: MessageForm, has_developer: bool) -> MessageForm:
        forms = [form, replace(form, parts=form.parts | {"system", "developer"})]
        if "user" in form.parts:
            forms.reverse()
        # A template that ranks shows the words of other roles in place of the user's.
        chat, words = ([_FIRST], (BRIEF,)) if "user" in form.hidden else ([_FIRST, _USER], (BRIEF, ASKED))
        shown = [each for each in forms if _plain(self.text(chat, each), *words)]
        if not shown:
            return replace(form, system=System.NOWHERE)
        form = shown[0]
        if has_developer and _plain(self.text([_DEVELOPER, _USER], replace(form, developer=True)), BRIEFER, ASKED):
            form = replace(form, developer=True)
        late = [_FIRST, _SECOND, _USER], [_FIRST, _USER, _ANSWER, _SECOND, _USER_AGAIN]
        everywhere = all(_plain(self.text(chat, form), BRIEF, BRIEFER, ASKED) for chat in late)
        everywhere = everywhere and not self._taken_for_answer(form, "system")
        return form if everywhere else replace(form, system=System.FIRST)

    # ------------------------------------------------------------ tools, calls and their results

    def _with_tools(self, form: MessageForm) -> MessageForm:
        chats = [_USER], [_FIRST, _USER], [_USER, _ANSWER, _USER_AGAIN]
        for place in (Tools.VARIABLE, Tools.MESSAGE):
            each = replace(form, tools=place)
            if any("offered_tool" in text for chat in chats for text in self._texts(chat, each, [TOOLS])):
                return each
        return replace(form, tools=Tools.NOWHERE)

    def _with_calls(self, form: MessageForm) -> MessageForm:
        """Choose the first form in which a call shows."""
        flags = product((Ids.ANY, Ids.SHORT, Ids.NAMED), (False, True), (Arguments.OBJECT, Arguments.TEXT))
        forms = [replace(form, ids=i, empty_content=e, arguments=a) for i, e, a in flags]
        for accepts in (_shows_plainly, _shows):
            for each in forms:
                if any(map(accepts, self._with_call(each, _RESULT))):
                    return self._with_results(self._with_details(each))
        return self._with_results(replace(form, calls=Calls.WRITTEN))

    def _with_call(self, form: MessageForm, *results: Message, called: Message = _CALLED) -> Iterator[str]:
        """Yield what the template makes of a call; some want its result behind it, or a question at the end."""
        asked = [_USER, called]
        chats = [*asked, *results], [*asked, *results, _ANSWER, _USER_AGAIN]
        for chat in chats:
            yield from self._texts(chat, form, (TOOLS, None))

    def _with_details(self, form: MessageForm) -> MessageForm:
        if form.arguments is Arguments.OBJECT:
            either = replace(form, arguments=Arguments.EITHER)
            if any(_VALUE in text for text in self._with_call(either, _RESULT, called=_CUT)):
                form = either
        if not self._shows_both(form) and self._shows_both(replace(form, calls=Calls.SINGLE)):
            form = replace(form, calls=Calls.SINGLE)
        quiet = _CALLED._replace(content=BRIEF)
        apart = replace(form, words_apart=True)
        if not self._shows_words(form, quiet) and self._shows_words(apart, quiet):
            form = apart
        wordy = quiet._replace(thought=THOUGHT)
        if not any(self._with_call(form, _RESULT, called=wordy)) and any(self._with_call(form, _RESULT, called=quiet)):
            form = replace(form, thought_beside_words=False)
        return form

    def _shows_both(self, form: MessageForm) -> bool:
        both = _CALLED._replace(calls=(_CALL, _OTHER))
        texts = self._with_call(form, _RESULT, _OTHER_RESULT, called=both)
        return any(_shows(text) and _OTHER_VALUE in text for text in texts)

    def _shows_words(self, form: MessageForm, called: Message) -> bool:
        return any(_shows(text) and called.content in text for text in self._with_call(form, _RESULT, called=called))

    def _with_results(self, form: MessageForm) -> MessageForm:
        """Choose the role and the content of results."""
        for role in _RESULTS:
            of_user = form.parts | ({role} if role != "user" else set())
            for parts in (form.parts, of_user):
                each = replace(form, results=role, parts=parts)
                shown = any(_plain(text, _RESULT.content) for text in self._with_call(each, _RESULT))
                if shown and (role == "user" or not self._taken_for_answer(each, role)):
                    return each
        return replace(form, hidden=form.hidden | {"tool"}) if any(self._with_call(form, _RESULT)) else form


def _without_end(text: str, other: str) -> str:
    """Return a text without the end that it has in common with another."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text[::-1], other[::-1], strict=False)))
    return text[: len(text) - shared]


def _turns(text: str) -> Turns:
    if not text or (ASKED in text and AGAIN in text):
        return Turns.ALL
    return Turns.FIRST if ASKED in text else Turns.LAST


def _plain(text: str, *words: str) -> bool:
    """Return whether words are there, and not as a part that was written with its type."""
    return all(word in text for word in words) and "'type': 'text'" not in text and '"type": "text"' not in text


def _shows_plainly(text: str) -> bool:
    # Content that is none may be written as a word.
    return _shows(text) and "None" not in text


def _shows(text: str) -> bool:
    """Return whether the call is there, with its arguments: as the JSON that was sent, or word for word."""
    compact = text.replace(" ", "")
    spoilt = "{'probed'" in compact or '{\\"probed' in compact
    return _CALL.name in text and _VALUE in text and not spoilt
