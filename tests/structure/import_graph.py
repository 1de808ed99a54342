"""Computes the shape of each package from its imports: rooms, edges between them, cycles, the longest path.

    python -m tests.structure.import_graph [ROOT]

A room is a folder below a package, or a file that stands loose at the package's top. An edge joins two rooms of one
package when any file of the first imports any file of the second. Imports for type checkers and imports inside
functions count. Standard library only, so that it also runs on another checkout.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("router", "kvmanager", "gpuworker", "common", "cli", "bench")

Graph = dict[str, set[str]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The figures of one package. `cycles` lists groups of rooms that import each other, directly or not."""

    package: str
    files: int
    loose: tuple[str, ...]
    rooms: Graph
    cycles: tuple[tuple[str, ...], ...]
    module_cycles: tuple[tuple[str, ...], ...]

    @property
    def edges(self) -> int:
        """Imports between rooms, each pair of rooms once."""
        return sum(map(len, self.rooms.values()))

    @property
    def longest_path(self) -> int:
        """Rooms on the longest chain of imports; a cycle counts as one room."""
        return longest_path(self.rooms)


def module_graph(root: Path, package: str) -> Graph:
    """Return which modules of `package` import which others of it; names without the package's own."""
    files = {_module(root, path): path for path in sorted((root / package).rglob("*.py")) if not _generated(path)}
    graph: Graph = {}
    for module, path in files.items():
        found = {name for name in _imports(path, set(files)) if name in files and name != package}
        graph[_short(module, package)] = {_short(name, package) for name in found if name != module}
    graph.pop("", None)
    return graph


def shape_of(root: Path, package: str) -> Shape:
    """Return the figures of one package below `root`."""
    modules = module_graph(root, package)
    folders = {module.partition(".")[0] for module in modules if "." in module}
    rooms: Graph = {module.partition(".")[0]: set() for module in modules}
    for module, imported in modules.items():
        room = module.partition(".")[0]
        rooms[room] |= {name.partition(".")[0] for name in imported} - {room}
    loose = tuple(sorted(set(rooms) - folders))
    return Shape(package, len(modules), loose, rooms, cycles(rooms), cycles(modules))


def cycles(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Return the strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(tuple(sorted(stack[at:])))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return tuple(sorted(found))


def longest_path(graph: Graph) -> int:
    """Return how many nodes the longest path has; edges inside a cycle are left out."""
    group = {node: circle for circle in cycles(graph) for node in circle}
    depth: dict[str, int] = {}

    def below(node: str) -> int:
        if node not in depth:
            members = group.get(node, (node,))
            targets = {target for member in members for target in graph[member]} - set(members)
            depth[node] = 1 + max(map(below, targets), default=0)
        return depth[node]

    return max(map(below, graph), default=0)


def _module(root: Path, path: Path) -> str:
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _short(module: str, package: str) -> str:
    return module[len(package) + 1 :]


def _generated(path: Path) -> bool:
    return path.stem.endswith(("_pb2", "_pb2_grpc"))


def _imports(path: Path, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def table(root: Path) -> str:
    """Return the figures of every package as a Markdown table."""
    lines = [
        "| package | files | loose | rooms | edges | longest path | cycles of rooms | of modules |",
        "|" + "---|" * 8,
    ]
    for package in PACKAGES:
        shape = shape_of(root, package)
        figures = (shape.files, len(shape.loose), len(shape.rooms), shape.edges, shape.longest_path)
        circles = (len(shape.cycles), len(shape.module_cycles))
        lines.append(f"| {package} | " + " | ".join(map(str, (*figures, *circles))) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))  # noqa: T201
