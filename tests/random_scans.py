"""Scans drawn from a seed, over rows or positions: what they carry is added to, and more.

Many carry sums that no turn sees. Others read one, old or new, in a call, a branch or a loop of the
body, return it, exchange two, or do something else that makes a turn follow from those before it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from hfjax.parallel.jaxprs.walk import scan_counts
from hfjax.parallel.spmd.rules import control_flow
from tests.random_programs import Program, Sizes, coarse, make_batch, tame


@jax.custom_jvp
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


twice.defjvp(lambda xs, dxs: (2 * xs[0], 2 * dxs[0]))
turned = lambda x: x[::-1] if x.ndim else 1 - x
until = lambda c: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, -s[1]), (0, c / 2))[1]

# How a sum is added to, and in which program.
ADDS: list[Callable] = [
    lambda c, t: c + t,
    lambda c, t: t + c,
    lambda c, t: c - t,
    lambda c, t: c + t + jnp.sin(t),
    lambda c, t: lax.convert_element_type(c, c.dtype) + t,
    lambda c, t: jax.jit(jnp.add)(c, t) + 0.25 * t,
]
PLACES: list[Callable] = [
    lambda f: f,
    lambda f: f,
    jax.jit,
    jax.checkpoint,
    lambda f: jax.jit(jax.checkpoint(f)),
]
# How a turn follows from those before it.
MIXES: list[Callable] = [
    lambda c, t: t - c,
    lambda c, t: 0.5 * c + t,
    lambda c, t: c + c,
    lambda c, t: jnp.tanh(c + t),
    lambda c, t: jnp.maximum(coarse(c), coarse(t)),
    lambda c, t: (c + t).astype("float32").astype(c.dtype),
    lambda c, t: turned(c) + t,
    lambda c, t: c.at[0].set(c[0] * 2) + t if c.ndim else c * t,
    lambda c, t: lax.cond(coarse(c.sum()) > 0.25, lambda: c + t, lambda: c - t),
    lambda c, t: lax.fori_loop(0, 2, lambda i, c: jnp.sin(c) + t, c),
    lambda c, t: until(lax.stop_gradient(c)) + t,
    lambda c, t: lax.scan(lambda s, _: (s + c, None), t, None, length=2)[0],
    lambda c, t: c + t * jnp.tanh(c),
    lambda c, t: twice(c) + t,
    lambda c, t: t,
]
# What sees a sum.
READS: list[Callable] = [
    lambda c: c,
    jnp.tanh,
    jax.jit(jnp.cos),
    jax.checkpoint(jnp.sin),
    lambda c: lax.cond(coarse(c.sum()) > 0.25, jnp.cos, jnp.sin, c),
    lambda c: lax.scan(lambda s, _: (s + c, None), c, None, length=2)[0],
    lambda c: twice(c) * 0.5,
    lambda c: c.astype("float32").astype(c.dtype),
    lambda c: jnp.concatenate([jnp.atleast_1d(c), jnp.atleast_1d(c)]).sum(),
]
FAULTS = ("none", "read", "read inside", "in a sum", "mixed", "exchange", "return")


def seeds_of(fault: str) -> range:
    """Return seeds of bodies with this fault: with all that reads a sum, or mixes it."""
    first = FAULTS.index(fault)
    return range(first, first + len(FAULTS) * len(MIXES), len(FAULTS))


class Scan:
    """A scan of a seed, of slices of this shape.

    Attributes:
        start: What it carries first: sums, a counter, a number that stays.
        body: (weights, carry, slice) -> (carry, results).
        how: Options of `lax.scan`.
    """

    def __init__(self, seed: int, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng([seed, 7])
        pick = lambda things: things[int(rng.integers(len(things)))]
        self.fault, turn = FAULTS[seed % len(FAULTS)], seed // len(FAULTS)
        self.mix, self.read = MIXES[turn % len(MIXES)], READS[turn % len(READS)]
        count = 2 if self.fault == "exchange" else pick((1, 2, 2, 3))
        self.adds = [(pick(ADDS), pick(PLACES)) for _ in range(count)]
        self.shapes = [pick((shape, ()))] * 2
        if self.fault != "exchange":
            self.shapes = [pick((shape, ())) for _ in range(count)]
        self.late, self.results = pick((True, False)), pick((True, False))
        self.at, self.to = int(rng.integers(count)), count - 1
        self.how = {"reverse": pick((True, False)), "unroll": pick((1, 1, 2))}
        sums = [rng.normal(size=each) for each in self.shapes]
        self.start = (sums, np.int32(3), np.float64(rng.normal()))
        self.weights = {"a": rng.normal(size=shape)}

    def body(self, weights: Any, carry: Any, x: jax.Array) -> Any:
        sums, turn, scale = carry
        term, new = jnp.sin(weights["a"] * x * scale + 0.1), []
        seen = lambda: (new + sums[len(new) :])[self.at] if self.late else sums[self.at]
        results = [jnp.tanh(term)]
        for number, (add, place) in enumerate(self.adds):
            more = term if self.shapes[number] else term.sum()
            if self.fault == "in a sum" and number == self.to:
                more = more + 0.1 * self.read(seen()).sum()
            if self.fault == "mixed" and number == self.at:
                add = self.mix
            if self.fault == "read inside" and number == self.at:
                inside = lambda c, t, add=add: (n := add(c, t), self.read(n if self.late else c))
                found, result = place(inside)(sums[number], more)
                results.append(result)
            else:
                found = place(add)(sums[number], more)
            new.append(found)
        if self.fault == "read":
            results[0] = results[0] + self.read(seen()).sum()
        if self.fault == "return":
            results.append(seen())
        if self.fault == "exchange":
            new.reverse()
        return (new, turn + 1, scale), results if self.results else sum(map(jnp.mean, results))

    def run(self, weights: Any, xs: jax.Array) -> Any:
        start = jax.tree.map(jnp.asarray, self.start)
        return lax.scan(lambda carry, x: self.body(weights, carry, x), start, xs, **self.how)


def along(batch: Any, over: str, which: int) -> jax.Array:
    """Return what is sliced along its first dimension: rows, or positions."""
    z = jnp.swapaxes(batch["z"], 0, 1)
    rows = [batch["x"], batch["z"], batch["across"].T, batch["crops"]]
    return (rows if over == "rows" else [z, batch["across"], batch["shared"], z[..., 0]])[which]


def scans(seed: int, sizes: Sizes = None, over: str = "rows") -> Program:
    """Return the program of a seed: a scan over rows or positions."""
    batch = make_batch(np.random.default_rng([seed, 0]), sizes)
    xs = lambda batch: along(batch, over, seed % 4)
    scan = Scan(seed, jax.eval_shape(xs, batch).shape[1:])

    def function(weights: Any, batch: Any) -> tuple:
        (sums, turns, _), results = scan.run(weights, xs(batch))
        found = [tame(y) for y in (*sums, *jax.tree.leaves(results))]
        loss = sum((i + 1) * jnp.mean(jnp.sin(y)) for i, y in enumerate(found))
        return loss, {"found": found, "turns": turns}

    return Program(f"scan {seed} ({scan.fault})", function, scan.weights, batch)


def judged(seed: int) -> tuple[bool, list[str]]:
    """Return whether each device may run its own turns by the rule, and what speaks against it.

    A turn sees no sum if, with another one, it adds the same and returns the same beside.
    """
    scan = Scan(seed, (2, 3))
    (loop,) = jax.make_jaxpr(scan.run)(scan.weights, np.ones((4, 2, 3))).eqns
    body = loop.params["jaxpr"]
    consts, carried = scan_counts(loop)
    alone = control_flow._find_accumulators(
        body.jaxpr, body.jaxpr.invars[consts : consts + carried]
    )
    rng = np.random.default_rng([seed, 8])
    number = lambda v: rng.normal(size=v.aval.shape) if v.aval.dtype == np.float64 else np.int32(5)
    given = list(map(number, body.jaxpr.invars))
    turn = lambda given: jaxpr_as_fun(body)(*given)
    found, against = turn(given), []
    for i in range(carried):
        for _ in range(2):
            more = number(body.jaxpr.invars[consts + i])
            others = turn([x + more if n == consts + i else x for n, x in enumerate(given)])
            for n, (x, y) in enumerate(zip(found, others, strict=True)):
                if not np.allclose(y, x + more if n == i else x, rtol=1e-9, atol=1e-12):
                    against.append(f"{scan.fault}: result {n} sees what is carried as {i}")
    return alone is not None, against
