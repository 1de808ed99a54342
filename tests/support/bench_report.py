"""A made-up report of `quire bench`, with a part of every kind."""

from __future__ import annotations

from typing import Final

from cli.benchmark.advice import Alternative, Comparison, Setting, advise
from cli.benchmark.limits import Limit
from cli.benchmark.plan import LeftOut, Run
from cli.benchmark.report import Figure, Report

_BEFORE: Final = (100.0, 100.0, 100.0)
_SETTING: Final = Setting("cpu", True, "none", threads=1, cores=2, kv_dtype="float32", block_size=16)
_COMPARISONS: Final = (
    Comparison(Alternative("quantization", "int8"), _BEFORE, (150.0, 140.0, 160.0)),
    Comparison(Alternative("threads", "2"), _BEFORE, (101.0, 98.0, 100.0)),
)
REPORT: Final = Report(
    machine={"processor": "a processor", "cores": 2},
    served={
        "model": "SmolLM2",
        "path": "the native CPU path",
        "dtype": "float32",
        "weight_bytes": 513 << 20,
        "kv_slots": 65536,
        "max_model_len": 8192,
        "start_s": 7.9,
        "worker_rss_mib": 812.0,
    },
    setting=_SETTING,
    figures=(
        Figure(Run("streams", 8, 32, 64, 3, 9.0), (290.0, 280.0, 300.0)),
        Figure(Run("ttft", 1, 2048, 1, 1, 9.0), (1.3,)),
        Figure(Run("streams", 1, 32, 64, 3, 9.0), (40.0, 39.0, 41.0)),
        Figure(Run("ttft", 1, 512, 1, 3, 9.0), (0.25, 0.26, 0.25)),
    ),
    limits=(
        Limit("memory bandwidth", True, 0.82, "one stream reads 20.5 of 25.0 GB/s: 0.51 GB a token"),
        Limit("cores", False, 0.6, "1.2 of 2 busy with 8 streams"),
        Limit("KV blocks", False, 1.0, "the pool holds 65,536 tokens: 32 sequences of 2,048; up to 64 run"),
    ),
    comparisons=_COMPARISONS,
    advice=tuple(advise(_SETTING, _COMPARISONS, blocks_bind=False)),
    left_out=(LeftOut("32 streams", "takes up to 60 s, and 20 s are left"),),
    seconds=120.4,
)
