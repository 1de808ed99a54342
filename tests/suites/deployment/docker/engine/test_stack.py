"""The stack on a real Docker engine, as one story: build, start, ask, scale, restart, crash, stop. `make test-docker`.

Every step builds on the one before it; pytest stops at the first that fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal

from common.rpc import probe
from quire.types.v1 import types_pb2
from tests.suites.deployment.docker.engine.events import Events
from tests.suites.deployment.docker.engine.stack import Stack, Transcript

IMAGES = {"kvmanager": "quire/kvmanager", "router": "quire/router", "gpuworker": "quire/gpuworker:cpu"}
# Services that end before the others start, with status 0.
ONCE = {"certs", "redis-users"}
BASE = os.environ.get("PYTHON_IMAGE", "python:3.11-slim-bookworm")
# Writes where an image must not be written; prints what comes of it.
WRITE = "import pathlib; pathlib.Path('/opt/quire/x').write_text('x')"
REFUSED = f"""
try: exec({WRITE!r}); print('written')
except OSError as error: print(error.strerror)
"""
OUTSIDE = """
import socket
try: socket.create_connection(('192.0.2.1', 80), timeout=2); print('connected')
except OSError as error: print(type(error).__name__)
"""
LIMITS = "from common.process.cores import usable_cores; import os; print(usable_cores(), os.getuid())"


def test_the_images_are_built(stack: Stack, transcript: Transcript) -> None:
    transcript.say(stack.docker("version", "--format", "docker {{.Client.Version}}, engine {{.Server.Version}}"))
    transcript.say(stack.compose("version"))
    for service in IMAGES:
        with transcript.timed(f"docker compose build {service}"):
            stack.compose("build", service, timeout=1500.0)
    base = int(stack.docker("image", "inspect", "--format", "{{.Size}}", BASE))
    transcript.say(f"{BASE}: {base / 1e6:.0f} MB")
    for image in IMAGES.values():
        size = int(stack.docker("image", "inspect", "--format", "{{.Size}}", image))
        transcript.say(f"{image}: {size / 1e6:.0f} MB, {(size - base) / 1e6:.0f} MB without its base")
    for image in (IMAGES["kvmanager"], IMAGES["router"]):
        found = stack.docker("run", "--rm", "--entrypoint", "sh", image, "-c", "ls -d /opt/quire/lib/*/site-packages/*")
        assert "site-packages/grpc\n" in found
        assert not any(f"site-packages/{package}\n" in found for package in ("torch", "triton", "transformers", "pip"))


def test_a_worker_without_a_manager_stops_at_once(stack: Stack, transcript: Transcript) -> None:
    """As the container's first process, which is deaf to signals that it does not handle: there is no init here."""
    image = IMAGES["gpuworker"]
    name = stack.docker("run", "--detach", image, "--manager", "nowhere.invalid:50052", "--insecure").strip()
    try:
        stack.until_logged(name, "cannot be found")
        with transcript.timed("docker stop of a worker that waits for its manager"):
            stack.docker("stop", "--time", "30", name)
        assert stack.docker("inspect", "--format", "{{.State.ExitCode}}", name).strip() == str(128 + signal.SIGTERM)
    finally:
        stack.docker("rm", "--force", name)


def test_it_starts_and_is_healthy(stack: Stack, events: Events, transcript: Transcript) -> None:
    with transcript.timed("docker compose up --wait --scale gpuworker=2"):
        stack.compose("up", "--detach", "--wait", "--wait-timeout", "240", "--scale", "gpuworker=2")
    transcript.say("\n".join(f"{each['Name']:26} {each['Status']}" for each in stack.containers()))
    assert {each["Health"] for each in stack.containers() if each["Service"] not in ONCE} == {"healthy"}
    ends = sorted((each.action, each.service, each.exit_code) for each in events.seen)
    assert ends == [("die", service, 0) for service in sorted(ONCE)], "nothing else ended on the way"
    assert probe.ask(f"127.0.0.1:{stack.grpc_port}", "quire.inference.v1.InferenceService") == "SERVING"


def test_another_container_is_answered(stack: Stack, transcript: Transcript) -> None:
    with transcript.timed("docker compose run client once"):
        answer = json.loads(stack.compose("run", "--no-deps", "--rm", "-T", "client", "once").splitlines()[-1])
    transcript.say(f"answered: {answer}")
    assert (answer["tokens"], answer["reason"]) == (8, "FINISH_REASON_LENGTH")
    assert answer["worker"] in stack.workers()
    assert answer["http"]
    transcript.say(stack.compose("exec", "-T", "router", "quire", "status"))


def test_what_runs_is_confined(stack: Stack, transcript: Transcript) -> None:
    for service in IMAGES:
        assert stack.python(service, REFUSED) == "Read-only file system"
        host = stack.inspect(stack.container(service))["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False)
    assert stack.python("gpuworker", OUTSIDE) in ("OSError", "TimeoutError")
    assert stack.python("gpuworker", LIMITS) == "1 10001"
    transcript.say("file systems are read-only, capabilities dropped, uid 10001; workers reach nothing outside")


def test_workers_come_and_go_under_load(stack: Stack, events: Events, transcript: Transcript) -> None:
    with stack.load() as load:
        before = stack.workers()
        with transcript.timed("docker compose up --scale gpuworker=3, under load"):
            stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "gpuworker=3")
        (third,) = set(stack.workers()) - set(before)
        with transcript.timed(f"the third worker, {third}, gets streams"):
            load.more(3, worker=third)
        asyncio.run(stack.until_all_run(3))
        with transcript.timed("docker compose up --scale gpuworker=2, while each of the three runs streams"):
            stack.compose("up", "--detach", "--wait", "--no-recreate", "--scale", "gpuworker=2")
        assert len(stack.workers()) == 2
        load.more(24)
    ends = events.ends(lambda ends: any(service == "gpuworker" for service, _ in ends))
    assert [end for end in ends if end[0] == "gpuworker"] == [("gpuworker", 0)]


def test_the_manager_is_restarted_under_load(stack: Stack, transcript: Transcript) -> None:
    with stack.load() as load:
        with transcript.timed("docker compose restart kvmanager, under load"):
            stack.compose("restart", "kvmanager")
        load.more(24)
        transcript.say("killing the manager's process, under load")
        manager = stack.container("kvmanager")
        stack.crash(manager)
        with transcript.timed("the engine starts it again, and it is healthy"):
            stack.until_restarted(manager)
        load.more(24)
    lines = stack.compose("logs", "--no-log-prefix", "kvmanager").splitlines()
    epochs = [json.loads(line)["msg"] for line in lines if "took epoch" in line]
    transcript.say(f"the manager: {', '.join(epochs)}")
    assert len(epochs) == 3


def test_a_worker_crashes_under_load(stack: Stack, transcript: Transcript) -> None:
    """Its streams go on at the other one; with the same tokens, as the workers are deterministic here."""
    with stack.load() as load:
        asyncio.run(stack.until_all_run(2))
        worker = stack.container("gpuworker")
        transcript.say(f"killing the process of worker {worker[:12]}, under load")
        stack.crash(worker)
        with transcript.timed("the engine starts it again, and it is healthy"):
            stack.until_restarted(worker)
        with transcript.timed("it gets streams again"):
            load.more(3, worker=f"{worker[:12]}-50053")


def test_it_stops_cleanly(stack: Stack, events: Events, transcript: Transcript) -> None:
    with transcript.timed("docker compose stop, while 12 streams of 3500 tokens run"):
        streams = asyncio.run(stack.stop_amid_streams(12, 3500))
    assert {(stream.tokens, stream.reason) for stream in streams} == {(3500, types_pb2.FINISH_REASON_LENGTH)}
    late = sum(stream.at > events.told_to_stop("router") for stream in streams)
    transcript.say(f"all ended with their last token, {late} of them after the signal to stop")
    assert late > 0
    ends = events.ends(lambda ends: ("redis", 0) in ends)  # it is the last to be stopped
    transcript.say(f"all ends so far: {', '.join(f'{service} {code}' for service, code in ends)}")
    assert [service for service, _ in ends[-5:]] == ["router", "gpuworker", "gpuworker", "kvmanager", "redis"]
    killed = 128 + signal.SIGKILL
    assert [end for end in ends if end[1] != 0] == [("kvmanager", killed), ("gpuworker", killed)]
    with transcript.timed("docker compose down --volumes"):
        stack.take_down()
    assert stack.containers() == []
