"""`quire chat` on a terminal of 80 columns, over a router that plays scripts: streaming, history, keys, commands."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.contracts.errors import FieldViolation, InvalidRequest
from common.process.python import module_command
from quire.inference.v1 import inference_pb2 as pb
from tests.support.fake_router import PATIENCE_S, TRACE_ID, RouterDouble, admitted, finished, served, tokens
from tests.support.terminal import Terminal

CTRL_D = "\x04"
Context = grpc.aio.ServicerContext[Any, Any]


class ChatRouter(RouterDouble):
    """A router whose model has a chat template, and whose scripts are for streams alone."""

    template = True

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(model="demo", max_model_len=512, has_chat_template=self.template)

    def chats(self) -> list[list[tuple[str, str]]]:
        """The messages of each request."""
        return [[(each.role, each.content) for each in request.prompt.chat.messages] for request in self.requests]


def answer(*words: str) -> tuple[pb.GenerateResponse, ...]:
    return (admitted(cached=4), *(tokens(word, 1) for word in words), finished(len(words)))


@pytest_asyncio.fixture
async def router() -> AsyncIterator[tuple[ChatRouter, str]]:
    double = ChatRouter()
    async with served(double) as address:
        yield double, address


def command(address: str, *words: str) -> list[str]:
    return module_command("cli.main", "chat", "--address", address, *words)


async def test_a_conversation_on_a_terminal(router: tuple[ChatRouter, str]) -> None:
    double, address = router
    never = asyncio.Event()
    refusal = InvalidRequest(FieldViolation("prompt.messages", "has 600 tokens; expected at most 512"))
    double.scripts = (
        answer(" Hel", "lo!"),
        (admitted(), tokens("an endless", 1), never),
        (refusal,),
        answer("ok"),
        answer("fresh"),
    )

    def talk() -> list[str]:
        with Terminal(command(address, "--system", "Be kind"), 80) as terminal:
            for keys, answered in (
                ("Hi \\\nthere\n", "prompt tokens cached"),
                ("More\n", "an endless"),
                (None, "stopped"),
                ("Too long\n", "expected at most 512"),
                ("half a line", "> half a line"),
                (None, "(Ctrl-D ends)"),
                ("/trace\n", TRACE_ID),
                ("/nonsense\n", "there is no command /nonsense; /help lists them"),
                ("Again\n", "ok"),
                ("/reset\n", "begins anew"),
                ("/system\n", "there is no system message"),
                ("Anew\n", "fresh"),
                ("/help\n", "Ctrl-D         end"),
            ):
                if keys is None:
                    terminal.interrupt_until(answered)
                    continue
                terminal.until_prompt("> ")
                terminal.type(keys)
                terminal.until(answered)
            terminal.until_prompt("> ")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
            return terminal.lines

    lines = await asyncio.to_thread(talk)
    await asyncio.wait_for(double.cancelled.wait(), PATIENCE_S)
    first = [("system", "Be kind"), ("user", "Hi \nthere"), ("assistant", "Hello!")]
    stopped = [*first, ("user", "More"), ("assistant", "an endless")]
    assert double.chats() == [
        first[:2],
        [*first, ("user", "More")],
        [*stopped, ("user", "Too long")],
        [*stopped, ("user", "Again")],
        [("user", "Anew")],
    ]
    shown = "\n".join(lines)
    for words in (
        "2 tokens in",
        "the first after 500 ms; 4 of 5 prompt tokens cached",
        f"quire trace {TRACE_ID}",
        "there is no command /nonsense; /help lists them",
        "there is no system message",
    ):
        assert words in shown
    assert "Traceback" not in shown


async def test_piped_lines_are_answered_without_a_prompt(router: tuple[ChatRouter, str]) -> None:
    double, address = router
    double.scripts = (answer("one"), answer("two"))
    done = await asyncio.to_thread(
        subprocess.run,
        command(address, "--seed", "3"),
        input="a\nb\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\n", "")
    assert double.chats() == [[("user", "a")], [("user", "a"), ("assistant", "one"), ("user", "b")]]
    assert [request.sampling.seed for request in double.requests] == [3, 3]


async def test_what_cannot_be_talked_with_is_said(router: tuple[ChatRouter, str]) -> None:
    double, address = router
    double.template = False

    async def said(*words: str) -> tuple[int, str]:
        done = await asyncio.to_thread(
            subprocess.run, command(*words), input="", capture_output=True, text=True, timeout=PATIENCE_S
        )
        return done.returncode, done.stderr

    assert await said(address) == (1, "quire: demo has no chat template; quire generate --raw completes a text\n")
    assert await said("127.0.0.1:1") == (1, "quire: no router answers at 127.0.0.1:1; start one with `quire serve`\n")


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
async def test_piped_bytes_that_are_no_text_are_refused(router: tuple[ChatRouter, str], locale: str) -> None:
    double, address = router
    done = await asyncio.to_thread(
        subprocess.run,
        command(address),
        input=b"\xff\xfe\n",
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "LC_ALL": locale},
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"quire: standard input: is not UTF-8; expected text\n"
    assert not double.requests
