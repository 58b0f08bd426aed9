"""Partition a global program by a rule per primitive: what DTensor is to PyTorch, for jaxprs.

DTensor dispatches each operator as it is called. Here a function is traced at global shapes (to a
jaxpr), and each device runs this program, equation by equation, on its shards: the rule of a
primitive says what to communicate, what to compute locally, and how the result is placed. So it
works in a `jax.shard_map(…, check_vma=False)`, a `jax.vmap(…, axis_name=…)` and under `jax.grad`.

    >>> import jax, jax.numpy as jnp
    >>> from hfjax.parallel.spmd.interpreter import run_partitioned
    >>> from hfjax.parallel.spmd.placements import AxisGroup, ShardedValue
    >>> group, comms = AxisGroup(("data",), 2), []  # two devices along the mesh axis "data"
    >>> def program(w, x):  # at global shapes: x is [4, 2]
    ...     y = x @ w
    ...     return y - y.mean(0, keepdims=True), x.T @ y, jnp.sort(y, 0)
    >>> def device(w, x):  # what each device runs: x is its shard, [2, 2]
    ...     return run_partitioned(group, program, w, ShardedValue(x), comms=comms)
    >>> w = jnp.array([[1.0], [2.0]])
    >>> x = jnp.array([[1.0, 0.0], [3.0, 1.0], [2.0, 2.0], [0.0, 1.0]]).reshape(2, 2, 2)
    >>> outs = jax.vmap(device, in_axes=(None, 0), axis_name="data")(w, x)
    >>> for out in outs:
    ...     print(type(out).__name__, out.x[..., 0].tolist())
    ShardedValue [[-2.5, 1.5], [2.5, -1.5]]
    PartialValue [[16.0, 5.0], [12.0, 14.0]]
    ShardedValue [[1.0, 2.0], [5.0, 6.0]]
    >>> for event in comms:
    ...     print(event.operation, event.action, event.bytes, event.has_rule)
    sub sum 4 True
    sort gather 16 False

Placements (`placements`; DTensor's names in brackets). What a device holds of a value is

- an array, the same on every device [Replicate];
- `ShardedValue(x, Split(dim, blocks))`: x is its shard along a dimension [Shard]; with several
  blocks, as [B] -> [S * B] makes them, a device holds its shard of each block;
- `PartialValue(x)`: the value is the sum of x over the devices [Partial]. Linear equations keep it
  so; the first other one that reads it makes the devices add it up, once;
- `LazyValue`: not computed yet (an iota, a mask, random bits): each device computes its shard only;
- `Ungathered`: a parameter that is all-gathered when an equation uses it; a loop over it may gather
  it slice by slice. How it is stored and gathered is up to a subclass.

Results are arrays, `ShardedValue` or `PartialValue`. The cotangent of a sharded value is sharded
alike, that of a replicated value is partial, that of a partial value is replicated. So
differentiate each device's term of the loss, `group.as_partial_tree(loss)`, and all-reduce the
gradients of replicated arguments.

An `AxisGroup` is the devices along one or several mesh axes, with their collectives. Each holds one
contiguous chunk of a split dimension, or chunks that the group lists (zigzag). A program is
partitioned over one group; `nested` partitions it over several (batch and sequence, say), one after
the other.

Where no rule knows an equation, or a rule returns None (a sort along the split dimension), the
interpreter falls back to replicated: it all-gathers the operands, runs the equation on every device
and slices the outputs again. The gather is reported, as a `CommEvent` with `has_rule=False`.

The table is `RULES` in `interpreter`; the rules are in `rules`, a file for each kind. To add one:

- an elementwise primitive: its name in `POINTWISE` (`jaxprs.primitives`); one that moves entries:
  a function that returns its `ViewMap`, in `VIEWS`;
- any other: a function `(ctx, equation, values) -> values or None` in the `RULES` of its file. It
  asks for `ctx.shape(value)`, gets local arrays by `ctx.shard(value, split)` or
  `ctx.replicate(value)` (they communicate if they must, and report it) and returns, for instance,
  `ctx.bind_sharded(split, equation, arrays)`. The first line of its docstring is what
  docs/own_programs.md says of it (python -m tests.rules_page);
- a sample in tests/rule_samples.py: tests run it with operands of all placements.

Besides, `partition_context` is a program while it runs, `rule_calls` are functions that stay one
call with a rule of their own, `global_batch` runs a model's components on the global batch,
`microbatches` redistributes examples so that microbatches are those of one device, `axes` reads
the names of axes, and `report` prints the events of a step.
"""
