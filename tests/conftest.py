"""What every test shares: a real Redis, an environment without the caller's options, and what each folder needs."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from xdist.scheduler import LoadScopeScheduling

from common.process.local_redis import LocalRedis

# Whether a client that is not installed is a failure (.ci/run) or a reason to skip: see tests/suites/clients/served.py.
if "QUIRE_ALL_CLIENTS" in os.environ:
    os.environ["PYTEST_ALL_CLIENTS"] = os.environ["QUIRE_ALL_CLIENTS"]
for _name in [name for name in os.environ if name == "REDIS_URL" or name.startswith(("QUIRE_", "OTEL_"))]:
    del os.environ[_name]

_HERE = Path(__file__).parent

# What the tests of these folders and files need. `--fast` does not even import them.
_NEEDS = {
    "torch": """
        bench/gpu bench/test_constraints.py bench/test_cpu_attention.py bench/test_engine.py bench/test_phases.py
        bench/test_prefix.py bench/test_split.py
        cli/demo_model cli/suite/test_preflight.py cli/test_commands.py
        gpuworker/attention gpuworker/checkpoints gpuworker/memory gpuworker/models gpuworker/native gpuworker/plane
        gpuworker/runner gpuworker/sampling gpuworker/structured gpuworker/engine/test_determinism.py
        gpuworker/engine/test_equality.py gpuworker/server/test_router_streams.py gpuworker/test_process.py
        router/text/test_tokenizer.py structure/test_light_imports.py
    """,
    "processes": """
        bench/comparison/test_peer_process.py bench/lib/test_suite.py bench/test_load.py bench/test_peers.py
        bench/test_split.py cli/test_commands.py gpuworker/test_process.py kvmanager/test_process.py
        router/test_privacy.py router/test_process.py
        suites/clients suites/deployment/operate suites/e2e
    """,
    "searches": "kvmanager/core/test_soak.py suites/protocol",
    "plots": "bench/comparison/test_plots.py bench/open_loop/test_plot.py",
    "clients": """
        suites/clients/test_examples.py suites/clients/test_open_inference.py suites/clients/test_tritonclient.py
    """,
}
# Tests of these share what is slow to start, such as a suite: one process runs all of a folder, or all of a file.
_SHARED_BY_FOLDER = "suites/clients suites/deployment/operate"
_SHARED_BY_FILE = """
    bench/test_engine.py cli/demo_model cli/test_commands.py router/kserve router/openai
    suites/e2e/test_chaos.py suites/e2e/test_openai.py suites/e2e/test_privacy.py suites/e2e/test_routers.py
    suites/e2e/test_several_sequences.py suites/e2e/test_streams.py suites/e2e/test_trace_statuses.py
"""
_ONLY_WHEN_NAMED = ("exhaustive", "prometheus")


def _within(path: Path, names: str) -> bool:
    return any(path.is_relative_to(_HERE / name) for name in names.split())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out, unread, what needs torch, started services or a minute"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("fast") and any(_within(collection_path, names) for names in _NEEDS.values()):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for need, names in _NEEDS.items():
            if _within(item.path, names):
                item.add_marker(need)
    unwanted = [name for name in _ONLY_WHEN_NAMED if name not in config.option.markexpr]
    if config.getoption("fast"):
        unwanted.append("long")
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _group(path: Path) -> str | None:
    """Return the name under which pytest-xdist keeps the tests of a file together; None where each may go anywhere."""
    if _within(path, _SHARED_BY_FILE):
        return str(path.relative_to(_HERE))
    return next((name for name in _SHARED_BY_FOLDER.split() if _within(path, name)), None)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Hands tests that share a started suite to one process, the largest groups first.

    pytest-xdist's own `loadgroup` renames tests through an attribute that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(_HERE.parent / nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("fast") and "torch" in sys.modules:
        raise pytest.UsageError("a test imports torch: name it in tests/conftest.py, or import torch in a function")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[LocalRedis]:
    """One server for the whole run of this process; a test that kills it must start it again."""
    with LocalRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: LocalRedis) -> str:
    """The URL of a Redis that is empty when the test starts."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty Redis; values are bytes."""
    async with Redis.from_url(redis_url) as client:
        yield client
