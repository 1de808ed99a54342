"""The common part of the commands: the router's address, CA and key, a client or a channel, a console, and errors."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import grpc
from pydantic import Field
from rich.console import Console

from cli.certificates.folder import CertificateFolder
from common.contracts.errors import FieldViolation, InvalidConfig, QuireError, Unavailable, Unsupported
from common.rpc.roles import Role
from common.rpc.server import open_channel
from common.rpc.tls import Identity
from common.rpc.tls_words import tls_problem
from common.settings.config import exit_status, load_or_exit
from common.settings.options import Address, TlsSettings, checked_address
from quire.api.proxy import is_this_machine
from quire.api.status import error_from_rpc
from quire.client import AsyncClient
from quire.client.setup import credentials_of


# Options of the commands that call a router, from flags, environment and a TOML file.
# They stand apart from those of `quire serve`, which take longer to import than most commands to run.
class ClientSettings(TlsSettings):
    """options of the commands that talk to a router"""

    service: ClassVar[str] = "client"

    address: Address = Field("127.0.0.1:50051", description="HOST:PORT of the router")
    http_address: Address = Field("127.0.0.1:8000", description="HOST:PORT of the router's HTTP port")
    ca: Path | None = Field(None, description="PEM file: the CA of the router's public ports; given, TLS is used")
    api_key: str | None = Field(None, description="API key that calls carry")
    state_dir: Path = Field(
        Path(".quire"), description="folder of `quire serve`, whose certs/operator opens the admin plane"
    )
    admin_address: Address = Field("127.0.0.1:50050", description="HOST:PORT of the router's admin plane")


_PIPED_WIDTH = 140
# The messages of gRPC servers themselves.
_NO_SUCH_METHOD = "Method not found!"
# gRPC's word for a host whose name leads to no address.
_NOT_RESOLVED = "errors resolving"


def address_of(word: str) -> str:
    """Return an address of the command line. Raises ArgumentTypeError."""
    try:
        return checked_address(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is {word!r}; {error}") from None


def path_of(word: str) -> Path:
    """Return a path of the command line. Raises ArgumentTypeError for none: a Path would be the working directory."""
    if not word:
        raise argparse.ArgumentTypeError("is empty; expected a path")
    return Path(word)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the router's address. Its default comes from the environment and the option file."""
    address = load_or_exit(ClientSettings, ()).address
    text = "HOST:PORT of the router (default %(default)s; environment: QUIRE_ADDRESS)"
    parser.add_argument("--address", type=address_of, default=address, help=text)


def add_http_address(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the router's HTTP port, as `add_address` does."""
    text = "HOST:PORT of the router's HTTP port (default %(default)s; environment: QUIRE_HTTP_ADDRESS)"
    parser.add_argument("--http-address", type=address_of, default=_access().http_address, help=text)


def http_target(address: str) -> tuple[str, str, Path | None]:
    """Return the URL of an HTTP port, the key and the CA. Given a CA, TLS is used."""
    settings = _access()
    return f"{'https' if settings.ca else 'http'}://{address}", settings.api_key or "", settings.ca


# Plain text and no key, whatever the environment has: for a suite that a command started itself.
PLAIN: Final = ClientSettings()


def _access() -> ClientSettings:
    """Return the CA and the key of the environment and the option file."""
    return load_or_exit(ClientSettings, ())


def add_admin_address(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the router's admin plane, as `add_address` does: its address, and the certificates' folder."""
    settings = _access()
    text = "HOST:PORT of the router's admin plane (default %(default)s; environment: QUIRE_ADMIN_ADDRESS)"
    parser.add_argument("--admin-address", type=address_of, default=settings.admin_address, help=text)
    text = "state directory of `quire serve`, for the operator's certificate (default %(default)s; QUIRE_STATE_DIR)"
    parser.add_argument("--state-dir", type=path_of, default=settings.state_dir, help=text)


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on a line, and nothing else")


def print_json(value: Mapping[str, Any]) -> None:
    """Print a JSON document on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")


@asynccontextmanager
async def router_client(address: str, access: ClientSettings | None = None) -> AsyncIterator[AsyncClient]:
    """Open the client library. Calls have no deadline unless they set one."""
    settings = access or _access()
    credentials, key = _credentials(settings), settings.api_key or ""
    async with AsyncClient(address, timeout=None, credentials=credentials, ca="", api_key=key) as client:
        try:
            yield client
        except (Unavailable, Unsupported) as error:
            of_ca = f"QUIRE_CA is {settings.ca}" if settings.ca else "name the router's CA with QUIRE_CA"
            raise _with_advice(error, address, credentials is not None, of_ca) from error


@asynccontextmanager
async def admin_channel(address: str, state_dir: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel to a router's admin plane, as its operator. A failed call inside raises the service's QuireError.

    The certificate is that of QUIRE_TLS_CERT, else the operator's that `quire serve` has made. Raises InvalidConfig.
    """
    identity, elsewhere = _operator(_access(), state_dir), not is_this_machine(address)
    async with open_channel(address, identity=identity, role=Role.ROUTER, by_proxy=elsewhere) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            advice = f"name the --state-dir of its certificates, which is {state_dir} here"
            raise _with_advice(error_from_rpc(error), address, identity is not None, advice) from error


def _operator(settings: ClientSettings, state_dir: Path) -> Identity | None:
    leaf = CertificateFolder(state_dir / "certs").role(Role.OPERATOR)
    if settings.insecure:
        return None
    return Identity.of(settings) or (leaf.identity() if leaf.cert.exists() else None)


def _credentials(settings: ClientSettings) -> grpc.ChannelCredentials | None:
    """Raises InvalidConfig when the CA cannot be read."""
    try:
        return credentials_of(settings.ca or "")
    except OSError as error:
        what = f"{settings.ca} cannot be read: {error.strerror}; expected a PEM file"
        raise InvalidConfig(FieldViolation("QUIRE_CA", what)) from None


def _with_advice(error: QuireError, address: str, with_tls: bool, of_tls: str) -> QuireError:
    """Add advice to an error when no router answers, or when another server does; `of_tls` where TLS fails."""
    if isinstance(error, Unavailable) and (problem := tls_problem(str(error), address, with_tls)):
        return Unavailable(f"{problem}; {of_tls}")
    if isinstance(error, Unavailable) and "connect" in str(error).lower():
        return Unavailable(f"no router answers at {address}; start one with `quire serve`")
    if isinstance(error, Unavailable) and _NOT_RESOLVED in str(error).lower():
        host = address.rpartition(":")[0]
        return Unavailable(f"no router answers at {address}: the host {host!r} has no address; name another HOST:PORT")
    if isinstance(error, Unsupported) and str(error) == _NO_SUCH_METHOD:
        return Unsupported(
            f"the server at {address} is not a router, or this is not its API port; `quire serve` prints the address"
        )
    return error


def unheard_in_words(managers: Iterable[str], then: str) -> list[str]:
    """Return a line for each KV manager that has not answered since the router's start, and what happens later."""
    words = "has not answered since the router's start; if it leads another group,"
    return [f"  the KV manager at {each} {words} {then} once it answers" for each in managers]


def command_console(width: int | None = None, record: bool = False) -> Console:
    """Return a console that prints to stdout; `width` is in columns, `record` keeps the output for an export."""
    unless_given = None if sys.stdout.isatty() else _PIPED_WIDTH
    # Without emoji codes: a model's ":smile:" stays these seven characters.
    return Console(highlight=False, emoji=False, width=width or unless_given, record=record)


def failed(error: QuireError) -> int:
    """Print an error on one line, and return the exit status: 2 for wrong usage, 1 for what failed."""
    print(f"quire: {error}", file=sys.stderr)
    return exit_status(error)


def run_command(body: Callable[[Console], Coroutine[Any, Any, None]], console: Console | None = None) -> int:
    """Run a command's body, print an error on one line, and return the exit status."""
    try:
        asyncio.run(body(console or command_console()))
    except QuireError as error:
        return failed(error)
    except KeyboardInterrupt:
        return 130
    return 0
