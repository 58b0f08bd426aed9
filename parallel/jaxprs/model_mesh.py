"""The mesh that a model sees: axes of its own names, each of size 1.

A model may place its arrays: by explicit sharding (`out_sharding=`, `jax.sharding.reshard`), or by
`with_sharding_constraint` and a PartitionSpec. Inside a step the layout does that, and a model is
traced at global shapes. So where it asks for a mesh, it is traced again under an abstract one whose
axes have size 1: Auto axes first, then Explicit ones. What is left in its program are the specs
that it asked for; `bind` (jaxprs/bind.py) drops them, or makes them constraints over the axes that
XLA's partitioner has.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from hfjax.parallel.mesh import AXES, describe_mesh, names_of
from hfjax.utils.keywords import wrap_function
from hfjax.utils.tables import align
from hfjax.utils.trace_context import current_auto_axes, set_value

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_UNKNOWN_AXIS = re.compile(r"Resource axis: (\S+) of .* is not found in mesh")
_ASKS_FOR_MESH = re.compile(
    r"(not under a|non-empty|empty|set a) mesh|mesh context|context mesh|not found in mesh"
    r"|of type:? .?(Auto|Manual|Explicit)|AxisType|only refer to Auto axes"
)
# What JAX raises where a model needs a mesh, by operation; NotImplementedError if an array is of
# another one. They are caught, and raised again unless their text asks for a mesh.
_ERRORS = (ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError)


class SpecRequest(NamedTuple):
    """A spec that a model asks for.

    Attributes:
        line: The line of the user's program.
        spec: As the model writes it.
        constraint: The same over the axes of XLA's partitioner; None: the strategy decides (in a
            branch: the partitioner).
    """

    line: str
    spec: P
    constraint: P | None


@dataclass
class ModelMesh:
    """What is known of the mesh that a model asks for, while it is traced.

    Attributes:
        mesh_axes: The model's name of an axis -> the mesh's; None: it splits nothing.
        names: The names of the axes that the model sees.
        axis_type: Of these axes; None: the model has asked for no mesh.
        requests: The specs that it has asked for, each once.
    """

    mesh_axes: Mapping[str, str | None] = field(default_factory=dict)
    names: tuple[str, ...] = AXES
    axis_type: AxisType | None = None
    requests: dict[SpecRequest, None] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh_axes: Mapping[str, str | None]) -> "ModelMesh":
        """Return the mesh of a new model; it has the names of a mesh that is set now."""
        current = jax.sharding.get_abstract_mesh()
        is_explicit = AxisType.Explicit in current.axis_types
        set_names = current.axis_names if is_explicit else ()
        names = tuple(dict.fromkeys((*mesh_axes, *set_names, *AXES)))
        axis_type = AxisType.Explicit if is_explicit else AxisType.Auto if mesh_axes else None
        return cls(mesh_axes, names, axis_type)

    def learn(self, error: Exception) -> bool:
        """Return whether to trace the model again, since it asks for another mesh."""
        text = str(error)
        if not isinstance(error, _ERRORS) or not _ASKS_FOR_MESH.search(text):
            return False
        unknown = _UNKNOWN_AXIS.search(text)
        if unknown and unknown[1] not in self.names:
            self.names += (unknown[1],)
            self.axis_type = self.axis_type or AxisType.Auto
            return True
        if self.axis_type is AxisType.Explicit:
            return False
        self.axis_type = AxisType.Auto if self.axis_type is None else AxisType.Explicit
        return True

    def context(self) -> AbstractContextManager:
        """Return the context in which the model is traced."""
        if self.axis_type is None:
            return nullcontext()
        count, current = len(self.names), jax.sharding.get_abstract_mesh()
        device = getattr(current, "abstract_device", None)
        types = {"axis_types": (self.axis_type,) * (count + 1), "abstract_device": device}
        return _under_mesh(AbstractMesh((1,) * (count + 1), (*self.names, _MARK), **types))

    def constraint(self, spec: P) -> P | None:
        """Return a spec over the axes that XLA's partitioner has; None: it names none of them."""
        axes, name_of = current_auto_axes(), lambda name: self.mesh_axes.get(name, name)
        auto_names = [
            tuple(a for a in map(name_of, names) if a in axes) for names in names_of(spec)
        ]
        if _IN_BRANCH.get() or not any(auto_names):
            return None
        others = (x if x is P.UNCONSTRAINED else None for x in spec.partitions)
        return P(*(names or other for names, other in zip(auto_names, others, strict=True)))


_MARK = "of the model"  # an axis that tells a mesh that only a model sees from any other
_WITHOUT_SIZE_ONE = "jax_remove_size_one_mesh_axis_from_type"
_ONE_AT_A_TIME = RLock()
_IN_BRANCH: ContextVar[bool] = ContextVar("a branch is traced", default=False)
_CURRENT: ContextVar[ModelMesh | None] = ContextVar("the mesh that a model sees", default=None)


@dataclass(frozen=True)
class ShardingReport:
    """The specs that a model asks for, and what became of each; print it."""

    requests: tuple[SpecRequest, ...]

    def __str__(self) -> str:
        if not self.requests:
            return "the model asks for no sharding"
        outcome = lambda spec: "the strategy decides" if spec is None else f"constraint {spec}"
        rows = [(r.line or "(no line)", str(r.spec), outcome(r.constraint)) for r in self.requests]
        return "\n".join(align(rows))


def in_branch() -> AbstractContextManager:
    """Make no constraints meanwhile: XLA wants the results of all branches split alike."""
    return set_value(_IN_BRANCH, True)


def use_model_mesh(mesh: ModelMesh) -> AbstractContextManager:
    """Trace models under this mesh meanwhile, where they ask for one."""
    return set_value(_CURRENT, mesh)


def current_model_mesh() -> ModelMesh:
    """Return the mesh that models see where they ask for one."""
    return _CURRENT.get() or ModelMesh()


@contextmanager
def _under_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """Trace under a mesh whose axes of size 1 JAX leaves out of types: no two arrays disagree."""
    with _ONE_AT_A_TIME, change_mesh(mesh):  # all threads share the flag
        before = getattr(jax.config, _WITHOUT_SIZE_ONE)
        jax.config.update(_WITHOUT_SIZE_ONE, True)
        try:
            yield
        finally:
            jax.config.update(_WITHOUT_SIZE_ONE, before)


def without_mesh(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function; it runs without a mesh that the user has set (`jax.set_mesh`)."""
    leave = leave_mesh

    def call(*args: Any, **keywords: Any) -> Any:
        with leave():
            return function(*args, **keywords)

    return wrap_function(function, call)


@contextmanager
def leave_mesh() -> Iterator[None]:
    """Leave a mesh that the user has set meanwhile: a layout has its own."""
    mesh = jax.sharding.get_abstract_mesh()
    context: AbstractContextManager = nullcontext()
    try:
        if not mesh.empty:
            context = jax.set_mesh(cast(Any, None))
    except ValueError as error:  # it is called by another program
        if AxisType.Explicit in mesh.axis_types and not is_model_mesh(mesh):
            raise ValueError(
                "a program of your own calls hfjax while a mesh with Explicit axes is set, "
                f"{describe_mesh(cast(Any, mesh))}: JAX runs no program of another mesh there. "
                "Compile and call yours outside of `with jax.set_mesh(…)`; what calls hfjax "
                "directly may stay."
            ) from error
    with context:
        yield


@contextmanager
def change_mesh(mesh: AbstractMesh) -> Iterator[None]:
    """Trace under another abstract mesh meanwhile, whatever the current one is."""
    use = jax.sharding.use_abstract_mesh
    with use(AbstractMesh((), ())), use(mesh):  # JAX refuses to change from one to another
        yield


def mesh_context(mesh: AbstractMesh) -> AbstractContextManager:
    """Return the context in which an equation that was traced under this mesh is traced again."""
    return _under_mesh(mesh) if is_model_mesh(mesh) else nullcontext()


def trace_under_mesh(trace: Callable[..., Result], *shapes: Any) -> Result:
    """Return `trace(*shapes)`: called again, under a mesh, if the model asks for one."""
    mesh = current_model_mesh()
    is_inside = is_model_mesh(jax.sharding.get_abstract_mesh())
    context = nullcontext() if is_inside else mesh.context()
    while True:
        try:
            with context:
                return trace(*_on_mesh(shapes))
        except _ERRORS as error:
            if not mesh.learn(error):
                raise
            context = mesh.context()


def _on_mesh(shapes: Any) -> Any:
    """Return shapes as those of arrays on the model's mesh, if that is the current one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not is_model_mesh(mesh):
        return shapes
    replicated = lambda x: NamedSharding(mesh, P(*[None] * len(x.shape)))
    on_mesh = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=replicated(x), weak_type=getattr(x, "weak_type", False)
    )
    return jax.tree.map(on_mesh, shapes)


def call_or_trace(function: Callable, run_traced: Callable, *arguments: Any) -> Any:
    """Return `function(*arguments)`, or `run_traced(*arguments)` if the function needs a mesh."""
    mesh = current_model_mesh()
    if mesh.axis_type is None:
        try:
            return function(*arguments)
        except _ERRORS as error:
            if not mesh.learn(error):
                raise
    return run_traced(*arguments)


def is_model_mesh(mesh: Any) -> bool:
    """Return whether a mesh is one that only a model sees."""
    return _MARK in mesh.axis_names
