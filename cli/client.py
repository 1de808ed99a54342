"""The common part of the commands: the router's address, a client or a channel, a console, and error messages."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
from rich.console import Console

from cli.config import ClientSettings
from common.errors import QuireError, Unavailable, Unsupported
from common.settings.config import load_or_exit
from quire.api.status import error_from_rpc
from quire.client import AsyncClient

_PIPED_WIDTH = 140
# The messages of gRPC servers themselves.
_NO_SUCH_METHOD = "Method not found!"


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the router's address. Its default comes from the environment and the option file."""
    address = load_or_exit(ClientSettings, ()).address
    text = "HOST:PORT of the router (default %(default)s; environment: QUIRE_ADDRESS)"
    parser.add_argument("--address", default=address, help=text)


@asynccontextmanager
async def router_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel. A failed call inside raises the QuireError that the service sent."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            raise _with_advice(error_from_rpc(error), address) from error


@asynccontextmanager
async def router_client(address: str) -> AsyncIterator[AsyncClient]:
    """Open the client library. Calls have no deadline unless they set one."""
    async with AsyncClient(address, timeout=None) as client:
        try:
            yield client
        except (Unavailable, Unsupported) as error:
            raise _with_advice(error, address) from error


def _with_advice(error: QuireError, address: str) -> QuireError:
    """Add advice to an error when no router answers, or when another server does."""
    if isinstance(error, Unavailable) and "connect" in str(error).lower():
        return Unavailable(f"no router answers at {address}; start one with  quire up --model DIR")
    if isinstance(error, Unsupported) and str(error) == _NO_SUCH_METHOD:
        return Unsupported(
            f"what answers at {address} is no router; expected the gRPC port that `quire up` names when ready"
        )
    return error


def command_console(width: int | None = None, record: bool = False) -> Console:
    """Return a console that prints to stdout; `width` is in columns, `record` keeps the output for an export."""
    unless_given = None if sys.stdout.isatty() else _PIPED_WIDTH
    # Without emoji codes: a model's ":smile:" stays these seven characters.
    return Console(highlight=False, emoji=False, width=width or unless_given, record=record)


def run_command(body: Callable[[Console], Coroutine[Any, Any, None]], console: Console | None = None) -> int:
    """Run a command's body, print an error on one line, and return the exit status."""
    try:
        asyncio.run(body(console or command_console()))
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
