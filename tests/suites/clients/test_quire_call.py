"""`quire call` against every service of a running suite, as a process: what it asks it knows from reflection alone."""

from __future__ import annotations

import json
import subprocess
import sys

from quire.client import Client
from quire.kvmanager.v1 import kvmanager_pb2
from tests.suites.clients.served import ROOT, Served


def quire_call(*words: str, address: str) -> str:
    command = [sys.executable, "-m", "cli.main", "call", *words, "--address", address]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240.0, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_stream_is_what_the_client_library_gets(served: Served) -> None:
    request = {"prompt": {"text": "The river"}, "sampling": {"temperature": 0, "max_tokens": 8}}
    shown = quire_call("Generate", json.dumps(request), address=served.address)
    events = [json.loads(line) for line in shown.splitlines()]
    with Client(served.address) as client:
        wanted = client.generate("The river", temperature=0.0, max_tokens=8)
    assert "".join(event["tokens"].get("text", "") for event in events if "tokens" in event) == wanted.text
    assert events[-1]["finished"]["usage"]["output_tokens"] == wanted.usage.output_tokens


def test_the_manager_and_the_workers_answer_too(served: Served) -> None:
    manager = served.suite.stack.children["kvmanager"].program.address
    (pool,) = json.loads(quire_call("GetPool", "--defaults", address=manager))["pools"]
    assert (pool["worker_id"], pool["num_blocks"]) == ("worker-0", 1024)
    assert set(pool) <= {field.name for field in kvmanager_pb2.Pool.DESCRIPTOR.fields}
    (worker,) = (each for name, each in served.suite.stack.children.items() if name.startswith("worker"))
    info = json.loads(quire_call("GetWorker", address=worker.program.address))["info"]
    assert (info["worker_id"], info["identity"]["kv_geometry"]["dtype"]) == ("worker-0", "float32")


def test_a_public_protocol_is_called_like_ours(served: Served) -> None:
    assert json.loads(quire_call("ServerLive", address=served.address)) == {"live": True}
    metadata = json.loads(quire_call("ModelMetadata", json.dumps({"name": served.model}), address=served.address))
    assert metadata["name"] == served.model
    assert {each["datatype"] for each in metadata["inputs"]} >= {"BYTES"}
