"""Open WebUI as released: what its page sends for a chat, in which the model calls tools of Open WebUI itself."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.suites.clients.double import MODEL, Double, call, served_double
from tests.suites.clients.other_python import need_clients, program
from tests.support.suite import PATIENCE
from tests.support.waiting import until

CONTEXT = 50_000
ANSWER = "a"
TASK = "Note what we said, then tell me."
# How each of its requests for a title, for tags and for questions begins, which it makes beside the chat.
ASIDES = {"### Task:": json.dumps({"title": "Greetings", "tags": ["hello"], "follow_ups": ["And now?"]})}


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """Check for the page before anything is started for it."""
    need_clients("open-webui")


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    with served_double(CONTEXT) as running:
        yield running


@asynccontextmanager
async def page(double: Double, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run Open WebUI until the context ends; yield a client that its only user has signed in."""
    settings = {
        "HOME": str(folder), "DATA_DIR": str(folder), "WEBUI_SECRET_KEY": "x", "WEBUI_AUTH": "False",
        "OPENAI_API_BASE_URL": f"{double.http_url}/v1", "OPENAI_API_KEY": "x", "ENABLE_OLLAMA_API": "False",
        # It loads no model of embeddings from elsewhere.
        "OFFLINE_MODE": "True", "RAG_EMBEDDING_ENGINE": "openai",
    }  # fmt: skip
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(program("open-webui", "open-webui")), "serve", "--host", "127.0.0.1", "--port", "0"]
    with (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=ours | settings, cwd=folder)
    try:
        port = await until(lambda: listens_at(server, folder / "log"), seconds=2 * PATIENCE)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            user = await answer(client, "/api/v1/auths/signin", {"email": "", "password": ""})
            client.headers["authorization"] = f"Bearer {user['token']}"
            yield client
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


def listens_at(server: asyncio.subprocess.Process, log: Path) -> int | None:
    """Return the port; None until it listens. Fail with the log when it has ended."""
    assert server.returncode is None, log.read_text()
    listening = [each for each in psutil.Process(server.pid).net_connections("tcp") if each.status == "LISTEN"]
    return listening[0].laddr.port if listening else None


async def answer(client: httpx.AsyncClient, path: str, body: Any = None) -> Any:
    """Return the answer to a request of the page."""
    got = await (client.get(path) if body is None else client.post(path, json=body))
    assert got.status_code == 200, got.text
    return got.json()


async def asked(client: httpx.AsyncClient, text: str) -> str:
    """Ask in a new chat, as the page does; return its id. The message that will be answered is ANSWER."""
    question = {
        "id": "q",
        "parentId": None,
        "childrenIds": [ANSWER],
        "role": "user",
        "content": text,
        "models": [MODEL],
    }
    reply = {"id": ANSWER, "parentId": "q", "childrenIds": [], "role": "assistant", "content": "", "model": MODEL}
    stamped = [each | {"timestamp": int(time.time())} for each in (question, reply)]
    history = {"messages": {each["id"]: each for each in stamped}, "currentId": ANSWER}
    chat = {"title": "New Chat", "models": [MODEL], "params": {}, "history": history, "messages": stamped}
    identifier = (await answer(client, "/api/v1/chats/new", {"chat": chat}))["id"]
    wanted = dict.fromkeys(("title_generation", "tags_generation", "follow_up_generation"), True)
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, "params": {},
        "stream_options": {"include_usage": True}, "tool_servers": [], "features": {}, "background_tasks": wanted,
        "session_id": "s", "chat_id": identifier, "id": ANSWER,
    }  # fmt: skip
    await answer(client, "/api/chat/completions", body)
    return str(identifier)


async def test_open_webui_runs_tools_and_titles_the_chat(double: Double, tmp_path: Path) -> None:
    """Model double: it writes a note, finds it, then answers; a title is asked for beside that."""
    double.play(
        call("write_note", title="Greeting", content="hello"),
        call("search_notes", query="Greeting"),
        "All done.",
        asides=ASIDES,
    )
    async with page(double, tmp_path) as client:
        (model,) = (await answer(client, "/api/models"))["data"]
        assert (model["id"], model["max_model_len"]) == (MODEL, CONTEXT)
        chat = await asked(client, TASK)

        async def titled() -> Any:
            state = await answer(client, f"/api/v1/chats/{chat}")
            reply = state["chat"]["history"]["messages"][ANSWER]
            return reply if reply.get("done") and state["title"] == "Greetings" else None

        reply = await until(titled, every=0.1)
        (note,) = await answer(client, "/api/v1/notes/")
    prompts = double.prompts()
    assert "All done." in reply["content"]
    assert note["title"] == "Greeting"
    assert [TASK in each for each in prompts] == [True] * 3
    assert note["id"] in prompts[2].rpartition("search_notes")[2], "what it found"
