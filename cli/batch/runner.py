"""Sends the requests of a batch, so many at once, and tries again while the server is busy or away."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from common.backoff import Backoff
from common.batch.lines import Item
from common.batch.results import AGAIN, BACKOFF, Result, asked_pause
from common.contracts.errors import (
    FieldViolation,
    InvalidConfig,
    PermissionDenied,
    QuireError,
    Unauthenticated,
    Unavailable,
)
from common.rpc.tls_words import tls_problem
from quire.api.proxy import is_this_machine


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how often and how long each is tried."""

    url: str
    api_key: str = ""
    ca: Path | None = None
    concurrency: int = 32
    attempts: int = 10
    timeout: float = 600.0
    backoff: Backoff = BACKOFF


@dataclass(slots=True)
class Counts:
    """What a run has done so far."""

    succeeded: int = 0
    refused: int = 0
    failed: int = 0
    retries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def take(self, result: Result) -> None:
        self.succeeded += result.ok
        self.refused += bool(result.status) and not result.ok
        self.failed += bool(result.error)
        usage = result.body.get("usage") if isinstance(result.body, dict) else None
        if isinstance(usage, dict):
            self.input_tokens += _number(usage, "prompt_tokens", "input_tokens")
            self.output_tokens += _number(usage, "completion_tokens", "output_tokens")


@asynccontextmanager
async def client(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client with a connection for each request that runs. Raises InvalidConfig for a bad CA file or proxy."""
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=target.concurrency, max_keepalive_connections=target.concurrency)
    timeout = httpx.Timeout(target.timeout, connect=10.0, pool=None)
    # A proxy of the environment leads to other machines alone.
    trust_env, trust = not is_this_machine(urlsplit(target.url).netloc), _trust(target.ca)
    try:
        opened = httpx.AsyncClient(
            base_url=target.url, headers=headers, limits=limits, timeout=timeout, verify=trust, trust_env=trust_env
        )
    except (
        ImportError,
        ValueError,
        httpx.InvalidURL,
    ) as error:  # a proxy of a kind that httpx does not know, or not without a package
        what = f"the proxy cannot be used: {error}; expected http://HOST:PORT, or the router's host in no_proxy"
        raise InvalidConfig(FieldViolation("http_proxy, https_proxy or all_proxy", what)) from None
    async with opened:
        yield opened


def _trust(ca: Path | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        what = f"{ca} cannot be read: {error.strerror or error}; expected a PEM file"
        raise InvalidConfig(FieldViolation("QUIRE_CA", what)) from None


class Runner:
    """One run over the requests of a batch. `ended` takes each result; nothing is awaited in it."""

    def __init__(self, target: Target, ended: Callable[[Result], None]) -> None:
        self._target, self._ended = target, ended
        self.counts = Counts()

    async def run(self, items: Iterator[Item]) -> None:
        """Send everything. Raises Unauthenticated or PermissionDenied for the key, Unavailable where no router is."""
        async with client(self._target) as opened:
            await self._reach(opened)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._target.concurrency):
                        group.create_task(self._work(opened, items))
            except* QuireError as errors:
                raise errors.exceptions[0] from None

    async def _reach(self, opened: httpx.AsyncClient) -> None:
        """Ask for the models: a wrong address or key is an error of the whole batch, not of each line."""
        try:
            response = await opened.get("/v1/models")
        except httpx.TransportError as error:
            if problem := tls_problem(_words(error), self._target.url, self._target.url.startswith("https")):
                raise Unavailable(f"{problem}; QUIRE_CA names the router's CA, and asks for TLS") from None
            what = f"no router answers at {self._target.url} ({_words(error)})"
            raise Unavailable(f"{what}; start one with `quire serve`, or name it with --http-address") from None
        _check_key(response)

    async def _work(self, opened: httpx.AsyncClient, items: Iterator[Item]) -> None:
        for item in items:  # all workers share one iterator
            result = await self._result(opened, item)
            self.counts.take(result)
            self._ended(result)

    async def _result(self, opened: httpx.AsyncClient, item: Item) -> Result:
        failure = ""
        for attempt in range(1, self._target.attempts + 1):
            asked = 0.0
            try:
                response = await opened.post(item.url, json=item.body)
                if response.status_code not in AGAIN:
                    _check_key(response)
                    return Result(item.custom_id, response.status_code, _request_id(response), _body(response))
                failure = f"HTTP {response.status_code}: {_message(response)}"
                asked = asked_pause(response.headers.get("retry-after", ""))
            except httpx.TransportError as error:
                failure = _words(error)
            if attempt < self._target.attempts:
                self.counts.retries += 1
                await asyncio.sleep(asked + self._target.backoff.pause(attempt, random.random()))
        return Result(item.custom_id, error=f"after {self._target.attempts} attempts: {failure}")


def _check_key(response: httpx.Response) -> None:
    """Raise Unauthenticated for a key that the server does not know: no line of the batch would get further."""
    if response.status_code == 401:
        raise Unauthenticated(f"{_message(response)}; set QUIRE_API_KEY, and run the same command again")
    if response.status_code == 403 and response.request.method == "GET":
        raise PermissionDenied(_message(response))


def _request_id(response: httpx.Response) -> str:
    return str(response.headers.get("x-request-id", ""))


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _message(response: httpx.Response) -> str:
    body = _body(response)
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else response.text[:200]


def _number(usage: dict[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := usage.get(name), int)), 0)


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
