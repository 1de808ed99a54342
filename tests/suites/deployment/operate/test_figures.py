"""Every figure that rules and dashboard name is one that a running suite exposes, with those labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set

import pytest
import pytest_asyncio

from tests.suites.deployment.operate.exposition import OPENMETRICS, Exposed, scrape
from tests.suites.deployment.operate.files import Expression, expressions, rules
from tests.suites.deployment.operate.promql import TARGET_LABELS, Selector, groupings, result_labels, selectors
from tests.support.suite import Suite

pytestmark = pytest.mark.asyncio(loop_scope="session")

# What Prometheus makes itself.
BUILT_IN: Mapping[str, Set[str]] = {"up": frozenset(), "ALERTS": frozenset({"alertname", "alertstate", "severity"})}
# Of pools with groups of layers, which this suite has not; tests/kvmanager/test_operator_calls.py has its labels.
OF_GROUPS: Mapping[str, Set[str]] = {"quire:kv_group_blocks": frozenset({"worker", "layers", "state"})}
JOBS = ("router", "kvmanager", "gpuworker")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def exposed(suite: Suite) -> dict[str, Exposed]:
    return await scrape(suite, OPENMETRICS)


def recorded(exposed: Mapping[str, Exposed]) -> dict[str, Set[str]]:
    """Return the labels of each recorded figure."""
    known = _merged(exposed)
    return {rule["record"]: result_labels(rule["expr"], known) for rule in rules("record")}


def _merged(exposed: Mapping[str, Exposed]) -> dict[str, Set[str]]:
    merged: dict[str, Set[str]] = {}
    for job in exposed.values():
        for name, labels in job.labels.items():
            merged[name] = merged.get(name, frozenset()) | labels
    return merged


def jobs_of(selector: Selector) -> list[str]:
    """Return the jobs that a selector's matchers let pass."""
    return [job for job in JOBS if selector.allows("job", job)]


def of_each(look: Callable[[Expression], Iterator[str]]) -> dict[str, list[str]]:
    """Return what a look finds wrong, by where the expression stands; one that has nothing wrong is left out."""
    return {each.where: found for each in expressions() if (found := list(look(each)))}


async def test_what_is_asked_for_exists(exposed: dict[str, Exposed]) -> None:
    ours = {**BUILT_IN, **OF_GROUPS, **recorded(exposed)}

    def wrong(expression: Expression) -> Iterator[str]:
        for selector in selectors(expression.text):
            named = {name for name, _, _ in selector.matchers}
            if selector.name in ours:
                yield from (
                    f"{selector.name} has no label {name}" for name in named - ours[selector.name] - TARGET_LABELS
                )
            elif "job" not in named:
                yield f"{selector.name}: several jobs have such figures"
            else:
                yield from _wrong_of_jobs(selector, exposed)

    assert of_each(wrong) == {}


def _wrong_of_jobs(selector: Selector, exposed: Mapping[str, Exposed]) -> Iterator[str]:
    jobs = jobs_of(selector)
    if not jobs:
        yield f"no job passes {selector}"
    for name in jobs:
        labels = exposed[name].labels.get(selector.name)
        if labels is None:
            yield f"{name} exposes no {selector.name}"
            continue
        for label, operator, value in selector.matchers:
            if label == "job":
                continue
            if label not in labels:
                yield f"{selector.name} of {name} has no label {label}"
            elif operator == "MatchOp.Equal" and value not in exposed[name].values[selector.name, label]:
                yield f"{selector.name} of {name} never has {label}={value}"


async def test_labels_that_are_grouped_by_or_shown_exist(exposed: dict[str, Exposed]) -> None:
    known = {**_merged(exposed), **BUILT_IN, **OF_GROUPS, **recorded(exposed)}

    def wrong(expression: Expression) -> Iterator[str]:
        for labels, inside in groupings(expression.text):
            for selector in inside:
                missing = labels - known[selector.name] - TARGET_LABELS
                yield from (f"{selector.name} has no label {label}" for label in sorted(missing))
        unshown = expression.labels_named - result_labels(expression.text, known)
        yield from (f"its result has no label {label}" for label in sorted(unshown))

    assert of_each(wrong) == {}


async def test_every_figure_is_explained(exposed: dict[str, Exposed]) -> None:
    assert {job: each.undocumented for job, each in exposed.items()} == {job: [] for job in JOBS}


async def test_names_and_labels_are_the_same_in_both_formats(suite: Suite, exposed: dict[str, Exposed]) -> None:
    text = await scrape(suite, {})
    for job in JOBS:
        ours = {name: labels for name, labels in exposed[job].labels.items() if name.startswith("quire:")}
        assert ours == {name: labels for name, labels in text[job].labels.items() if name.startswith("quire:")}
        assert len(ours) > 10


async def test_every_figure_of_ours_is_looked_at(exposed: dict[str, Exposed]) -> None:
    """What no panel, rule or alert shows is not worth counting; those that are only read by people are named here."""
    asked = {selector.name for each in expressions() for selector in selectors(each.text)}
    families = {_family(name) for name in _merged(exposed) if name.startswith("quire:")}
    unread = {
        "quire:num_blocks",  # the pool's size, which blocks by use add up to
        "quire:decode_step_seconds",  # what the router's choice goes by; the dashboard has the histogram
        "quire:prefill_seconds_per_token",
        "quire:ignored_seals",  # a manager that waits for a parent: only for the search of a defect
        "quire:workers",
        "quire:kept_requests",  # by rule: read when a bad request has no trace
        "quire:kept_requests_left_out",
        "quire:prefix_cache_partial_hit_tokens",  # the dashboard has how often a part of a block was copied
        "quire:kv_retained_blocks",  # a part of the cached blocks; the dashboard has those that went all the same
        "quire:kv_kept_pinned_blocks",  # likewise, and `quire pins` shows them
        "quire:pinned_prefixes",
        "quire:decision_log_records",  # of a log that is an option; docker/OPERATING.md says what a drop means
        "quire:decision_log_dropped",
        "quire:decision_log_bytes",
        "quire:disk_read_seconds",  # what a worker tells its manager, which orders fetches by it
        "quire:orphan_bytes",  # what the limits bound; the dashboard has the orphans
    }
    assert families - {_family(name) for name in asked} == unread


def _family(name: str) -> str:
    for suffix in ("_total", "_bucket", "_count", "_sum", "_created"):
        name = name.removesuffix(suffix)
    return name
