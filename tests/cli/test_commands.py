"""The `quire` command as a person uses it: up, status, generate, trace, Ctrl-C; and the demonstration."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from cli.client import command_console
from cli.commands.demo import svg_of
from cli.suite.stack import free_ports
from common.process.python import module_command
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.checkpoints import config_of
from tests.support.hostile import hostile_folder
from tests.support.up_harness import READY_SECONDS, Up, quire
from tests.support.waiting import wait_until

LONG = 700
OPTIONS = """
max_model_len = 1024
[serve]
kv_blocks = 512
dtype = "float32"
[kvmanager]
watermark = 0.25
[gpuworker]
max_num_seqs = 8
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A suite with options from every source, started in a folder whose packages have the names of Quire's."""
    folder = tmp_path_factory.mktemp("up")
    (folder / "quire.toml").write_text(OPTIONS)
    environ = {"QUIRE_WORKERS": "1", "QUIRE_ADDRESS": "127.0.0.1:1", "QUIRE_SERVE_TRACE_SAMPLE_RATIO": "1"}
    cwd = hostile_folder(folder / "hostile")
    running = Up(folder, "--config", str(folder / "quire.toml"), environ=environ, cwd=cwd)
    try:
        running.until("quire     ready")
        yield running
    finally:
        running.close()


class LongStreams:
    """Requests of LONG tokens each, read on threads of their own; `begun` once each has a token."""

    def __init__(self, address: str, count: int) -> None:
        self.tokens, self.failures = [0] * count, 0
        self._begun = threading.Barrier(count + 1)
        self._channel = grpc.insecure_channel(address)
        self._generate = self._channel.unary_stream(  # the generated stubs are asyncio's alone
            "/quire.inference.v1.InferenceService/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )
        self._threads = [threading.Thread(target=self._read, args=(index,)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        sampling = types.SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
        request = pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[index + 9, 7])), sampling=sampling)
        try:
            for event in self._generate(request, timeout=READY_SECONDS):
                if event.WhichOneof("event") == "tokens":
                    if not self.tokens[index]:
                        self._begun.wait(READY_SECONDS)
                    self.tokens[index] += len(event.tokens.token_ids)
        except grpc.RpcError:
            self.failures += 1

    def begun(self) -> None:
        """Wait until each has a token."""
        self._begun.wait(READY_SECONDS)

    def ended(self) -> None:
        """Wait until each has ended, for good or ill."""
        for thread in self._threads:
            thread.join(READY_SECONDS)
        self._channel.close()


def test_status_shows_the_worker(up: Up, tmp_path: Path) -> None:
    idle = r"worker-0\s+127\.0\.0\.1:\d+\s+connected\s+attached\s+0\s+0\s+512\s+512"
    folder = hostile_folder(tmp_path / "hostile")

    def status() -> str:
        shown = quire("status", *up.admin, cwd=folder)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    # The blocks of the test before come free.
    wait_until(status, lambda shown: re.search(idle, shown), seconds=READY_SECONDS)


def test_figures_are_json_on_one_line_where_asked(up: Up) -> None:
    status = json.loads(quire("status", *up.admin, "--json").stdout)
    assert (status["workers"][0]["num_blocks"], status["model"]["max_model_len"]) == (512, 1024)
    asked = ("generate", "ab", "--raw", "--max-tokens", "3", "--temperature", "0", "--json", "--address", up.address)
    shown = quire(*asked)
    assert shown.stdout.count("\n") == 1
    done = json.loads(shown.stdout)
    assert (done["outputs"][0]["usage"]["output_tokens"], done["outputs"][0]["finish_reason"]) == (3, "length")
    deadline = time.monotonic() + READY_SECONDS  # a worker sends its spans every half second
    while True:
        trace = json.loads(quire("trace", done["trace_id"], *up.admin, "--json").stdout)
        assert trace["trace_id"] == done["trace_id"]
        if {span["service"] for span in trace["spans"]} >= {"quire-router", "quire-gpuworker"}:
            break
        assert time.monotonic() < deadline, trace


def test_commands_find_the_router_by_the_environment(up: Up) -> None:
    shown = quire("status", environ={"QUIRE_ADMIN_ADDRESS": up.admin_address, "QUIRE_STATE_DIR": str(up.state_dir)})
    assert shown.returncode == 0, shown.stderr


def test_services_read_the_file_that_up_was_given(up: Up) -> None:
    for service in ("-m kvmanager", "-m gpuworker", "-m router"):
        words = up.child(service).cmdline()
        assert words[words.index("--config") + 1].endswith("quire.toml")
    up.until("at most 8 run in a step")  # of [gpuworker], which `up` did not overrule


def test_debug_dump_shows_every_service(up: Up) -> None:
    dumped = quire("debug", "dump", "--json", "--state-dir", str(up.state_dir))
    assert dumped.returncode == 0, dumped.stderr
    found = {each["service"]: each for each in map(json.loads, dumped.stdout.splitlines())}
    assert set(found) == {"kvmanager", "gpuworker", "router"}
    assert found["router"]["address"] == up.address
    assert found["router"]["state"]["workers"][0]["worker_id"] == "worker-0"
    assert found["kvmanager"]["state"]["pools"]["worker-0"]["num_blocks"] == 512
    assert found["gpuworker"]["state"]["engine"]["manager_attached"] is True
    assert any("engine" in name for name in found["gpuworker"]["threads"])
    shown = quire("debug", "dump", "--address", up.address, "--state-dir", str(up.state_dir))
    assert "MainThread" in shown.stdout
    assert "kvmanager" not in shown.stdout.splitlines()[0]


def test_lines_name_clock_and_service_once(up: Up) -> None:
    line = next(line for line in up.lines if "took epoch" in line)
    assert re.fullmatch(r" +[\d.]+s  kvmanager took epoch \d+\n", line)


def test_generate_streams_and_trace_draws_what_it_names(up: Up) -> None:
    shown = quire("generate", "ab", "--raw", "--max-tokens", "4", "--temperature", "0", "--address", up.address)
    assert shown.returncode == 0, shown.stderr
    found = re.search(r"(\d+) output tokens .* quire trace ([0-9a-f]{32})", shown.stdout)
    assert found is not None, shown.stdout
    drawn = quire("trace", found[2], *up.admin)
    assert drawn.returncode == 0, drawn.stderr
    assert "routing: worker-0" in drawn.stdout


def test_a_constraint_is_examined_although_the_folder_is_hostile(up: Up) -> None:
    """The router starts the examiner as a child process in the suite's folder."""
    refused = quire("generate", "ab", "--raw", "--regex", "(", "--address", up.address)
    assert refused.returncode == 2
    assert "regex" in refused.stderr


def test_generate_keeps_to_a_regex_of_a_file(up: Up, tmp_path: Path) -> None:
    (tmp_path / "regex").write_text("[ab]{3}")
    words = ("ab", "--raw", "--quiet", "--regex", f"@{tmp_path}/regex", "--address", up.address)
    shown = quire("generate", *words)
    assert re.fullmatch("[ab]{3}\n", shown.stdout), shown.stderr


def test_errors_are_one_line_and_say_what_to_do(up: Up) -> None:
    too_long = quire("generate", "ab", "--raw", "--max-tokens", "4000", "--address", up.address)
    assert too_long.returncode == 2
    assert "--max-tokens" in too_long.stderr
    assert len(too_long.stderr.splitlines()) == 1
    nobody = quire("status", "--admin-address", f"127.0.0.1:{free_ports(1)[0]}")
    assert nobody.returncode == 1
    assert "quire serve" in nobody.stderr


def test_giving_up_says_after_how_long_and_how_far_it_came(up: Up) -> None:
    worker = up.child("-m gpuworker")
    words = ("ab", "--raw", "--max-tokens", str(LONG), "--seed", "3", "--address", up.address)
    # A slow machine needs longer for the first token, or stops the worker after the last one: then it is tried again.
    for timeout in ("3", "10", "30") * 7:
        command = module_command("cli.main", "generate", *words, "--timeout", timeout)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as generating:
            assert generating.stdout is not None
            begun = generating.stdout.read(1)
            worker.suspend()
            try:
                _, said = generating.communicate()
            finally:
                worker.resume()
        if begun and generating.returncode:
            break
    assert generating.returncode == 1
    assert re.fullmatch(
        rf"quire: gave up after --timeout {timeout} s with \d+ output tokens; quire trace [0-9a-f]{{32}}\n", said
    )


def test_a_killed_redis_is_started_again(up: Up) -> None:
    up.child("-server 127.0.0.1:").kill()
    up.until("redis     killed by SIGKILL; starting it again in 0.5 s")
    up.until("redis     started again on 127.0.0.1:")
    deadline = time.monotonic() + READY_SECONDS
    while "Redis connected" not in quire("status", *up.admin).stdout:
        assert time.monotonic() < deadline, "".join(up.lines)


def test_a_killed_worker_is_started_again(up: Up) -> None:
    up.child("-m gpuworker").kill()
    up.until("worker-0  killed by SIGKILL; starting it again")
    deadline = time.monotonic() + READY_SECONDS
    while quire("generate", "ab", "--raw", "--max-tokens", "2", "--address", up.address).returncode:
        assert time.monotonic() < deadline, "".join(up.lines)


def test_ctrl_c_lets_running_streams_finish_and_leaves_nothing_behind(tmp_path: Path) -> None:
    up = Up(tmp_path, "--drain-timeout", "300", "--max-model-len", "1024", "--simulate")
    try:
        up.until("quire     ready")
        below = up.children()
        assert len(below) >= 4
        streams = LongStreams(up.address, 8)
        streams.begun()
        up.child("-m gpuworker").suspend()  # so that no stream ends before the suite stops
        up.process.send_signal(signal.SIGINT)
        up.until("quire     stopping: running requests have 300 s to finish")
        assert sum(streams.tokens) < 8 * LONG
        up.child("-m gpuworker").resume()
        streams.ended()
        assert (streams.tokens, streams.failures) == ([LONG] * 8, 0)
        assert up.process.wait(timeout=READY_SECONDS) == 0
        up.until("quire     stopped")
        _, alive = psutil.wait_procs(below, timeout=READY_SECONDS)
        assert not alive
    finally:
        up.close()


def test_a_suite_that_shows_warnings_alone_says_nothing_of_what_goes_well(tmp_path: Path) -> None:
    up = Up(tmp_path, "--simulate", "--log-level", "warning", environ={"QUIRE_KV_BLOCKS": "512"})
    try:
        wait_until(
            lambda: quire("status", *up.admin).stdout, lambda shown: "  connected  " in shown, seconds=READY_SECONDS
        )
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=READY_SECONDS) == 0
    finally:
        up.close()
    # A worker that is up before the KV manager warns.
    assert [line for line in up.lines if " warning: " not in line] == []


def test_embedded_managers_serve_and_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    environ = {"QUIRE_MANAGER": "embedded", "QUIRE_KV_BLOCKS": "512"}
    up = Up(tmp_path, "--drain-timeout", "60", "--simulate", environ=environ)
    try:
        up.until("quire     ready")
        below = up.children()
        assert not any("kvmanager" in each.cmdline() for each in below)
        streams = LongStreams(up.address, 8)
        streams.begun()
        up.child("cli.suite.embedded").suspend()  # so that no stream ends before the second Ctrl-C
        up.process.send_signal(signal.SIGINT)
        up.until("quire     stopping: running requests have 60 s to finish")
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=READY_SECONDS) == 130
        streams.ended()
        assert streams.failures == 8
        _, alive = psutil.wait_procs(below, timeout=READY_SECONDS)
        assert not alive
    finally:
        up.close()


def test_a_service_that_refuses_to_run_stops_the_suite_with_its_words(tmp_path: Path) -> None:
    up = Up(tmp_path, "--simulate", "--kv-blocks", "4", "--max-model-len", "512")
    try:
        assert up.process.wait(timeout=READY_SECONDS) == 2
        up.until("worker-0 cannot run; its lines above say why")
        assert sum("--max-model-len: 4 blocks of 16 slots do not hold one sequence" in line for line in up.lines) == 1
        assert any(line.endswith("quire-gpuworker cannot start:\n") for line in up.lines)
        assert not any("starting it again" in line or "nothing was started" in line for line in up.lines)
    finally:
        up.close()


def test_a_checkpoint_without_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    free = [word for flag in ("port", "grpc-port", "manager-port", "worker-port") for word in (f"--{flag}", "0")]
    refused = quire("up", "--model", str(tmp_path), "--device", "cpu", *free)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines() == [
        "1 bad option; nothing was started.",
        (
            f"  --model: no weights in {tmp_path}; expected *.safetensors: finish the download"
            " (--load-format dummy runs on"
            " random weights)"
        ),
    ]


def test_what_a_router_refuses_is_named_by_its_flag(up: Up) -> None:
    refused = quire("generate", "--address", up.address, "--max-tokens", "0", "--temperature", "-1", "Hello")
    assert refused.returncode == 2
    assert refused.stderr == (
        "quire: --temperature: is -1; expected 0 or more (0 is greedy); --max-tokens: is 0; expected 1 or more\n"
    )


def test_bad_options_are_all_reported_before_anything_starts() -> None:
    refused = quire("up", "--block-size", "17", "--workers", "0", "--wrokers", "2", "/nowhere")
    assert refused.returncode == 2
    for words in (
        "--block-size",
        "power of two",
        "--workers",
        "did you mean --workers",
        "--model",
        "nothing was started",
    ):
        assert words in refused.stderr


def test_the_drawing_has_the_output_and_loads_nothing_from_elsewhere() -> None:
    console = command_console(100, record=True)
    console.print("[bold]A few prompts[/]")
    svg = svg_of(console)
    assert "few" in svg
    assert "url(" not in svg.replace("url(#", "")
    assert "cdn" not in svg


def test_the_demonstration_shows_a_cache_hit_and_a_trace(tmp_path: Path) -> None:
    """A hit is shown where both requests went to one worker. The router may divide them, as its first steps look."""
    folder, places = hostile_folder(tmp_path / "hostile"), set[str]()
    for _ in range(5):
        if len(places) != 1:
            shown = quire("demo", timeout=300.0, cwd=folder)
            assert shown.returncode == 0, shown.stderr
            rows = re.findall(r"^ +(?:first|second) +\d+ +(\d+) +[\d.]+ ms +(worker-\d)", shown.stdout, re.MULTILINE)
            places = {place for _, place in rows}
    (first, _), (second, _) = rows
    assert int(first) == 0
    assert int(second) > 200
    for words in ("kvmanager.reserve", "prefill chunk", "routing: worker-", "Everything is stopped and removed"):
        assert words in shown.stdout
    called = re.search(r'look_up\(\{"person": "(\w+)"\}\)\s+the tool says: (.*)\s+the model says: (.*)', shown.stdout)
    assert called is not None
    assert called[1] in called[3]
    assert called[3] in called[2]
