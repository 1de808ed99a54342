"""`quire batch` and a proxy of the environment: it leads to other machines alone."""

from __future__ import annotations

import httpx
import pytest

from cli.batch.runner import Target, client
from common.contracts.errors import InvalidConfig
from tests.support.proxies import running_proxy


@pytest.mark.parametrize(("host", "asked"), [("router.invalid:8000", 1), ("127.0.0.1:1", 0), ("[::1]:1", 0)])
async def test_a_batch_goes_by_the_proxy_to_other_machines_alone(
    host: str, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_proxy() as proxy:
        for name, value in proxy.environ.items():
            monkeypatch.setenv(name, value)
        async with client(Target(f"http://{host}")) as opened:
            try:
                assert (await opened.get("/v1/models")).status_code == 502
            except httpx.ConnectError:
                assert not asked
        assert proxy.asked == [f"GET http://{host}/v1/models HTTP/1.1"] * asked


@pytest.mark.parametrize("value", ["ftp://127.0.0.1:1", "http://127.0.0.1:port"])
async def test_a_proxy_that_cannot_be_used_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy() as proxy:
        for name in proxy.environ:
            monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", value)
    with pytest.raises(InvalidConfig, match=r"http_proxy, https_proxy or all_proxy: the proxy cannot be used: "):
        async with client(Target("http://router.invalid:8000")):
            pass
