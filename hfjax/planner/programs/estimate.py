"""Estimates the memory of one step from the layout, its trace and its compiled program."""

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from hfjax.analysis.count_transfers import host_transfers
from hfjax.analysis.residuals import saved_residuals
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.layerwise.engines import LayerwiseEngine
from hfjax.parallel.mesh import platform_of
from hfjax.parallel.offload.host_memory import HOST_MEMORY_KIND
from hfjax.parallel.pipeline.engine import PipelineEngine, waiting_bytes
from hfjax.planner.programs.planned_run import PlannedRun, compile_for_gpu
from hfjax.sharding.host_memory import rule_of
from hfjax.utils.paths import flatten

STATE = ("parameters", "optimizer_state", "master")


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device, and of its share of host memory; None: not known, or not asked for."""

    name: str
    # from the layout
    parameters: int
    gradients: int
    optimizer_state: int
    master: int
    host_parameters: int
    host_optimizer_state: int
    host_master: int
    # from the trace: residuals of the backward pass
    layers: int | None  # of the layers, of one microbatch (in a pipeline: of all that wait)
    ends: int | None  # before and after the layers
    messages: int | None  # between stages
    host_stashes: int | None
    to_host: int  # sent in a step
    to_device: int
    sent_whole: bool  # whether the program does not say how some arrays that are sent are sharded
    # from the compiler
    platform: str
    arguments: int
    temporaries: int
    peak: int
    host_compiled: int

    @property
    def heading(self) -> str:
        """The name, with a line for each setting."""
        return self.name.replace(",", "\n").replace("+", "\n+")

    @property
    def stashes(self) -> int:
        """Residuals of the backward pass in device memory, as far as the trace shows."""
        return sum(size or 0 for size in (self.layers, self.ends, self.messages))

    @property
    def layout_and_trace_bytes(self) -> int:
        """Bytes in device memory that the layout and the trace show."""
        return self.parameters + self.optimizer_state + self.master + self.gradients + self.stashes

    @property
    def host(self) -> int:
        """Bytes in host memory that the layout and the trace show."""
        state = self.host_parameters + self.host_optimizer_state + self.host_master
        return state + (self.host_stashes or 0)


def estimate(name: str, run: PlannedRun) -> Estimate:
    """Return the memory of a step, which is traced and compiled; nothing is allocated."""
    step = run.step
    traced = run.trace()
    copies = host_transfers(traced)
    return Estimate(
        name,
        gradients=_gradient_bytes(step),
        **_state_bytes(step.layout),
        **_residual_bytes(step, traced, run.batch),
        to_host=copies.to_host,
        to_device=copies.to_device,
        sent_whole=any(copy.is_global for copy in copies),
        platform=platform_of(step.layout.mesh),
        **program_memory(compile_for_gpu(traced.lower())),
    )


def _gradient_bytes(step: Any) -> int:
    """Return the bytes of gradients live at once: all, or those of the ends and one layer."""
    sizes = step.layout.gradient_bytes
    if not step.execution.optimizer_in_backward:
        return sum(sizes.values())
    layers: dict[str, int] = {}
    for path in [path for path in sizes if path.startswith(LAYERS)]:
        number = path.split("/")[1] if step.layout.template.is_layer_list else "each"
        num_layers = 1 if number != "each" else step.layout.param_specs[path].shape[0]
        layers[number] = layers.get(number, 0) + sizes.pop(path) // num_layers
    return sum(sizes.values()) + max(layers.values())


def _state_bytes(layout: Any) -> dict[str, int]:
    """Return bytes of one device for each part of the state, by memory kind."""
    sizes = dict.fromkeys([*STATE, *(f"host_{kind}" for kind in STATE)], 0)
    state = layout.abstract_state()
    for keys, x in jax.tree_util.tree_leaves_with_path((state.params, state.optimizer)):
        kind = "parameters" if keys[0].idx == 0 else rule_of(keys)
        prefix = "host_" if x.sharding.memory_kind == HOST_MEMORY_KIND else ""
        sizes[prefix + kind] += prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sizes


def _residual_bytes(step: Any, traced: jax.stages.Traced, batch: Any) -> dict[str, int | None]:
    """Return the residuals of the backward pass: of a pipeline its buffers, else from the trace.

    An unrolled loop, forward and backward, does not show them.
    """
    residuals = None if isinstance(step.engine, LayerwiseEngine) else saved_residuals(traced)
    if residuals is None:
        return dict.fromkeys(("layers", "ends", "messages", "host_stashes"))
    device_bytes = lambda layers: sum(
        k.total for k in residuals if k.layers == layers and not k.host
    )
    sizes: dict[str, int | None] = {
        "layers": device_bytes(True),
        "ends": device_bytes(False),
        "messages": 0,
        "host_stashes": sum(k.total for k in residuals if k.host),
    }
    if isinstance(step.engine, PipelineEngine):
        sizes |= _pipeline_bytes(step, batch)
    return sizes


def _pipeline_bytes(step: Any, batch: Any) -> dict[str, int | None]:
    schedule = step.execution.schedule
    if schedule.versions(step.engine.ticks.table.stages) is not None:
        return dict.fromkeys(
            ("layers", "messages", "host_stashes")
        )  # it has an executor of its own
    state = step.layout.abstract_state()
    inputs = flatten(state.params), flatten(state.variables)
    stash_sizes = waiting_bytes(step.engine, *inputs, batch, state.step)
    activations, messages = stash_sizes["activations"], stash_sizes["messages"]
    return {
        "layers": activations[0],
        "messages": messages[0],
        "host_stashes": activations[1] + messages[1],
    }


def program_memory(program: jax.stages.Compiled) -> dict[str, int]:
    """Return the memory of a program, as its compiler reports it."""
    memory: Any = program.memory_analysis()
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return {
        "arguments": arguments,
        "temporaries": temporaries,
        "peak": arguments + temporaries + fresh,
        "host_compiled": host + memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes,
    }
