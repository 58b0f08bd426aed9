"""all_gather_matmul and matmul_reduce_scatter: the product against cuBLAS, and virtual ranks.

On a ring of one GPU nothing travels: it is the matmul part, 8192^3 in bfloat16. Virtual ranks play
the whole ring on one GPU (ranks as a grid axis): the same events, all links being its own memory.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.gpu_sections.cases import Case, Goal, run_cases, tunings
from benchmarks.gpu_sections.rows import Reporter
from hfjax.hardware.machine import MACHINES
from hfjax.pallas_kernels.ring.all_gather_matmul import (
    all_gather_matmul,
    reference as reference_gather,
)
from hfjax.pallas_kernels.ring.gather import gather_matmul
from hfjax.pallas_kernels.ring.matmul_reduce_scatter import (
    matmul_reduce_scatter,
    reference as reference_scatter,
)
from hfjax.pallas_kernels.ring.peers import VirtualRing
from hfjax.pallas_kernels.ring.scatter import matmul_scatter
from hfjax.pallas_kernels.ring.tiles import Tuning

AXIS = "tensor"
SIDE, TINY = 8192, 64
RANKS, ROWS, WIDE = 4, 1024, 4096  # virtual: of each rank x [ROWS, WIDE], w [WIDE, WIDE]
PROCESSORS = MACHINES["h100"].sms
KERNELS = ("all_gather_matmul", "matmul_reduce_scatter")
PRODUCTS = {  # the kernel, and the same in plain JAX
    KERNELS[0]: (all_gather_matmul, reference_gather),
    KERNELS[1]: (matmul_reduce_scatter, reference_scatter),
}
BODIES = {KERNELS[0]: gather_matmul, KERNELS[1]: matmul_scatter}
TUNINGS = (
    {"columns": 128},
    {"stages": 3},
    {"band": 4},
    {"band": 16},
    {"columns": 128, "stages": 6},
)


def run(reporter: Reporter) -> None:
    """Measure both products alone, then as virtual rings."""
    for kernel in KERNELS:
        run_cases(reporter, partial(_alone, kernel))
    if not reporter.smoke:
        for kernel in KERNELS:
            run_cases(reporter, partial(_virtual, kernel))


def cases(smoke: bool) -> Iterator[Case]:
    """Yield all cases."""
    for make in (_alone, *([] if smoke else [_virtual])):
        for kernel in KERNELS:
            yield from make(kernel, smoke)


def _alone(kernel: str, smoke: bool) -> Iterator[Case]:
    ours, plain = PRODUCTS[kernel]
    side = TINY if smoke else SIDE
    of = lambda product, *more: _on_one(lambda x, w: product(x, w, AXIS, *more))
    candidates = {"reference": of(plain)}
    if not smoke:
        found = tunings(Tuning(), *TUNINGS)
        candidates = {text: of(ours, t) for text, t in found.items()}
    yield Case(
        kernel,
        f"ring of 1, {side}^3",
        operands=partial(_operands, ((side, side), (side, side))),
        candidates=candidates,
        rivals={"cuBLAS (XLA)": jnp.dot},
        oracle=_wide(jnp.dot),
        flops=2.0 * side**3,
        bytes=6.0 * side**2,
        goals=(Goal("ratio", 0.9),),
        notes={"ring": 1},
    )


def _on_one(product: Callable) -> Callable:
    """Return a product of a ring, run on a ring of this one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    specs = {"in_specs": (P(AXIS), P(AXIS)), "out_specs": P(AXIS)}
    return jax.shard_map(product, mesh=mesh, check_vma=False, **specs)


def _virtual(kernel: str, smoke: bool) -> Iterator[Case]:
    del smoke
    body = partial(_body, BODIES[kernel], VirtualRing(RANKS))
    found = tunings(Tuning(), *({"blocks": n} for n in (PROCESSORS // RANKS, 32, 16)))
    found.pop("default")  # more blocks than processors would wait for each other for ever
    gather = kernel == KERNELS[0]
    x = (RANKS, ROWS, WIDE) if gather else (RANKS, RANKS, ROWS, WIDE // RANKS)
    w = (RANKS, WIDE, WIDE) if gather else (RANKS, WIDE // RANKS, WIDE)
    product = _gathered if gather else _scattered
    yield Case(
        f"{kernel}, virtual",
        f"{RANKS} virtual ranks, x {list(x[1:])}, w {list(w[1:])}",
        operands=partial(_operands, (x, w)),
        candidates={text: partial(body, t) for text, t in found.items()},
        rivals={"XLA": product},
        oracle=_wide(product),
        flops=2.0 * RANKS * RANKS * ROWS * w[1] * WIDE,
        bytes=2.0 * (prod(x) + prod(w) + RANKS * ROWS * WIDE * (RANKS if gather else 1)),
        notes={"virtual": RANKS},
    )


def _body(
    body: Callable, ring: VirtualRing, tuning: Tuning, x: jax.Array, w: jax.Array
) -> jax.Array:
    return body(ring, x, w, tuning)


def _gathered(x_RMK: jax.Array, w_RKN: jax.Array) -> jax.Array:
    """Return every rank's product with all rows, [R, S, M, N]."""
    return jnp.einsum("smk,rkn->rsmn", x_RMK, w_RKN)


def _scattered(x_RSMK: jax.Array, w_RKN: jax.Array) -> jax.Array:
    """Return every rank's rows of the sum over ranks, [S, M, N]."""
    return jnp.einsum("rsmk,rkn->smn", x_RSMK, w_RKN)


def _wide(product: Callable) -> Callable:
    return lambda x, w: product(x.astype(jnp.float32), w.astype(jnp.float32))


def _operands(shapes: tuple, seed: int) -> tuple:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
