"""jax's interpreter of GPU kernels, taught several devices: semaphores, peers' refs, deadlocks.

jax interprets the copies, barriers and matrix instructions of one GPU. `install` adds, for the time
of a test: semaphores (`pl.get_global`, signal, wait) and `plgpu.remote_ref` on a mesh of fake
devices; races raise on every version (0.11.2 only prints them); a wait without progress raises; a
signal that nobody waited for raises; and all blocks of a grid run at the same time, as they do on a
GPU that holds them all (jax runs one after the other, where waiting for another block never ends).

It touches jax's insides. A newer jax is admitted by adding it to TRIED once test_ring.py and
test_collective_matmul.py pass there.
"""
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
# pyright: reportPrivateImportUsage=false

import functools
import itertools
import threading

import jax
import jax.numpy as jnp
from jax._src import callback, core as jax_core
from jax._src.pallas import primitives
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax._src.state import indexing
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests import interpreter_memory as memory

TRIED = ("0.11.2", "0.12.0", "0.12.0.1")


@jax.tree_util.register_static
class Semaphore:
    """What `pl.get_global` returns while interpreting: a number that all devices agree on."""

    numbers = itertools.count()

    def __init__(self):
        self.number = next(Semaphore.numbers)


_semaphores: dict = {}  # variable of a jaxpr -> Semaphore: the same for all threads and devices


def _index(transforms):
    index = []
    for transform in transforms:
        assert isinstance(transform, indexing.NDIndexer), transform
        for i in transform.indices:
            index.append(i.start if isinstance(i, indexing.Slice) else i)
    return tuple(jnp.int32(i) for i in index)


def _call(interpreter, token, function, semaphore, **values):
    token = callback.io_callback(
        functools.partial(function, semaphore=semaphore.number),
        callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        **values,
    )
    return token, []


def _get_global(interpreter, equation, token, values):
    variable = equation.outvars[0]
    return token, [_semaphores.setdefault(variable, Semaphore())]


def _signal(interpreter, equation, token, values):
    semaphore, transforms, amount, device, _ = jax.tree.unflatten(
        equation.params["args_tree"], values
    )
    named = {"index": _index(transforms), "amount": amount, "device": device}
    return _call(interpreter, token, memory.signal, semaphore, **named)


def _wait(interpreter, equation, token, values):
    semaphore, transforms, value, decrement = jax.tree.unflatten(
        equation.params["args_tree"], values
    )
    named = {"index": _index(transforms), "value": value, "decrement": decrement}
    return _call(interpreter, token, memory.wait, semaphore, **named)


RULES = {
    primitives.get_global_p: _get_global,
    primitives.semaphore_signal_p: _signal,
    primitives.semaphore_wait_p: _wait,
    gpu_primitives.semaphore_signal_p: _signal,
    gpu_primitives.semaphore_wait_p: _wait,
}


def _alone(jaxpr, equation):
    """Return a jaxpr of one equation, its inputs and its outputs."""
    inputs = dict.fromkeys(v for v in equation.invars if not isinstance(v, jax_core.Literal))
    outputs = [v for v in equation.outvars if not isinstance(v, jax_core.DropVar)]
    unnamed = jaxpr.debug_info.with_unknown_names()
    alone = jaxpr.replace(
        constvars=[], invars=list(inputs), outvars=outputs, eqns=[equation], debug_info=unnamed
    )
    return alone, list(inputs), outputs


class Interpreter(jaxpr_interpret.JaxprInterpreter):
    """jax's interpreter with `RULES` for the primitives that it lacks."""

    def interpret(self, jaxpr, token, *values):
        found = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def read(v):
            return v.val if isinstance(v, jax_core.Literal) else found[v]

        for equation in jaxpr.eqns:
            if rule := RULES.get(equation.primitive):
                token, out = rule(self, equation, token, [read(v) for v in equation.invars])
                outputs = equation.outvars
            else:
                alone, inputs, outputs = _alone(jaxpr, equation)
                token, out = super().interpret(alone, token, *[found[v] for v in inputs])
            found.update(zip(outputs, out, strict=True))
        return token, [read(v) for v in jaxpr.outvars]


def _beginning(initialize, patience):
    """Return jax's first callback of a launch, followed by one that knows the mesh."""

    def begun(*, token, **given):
        axes = tuple(jax_core.get_axis_env().axis_sizes.items())
        begin = functools.partial(memory.begin, axes=axes, patience=patience)
        token = initialize(token=token, **given)
        return callback.io_callback(begin, callbacks.TOKEN_SHAPE_DTYPE, token=token)

    return begun


def _unless_shared(function):
    """Return a callback that is left out while other devices are still running.

    At its end a device resets every device's clocks and looks for barriers that were not freed.
    """

    @functools.wraps(function)
    def alone(token):
        shared = callbacks._get_shared_memory().num_devices > 1
        return token if shared else function(token=token)

    return alone


def _raising(check):
    """Return a check of an access that raises when it has found a race."""

    @functools.wraps(check)
    def raising(self, *positional, **named):
        check(self, *positional, **named)
        if self.races_found:
            raise RuntimeError("RACE DETECTED: the accesses are printed above")

    return raising


def races_raise(patch):
    """Until `patch` is undone, a race raises: jax 0.11.2 only prints it."""
    for name in ("check_read", "check_write"):
        check = getattr(GPURaceDetectionState, name)
        patch.setattr(GPURaceDetectionState, name, _raising(check))


def compile_once(patch):
    """Until `patch` is undone, compile what all warpgroups run once, not once for each of them."""
    programs, lock = {}, threading.Lock()

    def run(jaxpr, consts, *values):
        with lock:
            if id(jaxpr) not in programs:
                program = jax.jit(
                    lambda consts, *values: jax_core.eval_jaxpr(jaxpr, consts, *values)
                )
                programs[id(jaxpr)] = program.lower(consts, *values).compile(), jaxpr
        programs[id(jaxpr)][0](consts, *values)

    patch.setattr(thread_map, "_run_jaxpr", run)


def _all_blocks_at_once(kernel):
    def resident(body, *, grid=(), grid_names=(), cluster=(), cluster_names=(), **launch):
        cluster, names = (*grid, *cluster), (*grid_names, *cluster_names)
        return kernel(body, cluster=cluster, cluster_names=names, **launch)

    return resident


def install(patch, patience=memory.PATIENCE):
    """Teach jax's interpreter several devices until `patch` (pytest's monkeypatch) is undone."""
    if jax.__version__ not in TRIED:
        raise RuntimeError(
            f"kernels on several devices are interpreted with jax {', '.join(TRIED)}, this is "
            f"{jax.__version__}. If tests/test_ring.py passes with it, add it to TRIED"
        )
    for name in ("_get", "_swap", "copy_smem_to_gmem", "copy_gmem_to_smem"):
        patch.setattr(callbacks, name, memory.following_peers(getattr(callbacks, name)))
    for name in ("cluster_finished", "_assert_no_barriers_allocated"):
        patch.setattr(callbacks, name, _unless_shared(getattr(callbacks, name)))
    begin = _beginning(callbacks.call_initialize_shared_memory, patience)
    patch.setattr(callbacks, "call_initialize_shared_memory", begin)
    patch.setattr(
        callbacks,
        "_update_clocks_for_device_barrier",
        memory.at_both_ends(callbacks._update_clocks_for_device_barrier),
    )
    patch.setattr(jaxpr_interpret, "JaxprInterpreter", Interpreter)
    patch.setattr(plgpu, "kernel", _all_blocks_at_once(plgpu.kernel))
    races_raise(patch)
    compile_once(patch)
