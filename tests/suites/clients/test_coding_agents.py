"""Coding agents as released do a task of several turns in an empty folder, with the settings that they come with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.clients.double import Double, call, served_double
from tests.suites.clients.other_python import need_clients, output_of, program
from tests.suites.clients.served import missing

FOLDER = Path(__file__).with_name("coding_agents")
# Codex sends 11,000 tokens of the double a turn, Claude Code 6,600 with its first one.
CONTEXT = 100_000
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
    home = {"HOME": str(work.parent / "home"), "CODEX_HOME": str(work.parent / "home"), "PATH": path}
    command = ["env", "-C", str(work), str(FOLDER / "node_modules" / ".bin" / agent), *words]
    return output_of(command, more=home | environment)


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
