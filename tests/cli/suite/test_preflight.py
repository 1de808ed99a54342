"""What `quire serve` settles before it starts: whose option counts, what is refused, which folder is served."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.certificates.folder import CertificateFolder, Leaf
from cli.client import ClientSettings
from cli.config import UpSettings
from cli.demo_model import CHECKPOINT
from cli.suite.preflight import suite_options
from cli.suite.programs import Program
from cli.suite.stack import StackOptions, free_ports
from common.contracts.errors import InvalidConfig
from common.rpc.roles import Role
from common.settings.config import PORT_TAKEN_STATUS, installed_settings, load
from common.settings.options import ServiceSettings
from gpuworker.config import GpuWorkerSettings
from gpuworker.scheduling.step_costs import DEFAULT_COSTS
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings
from router.observe.tail_rules import Objective
from tests.support.checkpoints import MAX_POSITIONS
from tests.support.preflight import file_with, programs, refusals, resolve
from tests.support.stranger_files import POINTER


def test_up_and_the_client_commands_are_among_those_that_share_the_sources() -> None:
    assert {UpSettings, ClientSettings} <= set(installed_settings())


def test_a_kind_that_is_not_served_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is the one thing that a test cannot reach: its answer is a folder."""
    asked: list[object] = []

    def snapshot_download(model: str, **options: object) -> str:
        asked.append(options["allow_patterns"])
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    said = refusals(("some/reranker",), {key: value for key, value in base.items() if key != "QUIRE_MODEL"})
    assert said["--model"].startswith("xlm-roberta is an encoder")
    assert asked
    assert not any("*.safetensors" in patterns for patterns in asked if isinstance(patterns, list))


@pytest.mark.parametrize("service", [RouterSettings, KvManagerSettings, GpuWorkerSettings])
def test_each_service_accepts_what_up_and_the_clients_know(
    service: type[RouterSettings | KvManagerSettings | GpuWorkerSettings], tmp_path: Path
) -> None:
    config = file_with(
        tmp_path, "workers = 1\naddress = '127.0.0.1:2'\n[serve]\nworkers = 3\n[client]\naddress = 'a:1'\n"
    )
    environ = {"QUIRE_WORKERS": "2", "QUIRE_ADDRESS": "127.0.0.1:1", "QUIRE_SERVE_MANAGER": "embedded"}
    assert load(service, (*config, "--model", "m"), environ).service == service.service


def test_up_reads_environment_and_file(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "workers = 1\nblock_size = 32\n[serve]\nhost = '127.0.0.2'\n")
    options = suite_options(config, base | {"QUIRE_WORKERS": "2", "QUIRE_ADDRESS": "127.0.0.1:1"})
    assert (options.workers, options.block_size, options.host) == (2, 32, "127.0.0.2")


def test_the_model_is_a_word_a_flag_or_the_demo_model(folder: Path, base: dict[str, str]) -> None:
    nothing = {key: value for key, value in base.items() if key != "QUIRE_MODEL"}
    assert suite_options((), nothing).model == CHECKPOINT
    for words in ((str(folder),), ("--workers", "1", str(folder)), ("--model", str(folder))):
        found = programs(suite_options(words, nothing))
        assert load(RouterSettings, found["router"].flags, nothing).model == folder
        assert load(GpuWorkerSettings, found["worker-0"].flags, nothing).model == str(folder)


def test_what_the_http_api_allows_reaches_the_routers_alone(base: dict[str, str]) -> None:
    origins = ("--cors-origins", "https://a.example", "--cors-origins", "https://b.example")
    names = ("--allowed-hosts", "llm.example")
    pages = (
        "--root-path",
        "/llm",
        "--tokenizer-info",
        "--public-metrics",
        "--metrics-tenants",
        "20",
        "--metrics-alias",
        "vllm",
    )
    words = ("--open-schemas", "--force-include-usage", "--batch-dir", "files", *origins, *names, *pages)
    found = programs(suite_options(words, base))
    router = load(RouterSettings, found["router"].flags, base)
    assert (router.open_schemas, router.cors_origins) == (True, ("https://a.example", "https://b.example"))
    assert (router.allowed_hosts, router.batch_dir) == (("llm.example",), Path("files"))
    assert (router.root_path, router.tokenizer_info, router.force_include_usage) == ("/llm", True, True)
    assert (router.public_metrics, router.metrics_tenants, router.metrics_alias) == (True, 20, "vllm")
    assert "--open-schemas" not in found["worker-0"].flags
    plain = load(RouterSettings, programs(suite_options((), base))["router"].flags, base)
    assert (plain.open_schemas, plain.cors_origins) == (False, ())
    assert (plain.public_metrics, plain.metrics_tenants, plain.metrics_alias) == (False, 0, "none")


def test_the_models_names_and_the_seed_of_requests_reach_the_routers_alone(base: dict[str, str]) -> None:
    found = programs(suite_options(("--model-name", "a", "--model-name", "b", "--seed", "3"), base))
    router = load(RouterSettings, found["router"].flags, base)
    assert (router.model_name, router.seed) == (("a", "b"), 3)
    assert "--model-name" not in (*found["kvmanager"].flags, *found["worker-0"].flags)
    assert load(RouterSettings, programs(suite_options((), base))["router"].flags, base).seed is None


def test_the_demo_model_has_a_name_of_its_own(base: dict[str, str]) -> None:
    demo = str(CHECKPOINT)
    for words, names in (((demo,), ("quire-demo",)), ((demo, "--model-name", "a,b"), ("a,b",)), ((), ())):
        router = load(RouterSettings, programs(suite_options(words, base))["router"].flags, base)
        assert router.model_name == names


def test_port_is_http_and_grpc_port_grpc_everywhere(base: dict[str, str]) -> None:
    """QUIRE_PORT is the router's alone: services of the suite that have a port of that name keep theirs."""
    shared = {key: value for key, value in base.items() if key not in {"QUIRE_SERVE_PORT", "QUIRE_SERVE_GRPC_PORT"}}
    port, grpc_port = free_ports(2)
    for words, environ in (
        (("--port", str(port), "--grpc-port", str(grpc_port)), shared),
        ((), shared | {"QUIRE_PORT": str(port), "QUIRE_GRPC_PORT": str(grpc_port)}),
    ):
        options = suite_options(words, environ)
        found = programs(options)
        router = load(RouterSettings, found["router"].flags, environ)
        assert (options.port, options.grpc_port) == (router.port, router.grpc_port) == (port, grpc_port)
        assert load(KvManagerSettings, found["kvmanager"].flags, environ).port == options.manager_port
        assert load(GpuWorkerSettings, found["worker-0"].flags, environ).port == options.worker_ports[0]
    for settings in (UpSettings, RouterSettings):
        fields = settings.model_fields
        assert (fields["port"].default, fields["grpc_port"].default) == (8000, 50051)


def test_a_file_named_by_flag_reaches_the_services(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[kvmanager]\nwatermark = 0.5\n[gpuworker]\nmax_num_seqs = 3\n")
    found = programs(suite_options(config, base))
    assert load(KvManagerSettings, found["kvmanager"].flags, base).watermark == 0.5
    assert load(GpuWorkerSettings, found["worker-0"].flags, base).max_num_seqs == 3


def test_what_is_given_to_up_alone_reaches_the_workers(base: dict[str, str]) -> None:
    environ = base | {"QUIRE_SERVE_KV_BLOCKS": "9", "QUIRE_MAX_NUM_SEQS": "5"}
    options = suite_options(("--seed", "7", "--no-prefix-caching"), environ)
    worker = load(GpuWorkerSettings, programs(options)["worker-0"].flags, environ)
    assert (worker.kv_blocks, worker.max_num_seqs, worker.seed, worker.prefix_caching) == (9, 5, 7, False)


@pytest.mark.parametrize(
    ("words", "costs"), [(("--simulate",), DEFAULT_COSTS), (("--simulate", "base=1ms"), "base=1ms")]
)
def test_simulated_steps_reach_the_workers(words: tuple[str, ...], costs: str, base: dict[str, str]) -> None:
    worker = load(GpuWorkerSettings, programs(suite_options(words, base))["worker-0"].flags, base)
    assert worker.simulate == costs


def test_every_service_gets_the_certificate_of_its_role(base: dict[str, str]) -> None:
    options = suite_options(("--workers", "1"), base)
    folder = CertificateFolder(Path(base["QUIRE_STATE_DIR"]) / "certs")
    leaves: list[tuple[str, type[ServiceSettings], Leaf]] = [
        ("router", RouterSettings, folder.role(Role.ROUTER)),
        ("kvmanager", KvManagerSettings, folder.role(Role.MANAGER)),
        ("worker-0", GpuWorkerSettings, folder.worker("worker-0")),
    ]
    for name, service, leaf in leaves:
        settings = load(service, programs(options)[name].flags, base)
        assert (settings.tls_cert, settings.tls_key, settings.tls_ca) == (leaf.cert, leaf.key, leaf.ca)
        assert not settings.insecure
    assert not folder.path.exists(), "nothing is made before the suite starts"


def test_plain_text_needs_the_word(base: dict[str, str]) -> None:
    found = programs(suite_options(("--insecure", "--host", "0.0.0.0"), base))
    for name, service in (
        ("router", RouterSettings),
        ("kvmanager", KvManagerSettings),
        ("worker-0", GpuWorkerSettings),
    ):
        settings = load(service, found[name].flags, base)
        assert (settings.insecure, settings.tls_cert) == (True, None)


def test_public_certificates_reach_the_routers_alone(base: dict[str, str]) -> None:
    found = programs(suite_options(("--public-tls-cert", "a", "--public-tls-key", "b"), base))
    assert load(RouterSettings, found["router"].flags, base).public_tls_cert == Path("a")
    assert "--public-tls-cert" not in (*found["kvmanager"].flags, *found["worker-0"].flags)
    assert refusals(("--public-tls-cert", "a"), base) == {
        "--public-tls-key": "is missing; expected together with --public-tls-cert"
    }


@pytest.mark.parametrize(
    ("flags", "more"),
    [(("--slo-ttft", "1.5", "--slo-itl", "0.2"), {}), ((), {"QUIRE_SLO_TTFT": "1.5", "QUIRE_ROUTER_SLO_ITL": "0.2"})],
)
def test_objectives_reach_the_routers_alone(base: dict[str, str], flags: tuple[str, ...], more: dict[str, str]) -> None:
    found, environ = programs(suite_options(flags, base | more)), base | more
    assert load(RouterSettings, found["router"].flags, environ).objective == Objective(1.5, 0.2)
    assert "--slo-ttft" not in (*found["kvmanager"].flags, *found["worker-0"].flags)
    assert refusals(("--slo-ttft", "0"), base).keys() == {"--slo-ttft"}
    assert refusals((), base | {"QUIRE_SLO_ITL": "soon"}).keys() == {"QUIRE_SLO_ITL"}


def test_embedded_managers_need_no_address_of_one(base: dict[str, str]) -> None:
    environ = base | {"QUIRE_MANAGER": "embedded"}
    options = suite_options((), environ)
    assert options.embedded
    assert "kvmanager" not in programs(options)


def test_shards_have_managers_and_workers_of_their_own(base: dict[str, str]) -> None:
    options = suite_options(("--shards", "2", "--managers", "2", "--workers", "3"), base)
    found = programs(options)
    kept = [found[name] for name in found if name.startswith("kvmanager")]
    managers = [load(KvManagerSettings, each.flags, base | each.environment) for each in kept]
    ports = [each.port for each in managers]
    first, second = int(base["QUIRE_SERVE_MANAGER_PORT"]), int(base["QUIRE_SERVE_STANDBY_PORT"])
    assert ports == [first, second, second + 1, second + 2]
    groups = [each.group for each in managers]
    assert groups == groups[:2] * 2
    assert len(set(groups)) == 2
    addresses = [f"127.0.0.1:{port}" for port in ports]
    for number in range(3):
        worker = load(GpuWorkerSettings, found[f"worker-{number}"].flags, base)
        assert worker.manager == (addresses[number % 2], addresses[number % 2 + 2])
    assert load(RouterSettings, found["router"].flags, base).manager == tuple(addresses)


def test_some_workers_compute_prompts_for_the_others(base: dict[str, str]) -> None:
    passes = ("--host-memory", "1GiB", "--data-port", "0")
    words = ("--workers", "3", "--prefill-workers", "1", "--remote-prefill", "always", *passes)
    found = programs(suite_options(words, base))
    workers = [load(GpuWorkerSettings, found[f"worker-{number}"].flags, base) for number in range(3)]
    assert [each.disaggregation for each in workers] == ["prefill", "decode", "decode"]
    assert load(RouterSettings, found["router"].flags, base).remote_prefill == "always"


def test_prefill_workers_need_others_and_ports_for_blocks(base: dict[str, str]) -> None:
    found = refusals(("--workers", "2", "--prefill-workers", "2"), base)
    assert found == {"--prefill-workers": "is 2, and there are 2 workers; at least one decodes"}
    (said, *_) = refusals(("--workers", "2", "--prefill-workers", "1"), base).values()
    assert said == "is prefill, and blocks pass between workers by --data-port; add it, with --host-memory"


def test_several_managers_use_the_redis_that_the_suite_starts(base: dict[str, str]) -> None:
    """The unmended check refused every suite with `--managers 2`, because no Redis runs before the suite."""
    assert len(suite_options(("--managers", "2"), base).standby_ports) == 1
    assert suite_options(("--shards", "2", "--workers", "2"), base).shards == 2


def test_shards_without_managers_or_workers_are_refused(base: dict[str, str]) -> None:
    found = refusals(("--shards", "3", "--workers", "2"), base)
    assert found == {"--shards": "is 3, and there are 2 workers; expected one for each at least"}
    assert refusals(("--shards", "2", "--workers", "2"), base | {"QUIRE_MANAGER": "embedded"}).keys() == {"--shards"}


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


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
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
    what = f"no config.json in {tmp_path}; expected a checkpoint in Hugging Face format, or a GGUF file"
    assert found == {"--model": what}


def test_what_no_worker_could_do_is_found_before_anything_starts(folder: Path, base: dict[str, str]) -> None:
    found = refusals(("--device", "gpu", "--max-model-len", "2000", "--kv-memory", "1000TiB"), base)
    assert found["--device"] == "is 'gpu'; expected auto, cpu, cuda or cuda:N"
    words = f"is 2000; the model's positions end at {MAX_POSITIONS}: lower it, or leave it out"
    assert found["--max-model-len"] == words
    found = refusals(("--device", "cpu", "--kv-memory", "1000TiB", "--workers", "2"), base)
    assert found["--kv-memory"].startswith("asks for 1000.0 TiB for each of 2 workers, and ")


def test_every_adapter_reaches_each_worker_alone(base: dict[str, str]) -> None:
    given = ("--lora", "a=/x/a", "--lora", "b=/x/b", "--max-loras", "1")
    found = programs(suite_options((*given, "--workers", "2"), base))
    for name in ("worker-0", "worker-1"):
        worker = load(GpuWorkerSettings, found[name].flags, {})
        assert (worker.lora, worker.max_loras) == (("a=/x/a", "b=/x/b"), 1)
    assert "--lora" not in (*found["kvmanager"].flags, *found["router"].flags)


def test_a_draft_model_reaches_the_workers(folder: Path, base: dict[str, str]) -> None:
    options = suite_options(("--draft-model", str(folder)), base)
    worker = load(GpuWorkerSettings, programs(options)["worker-0"].flags, base)
    assert (worker.draft_model, worker.speculation) == (str(folder), "draft")


def test_a_draft_model_of_another_vocabulary_is_found_before_anything_starts(
    folder: Path, tmp_path: Path, base: dict[str, str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    said = refusals(("--draft-model", str(other)), base)
    assert said["--draft-model"].startswith(f"{other} has 300 tokens, and the model has 264; expected a smaller model")


def test_a_draft_model_that_is_not_there_is_found_before_anything_starts(tmp_path: Path, base: dict[str, str]) -> None:
    said = refusals(("--draft-model", str(tmp_path / "small.gguf")), base)
    assert list(said) == ["--draft-model"]


def test_an_option_for_the_workers_alone_is_checked_too(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[gpuworker]\nmax_model_len = 5000\n")
    assert set(refusals(config, base)) == {"--max-model-len"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", POINTER, "model.safetensors in {0} is a Git LFS pointer"),
        ("config.json", b'{"model_type": ', "{0}/config.json is not valid JSON: "),
        ("config.json", b'{"model_type": "rwkv"}', "rwkv cannot be served: its layers keep states in a cache of"),
        ("config.json", b'{"model_type": "lama"}', "'lama' is not a model type of transformers "),
        ("tokenizer.json", POINTER, "tokenizer.json in {0} is a Git LFS pointer"),
    ],
    ids=["pointer", "json", "rwkv", "unknown", "tokenizer"],
)
def test_a_checkpoint_that_no_worker_can_serve_is_found_by_up_itself(
    name: str, content: bytes, words: str, folder: Path, tmp_path: Path, base: dict[str, str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(content)
    (said,) = refusals(("--model", str(copy)), base).values()
    assert said.startswith(words.format(copy))


def test_the_checks_need_no_torch(folder: Path, tmp_path: Path) -> None:
    done = resolve(str(folder), tmp_path, "print(*(m for m in ('torch', 'transformers') if m in sys.modules))")
    assert done.stdout.splitlines()[-1] == "", done.stderr


def test_what_the_suite_decides_is_not_silently_overruled(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[gpuworker]\nthreads = 77\n")
    (said,) = refusals(config, base).values()
    assert said.startswith("is 77, and the suite takes ")
    assert said.endswith("; set it for `quire serve` as a whole")


def test_a_flag_of_up_overrules_a_services_own_option(tmp_path: Path, base: dict[str, str]) -> None:
    config = file_with(tmp_path, "[gpuworker]\nthreads = 77\n")
    options = suite_options((*config, "--threads", "2"), base)
    assert load(GpuWorkerSettings, programs(options)["worker-0"].flags, base).threads == 2


def test_a_service_whose_port_was_taken_in_between_says_that_and_no_more(taken: int, base: dict[str, str]) -> None:
    manager = programs(suite_options(("--insecure",), base))["kvmanager"]
    command = [*manager.command, *manager.flags, "--port", str(taken), "--redis-url", ""]
    env = os.environ | manager.environment
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240.0, check=False)
    assert done.returncode == PORT_TAKEN_STATUS
    assert done.stderr.splitlines() == [
        "quire-kvmanager cannot start:",
        f"  --port: cannot listen on 127.0.0.1:{taken}; expected a free port of this machine (0 takes one)",
    ]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens; nobody has the one of metrics that goes with it."""
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        yield port


def test_a_port_that_is_taken_is_reported_with_the_flag_that_changes_it(taken: int, base: dict[str, str]) -> None:
    found = refusals(("--manager-port", str(taken)), base)
    wanted = "is taken; kvmanager needs it: choose another with --manager-port or --standby-port"
    assert found == {f"port {taken} of 127.0.0.1": wanted}


def test_two_processes_cannot_have_one_port(base: dict[str, str]) -> None:
    found = refusals(("--worker-port", base["QUIRE_SERVE_PORT"]), base)
    flags = "--port, --grpc-port, --admin-port, --admin-http-port or --own-port"
    wanted = f"is given to worker-0 of this suite, too; router needs it: choose another with {flags}"
    assert found == {f"port {base['QUIRE_SERVE_PORT']} of 127.0.0.1": wanted}


def data_ports(options: StackOptions, environ: dict[str, str] | None = None) -> list[int | None]:
    return [load(GpuWorkerSettings, each.flags, environ or {}).data_port for each in _workers(options)]


def _workers(options: StackOptions) -> list[Program]:
    return [programs(options)[f"worker-{number}"] for number in range(options.workers)]


def test_several_workers_with_host_memory_fetch_blocks_from_each_other(base: dict[str, str], tmp_path: Path) -> None:
    tiers, two = ("--host-memory", "1GiB"), ("--workers", "2")
    assert data_ports(suite_options((*two, *tiers), base)) == [0, 0]
    assert data_ports(suite_options(two, base)) == [None, None]
    assert data_ports(suite_options(("--workers", "1", *tiers), base)) == [None]
    environ = {"QUIRE_GPUWORKER_HOST_MEMORY": "1GiB"}
    assert data_ports(suite_options(two, base | environ), environ) == [0, 0]
    file = file_with(tmp_path, "[gpuworker]\nhost_memory = '1GiB'\n")
    assert data_ports(suite_options((*file, *two), base)) == [0, 0]


def test_the_data_port_of_an_operator_is_that_of_the_first_worker(base: dict[str, str], tmp_path: Path) -> None:
    (port,) = free_ports(1)
    words = ("--workers", "2", "--host-memory", "1GiB")
    assert data_ports(suite_options((*words, "--data-port", str(port)), base)) == [port, port + 1]
    file = file_with(tmp_path, f"[gpuworker]\ndata_port = {port}\nhost_memory = '1GiB'\n")
    assert data_ports(suite_options((*file, "--workers", "2"), base)) == [port, port + 1]
    assert data_ports(suite_options((*words, "--data-port", "0"), base)) == [0, 0]


def test_a_data_port_that_is_taken_is_refused(base: dict[str, str]) -> None:
    words = ("--workers", "1", "--host-memory", "1GiB", "--data-port")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusals((*words, str(port)), base)[f"port {port} of 127.0.0.1"]
        assert said.startswith("is taken; worker-0 needs it: choose another with --worker-port, --data-port,")
        events = ("--workers", "1", "--kv-events", f"tcp://127.0.0.1:{port}")
        assert refusals(events, base) == {f"port {port} of 127.0.0.1": said}


def kv_events(options: StackOptions) -> list[tuple[str | None, str | None]]:
    found = [load(GpuWorkerSettings, each.flags, {}) for each in _workers(options)]
    return [(each.kv_events, each.kv_events_replay) for each in found]


def test_each_worker_publishes_events_at_ports_of_its_own(base: dict[str, str], tmp_path: Path) -> None:
    first, second = free_ports(2)
    words = ("--workers", "2", "--kv-events", f"tcp://127.0.0.1:{first}")
    more = ("--kv-events-replay", f"tcp://[::1]:{second}")
    assert kv_events(suite_options(("--workers", "2"), base)) == [(None, None)] * 2
    assert kv_events(suite_options((*words, *more), base)) == [
        (f"tcp://127.0.0.1:{first}", f"tcp://[::1]:{second}"),
        (f"tcp://127.0.0.1:{first + 1}", f"tcp://[::1]:{second + 1}"),
    ]
    free = "tcp://127.0.0.1:0"
    assert kv_events(suite_options(("--workers", "2", "--kv-events", free), base)) == [(free, None)] * 2
    file = file_with(tmp_path, f"[gpuworker]\nkv_events = 'tcp://127.0.0.1:{first}'\n")
    assert kv_events(suite_options((*file, "--workers", "2"), base))[1] == (f"tcp://127.0.0.1:{first + 1}", None)


def test_endpoints_of_workers_that_meet_are_refused(base: dict[str, str]) -> None:
    (first,) = free_ports(1)
    ends = ("--kv-events", f"tcp://127.0.0.1:{first}", "--kv-events-replay", f"tcp://127.0.0.1:{first + 1}")
    (said,) = refusals(("--workers", "2", *ends), base).values()
    assert "is given to worker-0 of this suite, too" in said


@pytest.mark.parametrize("wrong", ["tcp://0.0.0.0:5557", "5557", "tcp://127.0.0.1:many"])
def test_an_endpoint_that_a_worker_refuses_is_refused_here(base: dict[str, str], wrong: str) -> None:
    assert refusals(("--workers", "2", "--kv-events", wrong), base).keys() == {"--kv-events"}


def test_workers_of_a_suite_have_no_data_address_in_common(base: dict[str, str]) -> None:
    words = ("--workers", "2", "--host-memory", "1GiB", "--data-port", "0", "--data-address", "10.0.0.1:7000")
    assert refusals(words, base) == {"--data-address": "is the address of one worker, and there are 2; leave it out"}
    assert suite_options(("--workers", "1", *words[2:]), base).data_ports == (0,)


def test_a_suite_has_rank_0_and_no_other(folder: Path, base: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs other ranks serves nothing, so a suite around it would wait for its worker for ever."""
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    flags = ("--model", str(folder), "-tp", "2", "--threads", "1")
    assert "start quire-gpuworker here" in refusals(flags, base)["RANK"]
    monkeypatch.setenv("RANK", "0")
    assert "RANK" not in refusals((*flags, "--workers", "0"), base)
