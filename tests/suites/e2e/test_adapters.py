"""Adapters in a suite: chosen by model name, listed with their base, apart in the cache, loaded while others stream."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio

from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2
from tests.support.adapters import adapter, digits_of, tokens_of
from tests.support.checkpoints import checkpoint
from tests.support.suite import Suite, running_suite
from tests.support.tenants import tenant_suite
from tests.support.waiting import until
from tests.support.why import quire_adapters, quire_why

pytestmark = pytest.mark.asyncio(loop_scope="session")

KIND = "llama"
PROMPT = [7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45]
COUNT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which adapters may be loaded at run time."""
    return tmp_path_factory.mktemp("adapters")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[Suite]:
    """One worker with room for two adapters, and two of its own."""
    own = (word for each in (0, 1) for word in ("--lora", f"own-{each}={adapter(KIND, each)}"))
    flags = ("--kv-blocks", "256", "--dtype", "float32", "--max-loras", "2", "--lora-dir", str(folder), *own)
    options = StackOptions(model=checkpoint(KIND), workers=1, worker_flags=flags)
    async with running_suite(tmp_path_factory.mktemp("suite"), options) as running:
        yield running


async def complete(suite: Suite, model: str | None, prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        body |= {"return_token_ids": True} | more
        answer = await client.post(f"{suite.stack.http_url}/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found | {"request_id": answer.headers["x-request-id"]}


async def test_a_model_name_selects_the_base_or_an_adapter(adapted: Suite) -> None:
    answers = await asyncio.gather(*(complete(adapted, name) for name in (None, "own-0", "own-1")))
    for answer, variant in zip(answers, (None, 0, 1), strict=True):
        assert answer["choices"][0]["token_ids"] == tokens_of(KIND, variant, PROMPT, COUNT)
    assert [answer["model"] for answer in answers[1:]] == ["own-0", "own-1"]


async def post(suite: Suite, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{suite.stack.http_url}{path}", json=body)


async def load(suite: Suite, name: str, path: str) -> httpx.Response:
    return await post(suite, "/v1/load_lora_adapter", lora_name=name, lora_path=path)


async def unload(suite: Suite, name: str) -> httpx.Response:
    return await post(suite, "/v1/unload_lora_adapter", lora_name=name)


async def models_of(suite: Suite) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient(timeout=60) as client:
        found = (await client.get(f"{suite.stack.http_url}/v1/models")).json()["data"]
    return {each["id"]: each for each in found}


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_models_are_listed_with_their_parent(adapted: Suite) -> None:
    found = await models_of(adapted)
    base = next(name for name, each in found.items() if each["parent"] is None)
    assert {"own-0", "own-1"} <= found.keys()
    assert found["own-0"]["parent"] == base
    assert found["own-0"]["root"] != found["own-1"]["root"]


async def test_base_and_adapters_share_no_block(adapted: Suite) -> None:
    prompt = [each + 100 for each in PROMPT]
    assert [cached(await complete(adapted, name, prompt)) for name in (None, "own-0", "own-1")] == [0, 0, 0]
    assert [cached(await complete(adapted, name, prompt)) for name in (None, "own-0", "own-1")] == [16, 16, 16]


async def test_a_cold_adapter_loads_and_the_request_says_that_it_waited(adapted: Suite, folder: Path) -> None:
    """Two adapters fit in memory: each of three in turn finds the least recently used one gone."""
    shutil.copytree(adapter(KIND, 2), folder / "cold")
    assert (await load(adapted, "cold", "cold")).status_code == 200
    try:
        for _ in range(2):
            for name, variant in (("own-0", 0), ("own-1", 1), ("cold", 2)):
                answer = await complete(adapted, name)
                assert tokens(answer) == tokens_of(KIND, variant, PROMPT, COUNT)
        _, why, _ = await quire_why(adapted, answer["request_id"])
        assert "waiting for its adapter" in why, why
    finally:
        assert (await unload(adapted, "cold")).status_code == 200


async def test_the_command_lists_loads_and_unloads(adapted: Suite, folder: Path) -> None:
    shutil.copytree(adapter(KIND, 7), folder / "below" / "seven")
    status, out, err = await quire_adapters(adapted, "--load", "seven=below/seven")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "seven"
    assert "worker-0: rank 2, " in out
    assert tokens(await complete(adapted, "seven")) == tokens_of(KIND, 7, PROMPT, COUNT)
    _, out, _ = await quire_adapters(adapted)
    assert {"own-0", "own-1", "seven"} <= set(out.splitlines())
    status, out, _ = await quire_adapters(adapted, "--unload", "seven")
    assert (status, "seven" in out) == (0, False)
    status, _, err = await quire_adapters(adapted, "--unload", "seven")
    assert (status, "is not loaded at any worker" in err) == (1, True), err


async def test_structured_output_is_that_of_the_adapter(adapted: Suite) -> None:
    """Each token is the likeliest one of PEFT's own model among those that the constraint allows."""
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT))
    sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    expected = [digits_of(KIND, variant, PROMPT, COUNT) for variant in (0, 1)]
    assert expected[0] != expected[1]
    for _ in range(2):
        asked = [pb.GenerateRequest(prompt=prompt, sampling=sampling, model=f"own-{each}") for each in (0, 1)]
        for each in asked:
            each.regex = f"[0-9]{{{COUNT}}}"
        found = await asyncio.gather(*(adapted.generate(each) for each in asked))
        assert [each.tokens for each in found] == expected


async def test_the_name_of_a_model_in_grpc_selects_too(adapted: Suite) -> None:
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT))
    sampling = types_pb2.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    found = await adapted.generate(pb.GenerateRequest(prompt=prompt, sampling=sampling, model="own-1"))
    assert found.tokens == tokens_of(KIND, 1, PROMPT, COUNT)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await adapted.generate(pb.GenerateRequest(prompt=prompt, sampling=sampling, model="no-such"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_changed_adapter_under_the_same_name_meets_no_old_block(adapted: Suite, folder: Path) -> None:
    prompt = [each + 150 for each in PROMPT]
    shutil.copytree(adapter(KIND, 3), folder / "changing")
    assert (await load(adapted, "changing", "changing")).status_code == 200
    before = [await complete(adapted, "changing", prompt) for _ in range(2)]
    assert [cached(each) for each in before] == [0, 16]
    shutil.rmtree(folder / "changing")
    shutil.copytree(adapter(KIND, 4), folder / "changing")
    assert (await load(adapted, "changing", "changing")).status_code == 200
    after = [await complete(adapted, "changing", prompt) for _ in range(2)]
    assert [cached(each) for each in after] == [0, 16]
    assert tokens(before[1]) == tokens_of(KIND, 3, prompt, COUNT)
    assert tokens(after[1]) == tokens_of(KIND, 4, prompt, COUNT)
    assert (await unload(adapted, "changing")).status_code == 200
    assert (await post(adapted, "/v1/completions", model="changing", prompt=prompt)).status_code == 404
    assert "changing" not in await models_of(adapted)


@pytest.mark.parametrize(
    ("name", "path", "status", "words"),
    [
        ("../x", "x", 400, "letters, digits, dots"),
        ("x", "../../etc", 403, "adapters are loaded from below"),
        ("x", "/etc", 403, "adapters are loaded from below"),
        ("x", "missing", 400, "has no adapter_config.json"),
        ("x", "", 400, "lora_path"),
    ],
)
async def test_what_may_not_be_loaded(adapted: Suite, name: str, path: str, status: int, words: str) -> None:
    answer = await load(adapted, name, path)
    assert (answer.status_code, words in answer.text) == (status, True), answer.text


async def test_the_name_of_the_base_and_links_out_are_refused(adapted: Suite, folder: Path) -> None:
    base = next(name for name, each in (await models_of(adapted)).items() if each["parent"] is None)
    assert "which is the base; choose another name" in (await load(adapted, base, "x")).text
    (folder / "link").symlink_to(adapter(KIND, 5))
    assert (await load(adapted, "linked", "link")).status_code == 403
    assert (await unload(adapted, "never-loaded")).status_code == 404


@pytest.mark.rest
async def test_loads_and_unloads_under_load_fail_nothing_and_leave_no_memory(adapted: Suite, folder: Path) -> None:
    """200 times an adapter comes and goes, while the base and an adapter of the worker answer."""
    for variant in (5, 6):
        shutil.copytree(adapter(KIND, variant), folder / "soak" / str(variant))
    process = psutil.Process(adapted.stack.children["worker-0"].pid)
    pids = {name: each.pid for name, each in adapted.stack.children.items()}
    stop, answers = asyncio.Event(), list[list[int]]()

    async def ask(name: str | None) -> None:
        while not stop.is_set():
            answers.append(tokens(await complete(adapted, name)))

    async def turn(times: int) -> None:
        for number in range(times):
            assert (await load(adapted, "soak", f"soak/{5 + number % 2}")).status_code == 200
            assert tokens(await complete(adapted, "soak")) == tokens_of(KIND, 5 + number % 2, PROMPT, COUNT)
            assert (await unload(adapted, "soak")).status_code == 200

    load_tasks = [asyncio.create_task(ask(name)) for name in (None, "own-0")]
    try:
        await turn(50)
        warm = process.memory_info().rss
        await turn(150)
        grown = process.memory_info().rss - warm
    finally:
        stop.set()
        await asyncio.gather(*load_tasks)
        # Said before anything else: what ends a request otherwise is a service that ended.
        assert {name: each.pid for name, each in adapted.stack.children.items()} == pids
    expected = {tuple(tokens_of(KIND, variant, PROMPT, COUNT)) for variant in (None, 0)}
    assert {tuple(each) for each in answers} == expected
    assert grown < 8 << 20, f"{grown} bytes"


@pytest.mark.rest
async def test_streams_that_keep_coming_for_what_is_in_memory_hold_off_no_other_adapter(
    adapted: Suite, folder: Path
) -> None:
    """Requests for the two that fit in memory never end: a third one gets its turn beside them."""
    shutil.copytree(adapter(KIND, 2), folder / "third")
    assert (await load(adapted, "third", "third")).status_code == 200
    stop, answers = asyncio.Event(), list[list[int]]()

    async def ask(name: str) -> None:
        while not stop.is_set():
            answers.append(tokens(await complete(adapted, name, max_tokens=200)))

    others = [asyncio.create_task(ask(name)) for name in ("own-0", "own-1") for _ in range(3)]
    try:
        await until(lambda: len(answers) > 6)
        answer = await complete(adapted, "third")
        assert tokens(answer) == tokens_of(KIND, 2, PROMPT, COUNT)
        _, why, _ = await quire_why(adapted, answer["request_id"])
        assert "waiting for its adapter" in why, why
    finally:
        stop.set()
        await asyncio.gather(*others)
    assert {tuple(each[:COUNT]) for each in answers} == {tuple(tokens_of(KIND, each, PROMPT, COUNT)) for each in (0, 1)}
    assert (await unload(adapted, "third")).status_code == 200


@pytest.mark.rest
async def test_a_tenants_own_adapters_are_its_own_from_load_to_unload(tmp_path: Path) -> None:
    """Red loads its adapter from its own folder, within its bytes; blue neither sees, uses nor unloads it."""
    root = tmp_path / "adapters"
    for name, variant in (("sql", 0), ("large", 6)):
        shutil.copytree(adapter(KIND, variant), root / "red" / name)
    shutil.copytree(adapter(KIND, 0), root / "elsewhere")
    most = (root / "red" / "large" / "adapter_model.safetensors").stat().st_size // 2
    flags = ("--kv-blocks", "256", "--dtype", "float32", "--lora-dir", str(root))
    options = StackOptions(model=checkpoint(KIND), workers=1, worker_flags=flags)
    tenants = {"red": f'adapters = ["red-*"]\nadapter_bytes = {most}', "blue": ""}
    async with tenant_suite(tmp_path, tenants, options) as found:

        async def ask(tenant: str, path: str, **body: Any) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {found.keys[tenant]}"}
            async with httpx.AsyncClient(timeout=60, headers=headers, base_url=found.suite.stack.http_url) as client:
                answer = await (client.post(path, json=body) if body else client.get(path))
            return answer.status_code, answer.text

        async def load(tenant: str, name: str, path: str) -> tuple[int, str]:
            return await ask(tenant, "/v1/load_lora_adapter", lora_name=name, lora_path=path)

        assert (await load("red", "red-sql", "red/sql"))[0] == 200
        for tenant, name, path, words in (
            ("red", "red-2", "elsewhere", "from below the folder red of --lora-dir alone"),
            ("red", "red-2", "red/large", f"all of tenant red may take {most} (adapter_bytes)"),
            ("red", "other", "red/sql", "tenant red loads and unloads its own adapters alone: red-*"),
            ("blue", "red-sql", "red/sql", "by those with `adapters` of their own"),
        ):
            status, text = await load(tenant, name, path)
            assert (status, words in text) == (403, True), text
        wanted = {"model": "red-sql", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        assert (await ask("red", "/v1/completions", **wanted))[0] == 200
        status, text = await ask("blue", "/v1/completions", **wanted)
        assert (status, "tenant blue may not use model 'red-sql'" in text) == (403, True), text
        assert "red-sql" in (await ask("red", "/v1/models"))[1]
        assert "red-sql" not in (await ask("blue", "/v1/models"))[1]
        assert (await ask("blue", "/v1/models/red-sql"))[0] == 403
        assert (await ask("blue", "/v1/unload_lora_adapter", lora_name="red-sql"))[0] == 403
        _, out, _ = await quire_adapters(found.suite)
        assert "red-sql, of tenant red" in out.splitlines()
        assert f"at most {most >> 10}" in out.splitlines()[-1]
        assert (await ask("red", "/v1/unload_lora_adapter", lora_name="red-sql"))[0] == 200


@pytest.mark.rest
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
async def test_ranks_as_processes_load_use_and_forget_an_adapter(tmp_path: Path) -> None:
    shutil.copytree(adapter(KIND, 0), tmp_path / "adapters" / "zero")
    of_adapters = ("--lora-dir", str(tmp_path / "adapters"), "--lora", f"own={adapter(KIND, 6)}")
    flags = ("--kv-blocks", "256", "--dtype", "float32", "-tp", "2", "--threads", "1", *of_adapters)
    options = StackOptions(model=checkpoint(KIND), workers=1, worker_flags=flags)
    async with running_suite(tmp_path, options) as found:
        assert (await load(found, "zero-again", "zero")).status_code == 200
        answers = await asyncio.gather(*(complete(found, name) for name in (None, "own", "zero-again")))
        wanted = [tokens_of(KIND, variant, PROMPT, COUNT) for variant in (None, 6, 0)]
        assert [tokens(each) for each in answers] == wanted
        assert (await unload(found, "zero-again")).status_code == 200
        assert tokens(await complete(found, "own")) == wanted[1]
        shutil.rmtree(tmp_path / "adapters" / "zero")
        answer = await load(found, "zero-again", "zero")
        assert (answer.status_code, "has no adapter_config.json" in answer.text) == (400, True), answer.text
