"""What every test shares: a real Redis, an environment without the caller's options, and what each folder needs."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import settings
from redis.asyncio import Redis
from xdist.scheduler import LoadScopeScheduling

from common.process import ports
from common.process.local_redis import LocalRedis
from gpuworker.native.levels import levels_here
from tests.support.durations import read_durations
from tests.support.thirds import change_kernels, in_third

# Whether a client that is not installed is a failure (.ci/run) or a reason to skip: see tests/suites/clients/served.py.
if "QUIRE_ALL_CLIENTS" in os.environ:
    os.environ["PYTEST_ALL_CLIENTS"] = os.environ["QUIRE_ALL_CLIENTS"]
for _name in [name for name in os.environ if name == "REDIS_URL" or name.startswith(("QUIRE_", "OTEL_"))]:
    del os.environ[_name]
# A busy machine answers a lookup later than the default allows, and a hit that a test expects would be a miss. A router
# that shares its ports with a slow one would leave out what a test looks for there.
os.environ["QUIRE_ROUTER_INDEX_TIMEOUT"] = "5"
os.environ["QUIRE_ROUTER_SIBLING_TIMEOUT"] = "60"

# Each process that runs tests picks ports that no other one picks, and no suite that a test starts: those begin at
# 20,000. So a port that is picked is still free when it is given to the service that listens there.
# Suites of many tests run until a process ends. So the ports are shared by as few as can be.
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PROCESSES = max(4, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
ports.CANDIDATES = range(10_000 + 12 * _NUMBER, 19_000, 12 * _PROCESSES)  # type: ignore[misc]
# A machine that others use takes any time for an example.
settings.register_profile("quire", deadline=None)
# A line counts as run however often it runs, and coverage makes each run four times as dear. `--fast` is a first look.
settings.register_profile("few-examples", settings.get_profile("quire"), max_examples=15)

_HERE = Path(__file__).parent

# What the tests of these folders and files need. `--fast` does not even import them.
_NEEDS = {
    "torch": """
        attacks/test_worker_streams.py attacks/test_worker_submissions.py
        bench/gpu bench/test_constraints.py bench/test_cpu_attention.py bench/test_engine.py bench/test_phases.py
        bench/test_prefix.py bench/test_split.py
        bench/demo_model cli/suite/test_preflight.py cli/suite/test_served_folder.py cli/test_bench.py
        cli/test_commands.py cli/test_text_options.py common/checkpoint
        gpuworker/attention gpuworker/checkpoints gpuworker/memory gpuworker/models gpuworker/native gpuworker/plane
        gpuworker/runner gpuworker/sampling gpuworker/structured gpuworker/engine/test_determinism.py
        gpuworker/engine/test_equality.py gpuworker/engine/test_partial_blocks.py gpuworker/engine/test_speculation.py
        gpuworker/server/test_router_streams.py gpuworker/test_process.py
        router/answers/text/test_chat.py router/answers/text/test_tokenizer.py structure/test_light_imports.py
        suites/models
    """,
    "processes": """
        attacks bench/comparison/test_peer_process.py bench/lib/test_suite.py bench/test_attacks.py
        bench/test_load.py bench/test_peers.py bench/test_soak.py bench/test_split.py cli/suite/test_ports.py
        cli/suite/test_worker_cpus.py cli/test_bench.py cli/test_chat.py cli/test_commands.py cli/test_doctor.py
        cli/test_folders.py cli/test_screens.py cli/test_text_options.py cli/watch/test_terminal.py
        common/process/test_debug.py gpuworker/peers/test_source_processes.py gpuworker/test_process.py
        kvmanager/group/test_member.py
        kvmanager/group/test_options.py kvmanager/group/test_owner_names.py kvmanager/group/test_processes.py
        kvmanager/group/test_readiness.py kvmanager/group/test_shards.py kvmanager/group/test_watchers.py
        kvmanager/test_process.py router/answers/constraints/test_checker.py router/test_privacy.py
        router/test_process.py structure/test_waiting.py suites
    """,
    # Seconds without work.
    "patience": """
        cli/why/test_watch.py common/rpc/test_limits.py common/telemetry/test_provider.py kvmanager/test_pins.py
        kvmanager/test_stalls.py
        router/api/grpc/test_late_groups.py router/requests/test_drained_workers.py router/test_stalls.py
    """,
    "fuzz": "fuzz",
    "searches": """
        cli/block_size/test_accounting.py cli/replay/test_fit.py cli/replay/test_simulation.py
        kvmanager/ledger/test_soak.py kvmanager/index/test_groups_machine.py router/placement/test_shares_of_service.py
        router/api/anthropic/test_fuzz.py router/api/openai/test_fuzz.py router/api/openai/test_official_models.py
        suites/protocol
    """,
    "plots": """
        bench/comparison/test_plots.py bench/open_loop/test_plot.py cli/benchmark/test_plot.py
        bench/lib/test_trace_plots.py cli/replay/test_plot.py
    """,
    "clients": """
        suites/clients/test_agents.py suites/clients/test_embedders.py suites/clients/test_examples.py
        suites/clients/test_open_inference.py suites/clients/test_tritonclient.py
    """,
    # Rare configurations of a suite, benchmarks, clients, what is built or installed: .ci/run runs all of them.
    "rest": """
        attacks/test_cache_oracle.py attacks/test_fake_worker.py attacks/test_http2_floods.py
        attacks/test_internal_ports.py attacks/test_log_lines.py attacks/test_sampling.py attacks/test_starvation.py
        attacks/test_traces.py bench
        cli/suite/test_ports.py cli/test_bench.py cli/test_folders.py
        cli/test_text_options.py kvmanager/group/test_processes.py suites/clients
        suites/deployment/operate/test_probes.py suites/deployment/operate/test_rules.py
        suites/deployment/operate/test_traces.py suites/deployment/test_page.py suites/e2e/test_batch.py
        suites/e2e/test_chunked_grants.py suites/e2e/test_decision_log.py suites/e2e/test_drain_beside_sibling.py
        suites/e2e/test_embeddings.py suites/e2e/test_experts.py suites/e2e/test_gguf.py
        suites/e2e/test_incidents_of_constraints.py suites/e2e/test_ipv6.py suites/e2e/test_kept_requests.py
        suites/e2e/test_kv_events.py suites/e2e/test_memory_kinds.py
        suites/e2e/test_operation.py suites/e2e/test_proxies.py suites/e2e/test_redis_failover.py
        suites/e2e/test_page.py suites/e2e/test_partial_blocks.py suites/e2e/test_pins.py suites/e2e/test_privacy.py
        suites/e2e/test_prompt_logprobs.py suites/e2e/test_record.py suites/e2e/test_resources.py
        suites/e2e/test_ranks.py
        suites/e2e/test_rolling_restart.py suites/e2e/test_router_end.py suites/e2e/test_routers.py
        suites/e2e/test_several_sequences.py suites/e2e/test_shards.py suites/e2e/test_speculation.py
        suites/e2e/test_states.py suites/e2e/test_step_traces.py suites/e2e/test_thinking.py
        suites/e2e/test_trace_statuses.py suites/e2e/test_windows.py
    """,
    "frameworks": """
        suites/clients/test_ai_sdk.py suites/clients/test_aider.py suites/clients/test_coding_agents.py
        suites/clients/test_dynamo.py
        suites/clients/test_instructor.py suites/clients/test_litellm.py suites/clients/test_llama_index.py
        suites/clients/test_llm.py suites/clients/test_lm_eval.py suites/clients/test_open_webui.py
        suites/clients/test_smg.py
    """,
}
# One process runs all tests of a file, for they share what is slow to start or to make; here, those of several files.
_SHARED = (
    "suites/clients",
    "suites/deployment/operate",
    """
    suites/e2e/test_chaos.py suites/e2e/test_openai.py suites/e2e/test_recovery.py suites/e2e/test_streams.py
    suites/e2e/test_tools.py
    """,
)
# The tests of these share nothing, and each takes long.
_EACH_ALONE = "cli/suite/test_ports.py cli/test_folders.py suites/models suites/protocol suites/triton_interpreted"
# The expressions of `make test` and `make test-rest`.
_TEST, _TEST_REST = "not clients and not rest", "clients or rest"
_ONLY_WHEN_NAMED = ("exhaustive", "frameworks", "fuzz", "prometheus")
# `.ci/run` takes a third each day of the rest's files and of the tests of Triton's kernels (tests/support/thirds.py).
_THIRD, _CHANGED = os.environ.get("THIRD", ""), os.environ.get("CHANGED", "").split()
_TRITON = "suites/triton_interpreted suites/triton_compiled"


def _within(path: Path, names: str) -> bool:
    place = f"{path.relative_to(_HERE).as_posix()}/" if path.is_relative_to(_HERE) else ""
    return any(place.startswith(f"{name}/") for name in names.split())


@functools.cache
def _needs(path: Path) -> tuple[str, ...]:
    """Return what the tests of a file or a folder need."""
    return tuple(need for need, names in _NEEDS.items() if _within(path, names))


def _of_this_loop(record: logging.LogRecord) -> bool:
    """Tell whether a line of asyncio's log is of a test's own loop.

    gRPC has one queue of events for all loops of a process. What comes for the ended loop of an earlier test fails in
    the loop that runs now.
    """
    error = record.exc_info[1] if record.exc_info else None
    return "PollerCompletionQueue" not in record.getMessage() or str(error) != "Event loop is closed"


def pytest_configure(config: pytest.Config) -> None:
    """Choose Hypothesis' profile, and take SIGINT again, which a shell's background jobs ignore: tests press Ctrl-C."""
    logging.getLogger("asyncio").addFilter(_of_this_loop)
    few = getattr(config.option, "cov_source", None) or config.getoption("fast")
    settings.load_profile("few-examples" if few else "quire")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out, unread, what needs torch, started services or a minute"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Walk what modules and tests are made of neither while they are imported nor later: they live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("fast") and _needs(collection_path):
        return True
    return _is_of_the_other_part(collection_path, config.option.markexpr) or None


def _is_of_the_other_part(path: Path, expression: str) -> bool:
    """Tell whether `make test` or `make test-rest` runs no test of a file or a folder, which then is not imported.

    Each process of tests imports what it collects, and the files of either part take it some seconds.
    """
    of_rest = any(need in ("clients", "rest") for need in _needs(path))
    if expression == _TEST:
        return of_rest
    if expression != _TEST_REST or not path.name.startswith("test_"):
        return False
    if _THIRD and not in_third(path.relative_to(_HERE.parent).as_posix(), int(_THIRD), _CHANGED):
        return True
    if of_rest:
        return False
    # A test on a level of native code may be of the rest by its parameters.
    return not _within(path, "gpuworker") and "mark.rest" not in path.read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for need in _needs(item.path):
            item.add_marker(need)
        values = _parameters(item).values()
        if levels := [value for value in values if isinstance(value, str) and value in _middle_levels()]:
            item.add_marker("rest")
            if levels != [_level_of(item, levels[0])]:
                item.add_marker("exhaustive")
    if _THIRD and not change_kernels(_CHANGED):
        _leave_out(config, items, [each for each in items if _within(each.path, _TRITON) and _is_of_other_third(each)])
    unwanted = [name for name in _ONLY_WHEN_NAMED if name not in config.option.markexpr]
    if config.getoption("fast"):
        unwanted += ["plots", "rest", "searches"]
    _leave_out(config, items, [each for each in items if any(each.get_closest_marker(name) for name in unwanted)])
    if hasattr(config, "workerinput"):  # of several processes
        _put_slowest_first(items)


def _is_of_other_third(item: pytest.Item) -> bool:
    return not in_third(item.nodeid, int(_THIRD))


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        left = dict.fromkeys(left_out)
        items[:] = [item for item in items if item not in left]


@functools.cache
def _middle_levels() -> tuple[str, ...]:
    """Return the levels of native code between the plainest one and the best one of this processor."""
    return levels_here()[1:-1]


def _level_of(item: pytest.Item, level: str) -> str:
    """Return at which of these levels `make test-rest` runs a test: each test at one, about as many at each."""
    without_level = item.nodeid.replace(level, "").encode()
    return _middle_levels()[zlib.crc32(without_level) % len(_middle_levels())]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _put_slowest_first(items: list[pytest.Item]) -> None:
    """Sort the groups of tests by the seconds that they took when tests/durations.json was written.

    No process then waits at the end for another one's long group. A short file and a new one come last.
    """
    seconds = read_durations()
    of_group: Counter[str] = Counter()
    for file in {_file(item) for item in items}:
        of_group[_group(file) or file] += seconds.get(file, 0.0)  # type: ignore[assignment]  # seconds, not counts
    items.sort(key=lambda item: -of_group[_group(_file(item)) or _file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@functools.cache
def _group(file: str) -> str:
    """Return the name of the group of tests to which those of a file belong; "" where each is a group of its own."""
    path = _HERE.parent / file
    if _within(path, _EACH_ALONE):
        return ""
    return next((names for names in _SHARED if _within(path, names)), file)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Hands all tests of a group to one process, the slowest groups first.

    pytest-xdist's own `loadgroup` renames tests through an attribute that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    config.option.loadscopereorder = False  # the order is that of the collection
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
    """A client of an empty Redis; values are bytes. It waits for a busy machine, too."""
    async with Redis.from_url(redis_url, socket_timeout=60.0) as client:
        yield client
