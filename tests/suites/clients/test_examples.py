"""The examples in Python, Node, C++ and Go by the commands of their READMEs: each gets what the client library gets."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from common.contracts.types import FinishReason
from quire.client import Client, Completion, InvalidRequest, Message
from tests.suites.clients.served import ROOT, Served, missing

EXAMPLES = ROOT / "protos" / "examples"
QUESTION = "What does Joan eat?"
NODE = EXAMPLES / "node"
PATIENCE_S = 300.0
TOOLS = {
    "python": (),
    "node": ("node", "npm"),
    "cpp": ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin"),
    "go": ("make", "go", "protoc-gen-go", "protoc-gen-go-grpc"),
}


def commands(language: str) -> list[list[str]]:
    """Return the commands of a README's `sh` blocks."""
    (block,) = re.findall(r"```sh\n(.*?)```", (EXAMPLES / language / "README.md").read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def is_installed(command: list[str]) -> bool:
    """Return whether a command has nothing to do: npm would ask its registry even then."""
    stamp = NODE / "node_modules" / ".package-lock.json"
    lock = NODE / "package-lock.json"
    return command[0] == "npm" and stamp.is_file() and stamp.stat().st_mtime >= lock.stat().st_mtime


def run(command: list[str], address: str) -> str:
    """Run a README's command from the repository's root, its Python and its address exchanged for ours."""
    ours = {".venv/bin/python": sys.executable, "127.0.0.1:50051": address}
    words = [ours.get(word, word) for word in command]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'protos'}"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode and command[0] == "npm":
        missing("what protos/examples/node needs", f"make clients, which runs {shlex.join(command)}\n{done.stderr}")
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wanted(served: Served) -> tuple[Completion, list[str]]:
    """Return the answer to the question, and the lines that say what is wrong with the examples' bad request."""
    chat = [Message(role="user", content=QUESTION)]
    with Client(served.address) as client:
        answer = client.generate(chat, temperature=0.0, max_tokens=32)
        with pytest.raises(InvalidRequest) as refused:
            client.generate(chat, temperature=-1.0, top_p=2.0)
    return answer, [f"refused: {each.field} {each.description}" for each in refused.value.violations]


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("language", ["python", "node", "cpp", pytest.param("go", marks=pytest.mark.frameworks)])
def test_an_example_does_what_it_says_by_the_commands_of_its_readme(language: str, served: Served) -> None:
    absent = [tool for tool in TOOLS[language] if shutil.which(tool) is None]
    if absent:
        missing(", ".join(absent), f"make clients, and see protos/examples/{language}/README.md")
    answer, refusals = wanted(served)
    assert (answer.finish_reason, len(refusals)) == (FinishReason.STOP, 2)
    for command in commands(language):
        if QUESTION not in command:
            if not is_installed(command):
                run(command, served.address)
            continue
        *lines, cancelled = run(command, served.address).splitlines()
        assert lines == [
            *answer.text.splitlines(),
            f"{answer.usage.output_tokens} tokens, {answer.finish_reason}, from {answer.worker_id}",
            *refusals,
        ]
        assert re.fullmatch(r"cancelled after [1-9]\d* tokens", cancelled)
    served.until_all_free()
