"""The selectors of an expression in PromQL, and the labels that its result can have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

import promql_parser as p

# Of every series that is scraped, whatever the process says.
TARGET_LABELS: Final = frozenset({"job", "instance"})


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in an expression: its name, and (label, operator, value) of each matcher."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def allows(self, label: str, value: str) -> bool:
        """Whether the matchers of a label let a value pass."""
        for name, operator, wanted in self.matchers:
            if name == label and not _OPERATORS[operator](wanted, value):
                return False
        return True


_OPERATORS: Final[dict[str, Any]] = {
    "MatchOp.Equal": lambda wanted, value: value == wanted,
    "MatchOp.NotEqual": lambda wanted, value: value != wanted,
    "MatchOp.Re": lambda wanted, value: re.fullmatch(wanted, value) is not None,
    "MatchOp.NotRe": lambda wanted, value: re.fullmatch(wanted, value) is None,
}


def selectors(text: str) -> list[Selector]:
    """Return every selector in an expression."""
    found: list[Selector] = []

    def visit(node: Any) -> bool:
        if isinstance(node, p.MatrixSelector):
            found.append(_selector(node.vector_selector))
        elif isinstance(node, p.VectorSelector):
            found.append(_selector(node))
        return True

    p.walk(p.parse(text), visit)
    return found


def groupings(text: str) -> Iterator[tuple[set[str], list[Selector]]]:
    """Yield the labels of each `by` or `without`, with the selectors that it aggregates."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, p.AggregateExpr) and node.modifier is not None:
            found.append(node)
        return True

    p.walk(p.parse(text), visit)
    for node in found:
        yield set(node.modifier.labels), selectors(str(node.expr))


def result_labels(text: str, known: Mapping[str, Set[str]]) -> Set[str]:
    """Return the labels that the result may have; `known` are those of each metric."""
    return _labels(p.parse(text), known)


def _labels(node: Any, known: Mapping[str, Set[str]]) -> Set[str]:
    labels: Set[str] = frozenset()
    match node:
        case p.VectorSelector():
            labels = known.get(str(node.name), frozenset()) | TARGET_LABELS
        case p.MatrixSelector():
            labels = _labels(node.vector_selector, known)
        case p.AggregateExpr():
            labels = _aggregated(node.modifier, _labels(node.expr, known))
        case p.Call():
            inner = frozenset().union(*(_labels(each, known) for each in node.args))
            labels = inner - {"le"} if node.func.name == "histogram_quantile" else inner
        case p.BinaryExpr():
            labels = _labels(node.lhs, known) or _labels(node.rhs, known)
        case p.ParenExpr() | p.UnaryExpr() | p.SubqueryExpr():
            labels = _labels(node.expr, known)
    return labels


def _aggregated(modifier: Any, inner: Set[str]) -> Set[str]:
    if modifier is None:
        return frozenset()
    named = frozenset(modifier.labels)
    return named if modifier.type == p.AggModifierType.By else inner - named


def _selector(node: Any) -> Selector:
    matchers = tuple((each.name, str(each.op), each.value) for each in node.matchers.matchers)
    return Selector(node.name, matchers)
