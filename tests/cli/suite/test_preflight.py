"""What `quire up` settles before it starts anything: whose option counts, what is refused, which folder is served."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.config import ClientSettings, UpSettings
from cli.suite.preflight import suite_options
from cli.suite.programs import Program, StackOptions, service_programs
from cli.suite.stack import free_ports
from common.errors import InvalidConfig
from common.settings.config import installed_settings, load
from gpuworker.config import GpuWorkerSettings
from gpuworker.core.step_costs import DEFAULT_COSTS
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from tests.support.checkpoints import config_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a checkpoint from outside."""
    path = tmp_path_factory.mktemp("checkpoint")
    config_of("llama").save_pretrained(path)
    return path


@pytest.fixture
def base(folder: Path, tmp_path: Path) -> dict[str, str]:
    """An environment that names a checkpoint, ports that are free, and a folder for state."""
    names = ("PORT", "HTTP_PORT", "MANAGER_PORT", "WORKER_PORT")
    ports = {f"QUIRE_UP_{name}": str(port) for name, port in zip(names, free_ports(4), strict=True)}
    return {"QUIRE_MODEL": str(folder), "QUIRE_STATE_DIR": str(tmp_path / "state"), **ports}


def programs(options: StackOptions) -> dict[str, Program]:
    control, rest = service_programs(options, "redis://127.0.0.1:1")
    return {program.name: program for program in (*control, *rest)}


def refusals(argv: tuple[str, ...], environ: dict[str, str]) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        suite_options(argv, environ)
    return {each.field: each.description for each in caught.value.violations}


def file_with(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "quire.toml"
    path.write_text(text)
    return "--config", str(path)


def test_up_and_the_client_commands_are_among_those_that_share_the_sources() -> None:
    assert {UpSettings, ClientSettings} <= set(installed_settings())


@pytest.mark.parametrize("service", [RouterSettings, KvManagerSettings, GpuWorkerSettings])
def test_each_service_accepts_what_up_and_the_clients_know(
    service: type[RouterSettings | KvManagerSettings | GpuWorkerSettings], tmp_path: Path
) -> None:
    config = file_with(tmp_path, "workers = 1\naddress = '127.0.0.1:2'\n[up]\nworkers = 3\n[client]\naddress = 'a:1'\n")
    environ = {"QUIRE_WORKERS": "2", "QUIRE_ADDRESS": "127.0.0.1:1", "QUIRE_UP_MANAGER": "embedded"}
    assert load(service, (*config, "--model", "m"), environ).service == service.service


def test_up_reads_environment_and_file(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "workers = 1\nblock_size = 32\n[up]\nhost = '127.0.0.2'\n")
    options = suite_options(config, base | {"QUIRE_WORKERS": "2", "QUIRE_ADDRESS": "127.0.0.1:1"})
    assert (options.workers, options.block_size, options.host) == (2, 32, "127.0.0.2")


def test_a_file_named_by_flag_reaches_the_services(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[kvmanager]\nwatermark = 0.5\n[gpuworker]\nmax_num_seqs = 3\n")
    found = programs(suite_options(config, base))
    assert load(KvManagerSettings, found["kvmanager"].flags, base).watermark == 0.5
    assert load(GpuWorkerSettings, found["worker-0"].flags, base).max_num_seqs == 3


def test_what_is_given_to_up_alone_reaches_the_workers(base: dict[str, str]) -> None:
    environ = base | {"QUIRE_UP_KV_BLOCKS": "9", "QUIRE_MAX_NUM_SEQS": "5"}
    options = suite_options(("--seed", "7", "--no-prefix-caching"), environ)
    worker = load(GpuWorkerSettings, programs(options)["worker-0"].flags, environ)
    assert (worker.kv_blocks, worker.max_num_seqs, worker.seed, worker.prefix_caching) == (9, 5, 7, False)


@pytest.mark.parametrize(
    ("words", "costs"), [(("--simulate",), DEFAULT_COSTS), (("--simulate", "base=1ms"), "base=1ms")]
)
def test_simulated_steps_reach_the_workers(words: tuple[str, ...], costs: str, base: dict[str, str]) -> None:
    worker = load(GpuWorkerSettings, programs(suite_options(words, base))["worker-0"].flags, base)
    assert worker.simulate == costs


def test_embedded_managers_need_no_address_of_one(base: dict[str, str]) -> None:
    environ = base | {"QUIRE_MANAGER": "embedded"}
    options = suite_options((), environ)
    assert options.embedded
    assert "kvmanager" not in programs(options)


def test_dummy_weights_are_no_mismatch_between_worker_and_manager(base: dict[str, str]) -> None:
    found = programs(suite_options(("--load-format", "dummy", "--seed", "4"), base))
    manager = load(KvManagerSettings, found["kvmanager"].flags, base)
    assert (manager.load_format, manager.seed) == ("dummy", 4)


@pytest.mark.parametrize("command", [UpSettings, RouterSettings, GpuWorkerSettings, KvManagerSettings])
def test_every_program_knows_the_same_load_formats(
    command: type[UpSettings | RouterSettings | GpuWorkerSettings | KvManagerSettings],
) -> None:
    for known in ("auto", "dummy"):
        assert load(command, ("--model", "m", "--load-format", known), {}).load_format == known
    with pytest.raises(InvalidConfig, match="expected 'auto' or 'dummy'"):
        load(command, ("--model", "m", "--load-format", "safetensors"), {})


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    config = file_with(tmp_path, "[gpuworker]\nmax_num_seqs = 0\n[kvmanager]\nwatermark = 2\nwatermrk = 1\n")
    found = refusals((*config, "--workers", "0", "--model", "/nowhere"), {"QUIRE_ROUTER_SPAN_RING": "x"})
    assert set(found) == {
        "--workers",
        "--model",
        "QUIRE_ROUTER_SPAN_RING",
        *(f"{key} in {config[1]}" for key in ("gpuworker.max_num_seqs", "kvmanager.watermark", "kvmanager.watermrk")),
    }


def test_a_folder_without_a_checkpoint_is_found_by_up_itself(tmp_path: Path, base: dict[str, str]) -> None:
    found = refusals(("--model", str(tmp_path)), base)
    assert found == {"--model": f"no config.json in {tmp_path}; expected a checkpoint in Hugging Face format"}


def test_what_the_suite_decides_is_not_silently_overruled(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[gpuworker]\nthreads = 77\n")
    (said,) = refusals(config, base).values()
    assert said.startswith("is 77, and the suite takes ")
    assert said.endswith("; set it for `quire up` as a whole")


def test_a_flag_of_up_overrules_a_services_own_option(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[gpuworker]\nthreads = 77\n")
    options = suite_options((*config, "--threads", "2"), base)
    assert load(GpuWorkerSettings, programs(options)["worker-0"].flags, base).threads == 2


def test_a_service_whose_port_was_taken_in_between_says_that_and_no_more(taken: int, base: dict[str, str]) -> None:
    manager = programs(suite_options((), base))["kvmanager"]
    command = [*manager.command, *manager.flags, "--port", str(taken), "--redis-url", ""]
    env = os.environ | manager.environment
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240.0, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "1 bad option; nothing was started.",
        f"  --port: cannot listen on 127.0.0.1:{taken}; expected a free port of this machine (0 takes one)",
    ]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_a_port_that_is_taken_is_told_with_the_flag_that_changes_it(taken: int, base: dict[str, str]) -> None:
    found = refusals(("--manager-port", str(taken)), base)
    wanted = "is taken; kvmanager needs it: choose another with --manager-port"
    assert found == {f"port {taken} of 127.0.0.1": wanted}


def test_two_processes_cannot_have_one_port(base: dict[str, str]) -> None:
    found = refusals(("--worker-port", base["QUIRE_UP_PORT"]), base)
    wanted = "is taken; router needs it: choose another with --port, --http-port or --own-port"
    assert found == {f"port {base['QUIRE_UP_PORT']} of 127.0.0.1": wanted}


def resolve(model: str, tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Print what `up` would serve, in a process of its own: the hub's client reads its environment only once."""
    script = "import os, sys; from cli.suite.preflight import *; o = suite_options(sys.argv[1:], os.environ)"
    script += "; print(o.model); print(*o.router_flags)"
    ports = free_ports(4)
    flags = ("--port", "--http-port", "--manager-port", "--worker-port")
    words = [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]
    env = {**os.environ, "HF_HOME": str(tmp_path), **environ}
    command = [sys.executable, "-c", script, "--model", model, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240.0, check=False)


def test_a_hub_name_is_resolved_once_and_keeps_its_name(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "hub" / "models--quire--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, home / "snapshots" / ("0" * 40))
    done = resolve("quire/tiny", tmp_path, HF_HUB_OFFLINE="1")
    model, router_flags = done.stdout.splitlines()
    assert Path(model) == home / "snapshots" / ("0" * 40)
    assert "--model-name quire/tiny" in router_flags


def test_a_hub_name_that_the_hub_does_not_give_is_refused(tmp_path: Path) -> None:
    done = resolve("quire/no-such-model", tmp_path, HF_HUB_OFFLINE="1")
    assert (
        "InvalidConfig: --model: 'quire/no-such-model' is no directory here, and the hub did not give it" in done.stderr
    )
