"""Headless Chromium over its DevTools pipe: pages, what they log, what a script in them returns, and pictures of them.

Debian's `chromium` is enough; no driver and no WebSocket is needed.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.waiting import until

CHROMIUM: Final = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
# Bounds a hang; nothing that a test asserts depends on it.
PATIENCE: Final = 120.0
_FLAGS: Final = (
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --hide-scrollbars --no-first-run"
    " --disable-dev-shm-usage --disable-background-networking --disable-component-update --disable-sync"
    " --force-color-profile=srgb --font-render-hinting=none --mute-audio"
).split()
# Chromium reads commands from file 3 and writes to file 4.
_BEGIN: Final = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FIRST_FREE: Final = 10

Json = dict[str, Any]


@dataclass
class Page:
    """One tab. `complaints` are errors and warnings on its console, uncaught ones and those of the network too."""

    browser: Browser
    session: str
    complaints: list[str] = field(default_factory=list)

    async def call(self, method: str, **parameters: Any) -> Json:
        return await self.browser.call(method, self.session, **parameters)

    async def open(self, address: str) -> None:
        """Load an address."""
        found = await self.call("Page.navigate", url=address)
        assert "errorText" not in found, found

    async def run(self, script: str) -> Any:
        """Return what an expression gives; a promise is awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        return await until(lambda: self.run(script), every=0.05, seconds=PATIENCE)

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def show(self, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        """Set the size of the window, and light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=media)

    async def picture(self) -> bytes:
        """Return the window as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        return base64.b64decode(found["data"])

    def told(self, event: Json) -> None:
        """Note what the page complains about."""
        what, detail = event["method"], event["params"]
        if what == "Runtime.exceptionThrown":
            thrown = detail["exceptionDetails"]
            self.complaints.append(thrown.get("exception", {}).get("description") or thrown["text"])
        elif what == "Runtime.consoleAPICalled" and detail["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value", each.get("description"))) for each in detail["args"]))
        elif what == "Log.entryAdded" and detail["entry"]["level"] in ("error", "warning"):
            entry = detail["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


class Browser:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader, self._writer = reader, writer
        self._numbers, self._waiting = itertools.count(1), dict[int, asyncio.Future[Json]]()
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, session: str = "", **parameters: Any) -> Json:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        self._writer.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        async with asyncio.timeout(PATIENCE):
            found = await answer
        assert "error" not in found, (method, found["error"])
        result: Json = found["result"]
        return result

    async def page(self) -> Page:
        """Open a tab whose console is listened to."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        return page

    async def listen(self) -> None:
        """Read answers and events until the browser ends."""
        while True:
            try:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            if "id" in message:
                self._waiting.pop(message["id"]).set_result(message)
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.told(message)


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Start Chromium with a profile of its own; end it afterwards."""
    assert CHROMIUM is not None
    loop, (commands, to_browser), (from_browser, answers) = asyncio.get_running_loop(), os.pipe(), os.pipe()
    given = [_high(commands), _high(answers)]
    flags = (*_FLAGS, f"--user-data-dir={profile}", "about:blank")
    command = (sys.executable, "-c", _BEGIN, *map(str, given), CHROMIUM, *flags)
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, pass_fds=given, stdin=quiet, stdout=quiet, stderr=quiet)
    for each in given:
        os.close(each)
    reader = asyncio.StreamReader(limit=64 << 20)
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb")
    )
    writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_browser, "wb"))
    running = Browser(reader, writing)
    listening = asyncio.create_task(running.listen())
    try:
        yield running
    finally:
        try:
            await running.call("Browser.close")
        finally:
            # The profile's files are whole only when all its processes have ended.
            await process.wait()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        reading.close()
        writing.close()


def _high(file: int) -> int:
    """Return a copy of a file under an unused descriptor number, and close the file."""
    copy = fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FREE)
    os.close(file)
    return copy
