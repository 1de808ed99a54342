"""The soak benchmark: a few seconds of it, with a worker that is killed meanwhile."""

from __future__ import annotations

from tests.support.bench_process import run_benchmark


def test_seconds_of_mixed_load_are_counted_and_memory_is_followed() -> None:
    words = ["--minutes", "0.08", "--warm-minutes", "0", "--restart", "worker-1", "--restart-s", "2"]
    figures, lines = run_benchmark("soak", *words, "--clients", "6", "--simulate", "base=1ms")
    kinds = {line.split()[0] for line in lines if line.startswith("  ") and ": " in line}
    assert {"good", "cancelled", "bad", "broken", "over_http"} <= kinds
    assert figures["restarts"] >= 1
    assert figures["failed"] == 0, "streams survive the death of a worker"
    for name in ("router", "kvmanager", "worker-0", "worker-1", "redis"):
        assert figures[f"rss_mib_{name}"] > 1
