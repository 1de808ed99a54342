"""Requests of the router to its own application: what it answers, fails with, and sees of its end."""

from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from router.api.openai.batches.runner import asked
from router.tenants.tenancy import Caller, Tenant

CALLER = Caller(Tenant("red"), "key")


def application() -> tuple[FastAPI, asyncio.Event, asyncio.Event]:
    """Return an application, and events for when it waits, and for when such a request has ended."""
    app, waits, ended = FastAPI(), asyncio.Event(), asyncio.Event()

    @app.post("/echo")
    async def echo(request: Request) -> JSONResponse:
        found = {"caller": request.state.caller.tenant.name, "body": await request.json()}
        return JSONResponse(found, 201, {"x-seen": request.headers["x-request-id"]})

    @app.post("/broken")
    async def broken() -> None:
        raise RuntimeError("a defect")

    @app.post("/waits")
    async def wait(request: Request) -> None:
        waits.set()
        await request.body()
        try:
            await request.receive()
        finally:
            ended.set()

    return app, waits, ended


async def test_a_request_has_its_caller_and_its_answer_comes_whole() -> None:
    app, _, _ = application()
    answer = await asked(app, CALLER, "/echo", b'{"a": "\xc3\xa9"}', "batch_1")
    assert (answer.status, answer.header(b"x-seen")) == (201, "batch_1")
    assert json.loads(answer.body) == {"caller": "red", "body": {"a": "é"}}
    assert answer.header(b"none") == ""


async def test_a_defect_of_the_application_is_an_answer_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app, _, _ = application()
    assert (await asked(app, CALLER, "/broken", b"{}", "batch_1")).status == 500
    assert "a request of a batch failed" in caplog.text
    assert "a defect" in caplog.text


async def test_the_client_stays_until_it_is_cancelled() -> None:
    app, waits, ended = application()
    asking = asyncio.create_task(asked(app, CALLER, "/waits", b"{}", "batch_1"))
    await waits.wait()
    assert not ended.is_set()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ended.is_set()
