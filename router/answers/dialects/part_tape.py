"""A tape whose reader writes the parts of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from router.answers.dialects.offered import OfferedTool
from router.answers.dialects.tape import Flow, Mismatch, Tape
from router.contracts.answer_parts import CallArguments, CallBegun, Part, Thought, Words

# White space of this length before a call is text like any other.
_MOST_BLANK = 256


class PartTape(Tape):
    """Text that comes, and the parts that a reader has made of it.

    White space between calls, and between the start of the answer and its first call, is not part of the answer.
    """

    def __init__(self, offered: Sequence[OfferedTool] = ()) -> None:
        super().__init__()
        self.offered: Mapping[str, OfferedTool] = {tool.name: tool for tool in offered}
        self._parts: list[Part] = []
        self._calls = 0
        self._blank = ""
        self._only_blank = True

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return self._calls

    def thought(self, text: str) -> None:
        self._parts.append(Thought(text))

    def words(self, text: str) -> None:
        """Write text for the user."""
        self._blank += text
        if self._only_blank and self._blank.isspace() and len(self._blank) <= _MOST_BLANK:
            return
        self._flush()

    def begin(self, name: str) -> None:
        """Begin a call: what was held was its head."""
        self.release()
        self._blank, self._only_blank = "", True
        self._parts.append(CallBegun(self._calls, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments of the call that was begun last."""
        self._parts.append(CallArguments(self._calls - 1, text))

    def offers(self, name: str) -> bool:
        """Return whether a call without a marker may mean this tool. Where no tools are known, any may be meant."""
        return not self.offered or name in self.offered

    def attempt(self, flow: Flow[None], back: int = 0) -> Flow[None]:
        """Read what may be calls, the last `back` characters included. If it is none, its text becomes words.

        The part of a call that a cut-off output holds is not text for the user.
        """
        self.hold(back)
        before = self._calls
        try:
            yield from flow
        except Mismatch:
            held = self.release()
            if not (self.cut_off and (back or self._calls > before or self._names_tool(held))):
                self.words(held)
        else:
            self.release()

    def _names_tool(self, text: str) -> bool:
        return any(f'"{name}"' in text for name in self.offered)

    def finish(self) -> None:
        """Write the white space that waits for a call, unless calls came before it."""
        if not self._calls:
            self._flush()

    def cut(self) -> list[Part]:
        """Return the parts since the last time, neighbours of one kind as one."""
        parts, self._parts = self._parts, []
        return joined(parts)

    def _flush(self) -> None:
        if self._blank:
            self._parts.append(Words(self._blank))
            self._blank, self._only_blank = "", False


class FlowParser:
    """A parser whose work a coroutine does."""

    def __init__(self, tape: PartTape, flow: Callable[[PartTape], Flow[None]]) -> None:
        self._tape, self._flow = tape, flow(tape)

    def feed(self, text: str) -> Sequence[Part]:
        self._tape.append(text)
        next(self._flow, None)
        return self._tape.cut()

    def finish(self, cut: bool = False) -> Sequence[Part]:
        self._tape.end(cut)
        next(self._flow, None)
        self._tape.finish()
        return self._tape.cut()


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind as one part."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and _continues(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_one(run) for run in runs]


def _continues(before: Part, part: Part) -> bool:
    if isinstance(part, CallBegun) or type(part) is not type(before):
        return False
    return not isinstance(part, CallArguments) or part == CallArguments(getattr(before, "index", -1), part.text)


def _one(run: Sequence[Part]) -> Part:
    first = run[0]
    if isinstance(first, CallBegun) or len(run) == 1:
        return first
    text = "".join(part.text for part in run if not isinstance(part, CallBegun))
    return CallArguments(first.index, text) if isinstance(first, CallArguments) else type(first)(text)
