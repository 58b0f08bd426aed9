"""A training step by hand: FSDP and tensor parallelism of a small GPT, without hfjax.

    python examples/step_by_hand.py      # on 8 simulated CPU devices; it compiles for some seconds

The mesh has two axes. **fsdp** shards the batch, and every matrix along D: a layer all-gathers its
matrices when it uses them, again in its backward pass, and reduce-scatters their gradients.
**tensor** shards heads, MLP and vocabulary as Megatron-LM does: a device multiplies by columns of
one matrix, then by rows of the next, and the products are all-reduced. AdamW updates the shards.

All is one `jax.shard_map`: functions see what one device has, and `lax` sends. JAX (`check_vma`)
refuses a program that omits a psum; each pcast it would add itself, where the value is used.

Letters: [B]atch, [S]equence, [D] model width, [H]eads, [K] head width, [F] MLP width, [V]ocabulary,
[L]ayers; 3: query, key, value. On a device B is divided by fsdp, and H, F, V by tensor.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)  # they stand in where there are fewer than 8 GPUs

B, S, D, H, K, F, V, L = 16, 16, 64, 8, 8, 256, 32, 2
ADAMW, MAX_GRAD_NORM = optax.adamw(3e-3), 1.0
PARAMS = {  # shape, and the mesh axes that shard it; the head multiplies by the embedding
    "tokens": ((V, D), P("tensor", "fsdp")),
    "positions": ((S, D), P(None, "fsdp")),
    "layers/norm1_scale": ((L, D), P()),
    "layers/norm1_bias": ((L, D), P()),
    "layers/qkv": ((L, D, H, 3, K), P(None, "fsdp", "tensor")),
    "layers/qkv_bias": ((L, H, 3, K), P(None, "tensor")),
    "layers/out": ((L, H, K, D), P(None, "tensor", None, "fsdp")),
    "layers/out_bias": ((L, D), P()),
    "layers/norm2_scale": ((L, D), P()),
    "layers/norm2_bias": ((L, D), P()),
    "layers/up": ((L, D, F), P(None, "fsdp", "tensor")),
    "layers/up_bias": ((L, F), P(None, "tensor")),
    "layers/down": ((L, F, D), P(None, "tensor", "fsdp")),
    "layers/down_bias": ((L, D), P()),
    "norm_scale": ((D,), P()),
    "norm_bias": ((D,), P()),
}
SPECS = {name: spec for name, (_, spec) in PARAMS.items()}


# -- what is sent ----------------------------------------------------------------------------------


def unshard(name: str, x: jax.Array) -> jax.Array:
    """All-gather a parameter over fsdp; in the backward pass, reduce-scatter its gradient."""
    if "fsdp" not in SPECS[name]:
        return x
    axis = SPECS[name].index("fsdp") - name.startswith("layers/")  # the scan took the first one
    return lax.all_gather(x, "fsdp", axis=axis, tiled=True)


def copy_to_tensor(x: jax.Array) -> jax.Array:
    """Return x; in the backward pass, all-reduce what each device's columns give."""
    return lax.pcast(x, "tensor", to="varying")


def reduce_from_tensor(x: jax.Array) -> jax.Array:
    """All-reduce what each device's rows give; in the backward pass, send nothing."""
    return lax.psum(x, "tensor")


def global_norm(grads: dict[str, jax.Array]) -> jax.Array:
    """Return the norm of all gradients: one number is all-reduced, over both axes."""

    def squares(name, grad):
        copies = [lax.axis_size(axis) for axis in ("fsdp", "tensor") if axis not in SPECS[name]]
        return jnp.sum(grad**2) / np.prod(copies)  # so that all copies together count once

    total = sum(squares(name, grad) for name, grad in grads.items())
    return jnp.sqrt(lax.psum(total, ("fsdp", "tensor")))


# -- the model -------------------------------------------------------------------------------------


def layer_norm(x_BSD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    centred = x_BSD - x_BSD.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale_D + bias_D


def layer(x_BSD: jax.Array, shards: dict[str, jax.Array]) -> jax.Array:
    p = {name.removeprefix("layers/"): unshard(name, x) for name, x in shards.items()}
    h_BSD = copy_to_tensor(layer_norm(x_BSD, p["norm1_scale"], p["norm1_bias"]))
    qkv_BSH3K = jnp.einsum("bsd,dhck->bshck", h_BSD, p["qkv"]) + p["qkv_bias"]
    q_BSHK, k_BSHK, v_BSHK = (qkv_BSH3K[:, :, :, i] for i in range(3))
    attended_BSHK = jax.nn.dot_product_attention(q_BSHK, k_BSHK, v_BSHK, is_causal=True)
    out_BSD = reduce_from_tensor(jnp.einsum("bshk,hkd->bsd", attended_BSHK, p["out"]))
    x_BSD = x_BSD + out_BSD + p["out_bias"]
    h_BSD = copy_to_tensor(layer_norm(x_BSD, p["norm2_scale"], p["norm2_bias"]))
    up_BSF = jax.nn.gelu(h_BSD @ p["up"] + p["up_bias"])
    return x_BSD + reduce_from_tensor(up_BSF @ p["down"]) + p["down_bias"]


def embed(tokens_BS: jax.Array, table_VD: jax.Array) -> jax.Array:
    """Look up the tokens: each device finds those of its part of the vocabulary."""
    rows_BS = tokens_BS - lax.axis_index("tensor") * len(table_VD)
    is_here_BS = (rows_BS >= 0) & (rows_BS < len(table_VD))
    return reduce_from_tensor(jnp.where(is_here_BS[..., None], table_VD[rows_BS], 0))


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Return the loss of each token: three numbers of it are reduced, its logits stay sharded."""
    largest_BS = lax.pmax(lax.stop_gradient(logits_BSV).max(-1), "tensor")
    total_BS = reduce_from_tensor(jnp.exp(logits_BSV - largest_BS[..., None]).sum(-1))
    ids_V = jnp.arange(logits_BSV.shape[-1]) + lax.axis_index("tensor") * logits_BSV.shape[-1]
    target_BS = reduce_from_tensor(jnp.where(ids_V == targets_BS[..., None], logits_BSV, 0).sum(-1))
    return jnp.log(total_BS) + largest_BS - target_BS


def loss_part(params: dict[str, jax.Array], tokens_BS: jax.Array) -> jax.Array:
    """Return what this device's examples add to the mean loss of all examples."""
    layers = {name: x for name, x in params.items() if name.startswith("layers/")}
    p = {name: unshard(name, x) for name, x in params.items() if name not in layers}
    x_BSD = embed(tokens_BS[:, :-1], p["tokens"]) + p["positions"]
    keep = lambda primitive, *_, **__: primitive.name != "all_gather"  # keep all else for backward
    run = jax.checkpoint(layer, policy=keep, prevent_cse=False)  # a scan needs no barriers
    x_BSD, _ = lax.scan(lambda x_BSD, shards: (run(x_BSD, shards), None), x_BSD, layers)
    x_BSD = copy_to_tensor(layer_norm(x_BSD, p["norm_scale"], p["norm_bias"]))
    losses_BS = cross_entropy(x_BSD @ p["tokens"].T, tokens_BS[:, 1:])
    return losses_BS.sum() / (losses_BS.size * lax.axis_size("fsdp"))


# -- the step --------------------------------------------------------------------------------------


def device_step(state: tuple[dict, Any], tokens_BS: jax.Array) -> tuple[Any, jax.Array]:
    """Return one device's parameters and optimizer state after a step, and the loss."""
    params, opt_state = state
    # Norms and biases are equal along fsdp, their gradients are not: they are summed here, once.
    small = [name for name, spec in SPECS.items() if "fsdp" not in spec]
    own = params | {name: lax.pcast(params[name], "fsdp", to="varying") for name in small}
    loss, grads = jax.value_and_grad(loss_part)(own, tokens_BS)
    grads |= lax.psum({name: grads[name] for name in small}, "fsdp")
    scale = MAX_GRAD_NORM / jnp.maximum(global_norm(grads), MAX_GRAD_NORM)
    grads = {name: grad * scale for name, grad in grads.items()}
    updates, opt_state = ADAMW.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), lax.psum(loss, "fsdp")


def init_state() -> tuple[dict[str, np.ndarray], Any]:
    """Return all parameters (scales are 1, biases 0, matrices drawn) and the optimizer state."""
    rng, params = np.random.default_rng(0), {}
    for name, (shape, _) in PARAMS.items():
        constant = {"scale": 1.0, "bias": 0.0}.get(name.split("_")[-1])
        x = rng.normal(0, 0.02, shape) if constant is None else np.full(shape, constant)
        params[name] = x.astype(np.float32)
    return params, ADAMW.init(params)


def state_specs() -> tuple[dict[str, P], Any]:
    """Return the spec of each array of a state: a moment has its parameter's name, and its spec."""
    spec = lambda path, _: SPECS.get(getattr(path[-1], "key", ""), P())
    return jax.tree.map_with_path(spec, init_state())


def train_step(mesh: Mesh) -> Any:
    """Return the jitted step: (state, tokens) -> (state, loss)."""
    specs, data = state_specs(), P("fsdp")
    step = jax.shard_map(device_step, mesh=mesh, in_specs=(specs, data), out_specs=(specs, P()))
    return jax.jit(step, donate_argnums=0)


def batch(number: int) -> np.ndarray:
    """Return tokens [B, S + 1]: each example counts on by a stride of its own."""
    rng = np.random.default_rng(number)
    start, stride = rng.integers(0, V, (B, 1)), rng.integers(1, 4, (B, 1))
    return ((start + stride * np.arange(S + 1)) % V).astype(np.int32)


def train(mesh: Mesh, steps: int) -> list[float]:
    """Return the loss of each step."""
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    state, losses = jax.tree.map(put, init_state(), state_specs()), []
    step = train_step(mesh)
    for number in range(steps):
        state, loss = step(state, put(batch(number), P("fsdp")))
        losses.append(float(loss))
    return losses


def main(steps: int = 40) -> None:
    devices = jax.devices() if jax.device_count() >= 8 else jax.devices("cpu")
    for fsdp, tensor in ((8, 1), (1, 8), (2, 4)):
        mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), devices=devices)
        losses = train(mesh, steps)
        shown = " ".join(f"{loss:.4f}" for loss in losses[9::10])
        print(f"fsdp={fsdp} tensor={tensor}: the loss of every 10th step is {shown}", flush=True)


if __name__ == "__main__":
    main()
