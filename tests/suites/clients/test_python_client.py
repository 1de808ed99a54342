"""The client library against a running suite: as it is imported here, and from a wheel in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from common.contracts.types import FinishReason
from quire.client import (
    AsyncClient,
    Client,
    Completion,
    DeadlineExceeded,
    InterruptedByDeadline,
    InvalidRequest,
    Message,
    ThoughtBudget,
)
from tests.suites.clients.served import ROOT, Served, missing
from tests.support.deadlines import TooSlow, with_enough_time
from tests.support.hostile import hostile_folder
from tests.support.suite import greedy

PROMPT = [11, 12, 13, 14]
# What pip may find in an environment that has the client alone.
ALONE = {"googleapis-common-protos", "grpcio", "pip", "protobuf", "quire-llm-client", "setuptools", "typing-extensions"}
PATIENCE_S = 120.0


def tokens_of(answer: Completion) -> tuple[int, ...]:
    return answer.token_ids


def test_both_clients_get_the_tokens_that_the_wire_has(served: Served) -> None:
    outcome = served.run(lambda suite: suite.generate(greedy(PROMPT, 24)))

    async def asked() -> Completion:
        async with AsyncClient(served.address) as client:
            return await client.generate(PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True)

    with Client(served.address) as client:
        answer = client.generate(PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True)
    for each in (answer, asyncio.run(asked())):
        assert (each.token_ids, each.text) == (tuple(outcome.tokens), outcome.text)
        assert (each.finish_reason, each.usage.output_tokens) == (FinishReason.LENGTH, 24)
        assert each.timings.total_seconds > each.timings.time_to_first_token > 0.0


def test_several_outputs_are_drawn_from_one_prompt(served: Served) -> None:
    with Client(served.address) as client:
        answer = client.generate("The river", n=3, seed=5, max_tokens=6, ignore_eos=True)
        again = client.generate("The river", n=3, seed=5, max_tokens=6, ignore_eos=True)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in answer.outputs}) > 1
    assert [output.token_ids for output in again.outputs] == [output.token_ids for output in answer.outputs]


def test_tokens_and_back_model_and_status(served: Served) -> None:
    with Client(served.address) as client:
        tokens = client.tokenize("The river runs past the old mill.")
        assert client.detokenize(tokens) == "The river runs past the old mill."
        assert client.model().name == served.model
        (worker,) = client.status().workers
        assert (worker.state, worker.manager_attached) == ("connected", True)


def test_a_prompt_that_was_answered_is_cached_unless_it_says_otherwise(served: Served) -> None:
    prompt = list(range(40, 80))
    with Client(served.address) as client:
        options = {"temperature": 0.0, "max_tokens": 2, "salt": "test_python_client"}
        assert client.generate(prompt, **options).cached_tokens == 0  # type: ignore[arg-type]
        assert client.generate(prompt, **options).cached_tokens == 32  # type: ignore[arg-type]
        assert client.generate(prompt, no_cache=True, **options).cached_tokens == 0  # type: ignore[arg-type]


def test_a_deadline_keeps_what_had_come(served: Served) -> None:
    async def attempt(seconds: float) -> None:
        with Client(served.address) as client, pytest.raises(DeadlineExceeded) as late:
            client.generate(PROMPT, timeout=seconds, max_tokens=900, ignore_eos=True, n=16)
        if not (isinstance(late.value, InterruptedByDeadline) and late.value.partial.token_ids):
            raise TooSlow

    asyncio.run(with_enough_time(attempt, 0.3))
    served.until_all_free()


def test_every_wrong_field_is_named(served: Served) -> None:
    with Client(served.address) as client, pytest.raises(InvalidRequest) as refused:
        client.generate(PROMPT, top_p=2.0, priority=500)
    assert {violation.field for violation in refused.value.violations} == {"priority", "sampling.top_p"}


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}


def test_the_output_keeps_to_a_schema_a_regex_or_a_grammar(served: Served) -> None:
    with Client(served.address) as client:
        ask = partial(client.generate, "The river", temperature=0.0, max_tokens=64)
        assert isinstance(json.loads(ask(json_schema=SCHEMA).text)["on"], bool)
        assert re.fullmatch("[a-f]{4}", ask(regex="[a-f]{4}").text)
        assert ask(grammar='start: "yes" | "no"').text in {"yes", "no"}
        with pytest.raises(InvalidRequest) as refused:
            ask(regex="(")
    assert [violation.field for violation in refused.value.violations] == ["regex"]


def test_a_chat_is_rendered_with_what_the_client_sends_beside_it(served: Served) -> None:
    messages: list[Message] = [
        {"role": "user", "content": "Where does Anna live?"},
        {"role": "assistant", "content": "Anna lives in"},
    ]
    with Client(served.address) as client:
        whole, begun = client.tokenize(messages), client.tokenize(messages, continue_final_message=True)
        assert client.detokenize(begun, skip_special_tokens=False).endswith("Anna lives in")
        assert len(begun) < len(whole)
        answer = client.chat(messages, continue_final_message=True, temperature=0.0, max_tokens=8)
        assert answer.prompt_tokens == len(begun)
        with pytest.raises(InvalidRequest) as refused:
            client.chat("Hi", reasoning_effort="a b")
        assert [violation.field for violation in refused.value.violations] == ["prompt.chat.reasoning_effort"]
        with pytest.raises(InvalidRequest, match="two tools"):
            client.chat("Hi", tools=[{"type": "function", "function": {"name": "f"}}] * 2)


def test_a_thought_ends_with_its_budget(served: Served) -> None:
    budget: ThoughtBudget = {"max_tokens": 5, "opener": "<think>", "closer": "</think>", "end": "</think>\n"}
    options = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    with Client(served.address) as client:
        free = client.generate("The river", **options)  # type: ignore[arg-type]
        ended = client.generate("The river", thought_budget=budget | {"is_open": True}, **options)  # type: ignore[arg-type]
        end = client.tokenize("</think>\n", add_special_tokens=False)
        without = client.generate("The river", thought_budget=budget, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as refused:
            client.generate("The river", thought_budget=budget | {"end": "."})
    assert ended.token_ids[:5] == free.token_ids[:5]
    assert ended.token_ids[5 : 5 + len(end)] == end
    assert len(ended.token_ids) == 24
    assert without.token_ids == free.token_ids
    assert [violation.field for violation in refused.value.violations] == ["thought_budget.end"]


def test_threads_share_a_client(served: Served) -> None:
    prompts = [[20 + place, 7, 9] for place in range(16)]
    with Client(served.address) as client, ThreadPoolExecutor(8) as threads:
        ask = partial(client.generate, temperature=0.0, max_tokens=8, ignore_eos=True)
        assert list(map(tokens_of, threads.map(ask, prompts))) == list(map(tokens_of, map(ask, prompts)))


# ------------------------------------------------------------ alone


def python(*words: str, cwd: str | Path = "/") -> str:
    """Run a Python without this repository on its path; return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=env, cwd=cwd)
    if done.returncode and "-m pip" in " ".join(words):
        missing("the client alone", f"pip cannot install it\n{done.stderr[-2000:]}")
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fresh(folder: Path, wheel: Path, *versions: str) -> str:
    """Return the Python of a new environment with the wheel, and with these versions of what the wheel needs."""
    python(sys.executable, "-m", "venv", str(folder))
    made = str(folder / "bin" / "python")
    python(made, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *versions, str(wheel))
    return made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, client_wheel: Path) -> str:
    """The Python of an environment that has the client alone."""
    return fresh(tmp_path_factory.mktemp("alone"), client_wheel, "-c", str(ROOT / "constraints.txt"))


BOTH = """
import asyncio, json, sys
from quire.client import AsyncClient, Client, InvalidRequest
address, prompt = sys.argv[1], json.loads(sys.argv[2])
sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
async def asked():
    async with AsyncClient(address) as client:
        async with client.stream(prompt, **sampling) as stream:
            parts = [chunk.token_ids async for chunk in stream]
        try:
            await client.generate(prompt, top_p=2.0)
        except InvalidRequest as refused:
            return sum(map(list, parts), []), [each.field for each in refused.violations]
with Client(address) as client:
    answer = client.generate(prompt, **sampling)
print(json.dumps([answer.token_ids, *asyncio.run(asked())]))
"""
SCRIPT = """
import json, sys
from quire.client import Client
with Client(sys.argv[1]) as client:
    answer = client.generate(json.loads(sys.argv[2]), temperature=0.0, max_tokens=24, ignore_eos=True)
print(json.dumps(answer.token_ids))
"""


def test_the_commands_say_what_they_need_besides(alone: str) -> None:
    command = [alone, "-m", "cli.main", "status"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={"PYTHONPATH": ""})
    assert done.returncode == 2
    assert "Install quire-llm[cli] for the commands" in done.stderr


def test_the_client_brings_one_top_level_package(alone: str) -> None:
    script = "import importlib.metadata as m; print(*{str(f).split('/')[0] for f in m.files('quire-llm-client')})"
    tops = set(python(alone, "-c", script).split())
    assert {name for name in tops if not name.endswith(".dist-info")} == {"quire"}


def test_the_client_works_beside_packages_of_the_callers(alone: str, served: Served, tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "caller", modules=("redis", "torch"))  # protobuf itself imports `numbers`
    outcome = served.run(lambda suite: suite.generate(greedy(PROMPT, 24)))
    said = python(alone, "-c", SCRIPT, served.address, json.dumps(PROMPT), cwd=folder)
    assert json.loads(said) == outcome.tokens


@pytest.mark.timeout(3 * PATIENCE_S)
def test_the_client_alone_needs_no_service_and_gets_the_same(alone: str, served: Served) -> None:
    listed = json.loads(python(alone, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    assert {each["name"].lower().replace("_", "-") for each in listed} <= ALONE
    outcome = served.run(lambda suite: suite.generate(greedy(PROMPT, 24)))
    assert json.loads(python(alone, "-c", SCRIPT, served.address, json.dumps(PROMPT))) == outcome.tokens


@pytest.mark.timeout(3 * PATIENCE_S)
def test_the_oldest_versions_that_the_client_takes_are_enough(
    tmp_path: Path, client_wheel: Path, served: Served
) -> None:
    ranges = tomllib.loads((ROOT / "protos/pyproject.toml").read_text())["project"]["dependencies"]
    oldest = [each.partition(",")[0].replace(">=", "==") for each in ranges]
    made = fresh(tmp_path / "oldest", client_wheel, *oldest)
    outcome = served.run(lambda suite: suite.generate(greedy(PROMPT, 24)))
    said = json.loads(python(made, "-W", "error", "-c", BOTH, served.address, json.dumps(PROMPT)))
    assert said == [outcome.tokens, outcome.tokens, ["sampling.top_p"]]
