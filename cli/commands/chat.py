"""`quire chat`: talks with the served model in the terminal. Ctrl-C stops an answer, Ctrl-D ends.

/help lists what else can be typed. A line that ends with a backslash goes on in the next line.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from cli.client import add_address, failed, router_client
from common.contracts.errors import FieldViolation, InvalidRequest, QuireError, Unsupported
from quire.client import AsyncStream, Completion, Message, Model, Options

_PROMPT, _MORE = "> ", ". "
_ANSWER_SECONDS: Final = 10.0
_HELP: Final = """\
/help          this list
/reset         forget everything but the system message
/system TEXT   set the system message; without TEXT: drop it
/trace         how to see where the last answer's time went
Ctrl-C         stop an answer; the part that came stays in the conversation
Ctrl-D         end"""


@dataclass
class Conversation:
    """The messages so far, and how the next request is made of them."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def asking(self, text: str) -> list[Message]:
        """Return the messages of a request with one more message of the user."""
        head = [Message(role="system", content=self.system)] if self.system else []
        return [*head, *self.messages, Message(role="user", content=text)]

    def answered(self, text: str, answer: str) -> None:
        self.messages += [Message(role="user", content=text), Message(role="assistant", content=answer)]

    def obey(self, line: str, last_trace: str) -> str:
        """Carry out a line that begins with a slash; return what to say about it."""
        word, _, rest = line.partition(" ")
        match word:
            case "/help":
                return _HELP
            case "/reset":
                self.messages.clear()
                return "the conversation begins anew"
            case "/system":
                self.system = rest.strip()
                return f"the system message is: {self.system}" if self.system else "there is no system message"
            case "/trace":
                return f"quire trace {last_trace}" if last_trace else "nothing was answered yet"
        return f"there is no command {word}; /help lists them"


class Chat:
    """Reads lines, sends each with the conversation before it, and prints the answers as they arrive.

    Each answer has an event loop of its own, where Ctrl-C cancels a task. A blocking client could be left with a lock
    held by a call that ended anywhere, and the next answer would never come.
    """

    def __init__(self, address: str, conversation: Conversation, options: Options) -> None:
        self._address, self._conversation, self._options = address, conversation, options
        self._interactive = sys.stdin.isatty()
        self._last_trace = ""

    def run(self) -> None:
        """Serve until Ctrl-D, or until the end of a piped input."""
        while True:
            try:
                self._turn(self._read())
            except EOFError:
                return print() if self._interactive else None
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends)")

    def _turn(self, line: str) -> None:
        if line.startswith("/"):
            print(self._conversation.obey(line, self._last_trace))
        elif line.strip():
            self._answer(line)

    def _read(self) -> str:
        line = input(_PROMPT if self._interactive else "")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(_MORE if self._interactive else "")
        return line

    def _answer(self, text: str) -> None:
        """Print the answer. After Ctrl-C what came of it counts as the answer; after an error nothing was asked."""
        parts: list[str] = []
        began = time.monotonic()
        try:
            done = asyncio.run(self._streamed(text, parts))
            self._say(_figures(done, time.monotonic() - began))
        except KeyboardInterrupt:
            self._say("stopped")
        except QuireError as error:
            if not self._interactive:
                raise
            print(f"{_newline(parts)}quire: {error}", file=sys.stderr)
            return
        self._conversation.answered(text, "".join(parts).strip())

    async def _streamed(self, text: str, parts: list[str]) -> Completion:
        asked = self._conversation.asking(text)
        async with router_client(self._address) as client, client.stream(asked, **self._options) as stream:
            await _print_as_it_comes(stream, parts)
            self._last_trace = stream.completion.trace_id
            return stream.completion

    def _say(self, words: str) -> None:
        """Print a dim line about an answer, for people alone."""
        print(f"\n\x1b[2m{words}\x1b[0m" if self._interactive else "")


async def _print_as_it_comes(stream: AsyncStream, parts: list[str]) -> None:
    async for chunk in stream:
        text = chunk.text if parts else chunk.text.lstrip()
        if text:
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()


def _newline(parts: Sequence[str]) -> str:
    return "\n" if parts else ""


def _figures(done: Completion, seconds: float) -> str:
    """Return what an answer cost, in less than 80 columns."""
    tokens, first = done.usage.output_tokens, 1e3 * done.timings.time_to_first_token
    cached = f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens cached"
    return f"{tokens} tokens in {seconds:.2f} s, the first after {first:.0f} ms; {cached}"


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser("quire chat", description=__doc__, formatter_class=form)
    flags.add_argument("--system", default="", help="a system message in front of the conversation")
    flags.add_argument("--max-tokens", type=int, help="output tokens of an answer at most")
    flags.add_argument("--temperature", type=float, help="0 is greedy")
    flags.add_argument("--seed", type=int, help="the same seed gives the same answers")
    add_address(flags)
    return flags


def chat(args: argparse.Namespace) -> None:
    """Raises Unavailable when no router answers, and Unsupported for a model without a chat template."""
    options: Options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    model = asyncio.run(_model(args.address))
    if not model.has_chat_template:
        raise Unsupported(f"{model.name} has no chat template; quire generate --raw completes a text")
    if sys.stdin.isatty():
        print(f"{model.name} at {args.address}; /help lists commands, Ctrl-D ends")
    Chat(args.address, Conversation(args.system), options).run()


async def _model(address: str) -> Model:
    async with router_client(address) as client:
        return await client.model(timeout=_ANSWER_SECONDS)


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    with suppress(ModuleNotFoundError):  # some builds of Python have none; lines are then read without editing
        import readline  # noqa: F401 - input() edits lines, and keeps those of this session
    try:
        chat(args)
    except QuireError as error:
        return failed(error)
    except UnicodeDecodeError:
        return failed(InvalidRequest(FieldViolation("standard input", "is not UTF-8; expected text")))
    except KeyboardInterrupt:
        return 130
    return 0
