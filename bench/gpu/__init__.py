"""Shared parts of the GPU benchmarks. They also run without Quire installed, beside torch, triton and transformers."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("quire") is None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "protos"))
