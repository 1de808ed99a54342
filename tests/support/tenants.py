"""A running suite with tenants: simulated workers, keys, and clients that show them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cli.demo_model import CHECKPOINT
from cli.suite.stack import StackOptions
from quire.inference.v1 import inference_pb2 as pb
from router.tenants.keys import hash_of, new_key
from tests.support.suite import PATIENCE, Outcome, Suite, greedy, running_suite

# Token ids that are neither special nor text of the chat template.
_IDS = range(100, 400)
SIMULATED = ("--kv-blocks", "1024", "--simulate", "base=4ms,prefill=10us")


@dataclass
class TenantSuite:
    """A suite, and the key of each tenant. `file` is the file of tenants, which the router follows."""

    suite: Suite
    keys: Mapping[str, str]
    file: Path

    def metadata(self, tenant: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys[tenant]}"),)

    async def ask(self, tenant: str, request: pb.GenerateRequest) -> Outcome:
        """Stream one request of a tenant to its end."""
        outcome = Outcome()
        calls = self.suite.inference.Generate(request, timeout=PATIENCE, metadata=self.metadata(tenant))
        async for event in calls:
            match event.WhichOneof("event"):
                case "admitted":
                    outcome.admitted = event.admitted
                case "tokens":
                    outcome.tokens.extend(event.tokens.token_ids)
                case "finished":
                    outcome.finished = event.finished
        return outcome

    async def probe(self, tenant: str, prompt: list[int], shared_domain: str = "") -> pb.Admitted:
        """Return what a prompt discloses of the cache to its tenant."""
        request = greedy(prompt, 1)
        request.cache.shared_domain = shared_domain
        admitted = (await self.ask(tenant, request)).admitted
        assert admitted is not None
        return admitted


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(_IDS, k=tokens) for _ in range(count)]


def write_tenants(path: Path, keys: Mapping[str, str], options: Mapping[str, str], end: str = "") -> None:
    """Write a file of tenants; `options` are lines of TOML by tenant, `end` stands after all of them."""
    tables = [f'[tenants.{name}]\nkeys = ["{hash_of(key)}"]\n{options.get(name, "")}\n' for name, key in keys.items()]
    path.write_text("".join(tables) + end)


@asynccontextmanager
async def tenant_suite(
    folder: Path, options: Mapping[str, str], stack: StackOptions | None = None, end: str = ""
) -> AsyncIterator[TenantSuite]:
    """Run a suite with a tenant for each entry of `options`."""
    keys, file = {name: new_key() for name in options}, folder / "tenants.toml"
    write_tenants(file, keys, options, end)
    stack = stack or StackOptions(model=CHECKPOINT, worker_flags=SIMULATED)
    async with running_suite(folder, replace(stack, tenants=file)) as suite:
        yield TenantSuite(suite, keys, file)
