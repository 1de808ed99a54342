"""The order of a comparison, and a whole one: our suite and a peer's driver, which samples what the workload says."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.lib.checkpoints import SMALL
from bench.peers import Item, Mode, items_of, turns
from common.contracts.errors import FieldViolation, InvalidConfig, Unavailable

DRIVER = """
    import json, sys
    from bench.lib.workloads import make
    outputs = sys.argv[sys.argv.index("--outputs") + 1]
    print("READY", flush=True)
    for index, line in enumerate(sys.stdin):
        name, scale = line.split()
        figures = {f"{kind}_p{q}_ms": 1.0 for kind in ("ttft", "itl") for q in (50, 99)}
        said = {"workload": name, "scale": float(scale), "output_tok_s": 0.5, "peak_rss_mib": 12, **figures}
        print(json.dumps(said), flush=True)
        if index == 0:
            with open(outputs, "w") as file:
                json.dump({each.rid: {"ids": [-1] * each.max_new_tokens} for each in make(name, 0, 1).initial}, file)
"""


class Named:
    """Implements `peers.Engine` as far as the order goes."""

    def __init__(self, name: str) -> None:
        self.name, self.start_seconds = name, 0.0

    async def run(self, workload: str, scale: float) -> dict[str, Any]:
        return {}

    def first_outputs(self) -> dict[str, list[int]]:
        return {}


def order(repeat: int, once: tuple[str, ...] = ()) -> list[str]:
    engines, items = [Named(name) for name in "abc"], [Item("W1", 1.0), Item("W4", 1.0)]
    return [f"{rep}{item.workload}{engine.name}" for rep, item, engine in turns(engines, items, repeat, once)]


def test_engines_stand_side_by_side_and_each_begins_in_its_turn() -> None:
    assert order(1) == ["0W1a", "0W1b", "0W1c", "0W4b", "0W4c", "0W4a"]
    assert [each for each in order(2) if each.startswith("1W1")] == ["1W1b", "1W1c", "1W1a"]


def test_slow_ones_can_be_let_off_after_the_first_repetition() -> None:
    assert sum("a" in each for each in order(3, once=("a",))) == 2
    assert sum("b" in each for each in order(3, once=("a",))) == 6


def test_a_plan_names_workloads_and_shares_of_them() -> None:
    assert (Item.of("W1:0.5"), Item.of("W4")) == (Item("W1", 0.5), Item("W4", 1.0))
    assert str(Item.of("W2:0.25")) == "W2:0.25"


def test_with_a_cache_only_what_shares_prefixes_is_run() -> None:
    plan = [Item(name, 1.0) for name in ("W1", "W2", "W3", "W4")]
    assert [item.workload for item in items_of(plan, Mode("float32", prefix_caching=True))] == ["W2", "W3"]
    assert items_of(plan, Mode("float32", prefix_caching=False)) == plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A peers folder with our small model, made by transformers, and a driver that computes nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        **SMALL,
        "vocab_size": 32000,
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
    }
    shape = {key: value for key, value in shape.items() if key not in ("architectures", "model_type")}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / "model")
    (tmp_path / "hf/bin").mkdir(parents=True)
    (tmp_path / "hf/bin/python").symlink_to(sys.executable)
    (tmp_path / "bench_naive.py").write_text(textwrap.dedent(DRIVER))
    return tmp_path


def test_a_whole_comparison_runs_through(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "lines.jsonl"
    flags = ["--peers", str(folder), "--engines", "naive", "--dtype", "float32", "--caching", "off", "--plan", "W4:1"]
    flags += ["--agree", "W1:0.01", "--repeat", "2", "--threads", "1", "--out", str(out), "--json"]
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{Path.cwd() / 'protos'}")
    monkeypatch.setattr("sys.argv", ["bench.peers", *flags])
    peers.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["engine"], line["rep"]) for line in lines] == [("ours", 0), ("naive", 0), ("naive", 1), ("ours", 1)]
    ours = lines[0]
    assert (ours["workload"], ours["output_tokens"], ours["prompt_tokens"]) == ("W4", 256, 128)
    assert (ours["agreement"], lines[1]["agreement"], ours["agreed_on"]) == (1.0, 0.0, "W1:0.01")
    assert ours["rss_mib"].keys() == {"redis", "kvmanager", "worker-0", "router"}
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["tok_s_W4_fp32_naive"] == 0.5
    assert figures["ratio_W4_fp32"] == pytest.approx(figures["tok_s_W4_fp32_ours"] / 0.5, rel=1e-4)


async def test_a_peer_that_fails_is_left_out_and_the_rest_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Named):
        async def run(self, workload: str, scale: float) -> dict[str, Any]:
            if workload == "W1":
                raise Unavailable("out of memory")
            return {}

    engines: list[peers.Engine] = [Named("ours"), Failing("vllm")]

    @asynccontextmanager
    async def made(*_: object) -> AsyncIterator[list[peers.Engine]]:
        yield engines

    monkeypatch.setattr(peers, "loaded", made)
    plan = [Item("W4", 1.0), Item("W1", 1.0), Item("W3", 1.0)]
    args = argparse.Namespace(plan=plan, agree=Item("W3", 1.0), repeat=1, once=[])
    lines: list[dict[str, Any]] = []
    await peers.compare(args, Mode("float32", prefix_caching=False), lines.append)
    assert [line["engine"] for line in lines] == ["ours", "vllm", "ours", "ours"]
    assert capsys.readouterr().err == "vllm is left out from here on: out of memory\n"


def test_a_model_that_cannot_be_made_is_refused_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(_: str) -> Path:
        raise InvalidConfig(FieldViolation("--model", "smollm2 is not installed; run `make smollm2`"))

    monkeypatch.setattr("bench.comparison.peer_models.gguf_file", not_installed)
    with pytest.raises(SystemExit):
        peers.read_arguments(["--peers", str(folder), "--engines", "naive", "--model", "smollm2"])
    assert "--model smollm2 cannot be made" in (said := capsys.readouterr().err)
    assert "run `make smollm2`" in said


def test_a_folder_that_lacks_a_peer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.peers", "--peers", str(tmp_path), "--engines", "vllm"])
    with pytest.raises(SystemExit):
        peers.main()
    assert "bench_vllm.py" in capsys.readouterr().err
