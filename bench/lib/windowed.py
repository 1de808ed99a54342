"""The demo model with windows: a folder in which some layers of its configuration slide, for simulated workers."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.demo_model import CHECKPOINT


@contextmanager
def demo_with_windows(window: int) -> Iterator[Path]:
    """Yield the demo checkpoint without weights, of which every other layer has a window; with 0 the checkpoint."""
    if not window:
        yield CHECKPOINT
        return
    with tempfile.TemporaryDirectory(prefix="quire-windows-") as name:
        folder = Path(name) / "demo"
        shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        layers = config["num_hidden_layers"]
        config["layer_types"] = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
        config |= {"sliding_window": window, "use_sliding_window": True}
        (folder / "config.json").write_text(json.dumps(config))
        yield folder
