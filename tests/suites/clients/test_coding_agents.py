"""Coding agents as released do a task of several turns in an empty folder, with the settings that they come with."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.clients.double import Double, call, served_double
from tests.suites.clients.other_python import need_clients, output_of, program
from tests.suites.clients.served import missing

FOLDER = Path(__file__).with_name("coding_agents")
# In tokens of the double Codex sends 11,000 a turn, Claude Code 6,600 and Qwen Code 19,500 with their first.
# OpenCode, Qwen Code and Claude Code ask for 32,000 tokens an answer.
CONTEXT = 32_000
TASK = "Make a file that says hello, then let it say goodbye."
CONFIG = """
model = "{model}"
model_provider = "quire"
[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
env_key = "QUIRE_KEY"
wire_api = "responses"
"""
# A picture of one white point.
DOT = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")
# What OpenCode asks for beside its first turn.
TITLES = "You are a title generator."


@pytest.fixture(scope="session", autouse=True)
def agents() -> None:
    """Check for the agents before anything is started for them."""
    need_clients("ai-sdk")
    if not (FOLDER / "node_modules" / ".package-lock.json").exists():
        missing("the coding agents", "make test-clients, which runs npm")


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    with served_double(CONTEXT) as running:
        yield running


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """An empty folder to work in; the agent's home is beside it."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "work"


def run(work: Path, agent: str, *words: str, **environment: str) -> str:
    """Run an agent in its folder, and return what it prints."""
    path = f"{program('ai-sdk', 'node').parent}:/usr/bin:/bin"
    home = {"HOME": str(work.parent / "home"), "CODEX_HOME": str(work.parent / "home"), "PATH": path, "PWD": str(work)}
    command = ["env", "-C", str(work), str(FOLDER / "node_modules" / ".bin" / agent), *words]
    return output_of(command, more=home | environment)


def opencode_settings(double: Double, provider: str) -> str:
    """Return OpenCode's settings for a server, and for the API of a provider."""
    options = {"baseURL": f"{double.http_url}/v1", "apiKey": "x"}
    quire = {"npm": provider, "name": "Quire", "options": options, "models": {double.model: {}}}
    return json.dumps({"provider": {"quire": quire}, "model": f"quire/{double.model}"})


def test_codex_edits_files(double: Double, work: Path) -> None:
    """Model double: it runs two commands, then answers."""
    (work.parent / "home" / "config.toml").write_text(CONFIG.format(model=double.model, url=double.http_url))
    double.play(
        call("exec_command", cmd="echo hello > said.txt; cat said.txt"),
        call("exec_command", cmd="sed -i s/hello/goodbye/ said.txt"),
        "All done.",
    )
    said = run(work, "codex", "exec", "--skip-git-repo-check", "-s", "workspace-write", TASK, QUIRE_KEY="x")
    prompts = double.prompts()
    assert said.strip() == "All done."
    assert (work / "said.txt").read_text() == "goodbye\n"
    assert [TASK in each for each in prompts] == [True] * 3
    assert prompts[1].rpartition("exec_command")[2].count("hello") > 1, "the command, and what it printed"


def test_claude_code_edits_files(double: Double, work: Path) -> None:
    """Model double: it writes a file and edits it, then answers."""
    file = work / "said.txt"
    double.play(
        call("Write", file_path=str(file), content="hello\n"),
        call("Edit", file_path=str(file), old_string="hello", new_string="goodbye"),
        "All done.",
    )
    said = run(
        work, "claude", "-p", TASK, "--model", double.model, "--permission-mode", "acceptEdits",
        ANTHROPIC_BASE_URL=double.http_url, ANTHROPIC_API_KEY="x", ANTHROPIC_SMALL_FAST_MODEL=double.model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    assert said.strip() == "All done."
    assert file.read_text() == "goodbye\n"
    assert [TASK in each for each in double.prompts()] == [True] * 3


@pytest.mark.parametrize("api", ["openai-compatible", "openai", "anthropic"])
def test_opencode_edits_files(double: Double, work: Path, api: str) -> None:
    """Model double: it writes a file, reads and edits it, then answers."""
    settings = work.parent / "home" / ".config" / "opencode" / "opencode.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(opencode_settings(double, f"@ai-sdk/{api}"))
    file = str(work / "said.txt")
    double.play(
        call("write", filePath=file, content="hello\n"),
        call("read", filePath=file),
        call("edit", filePath=file, oldString="hello", newString="goodbye"),
        "All done.",
        asides={TITLES: "Greetings"},
    )
    downloads = dict.fromkeys(("AUTOUPDATE", "LSP_DOWNLOAD", "MODELS_FETCH"), "1")
    said = run(work, "opencode", "run", TASK, **{f"OPENCODE_DISABLE_{key}": yes for key, yes in downloads.items()})
    assert said.strip() == "All done."
    assert_edited(double, work)


@pytest.mark.parametrize("api", ["openai", "openai-responses", "anthropic"])
def test_qwen_code_edits_files(double: Double, work: Path, api: str) -> None:
    """Model double: it writes a file, reads and edits it, then answers."""
    file = str(work / "said.txt")
    double.play(
        call("write_file", file_path=file, content="hello\n"),
        call("read_file", file_path=file),
        call("edit", file_path=file, old_string="hello", new_string="goodbye"),
        "All done.",
    )
    said = run(
        work, "qwen", "--auth-type", api, "--yolo", TASK,
        OPENAI_BASE_URL=f"{double.http_url}/v1", OPENAI_API_KEY="x", OPENAI_MODEL=double.model,
        ANTHROPIC_BASE_URL=double.http_url, ANTHROPIC_API_KEY="x", ANTHROPIC_MODEL=double.model,
    )  # fmt: skip
    assert said.strip() == "All done."
    assert_edited(double, work)


def cline(double: Double, work: Path, provider: str, task: str) -> str:
    """Run Cline with a provider's API, and return what it prints."""
    # Without the first it leaves a daemon behind.
    settings = {"CLINE_SESSION_BACKEND_MODE": "local", "CLINE_NO_AUTO_UPDATE": "1"}
    server = ("-b", f"{double.http_url}/v1", "-k", "x", "-m", double.model)
    run(work, "cline", "auth", provider, *server, **settings)
    return run(work, "cline", task, **settings)


def test_cline_edits_files(double: Double, work: Path) -> None:
    """Model double: it writes a file, reads and edits it, then answers."""
    file = str(work / "said.txt")
    double.play(
        call("editor", path=file, new_text="hello\n"),
        call("read_files", files=[{"path": file}]),
        call("editor", path=file, old_text="hello", new_text="goodbye"),
        "All done.",
    )
    said = cline(double, work, "openai-compatible", TASK)
    assert said.strip().endswith("All done.")
    assert_edited(double, work)


def test_cline_edits_files_by_responses(double: Double, work: Path) -> None:
    """Model double: it writes a file by a patch, reads it and patches it, then answers."""
    double.play(
        call("apply_patch", input="*** Begin Patch\n*** Add File: said.txt\n+hello\n*** End Patch"),
        call("read_files", files=[{"path": str(work / "said.txt")}]),
        call("apply_patch", input="*** Begin Patch\n*** Update File: said.txt\n@@\n-hello\n+goodbye\n*** End Patch"),
        "All done.",
    )
    # It offers a search and a drawing of its vendor too, which are left out.
    said = cline(double, work, "openai-native", TASK)
    assert said.strip().endswith("All done.")
    assert_edited(double, work)


def test_cline_goes_on_after_an_image(double: Double, work: Path) -> None:
    """Model double: it looks at an image, then answers; the model gets a text in its place."""
    (work / "dot.png").write_bytes(DOT)
    double.play(call("read_files", files=[{"path": str(work / "dot.png")}]), "All done.")
    said = cline(double, work, "openai-compatible", "What is in dot.png?")
    _, after = double.prompts()
    assert said.strip().endswith("All done.")
    assert "[Left out: image. Only text reaches the model.]" in after


def assert_edited(double: Double, work: Path) -> None:
    """Check the file, and that each prompt has the task, and what the turn before it did."""
    prompts = double.prompts()
    assert (work / "said.txt").read_text().strip() == "goodbye"
    assert [TASK in each for each in prompts] == [True] * 4
    assert "hello" in prompts[2].rpartition("<|assistant|>")[0].rpartition("said.txt")[2], "what it read"
