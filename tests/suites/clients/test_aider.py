"""aider as released edits a file in an empty folder, over two of its runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.clients.double import Double, served_double
from tests.suites.clients.other_python import need_clients, output_of, program

CONTEXT = 20_000
TASK = "Make a file that says hello."
# What it asks for beside the task, after each edit.
COMMITS = "generates concise, one-line Git commit messages"
FILE = "said.txt\n```\n{text}\n```\n"


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """Check for aider before anything is started for it."""
    need_clients("aider")


@pytest.fixture(scope="module")
def double() -> Iterator[Double]:
    with served_double(CONTEXT) as running:
        yield running


def aider(double: Double, folder: Path, message: str) -> str:
    """Run aider in its folder with one message, and return what it prints."""
    agent = str(program("aider", "aider"))
    command = ["env", "-C", str(folder), agent, "--model", f"openai/{double.model}", "--yes-always"]
    given = {
        "HOME": str(folder.parent), "PWD": str(folder),
        "OPENAI_API_BASE": f"{double.http_url}/v1", "OPENAI_API_KEY": "x",
        # It looks nothing up elsewhere, and reports to nobody.
        "AIDER_ANALYTICS_DISABLE": "1", "AIDER_CHECK_UPDATE": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip
    return output_of([*command, "--message", message], more=given)


def test_aider_edits_a_file(double: Double, tmp_path: Path) -> None:
    """Model double: it writes a file; in the next run it names the file, gets it, and writes it anew."""
    folder = tmp_path / "work"
    folder.mkdir()
    double.play(FILE.format(text="hello"), asides={COMMITS: "Greet"})
    assert "Applied edit to said.txt" in aider(double, folder, TASK)
    (prompt,) = double.prompts()
    assert TASK in prompt
    assert (folder / "said.txt").read_text() == "hello\n"

    double.play("Show me said.txt.", FILE.format(text="goodbye"), asides={COMMITS: "Leave"})
    assert "Applied edit to said.txt" in aider(double, folder, "Let it say goodbye.")
    before, after = double.prompts()
    shown = "said.txt\n```\nhello\n```"
    assert (shown in before, shown in after) == (False, True)
    assert (folder / "said.txt").read_text() == "goodbye\n"
    log = output_of(["git", "-C", str(folder), "log", "--format=%s"])
    assert log.split() == ["Leave", "Greet"]
