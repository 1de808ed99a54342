"""A model double at the worker: a real router, over a worker that says what a test wrote down, in Hermes' dialect.

It serves where a model must choose well: a call of its own accord, and an answer to the call's result. What constrains
the output is not followed there; tests on the demo model do that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cli.demo_model import CHECKPOINT
from tests.suites.clients.threads import in_a_thread
from tests.support.router.router_process import router_under_attack
from tests.support.router.scripted_worker import FACTS, ScriptedWorker
from tests.support.suite import PATIENCE

# The router names the model after the folder of its checkpoint.
MODEL = "checkpoint"


@dataclass(frozen=True)
class Double:
    """The URL of the router (without /v1), and the worker behind it."""

    http_url: str
    worker: ScriptedWorker
    model: str = MODEL

    def play(self, *texts: str, asides: Mapping[str, str] | None = None) -> None:
        """Let the model say these texts, one a request; forget the prompts so far.

        A prompt with words of `asides` gets the text there, and is counted nowhere.
        """
        self.worker.prompts.clear()
        self.worker.script.clear()
        self.worker.script.extend(texts)
        self.worker.asides = dict(asides or {})

    def prompts(self) -> list[str]:
        """Return the prompts since `play`; fail unless every text was asked for, and none beyond them."""
        assert not self.worker.script, f"nothing asked for {[*self.worker.script]}"
        return [*self.worker.prompts]


def call(name: str, /, **arguments: Any) -> str:
    """Return a call of a tool as a model of Hermes' dialect writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def served_double(max_model_len: int = FACTS.max_model_len) -> Iterator[Double]:
    """Run the router and the worker until the context ends."""
    with in_a_thread(lambda: _double(max_model_len), 2 * PATIENCE) as double:
        yield double


@asynccontextmanager
async def _double(max_model_len: int) -> AsyncIterator[Double]:
    worker = ScriptedWorker(max_model_len=max_model_len, num_blocks=max(4096, max_model_len))
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / MODEL
        shutil.copytree(CHECKPOINT, checkpoint)
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_model_len}))
        async with router_under_attack(worker, "--tool-call-parser", "hermes", checkpoint=checkpoint) as router:
            yield Double(f"http://127.0.0.1:{router.http_port}", worker)
