"""Checkpoints that strangers made to end a process: router and worker end in one sentence, within 1 GB of memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from cli.demo_model import CHECKPOINT

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_S: Final = 120.0
CAP: Final = 1 << 30
PORTS: Final = {
    "router": ("--port", "0", "--grpc-port", "0", "--admin-port", "0", "--block-size", "4"),
    "gpuworker": ("--port", "0", "--metrics-port", "0", "--manager", "127.0.0.1:1", "--device", "cpu"),
}
# Data, with the stacks of threads. On Linux that counts what is written, not what is mapped.
PROGRAM: Final = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, ({cap}, {cap}));"
    "from {service}.main import main; sys.exit(main(sys.argv[1:]))"
)
Change = Callable[[Path], None]


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Return what changes an object in a JSON file."""

    def make(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return make


def replaced(name: str, content: str) -> Change:
    def make(folder: Path) -> None:
        (folder / name).write_text(content)

    return make


def header(folder: Path) -> None:
    """Let a tensor begin in the header of its file."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    first, last = entries["model.norm.weight"]["data_offsets"]
    entries["model.norm.weight"]["data_offsets"] = [-8, last - first - 8]
    raw = json.dumps(entries).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + whole[8 + length :])


GROWING: Final = {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 60_000}
BIG: Final = {"id": 10**9, "content": "<big>", "special": True}
BIG_TOKEN: Final = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | BIG
BOTH: Final = ("router", "gpuworker")
ATTACKS: Final[dict[str, tuple[Change, tuple[str, ...], str]]] = {
    "offsets": (header, ("gpuworker",), "tensor 'model.norm.weight' has data_offsets [-8, "),
    "nested config": (
        replaced("config.json", '{"a":' * 100_000 + "1" + "}" * 100_000),
        BOTH,
        "config.json is not valid JSON: it is nested too deeply",
    ),
    "wide config": (
        replaced("config.json", '{"a":[' + "[]," * 20_000_000 + "1]}"),
        BOTH,
        "config.json is not valid JSON: it has 20000002 lists and objects",
    ),
    "head_dim": (changed("config.json", lambda config: config.update(head_dim=-64)), BOTH, "head_dim is -64; expected"),
    "vocab_size": (
        changed("config.json", lambda config: config.update(vocab_size=10**18)),
        BOTH,
        "vocab_size is 1000000000000000000; expected a whole number from 1 to 16777216",
    ),
    "temperature": (replaced("generation_config.json", '{"temperature": "hot"}'), ("router",), "temperature is 'hot'"),
    "template": (
        replaced("chat_template.jinja", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
        ("router",),
        "the checkpoint's chat template cannot be compiled",
    ),
    "token id": (
        changed("tokenizer.json", lambda whole: whole["added_tokens"].append(BIG_TOKEN)),
        ("router",),
        "one of them has the id 1000000000; expected ids below",
    ),
    "normalizer": (
        changed("tokenizer.json", lambda whole: whole.update(normalizer=GROWING)),
        ("router",),
        "normalizer replaces an empty text; expected a pattern of one character or more",
    ),
}


@pytest.mark.parametrize(
    ("attack", "service"), [(attack, service) for attack, (_, services, _) in ATTACKS.items() for service in services]
)
def test_a_hostile_checkpoint_ends_the_start_in_words(attack: str, service: str, tmp_path: Path) -> None:
    change, _, words = ATTACKS[attack]
    folder = tmp_path / "model"
    shutil.copytree(CHECKPOINT, folder)
    change(folder)
    program = PROGRAM.format(cap=CAP, service=service)
    done = subprocess.run(
        [sys.executable, "-c", program, "--model", str(folder), *PORTS[service]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"quire-{service} cannot start:" in done.stderr
    assert words in done.stderr
