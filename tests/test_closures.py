"""Whoever opens a file of the core reads the core: what is loaded with it, in statements."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"hfjax": "hfjax"} | {
    name: f"hfjax.{name}" for name in ("models", "parallel", "pallas_kernels")
}
LIMITS = {  # module: statements
    "hfjax.parallel.engine.unshard": 825,
    "hfjax.parallel.engine.gradient_engine": 4_150,
    "hfjax.parallel.pipeline.executor": 1_920,
    "hfjax.sharding.layout": 4_330,  # 470 of them only for axes="auto": sharding/read_axes.py
}


@cache
def modules() -> dict[str, Path]:
    """Return {dotted name: file}; the links inside hfjax are left out."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder)
            if folder == "hfjax" and inside.parts[0] in FOLDERS:
                continue
            parts = [package, *inside.with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str) -> frozenset[str]:
    """Return what a module imports: in functions, for types, relatively, by name, too."""
    path, found = modules()[name], set()
    package = name.split(".")[: None if path.name == "__init__.py" else -1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {str(a.value) for a in node.args if isinstance(a, ast.Constant)}
    return frozenset(found & modules().keys()) - {"hfjax"}


def closure(start: str) -> set[str]:
    """Return the modules that are loaded with one, itself included."""
    seen, todo = set(), [start]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += imports(name)
    return seen


def statements(names: set[str]) -> int:
    """Return how many statements modules have together, without docstrings."""
    trees = (ast.parse(modules()[name].read_text(encoding="utf-8")) for name in names)
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    text = lambda n: isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    return sum(not text(node) for node in nodes)


@pytest.mark.parametrize("name", LIMITS)
def test_a_file_of_the_core_needs_no_more_statements_than_these(name):
    assert statements(closure(name)) <= LIMITS[name]


@pytest.mark.parametrize("name", LIMITS)
def test_a_file_of_the_core_loads_no_kernel(name):
    assert not [other for other in closure(name) if "pallas_kernels" in other]


@pytest.mark.slow
def test_a_data_parallel_step_on_a_cpu_loads_no_kernel_and_no_extension_that_it_does_not_use():
    program = """
import sys
import hfjax, jax, numpy as np, optax
from flax import nnx
jax.config.update("jax_platforms", "cpu")
model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=1), hfjax.DDP)
step = hfjax.train_step(layout, lambda outputs, batch: (outputs**2).mean())
step(hfjax.init(layout), np.ones((8, 8), np.float32))
print(*(name for name in sys.modules if name.startswith("hfjax.")))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = ran.stdout.split()
    assert len(loaded) <= 159
    others = "attention", "cross_entropy", "ring", "pipeline", "layerwise", "context_parallel"
    assert not [name for name in loaded if {*others} & {*name.split(".")}]
