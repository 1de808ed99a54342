"""What the processes of a running suite expose, as a scraper reads it: samples, their labels, by job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from cli.suite.programs import metrics_addresses
from tests.support.suite import Suite

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain; version=0.0.4; q=0.5"}


@dataclass
class Exposed:
    """Samples of one job: label names of each, the bounds of its histograms, the values of labels."""

    labels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    values: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    undocumented: list[str] = field(default_factory=list)


def targets(suite: Suite) -> dict[str, list[str]]:
    """Return HOST:PORT of every process that exposes metrics, by job."""
    options = suite.stack.options
    return {
        "router": metrics_addresses(options),
        "kvmanager": [f"{options.host}:{options.manager_port + 1000}"],
        "gpuworker": [f"{options.host}:{port + 1000}" for port in options.worker_ports],
    }


async def scrape(suite: Suite, headers: Mapping[str, str]) -> dict[str, Exposed]:
    """Scrape every process once."""
    found: dict[str, Exposed] = {}
    async with httpx.AsyncClient(timeout=120.0) as http:
        for job, addresses in targets(suite).items():
            found[job] = Exposed()
            for address in addresses:
                answer = await http.get(f"http://{address}/metrics", headers=dict(headers))
                _read(answer, found[job])
    return found


def _read(answer: httpx.Response, into: Exposed) -> None:
    parse = parse_openmetrics if "openmetrics" in answer.headers["content-type"] else parse_text
    for family in parse(answer.text):
        if not family.documentation:
            into.undocumented.append(family.name)
        for sample in family.samples:
            into.labels[sample.name] |= set(sample.labels)
            for label, value in sample.labels.items():
                into.values[sample.name, label].add(value)
