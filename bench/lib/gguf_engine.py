"""Our engine on a GGUF file, as a process that answers lines of JSON (bench/gguf.py)."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from bench.lib.models import data_plane, plane_worker
from cli.benchmark.requests import Request, Workload
from common.checkpoint.gguf.names import served_folder
from gpuworker.attention.backends import make_backend
from gpuworker.attention.step_inputs import attention_arrays, attention_metadata, pack_rows, to_device
from gpuworker.checkpoints.weights import Checkpoint
from gpuworker.memory.devices import DTYPES
from gpuworker.memory.kv_cache import KvCache
from gpuworker.plane.assembly import ModelPlane

_WINDOW, _WINDOWS, _BLOCK = 512, 8, 16
_ROOT: Final = Path(__file__).parents[2]
_TEXTS: Final = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/glossary.md", "docs/usage.md")
# What a folder of the widened weights takes from the folder of the file.
_KEPT_FILES: Final = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def widened(folder: Path, target: Path, dtype: torch.dtype) -> Path:
    """Write the weights of a GGUF file's folder as floats, in Hugging Face format."""
    checkpoint = Checkpoint(folder)
    save_file(
        {name: checkpoint.tensor(name, dtype).to(dtype).contiguous() for name in checkpoint},
        target / "model.safetensors",
    )
    for name in _KEPT_FILES:
        (target / name).write_text((folder / name).read_text())
    return target


@torch.inference_mode()
def perplexity(plane: ModelPlane, folder: Path) -> float:
    """Return the perplexity of the repository's documents, in windows that know nothing of each other."""
    text = "\n".join((_ROOT / name).read_text() for name in _TEXTS)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    windows = torch.tensor(ids[: _WINDOW * _WINDOWS]).view(-1, _WINDOW)
    cache = KvCache(plane.identity.kv_geometry, _WINDOW // _BLOCK, _BLOCK, torch.device("cpu"))
    attention = make_backend("auto", cache)
    table = np.arange(_WINDOW // _BLOCK, dtype=np.int32)[None]
    packed = pack_rows(np.zeros(1, np.int32), np.array([_WINDOW], np.int32), table, _BLOCK)
    positions, *tables = to_device([packed.positions, *attention_arrays(packed)], torch.device("cpu"))
    lost = 0.0
    for window in windows:
        attention.begin(attention_metadata(packed, tables))
        logits = plane.model.forward(window, positions.long(), torch.arange(_WINDOW - 1), attention)
        lost += float(torch.nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum"))
    return math.exp(lost / (len(windows) * (_WINDOW - 1)))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model", type=Path, required=True)
    flags.add_argument("--threads", type=int, required=True)
    flags.add_argument("--dtype", required=True)
    flags.add_argument("--weights", choices=["kept", "widened"], required=True)
    args = flags.parse_args()
    folder = served_folder(args.model)
    with tempfile.TemporaryDirectory(prefix="quire-bench-gguf-") as scratch:
        source = folder if args.weights == "kept" else widened(folder, Path(scratch), DTYPES[args.dtype])
        options: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads, "max_model_len": 1024}
        serve(data_plane(str(source), **options, kv_memory="256MiB", max_num_seqs=16), source)


def serve(plane: ModelPlane, folder: Path) -> None:
    """Answer each line of standard input."""
    with plane_worker(plane, _BLOCK) as worker:
        print(json.dumps({"weights": plane.memory.weights}), flush=True)
        for turn, line in enumerate(sys.stdin):
            request = json.loads(line)
            if "prompts" in request:
                asked = [Request(str(n), prompt, request["count"]) for n, prompt in enumerate(request["prompts"])]
                run = worker.drive(Workload("batch", asked), salt=str(turn))
                answer: dict[str, Any] = {"seconds": run.seconds, "outputs": list(run.outputs.values())}
            elif "perplexity" in request:
                answer = {"perplexity": perplexity(plane, folder)}
            else:
                answer = {"mib": psutil.Process().memory_info().rss / 2**20}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
