"""Checkpoints that a comparison makes in the folder of the peers: what they hold, and what is said where they fail."""

from __future__ import annotations

import json
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.comparison import peer_models
from bench.comparison.peer_models import MIXTURES, export, prepare
from bench.comparison.peer_process import TEXT, PeerOptions
from bench.peers import tokens_for
from common.contracts.errors import Unavailable
from gpuworker.models.llama.spec import llama_spec
from tests.support.gguf_files import write_model

TINY = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
TOOL = """
    #!/bin/sh
    for target; do :; done
    mkdir "$target" && echo "$@" > "$target/openvino_model.xml"
"""


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of peers, for mixtures that are tiny."""
    tiny: dict[str, Any] = {name: {**shape, **TINY, "vocab_size": 96} for name, shape in MIXTURES.items()}
    monkeypatch.setattr(peer_models, "MIXTURES", tiny)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text("{}")
    return tmp_path


def with_tool(peers: Path, text: str) -> None:
    tool = peers / "ovexport/bin/optimum-cli"
    tool.parent.mkdir(parents=True)
    tool.write_text(textwrap.dedent(text).strip())
    tool.chmod(0o755)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_made_once_and_read_by_the_native_path(name: str, peers: Path) -> None:
    prepare(peers, name, exported=False)
    made = AutoModelForCausalLM.from_pretrained(peers / name)
    spec = llama_spec(made.config)
    assert spec is not None
    assert spec.experts is not None
    assert made.dtype == torch.bfloat16
    assert (peers / name / "tokenizer.json").read_text() == "{}"
    (peers / name / "config.json").write_text('{"kept": true}')
    prepare(peers, name, exported=False)
    assert (peers / name / "config.json").read_text() == '{"kept": true}'


def test_the_real_model_has_what_its_integers_stand_for_and_a_text(
    peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_model(tmp_path / "tiny.gguf", kind="Q8_0")
    monkeypatch.setattr(peer_models, "gguf_file", lambda _: file)
    monkeypatch.setattr(peer_models, "real_text", lambda size: ("It was a real text. " * 9)[:size])
    prepare(peers, "smollm2", exported=False)
    folder = peers / "smollm2"
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    ids = json.loads((folder / TEXT).read_text())
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids).startswith("It was a real text.")
    arguments = PeerOptions(peers, peers, "smollm2").arguments
    assert arguments[:2] == ("--text", str(folder / TEXT))
    assert "--text" not in PeerOptions(peers, peers, "model").arguments
    passage = tokens_for(folder)(random.Random(0), 5)
    assert any(ids[begin : begin + 5] == passage for begin in range(len(ids)))


def test_other_folders_are_left_to_their_owner(peers: Path) -> None:
    prepare(peers, "model", exported=True)
    assert [path.name for path in peers.iterdir()] == ["model"]


def test_openvinos_tool_writes_beside_the_checkpoint(peers: Path) -> None:
    with_tool(peers, TOOL)
    prepare(peers, "mixtral", exported=True)
    words = (peers / "mixtral-ov/openvino_model.xml").read_text()
    assert words.startswith("export openvino --model mixtral --task text-generation-with-past --weight-format fp32")


def test_an_export_that_fails_leaves_nothing_and_says_why(peers: Path) -> None:
    with pytest.raises(Unavailable, match="OpenVINO needs an export of model"):
        export(peers, "model")
    with_tool(peers, TOOL + "    echo no such kind >&2; exit 1")
    with pytest.raises(Unavailable, match="no such kind"):
        export(peers, "model")
    assert sorted(path.name for path in peers.iterdir()) == ["model", "ovexport"]
