"""Options of a group that cannot work are refused, and lists of managers are read in every form."""

from __future__ import annotations

import pytest

from cli.config import UpSettings
from common.contracts.errors import InvalidConfig
from common.settings.config import load
from common.settings.options import Settings
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings

ELSEWHERE = "redis://192.0.2.1:6379"  # an address of no machine
BOTH = ("127.0.0.1:1", "127.0.0.1:2")


@pytest.mark.parametrize("settings", [GpuWorkerSettings, RouterSettings])
@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (("--manager", "127.0.0.1:1,127.0.0.1:2"), {}),
        (("--manager", "127.0.0.1:1", "--manager", "127.0.0.1:2"), {}),
        ((), {"QUIRE_MANAGER": "127.0.0.1:1, 127.0.0.1:2"}),
    ],
)
def test_managers_are_a_list(
    settings: type[GpuWorkerSettings | RouterSettings], flags: tuple[str, ...], environment: dict[str, str]
) -> None:
    assert load(settings, ("--model", "m", *flags), environment).manager == BOTH


@pytest.mark.parametrize(
    ("settings", "flags", "words"),
    [
        (KvManagerSettings, ("--group", "g"), "--group: is g, and there is no Redis for its lease"),
        (KvManagerSettings, ("--group-address", "a:1"), "--group-address: has no effect"),
        (KvManagerSettings, ("--group", "a b"), "--group"),
        (KvManagerSettings, ("--group", "g", "--redis-url", "redis://h", "--group-address", "a b:1"), "has spaces"),
        (KvManagerSettings, ("--group", "g", "--redis-url", ELSEWHERE), "--host: is 127.0.0.1, which only this host"),
        (
            KvManagerSettings,
            ("--group", "g", "--redis-url", ELSEWHERE, "--group-address", "localhost:1"),
            "--group-address: is localhost:1, which only this host reaches, and the Redis of group g is on another",
        ),
        (KvManagerSettings, ("--group-lease", "0.1"), "--group-lease"),
        (UpSettings, ("--managers", "2", "--manager", "embedded"), "--managers: is 2, and --manager embedded"),
        (GpuWorkerSettings, ("--model", "m", "--manager", ","), "--manager"),
        (GpuWorkerSettings, ("--model", "m", "--manager", "127.0.0.1:1,nonsense"), "--manager"),
    ],
)
def test_what_cannot_work_is_refused_in_words(settings: type[Settings], flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load(settings, flags, {})
    assert any(words in f"{each.field}: {each.description}" for each in refused.value.violations), refused.value


@pytest.mark.parametrize(
    "flags",
    [
        ("--redis-url", "redis://127.0.0.1:1"),
        ("--redis-url", "redis://localhost:1"),
        ("--redis-url", "unix:///run/redis.sock"),
        ("--redis-url", ELSEWHERE, "--host", "0.0.0.0", "--insecure"),
        ("--redis-url", ELSEWHERE, "--group-address", "manager-a:50052"),
    ],
)
def test_a_loopback_address_is_accepted_where_all_is_on_this_host(flags: tuple[str, ...]) -> None:
    assert load(KvManagerSettings, ("--group", "g", *flags), {}).group == "g"
