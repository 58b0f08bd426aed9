"""DeepLabV3-ResNet101 compiled for 8 H200s under DDP and FSDP: memory, and what is not hidden.

Nothing runs. Writes a row for each strategy to results/vision_h200.md.

    python -m benchmarks.vision_h200 [--only DDP]
"""

import argparse
import math
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import optax

import hfjax
from benchmarks.result_rows import put
from hfjax.analysis.flights import flights, products
from hfjax.machines.machine import H200
from hfjax.models.vision.deeplab import DeepLab, DeepLabConfig
from hfjax.models.vision.image_losses import segmentation_loss
from hfjax.target import target_devices

RESULTS = Path(__file__).parent / "results" / "vision_h200.md"
ROWS, SIDE, DEVICES = 4, 513, 8
CASES = {"DDP": (hfjax.DDP, {"data": DEVICES}), "FSDP": (hfjax.FSDP, {"fsdp": DEVICES})}
COLUMNS = (
    *("jax", "strategy", "state and batch", "temporaries", "peak", "collectives", "sent"),
    *("beside products", "covered", "exposed", "products", "traced in", "compiled in"),
)
HEAD = f"""# DeepLabV3-ResNet101, compiled for {DEVICES} H200s

`python -m benchmarks.vision_h200` (last rows: {{date}}), no GPU. {ROWS} images of {SIDE} x {SIDE} a
device, precision="bf16", BatchNorm over all devices, SGD with momentum, no remat.

Bytes are those of a device and a step. *Beside products*: the part of the bytes sent whose
collectives have convolutions or matmuls of 1 GFLOP or more between start and done. *Covered*: the
part of the modelled time of transfers for which these last; *exposed*: the rest of that time.
*Products*: the modelled time of all convolutions and matmuls, at 500 TFLOP/s
(hfjax/analysis/flights.py). *Compiled in*: on the clock, and seconds of the processor in this
process (ptxas runs in others).
"""


def row(name: str) -> tuple[str, ...]:
    """Return the cells of one strategy."""
    strategy, sizes = CASES[name]
    config = DeepLabConfig.preset("deeplabv3-resnet101")
    mesh = hfjax.make_mesh(devices=target_devices("h200", DEVICES), **sizes)
    sgd = optax.sgd(0.01, momentum=0.9)
    layout = hfjax.layout(lambda rngs: DeepLab(config, rngs=rngs), sgd, mesh, strategy)
    step = hfjax.train_step(layout, segmentation_loss, precision="bf16")
    shape = (ROWS * DEVICES, SIDE, SIDE)
    image = jax.ShapeDtypeStruct((*shape, 3), "uint8")
    start = time.perf_counter()
    lowered = step.lower({"image": image, "label": jax.ShapeDtypeStruct(shape, "int32")})
    traced, used = time.perf_counter() - start, time.process_time()
    compiled = lowered.compile()
    took = time.perf_counter() - start - traced
    return (*cells(name, compiled), f"{traced:.0f} s", f"{took:.0f} s, {spent(used)}")


def spent(before: float) -> str:
    """Return the processor seconds since."""
    return f"{time.process_time() - before:.0f} s of processors"


def cells(name: str, compiled: jax.stages.Compiled) -> tuple[str, ...]:
    """Return what a compiled program tells."""
    memory = compiled.memory_analysis()
    assert memory is not None
    found = flights(compiled)
    sent, hidden = sum(f.total for f in found), sum(f.hidden for f in found)
    seconds, exposed = sum(f.seconds * f.count for f in found), sum(f.exposed for f in found)
    flops = math.fsum(p.flops * p.count for p in products(compiled.as_text() or ""))
    kinds = sorted({f.kind for f in found})
    counts = ", ".join(f"{sum(f.count for f in found if f.kind == k)} {k}" for k in kinds)
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    gb = lambda size: f"{size / 1e9:.2f} GB"
    return (
        *(jax.__version__, name, gb(state), gb(temporary), gb(state + temporary + new)),
        *(counts, gb(sent), f"{hidden / sent:.0%}", f"{1 - exposed / seconds:.0%}"),
        *(
            f"{1e3 * exposed:.1f} of {1e3 * seconds:.1f} ms",
            f"{1e3 * flops / H200.scheduled_flops:.0f} ms",
        ),
    )


def main() -> None:
    """Compile what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[*CASES])
    given = parser.parse_args()
    print(" | ".join(COLUMNS))
    for name in CASES if given.only is None else [given.only]:
        found = row(name)
        print(" | ".join(found), flush=True)
        put(RESULTS, HEAD, COLUMNS, found)


if __name__ == "__main__":
    main()
