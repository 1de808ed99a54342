"""A suite whose environment names a proxy for everything: it starts and answers, and nobody comes to the proxy."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

from tests.support.proxies import Proxy, running_proxy
from tests.support.up_harness import READY_SECONDS, Up, quire


async def test_a_suite_behind_a_proxy_serves_and_sends_nothing_there(tmp_path: Path) -> None:
    async with running_proxy() as proxy:
        up = await asyncio.to_thread(Up, tmp_path, "--simulate", environ=proxy.environ, cwd=tmp_path)
        try:
            await asyncio.to_thread(up.until, "quire     ready")
            await asyncio.to_thread(use, up, proxy, tmp_path)
        finally:
            await asyncio.to_thread(up.close)
        assert proxy.asked == []


def use(up: Up, proxy: Proxy, folder: Path) -> None:
    """Ask over HTTP, and by the commands that clients and operators have, each with the proxy in its environment."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = json.dumps({"prompt": "a b c", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.port}/v1/completions", asked, {"content-type": "application/json"}
    )
    with direct.open(request, timeout=READY_SECONDS) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 2
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": json.loads(asked)}
    source.write_text(json.dumps(line) + "\n")
    for words in (
        ("status", *up.admin),
        ("generate", "--address", up.address, "--max-tokens", "2", "a b c"),
        ("batch", str(source), str(output), "--http-address", f"127.0.0.1:{up.port}"),
    ):
        done = quire(*words, environ=proxy.environ, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["response"]["status_code"] == 200
