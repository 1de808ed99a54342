"""The demo model with layers of other kinds, for simulated workers: a folder with another configuration, no weights."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cli.demo_model import CHECKPOINT

_FULL, _WINDOW, _STATE = "full_attention", "sliding_attention", "linear_attention"
# What the layers of the demo model become, each kind in turn.
LAYERS: Final[Mapping[str, Sequence[str]]] = {
    "full": (_FULL,),
    "window": (_WINDOW, _FULL),
    "state": (_STATE, _FULL),
    "mixed": (_STATE, _FULL, _WINDOW, _STATE),
}
_SPAN: Final = 64
# States of 18 KiB a layer, in bfloat16: three pages of 16 slots where two layers attend, five where they are groups.
_SIZES: Final = {
    "sliding_window": _SPAN,
    "use_sliding_window": True,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def add_tier_flags(flags: argparse.ArgumentParser) -> None:
    what = (
        "memory that keeps blocks which leave a worker's pool, such as 64MiB; a simulated worker checks what it reads"
    )
    flags.add_argument("--host-memory", help=what)
    what = "size of a disk cache of each worker, such as 64MiB, which one that was killed finds again"
    flags.add_argument("--disk-cache", metavar="SIZE", help=what)


@contextmanager
def tier_options(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the options of a suite whose workers have these tiers; their disk is a temporary folder."""
    options: dict[str, object] = {"host_memory": args.host_memory}
    if args.disk_cache is None:
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="quire-disk-") as folder:
        yield options | {"disk_cache": folder, "disk_cache_size": args.disk_cache}


def add_layers_flag(flags: argparse.ArgumentParser) -> None:
    what = (
        f"the simulated model's layers: full, all of them see everything; window, every other one sees {_SPAN} tokens; "
        "state, every other one keeps a state, of which there are checkpoints; mixed, all of these. With states, a "
        "worker checks what it reads"
    )
    flags.add_argument("--layers", choices=LAYERS, default="full", help=what)


@contextmanager
def demo_with_layers(layers: str) -> Iterator[Path]:
    """Yield the demo checkpoint, or one without weights whose layers are of these kinds."""
    if layers == "full":
        yield CHECKPOINT
        return
    with tempfile.TemporaryDirectory(prefix="quire-layers-") as name:
        folder = Path(name) / "demo"
        shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        kinds = LAYERS[layers]
        config["layer_types"] = [kinds[layer % len(kinds)] for layer in range(config["num_hidden_layers"])]
        (folder / "config.json").write_text(json.dumps(config | _SIZES))
        yield folder
