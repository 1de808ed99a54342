"""The files of the observability profile, read: rules, dashboard, and every expression in them with where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[4]
DOCKER: Final = ROOT / "docker"
OBSERVABILITY: Final = DOCKER / "observability"
PROMETHEUS: Final = OBSERVABILITY / "prometheus"
OPERATING: Final = DOCKER / "OPERATING.md"
RUNBOOK: Final = ROOT / "router" / "api" / "page" / "runbook.md"
# The values that Grafana substitutes for its variables, to read a panel's expression without Grafana.
_VARIABLES: Final = {"$__rate_interval": "1m", "$worker": ".*"}


@dataclass(frozen=True, slots=True)
class Expression:
    """One PromQL expression, and the labels that its legend or annotations name."""

    where: str
    text: str
    labels_named: frozenset[str] = frozenset()


def load_yaml(path: Path) -> Any:
    """Return the content of a YAML file of one document."""
    return yaml.safe_load(path.read_text())


def rules(kind: str) -> list[dict[str, Any]]:
    """Return all rules that have the key `kind`: "alert" or "record"."""
    groups = [group for file in sorted((PROMETHEUS / "rules").glob("*.yml")) for group in load_yaml(file)["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((OBSERVABILITY / "grafana/dashboards/quire.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def without_variables(text: str, rate_interval: str = "1m") -> str:
    """Return an expression as Grafana sends it."""
    for name, value in {**_VARIABLES, "$__rate_interval": rate_interval}.items():
        text = text.replace(name, value)
    return text


def expressions() -> Iterator[Expression]:
    """Yield every expression of rules and dashboard."""
    for rule in rules("record"):
        yield Expression(rule["record"], rule["expr"])
    for rule in rules("alert"):
        words = " ".join(rule["annotations"].values())
        yield Expression(rule["alert"], rule["expr"], frozenset(_named(words, "$labels.")))
    for panel in panels():
        for target in panel["targets"]:
            named = frozenset(_named(target["legendFormat"], ""))
            yield Expression(f"panel {panel['title']!r}", without_variables(target["expr"]), named)


def _named(words: str, prefix: str) -> Iterator[str]:
    """Yield the labels in {{ ... }}: `{{worker}}` in Grafana, `{{ $labels.worker }}` in Prometheus."""
    for part in words.split("{{")[1:]:
        name = part.split("}}")[0].split("|")[0].strip()
        if name.startswith(prefix) and name != "$value":
            yield name.removeprefix(prefix)
