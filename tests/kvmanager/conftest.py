"""A manager in this process with a real server, and channels to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from common.rpc.server import open_channel
from kvmanager.config import KvManagerSettings
from tests.support.kvmanager.fake_session import RawWorker, attach_of
from tests.support.kvmanager.running import Running as Running  # noqa: PLC0414 - with the types of the fixtures

Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_manager(tmp_path: Path) -> AsyncIterator[Start]:
    """Return what starts a manager without Redis unless asked otherwise; all are stopped at the end."""
    started: list[Running] = []

    async def start(**options: Any) -> Running:
        options.setdefault("state_dir", tmp_path / f"state-{len(started)}")
        running = Running(KvManagerSettings(port=0, metrics_port=0, **options))
        started.append(running)
        await running.process.start()
        return running

    yield start
    for running in started:
        await running.process.abort()


@pytest.fixture
async def manager(start_manager: Start) -> Running:
    """A manager without Redis."""
    return await start_manager()


ChannelTo = Callable[[str], aio.Channel]
Connect = Callable[..., RawWorker]


@pytest.fixture
async def channel_to() -> AsyncIterator[ChannelTo]:
    """Return what opens a channel to HOST:PORT; all are closed at the end."""
    async with AsyncExitStack() as stack:

        def open_to(address: str) -> aio.Channel:
            channel = open_channel(address)
            stack.push_async_callback(channel.close)
            return channel

        yield open_to


@pytest.fixture
async def connect(channel_to: ChannelTo) -> Connect:
    """Return what opens a raw session stream to a manager: (running, worker id, changes of its Attach)."""

    def open_stream(running: Running, worker_id: str = "w0", **changes: Any) -> RawWorker:
        return RawWorker(channel_to(running.address), attach_of(worker_id, **changes))

    return open_stream
