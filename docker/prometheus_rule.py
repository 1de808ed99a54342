"""Writes the rules of Prometheus as a PrometheusRule, a kind of its operator: `python docker/prometheus_rule.py`.

Standard library only. The groups are copied as text, so that their comments and their order stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DOCKER = Path(__file__).parent
RULES = DOCKER / "observability/prometheus/rules"
WRITTEN = DOCKER / "k8s/components/prometheus-operator/rules.yaml"
HEAD = """\
# Written by docker/prometheus_rule.py from docker/observability/prometheus/rules. Edit those instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: quire
spec:
  groups:
"""


def groups(text: str) -> str:
    """Return the lines of a file of rules below `groups:`, two columns further to the right."""
    _, _, lines = text.partition("\ngroups:\n")
    return "".join(f"  {line}" if line.strip() else line for line in lines.splitlines(keepends=True))


def prometheus_rule(files: Iterable[Path]) -> str:
    """Return the manifest with the groups of all files."""
    return HEAD + "".join(groups(file.read_text()) for file in files)


if __name__ == "__main__":
    WRITTEN.write_text(prometheus_rule(sorted(RULES.glob("*.yml"))))
