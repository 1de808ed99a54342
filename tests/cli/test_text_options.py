"""`--tokenizer`, `--chat-template` and `--revision`: every service gets what concerns it, and clients see it."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from cli.demo_model import CHECKPOINT
from cli.suite.preflight import suite_options
from cli.suite.programs import service_programs
from cli.suite.stack import free_ports
from common.checkpoint.fingerprint import tokenizer_fingerprint
from common.contracts.errors import InvalidConfig
from common.process.redis_users import RedisUrls
from common.settings.config import load
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from kvmanager.main import configured_identity
from router.config import RouterSettings
from tests.support.checkpoints import checkpoint
from tests.support.up_harness import READY_SECONDS, Up

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo model's tokenizer and one token more, and no model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for path in CHECKPOINT.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    more = Tokenizer.from_file(str(folder / "tokenizer.json"))
    more.add_tokens(["Lyon"])
    more.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "plain.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture
def base(tmp_path: Path) -> dict[str, str]:
    return {"QUIRE_MODEL": str(checkpoint("llama")), "QUIRE_STATE_DIR": str(tmp_path / "state")}


def refusals(argv: tuple[str, ...], environ: dict[str, str]) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        suite_options(argv, environ)
    return {each.field: each.description for each in caught.value.violations}


def flags(argv: tuple[str, ...], environ: dict[str, str]) -> dict[str, tuple[str, ...]]:
    names = ("--manager-port", "--worker-port", "--admin-port", "--admin-http-port")
    ports = [word for name, port in zip(names, free_ports(len(names)), strict=True) for word in (name, str(port))]
    control, rest = service_programs(suite_options((*ports, *argv), environ), RedisUrls.same("redis://127.0.0.1:1"))
    return {program.name: program.flags for program in (*control, *rest)}


def test_every_service_gets_the_tokenizer_and_the_router_the_template(
    base: dict[str, str], tokenizer: Path, template: Path
) -> None:
    found = flags(("--tokenizer", str(tokenizer), "--chat-template", str(template)), base)
    router = load(RouterSettings, found["router"], base)
    assert (router.tokenizer, router.chat_template) == (tokenizer, template)
    assert load(GpuWorkerSettings, found["worker-0"], base).tokenizer == tokenizer
    manager = configured_identity(load(KvManagerSettings, found["kvmanager"], base))
    assert manager["tokenizer_fingerprint"] == tokenizer_fingerprint(tokenizer)


def test_what_is_not_there_is_refused_before_anything_starts(base: dict[str, str], tmp_path: Path) -> None:
    found = refusals(("--tokenizer", str(tmp_path), "--chat-template", str(tmp_path / "none.jinja")), base)
    assert found["--tokenizer"].endswith("expected a folder with a tokenizer.json")
    assert found["--chat-template"].endswith("expected a file of this machine")


def test_a_folder_has_no_revision(base: dict[str, str]) -> None:
    found = refusals(("--revision", "main"), base)
    assert re.fullmatch(
        r"is 'main', and --model \S+ is a folder of this machine, which has no revisions; leave it out",
        found["--revision"],
    )


def test_workers_of_a_suite_serve_the_folder_that_the_revision_was_loaded_into(
    base: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is the one thing that a test cannot reach: its answer is a folder."""
    asked: list[object] = []

    def snapshot_download(model: str, **options: object) -> str:
        asked.append((model, options["revision"]))
        return str(checkpoint("llama"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    environ = {"QUIRE_STATE_DIR": base["QUIRE_STATE_DIR"], "QUIRE_REVISION": "v2"}
    found = flags(("--model", "some/model"), environ)
    assert set(asked) == {("some/model", "v2")}
    worker = load(GpuWorkerSettings, found["worker-0"], environ)
    assert (worker.model, worker.revision) == (str(checkpoint("llama")), "")


def test_a_suite_answers_with_another_tokenizer_and_template(tmp_path: Path, tokenizer: Path, template: Path) -> None:
    """Router, manager and worker agree on the tokenizer, or the worker could not attach."""
    words = ("--tokenizer", str(tokenizer), "--chat-template", str(template))
    up = Up(tmp_path, "--simulate", "--model", str(CHECKPOINT), *words)
    try:
        up.until("ready: ")
        found = re.search(r"HTTP (http://\S+?),", "".join(up.lines))
        assert found is not None
        body = json.dumps({"messages": [{"role": "user", "content": "Lyon"}]}).encode()
        asked = urllib.request.Request(f"{found[1]}/tokenize", data=body, headers={"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            tokens = json.load(answer)["tokens"]
    finally:
        up.close()
    reference = AutoTokenizer.from_pretrained(tokenizer)
    assert tokens == reference.encode(f"user: Lyon{reference.eos_token}", add_special_tokens=False)


def test_a_tokenizer_of_another_model_is_refused_as_the_router_starts(tmp_path: Path, tokenizer: Path) -> None:
    up = Up(tmp_path, "--simulate", "--tokenizer", str(tokenizer))
    try:
        up.until("--tokenizer: the tokenizer has 2,028 tokens and the model 264, so texts have tokens that")
        assert up.process.wait(timeout=READY_SECONDS) == 2
    finally:
        up.close()
