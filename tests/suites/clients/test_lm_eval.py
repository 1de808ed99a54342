"""lm-eval's local-completions as released, on a task of our own: the log-likelihoods are those of transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.demo_model import CHECKPOINT
from tests.suites.clients.served import ROOT, Served, missing
from tests.support.reference import next_logprobs, tokenizer

PYTHON = ROOT / ".clients" / "lm-eval" / "bin" / "python"
DATA, SCRIPT = (Path(__file__).with_name(name) for name in ("lm_eval_towns.jsonl", "lm_eval_calls.py"))
LIMIT_S = 600.0
TOLERANCE = 1e-4


@pytest.fixture(scope="session", autouse=True)
def clients() -> None:
    """Check for the client before a suite is started for it."""
    if not PYTHON.exists():
        missing(".clients/lm-eval", "make test-clients")


def evaluated(served: Served, cache: Path) -> list[tuple[str, Any, Any]]:
    """Return for each sample the name of its task, its requests and their results."""
    given = {"url": f"{served.http_url}/v1/completions", "model": served.model, "tokenizer": str(CHECKPOINT)}
    given |= {"data": str(DATA), "cache": str(cache)}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(PYTHON), "-I", str(SCRIPT)], input=json.dumps(given), capture_output=True, text=True,
        timeout=LIMIT_S, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [(name, requests, results) for name, requests, results in json.loads(done.stdout.splitlines()[-1])]


def ids_of(text: str) -> list[int]:
    return [int(token) for token in tokenizer().encode(text, add_special_tokens=False)]


def likelihood(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of a continuation, and whether each of its tokens is the likeliest."""
    rows = next_logprobs([*context, *continuation])[len(context) - 1 :]
    values = [float(row[token]) for row, token in zip(rows, continuation, strict=True)]
    return sum(values), all(int(row.argmax()) == token for row, token in zip(rows, continuation, strict=True))


def test_local_completions_gives_the_log_likelihoods_of_transformers(served: Served, tmp_path: Path) -> None:
    samples = evaluated(served, tmp_path)
    questions = DATA.read_text(encoding="utf-8").splitlines()
    choices = [(requests, results) for name, requests, results in samples if name == "quire_choices"]
    assert len(choices) == len(questions)
    for requests, results in choices:
        assert len(requests) == len(results) == 3
        for (context, continuation), ((found, greedy),) in zip(requests, results, strict=True):
            before = ids_of(context)
            wanted, is_greedy = likelihood(before, ids_of(context + continuation)[len(before) :])
            assert found == pytest.approx(wanted, abs=TOLERANCE)
            assert greedy == is_greedy
    wholes = [(requests, results) for name, requests, results in samples if name == "quire_whole"]
    assert len(wholes) == len(questions)
    for ((text,),), ((found,),) in wholes:
        assert found == pytest.approx(likelihood([tokenizer().bos_token_id], ids_of(text))[0], abs=TOLERANCE)
    served.until_all_free()
