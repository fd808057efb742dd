"""Prints which rooms of jaxattn import which, and fails on an upward import.

    python -m scripts.import_graph              # rooms, by floor, with the rooms that each imports
    python -m scripts.import_graph --files      # the same for files

A room is a package of one purpose, and a floor is a set of rooms that do not import each other. The
exit code is 1, with a line for each fault, in three cases: a room imports from its own or a higher
floor, files import each other in a circle, or a file of the engine imports a model.
"""

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From top to bottom. A file may import from rooms of lower floors and from its own room. Rooms on
# the same floor do not import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__", "serve", "plan.__main__"),
    ("bench",),
    ("cli",),
    ("server",),
    ("integrations",),
    ("jaxattn",),
    ("plan",),
    ("engine",),
    ("engine.distributed", "engine.startup"),
    ("engine.execution",),
    ("engine.compilation", "engine.scheduling"),
    ("engine.steps",),
    ("engine.sampling",),
    ("engine.requests", "engine.runtime"),
    ("models", "models.catalog"),
    ("models.loading",),
    ("models.checkpoint",),  # which names the families that it leaves to models.loading
    ("models.registry",),
    ("models.families",),
    ("models.families.components", "models.sharding"),
    ("models.embedded", "models.weight_map"),
    ("models.network",),
    ("models.blocks",),
    ("models.interface",),
    ("models.caches",),
    ("nn",),
    ("parallel",),
    ("mla", "gdn", "kda", "gqa", "moe"),
    # Kimi Delta Attention shares the checks, pools and chunk scan of gdn, TurboQuant those of gqa,
    # and experts the linear layers.
    ("ops.kda", "ops.turboquant", "ops.moe"),
    ("ops.mla", "ops.gdn", "ops.gqa", "ops.linear", "ops.collectives"),
    ("ops.attention", "ops"),
    ("kernels.turboquant",),  # whose tile scheduler, combine and epilogue are those of gqa
    ("kernels.gqa", "kernels.mla", "kernels.gdn", "kernels.moe"),
    ("kernels.collectives",),
    ("kernels.linear", "kernels"),
    ("kernels.attention",),
    ("kernels.hopper",),
    ("limits",),
    ("memory",),
    ("text",),
    ("core",),
    ("arena", "aliasing", "interrupt"),
)

# The only modules of `models` that the engine may import, none of which is a model.
INTERFACES = ("models", "models.interface", "models.caches.layer_cache")

type Graph = Mapping[str, Mapping[str, int]]


def modules(root: Path) -> dict[str, Path]:
    """Maps modules, without the leading `jaxattn.`, to files; the package itself is `jaxattn`."""
    package = root / "jaxattn"
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found[".".join(parts) or "jaxattn"] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Yields (module, line) for each import of jaxattn in a file, including those in functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] != "jaxattn":
                continue
            inner = name.removeprefix("jaxattn").removeprefix(".")
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            yield inner or "jaxattn", getattr(node, "lineno", 0)


def import_graph(root: Path = ROOT) -> Graph:
    """Maps each module to the modules that it imports, with the line of the first import."""
    known = modules(root)
    graph: dict[str, dict[str, int]] = {}
    for name, path in known.items():
        arrows = graph.setdefault(name, {})
        for target, line in imported(path, known):
            if target != name:
                arrows.setdefault(target, line)
    return graph


def room_of(module: str) -> str:
    """The longest listed room that contains a module.

    Raises:
        ValueError: no floor lists a room that contains it.
    """
    rooms = [room for floor in FLOORS for room in floor]
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in rooms:
            return room
    raise ValueError(f"jaxattn.{module} lies in no room of FLOORS (scripts/import_graph.py)")


def within(room: str, package: str) -> bool:
    """Whether a room is a package or inside it."""
    return room == package or room.startswith(f"{package}.")


def floor_of(room: str) -> int:
    return next(place for place, floor in enumerate(FLOORS) if room in floor)


def wrong_arrows(graph: Graph) -> list[str]:
    """A sentence for each import that the floors do not allow."""
    found = []
    for module, arrows in graph.items():
        own = room_of(module)
        for target, line in arrows.items():
            room = room_of(target)
            if room != own and floor_of(room) <= floor_of(own):
                found.append(f"{module}:{line} imports {target}: {own} is not above {room}")
            if within(own, "engine") and within(room, "models") and target not in INTERFACES:
                found.append(f"{module}:{line} imports the model {target}")
    return found


def circle(graph: Graph) -> list[str]:
    """The modules of a circular import, or an empty list."""
    state: dict[str, int] = {}

    def visit(module: str, path: list[str]) -> list[str]:
        state[module] = 1
        for target in graph.get(module, {}):
            if state.get(target) == 1:
                return [*path[path.index(target) :], target]
            if target not in state and (found := visit(target, [*path, target])):
                return found
        state[module] = 2
        return []

    for module in graph:
        if module not in state and (found := visit(module, [module])):
            return found
    return []


def by_room(graph: Graph) -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, arrows in graph.items():
        own = room_of(module)
        rooms.setdefault(own, set()).update({room_of(target) for target in arrows} - {own})
    return rooms


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--files", action="store_true", help="print files, not rooms")
    files = options.parse_args().files
    graph = import_graph()
    rooms = by_room(graph)
    for floor in FLOORS:
        for room in floor:
            if files:
                for module in (m for m in graph if room_of(m) == room):
                    print(f"{module}: {' '.join(sorted(graph[module]))}")
            else:
                print(f"{room}: {' '.join(sorted(rooms.get(room, ()), key=floor_of))}")
    wrong = wrong_arrows(graph)
    if ring := circle(graph):
        wrong.append(f"a circle: {' -> '.join(ring)}")
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
