"""Writes docs/clients.md from the tests: which client was tested in which version, what, and how the model was driven.

`python -m tests.suites.clients.page`; tests/structure compares the page with the tests.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "clients.md"
HERE = "tests/suites/clients"
E2E = "tests/suites/e2e"
ENVIRONMENTS = f"{HERE}/environments"
# How a test's docstring begins that says how its model was driven; the others let the demo model answer freely.
DRIVERS = ("Demo model", "Model double", "No model")
_FREE = "Demo model."
_HEAD = """\
# Clients

Packages as released against a running suite. `python -m tests.suites.clients.page` writes this page
from the tests, and a test compares both.

| the model is | which means |
|---|---|
| the demo model | a whole suite; the model is too weak to choose tools, so they are required or named |
| a model double | a real router over a worker that says what the test wrote down, in Hermes' dialect |

CI runs the tests of clients that `make install` or `make clients` installs. `make test-clients`
installs all clients into environments of their own below `.clients`, and runs all tests.

A gRPC client in another language than Python retries a CANCELLED that it did not cause: see
[Streams that go on](usage.md#streams-that-go-on).
"""


@dataclass(frozen=True)
class Client:
    """A client, the file that pins its version, and the tests: those whose names begin so, with this argument."""

    name: str
    package: str
    pinned_by: str
    files: tuple[str, ...]
    begins: str = ""
    argument: str = ""

    @property
    def environment(self) -> str:
        """The name of the environment; "" where it is Quire's own, or that of an example."""
        return Path(self.pinned_by).stem if self.pinned_by.startswith(ENVIRONMENTS) else ""

    @property
    def command(self) -> str:
        """The command that installs the client."""
        if not self.environment and not self.pinned_by.startswith(HERE):
            return "make clients" if "examples" in self.pinned_by else "make install"
        light = self.environment == "light" or self.pinned_by.endswith("embedders.txt")
        return "make clients" if light else "make test-clients"


def _of(name: str, file: str, environment: str = "light", package: str = "", begins: str = "") -> Client:
    return Client(name, package or name, f"{ENVIRONMENTS}/{environment}.txt", (f"{HERE}/{file}",), begins)


_OPENAI = tuple(f"{E2E}/test_{name}.py" for name in ("openai", "tools", "responses", "conversations"))
_AI_SDK = f"{HERE}/ai_sdk/package.json"
_AGENTS = f"{HERE}/coding_agents/package.json"
_CODING = (f"{HERE}/test_coding_agents.py",)
_NODE = "protos/examples/node/package.json"
CLIENTS = (
    Client("openai", "openai", "constraints.txt", _OPENAI, argument="client"),
    _of("anthropic", "test_messages.py"),
    _of("LangChain", "test_agents.py", package="langchain-openai", begins="langchain"),
    _of("pydantic-ai", "test_agents.py", package="pydantic-ai-slim", begins="pydantic_ai"),
    _of("instructor", "test_instructor.py", "instructor"),
    _of("LiteLLM", "test_litellm.py", "litellm", "litellm"),
    _of("LlamaIndex", "test_llama_index.py", "llama-index", "llama-index-llms-openai-like"),
    _of("llm", "test_llm.py", "llm"),
    _of("lm-eval", "test_lm_eval.py", "lm-eval", "lm_eval"),
    Client("Vercel AI SDK", "ai", _AI_SDK, (f"{HERE}/test_ai_sdk.py",)),
    Client("Codex CLI", "@openai/codex", _AGENTS, _CODING, begins="codex"),
    Client("Claude Code", "@anthropic-ai/claude-code", _AGENTS, _CODING, begins="claude_code"),
    Client("OpenCode", "opencode-ai", _AGENTS, _CODING, begins="opencode"),
    Client("Qwen Code", "@qwen-code/qwen-code", _AGENTS, _CODING, begins="qwen_code"),
    Client("Cline", "cline", _AGENTS, _CODING, begins="cline"),
    _of("aider", "test_aider.py", "aider", "aider-chat"),
    _of("Open WebUI", "test_open_webui.py", "open-webui", "open-webui"),
    Client("sentence-transformers", "sentence-transformers", f"{HERE}/embedders.txt", (f"{HERE}/test_embedders.py",)),
    _of("tritonclient", "test_tritonclient.py"),
    _of("open-inference-grpc", "test_open_inference.py"),
    _of("SMG's gateway", "test_smg.py", "smg", "smg"),
    _of("Dynamo's radix tree", "test_dynamo.py", "dynamo", "ai-dynamo-runtime"),
    Client("buf curl", "buf-bin", "constraints.txt", (f"{HERE}/test_buf_curl.py",)),
    Client("grpc-js, and the system's grpc++ and grpc-go", "@grpc/grpc-js", _NODE, (f"{HERE}/test_examples.py",)),
)


def version(client: Client) -> str:
    """Return the version that is pinned. Raises ValueError where there is none."""
    text = (ROOT / client.pinned_by).read_text()
    if client.pinned_by.endswith(".json"):
        return str(json.loads(text)["dependencies"][client.package])
    found = re.search(rf"^{re.escape(client.package)}==(\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{client.pinned_by} does not pin {client.package}")
    return found[1]


def tested(client: Client) -> Iterator[tuple[str, str]]:
    """Yield what each test of a client shows, and how its model was driven."""
    for test in (node for file in client.files for node in ast.parse((ROOT / file).read_text()).body):
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and _is_of(client, test):
            said = (ast.get_docstring(test) or "").partition("\n")[0]
            yield _words(test.name), said if said.startswith(DRIVERS) else _FREE


def _is_of(client: Client, test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = {each.arg for each in test.args.args}
    return test.name.startswith(f"test_{client.begins}") and (not client.argument or client.argument in given)


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def page() -> str:
    """Return the page."""
    lines = [_HEAD, "| client | package | installed by | tests |", "|---|---|---|---|"]
    for client in CLIENTS:
        files = ", ".join(f"`{file}`" for file in client.files)
        package = f"{client.package} {version(client)}"
        lines.append(f"| [{client.name}](#{_anchor(client.name)}) | {package} | `{client.command}` | {files} |")
    for client in CLIENTS:
        lines += ["", f"## {client.name}", "", "| what is tested | how the model is driven |", "|---|---|"]
        lines += [f"| {what} | {how} |" for what, how in tested(client)]
    return "\n".join([*lines, ""])


def _anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", name).lower().replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
