"""On a grid a model sees whole widths, rows and sequences: what people write is as on one device.

Most cases were refused while modules computed with the part that a device of the grid has.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.layers import Dropout, Linear, RMSNorm, local_ops, stack_layers
from hfjax.testing import assert_strategies_agree

CONFIG = GPTConfig.tiny(vocab=24, length=12, layers=2, embed=24, heads=12)
GRID = {"grid": (hfjax.GRID.edit(replicate_below=0), {"row": 2, "tensor": 2})}
BOTH = (hfjax.FSDP | hfjax.GRID).edit(replicate_below=0)
CUBE = {"cube": (BOTH, {"fsdp": 2, "row": 2, "tensor": 2})}


def tokens(rows=8, length=12):
    drawn = np.random.default_rng(0).integers(0, 24, (rows, length + 1))
    return {"tokens": drawn.astype(np.int32)}


def agree(model, cases=GRID, loss=next_token_loss, **options):
    """Assert that a model trains on a grid as on one device and in plain JAX."""
    options = {"precision": "fp64", "unroll": 1, "steps": 1} | options
    with jax.enable_x64(True):
        found = assert_strategies_agree(model, loss, tokens(), cases, **options)
    assert max(found.values()) < 1e-9, found


class Model(GPT):
    """A GPT with layers of its own: equal ones, or a list."""

    def __init__(self, *blocks, rngs, config=CONFIG):
        super().__init__(config, rngs=rngs)
        if len(blocks) == 1:
            self.layers = stack_layers(2, blocks[0], rngs)
        else:
            self.layers = nnx.List([block(rngs) for block in blocks])

    def __call__(self, batch):
        x = self.embed(batch)
        if isinstance(self.layers, nnx.List):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)
        return super().__call__(batch)


class Layer(nnx.Module):
    """Two linear maps, and something in the stream and between them."""

    def __init__(self, rngs, stream=None, inside=None):
        self.up = Linear((24, 24), ("embed", "mlp"), 1, 0.1, rngs=rngs)
        self.down = Linear((24, 24), ("mlp", "embed"), 1, 0.1, rngs=rngs)
        self.stream, self.inside = stream or (lambda x: x), inside or (lambda x: x)

    def __call__(self, x):
        return x + self.down(self.inside(self.up(self.stream(x))))


def layers_of(**how):
    return lambda rngs: Layer(rngs, **how)


def norm(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def only_if_wide(x):
    return jnp.tanh(x) if x.shape[-1] > 12 else x


def interleaved(x):
    """Pairs that the whole forms of its two halves, and a part of its own two."""
    halves = x.reshape(*x.shape[:-1], 2, -1)
    return halves.swapaxes(-1, -2).reshape(x.shape)


def along_the_sequence(x):
    number = jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None]
    return jnp.cumsum(jnp.roll(x, 1, axis=1), axis=1) / (1 + number) + x.mean(1, keepdims=True)


def in_heads(x):
    return jnp.sort(x.reshape(*x.shape[:2], -1, 2), axis=-1).reshape(x.shape)


IN_THE_STREAM = {
    "a norm": norm,
    "the width": lambda x: x / math.sqrt(x.shape[-1]),
    "a branch": only_if_wide,
    "a rank": lambda x: x * jnp.arange(x.shape[-1])[None, None],
    "numbers": lambda x: x * np.linspace(0, 1, x.shape[-1])[None, None],
    "shifts": lambda x: jnp.roll(x, 1, axis=1),
    "a mean of positions": lambda x: x - x.mean(1, keepdims=True),
    "pairs": interleaved,
    "a constant of one device": lambda x: x * jnp.ones((1, 1, 24)),
    "sorting": lambda x: jnp.sort(x, axis=-1),
    "the greatest": lambda x: jnp.where(x == x.max(-1, keepdims=True), x, 0),
    "a mean under another name": lambda x: x - x.mean(-1, keepdims=True),
    "elements": jnp.tanh,
    "pairs of neighbours": in_heads,
    "softmax": jax.nn.softmax,
}
INSIDE = {
    "softmax": jax.nn.softmax,
    "rows": lambda x: x - x.mean(0, keepdims=True),
    "the width": lambda x: x * x.shape[-1],
    "a count of rows": lambda x: x * x.shape[0],
    "halves": lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1),
    "accumulating": lambda x: jnp.cumsum(x, -1),
    "along the sequence": along_the_sequence,
    "pairs of neighbours": in_heads,
}


@pytest.mark.parametrize("cases", [GRID, CUBE], ids=["grid", "cube"])
@pytest.mark.short("grid")
def test_what_needs_the_whole_stream_or_inside_is_as_on_one_device(cases, short_cases):
    stream = short_cases(IN_THE_STREAM, "a norm", "pairs", "sorting")
    inside = short_cases(INSIDE, "softmax", "along the sequence")
    blocks = [layers_of(stream=function) for function in stream.values()]
    blocks += [layers_of(inside=function) for function in inside.values()]
    agree(lambda rngs: Model(*blocks, rngs=rngs), cases)


class Twice(Layer):
    """A second map into what the first one made."""

    def __call__(self, x):
        return x + self.down(self.up(self.up(x)))


class MeanInside(Layer):
    """A mean over the width inside."""

    def __call__(self, x):
        y = self.up(x)
        return x + self.down(y - y.mean(-1, keepdims=True))


class DropsRoutes(Layer):
    """Dropout of something in the stream that has not its width, and inside."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        dropped = self.dropout(x.mean(-1, keepdims=True))
        return x + dropped + self.down(self.dropout(self.up(x)))


class Positions(Layer):
    """Positions inside."""

    def __call__(self, x):
        y = self.up(x)
        return x + self.down(y * jnp.arange(y.shape[1])[None, :, None])


class Bare(Layer):
    """A parameter whose dimension has no name."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.scale = nnx.Param(jnp.ones(24))

    def __call__(self, x):
        return super().__call__(x * self.scale[...][None, None])


class Sideways(nnx.Module):
    """A linear map that leads nowhere on a grid."""

    def __init__(self, rngs):
        self.map = Linear((24, 24), ("embed", None), 1, 0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.map(x)


class Norm(nnx.LayerNorm):
    """A norm of flax, whose dimension has a name."""

    def __init__(self, rngs):
        super().__init__(24, rngs=rngs)
        self.scale, self.bias = (nnx.Param(jnp.ones(24), axes=("embed",)) for _ in range(2))


class WithNormedHeads(nnx.Module):
    """Attention's norm of queries and keys."""

    def __init__(self, rngs):
        self.up = Linear((24, 12, 2), ("embed", "heads", None), 2, 0.1, rngs=rngs)
        self.norm = RMSNorm(2, axis=None)
        self.down = Linear((12, 2, 24), ("heads", None, "embed"), 1, 0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.norm(self.up(x)))


class Convolving(nnx.Module):
    """A module of flax that knows nothing of names."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(24, 24, 3, param_dtype=jnp.zeros(()).dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.conv(x)


@pytest.mark.slow
def test_modules_of_every_kind_train_as_on_one_device(short_cases):
    kinds = [Twice, MeanInside, DropsRoutes, Positions, Bare, Sideways, Norm, WithNormedHeads]
    named = {kind.__name__: kind for kind in kinds}
    blocks = short_cases(named, "Twice", "Sideways", "WithNormedHeads").values()
    agree(lambda rngs: Model(*blocks, Convolving, rngs=rngs), CUBE)


class OnOtherRows(nnx.Module):
    """Linear maps of something else than all rows in their order: `of` says of what."""

    def __init__(self, rngs, of):
        self.layer, self.of = Layer(rngs), of
        self.more = nnx.Linear(8, 8, param_dtype=jnp.zeros(()).dtype, rngs=rngs)

    def __call__(self, x):
        map_of = lambda x: self.layer.down(jnp.tanh(self.layer.up(x)))
        return x + self.of(self, map_of, x)


def mixed_rows(self, y):
    """Return rows mixed by a module of flax that knows only the last dimension."""
    return self.more(y.T).T


OTHER_ROWS = {
    "half of them": lambda self, f, x: jnp.concatenate([f(x[:4]), x[4:]]),
    "in turn": lambda self, f, x: f(x.swapaxes(0, 1)).swapaxes(0, 1),
    "twice": lambda self, f, x: f(jnp.concatenate([x, jnp.sin(x)])).reshape(2, *x.shape).sum(0),
    "turned, then mixed": lambda self, f, x: mixed_rows(self, f(x.swapaxes(0, 1)).swapaxes(0, 1)),
    "mixed inside": lambda self, f, x: self.layer.down(mixed_rows(self, self.layer.up(x))),
    "summed up to here": lambda self, f, x: mixed_rows(self, self.layer.up(x).cumsum(0)),
    "one position": lambda self, f, x: f(x[:, 0])[:, None],
    "a mean": lambda self, f, x: f(x.mean(1))[:, None],
    "for each": lambda self, f, x: jax.vmap(f)(x),
    "pairs": lambda self, f, x: f(x.reshape(8, 4, -1, 24)).reshape(x.shape),
}


class Square(GPT):
    """A GPT of eight positions and eight rows."""

    def __init__(self, *, rngs):
        super().__init__(CONFIG, rngs=rngs)
        self.layers = nnx.List([OnOtherRows(rngs, of) for of in OTHER_ROWS.values()])

    def __call__(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


SEQUENCE = (hfjax.TENSOR | hfjax.SEQUENCE).edit(replicate_below=0)
SHAPES = {
    "square": (8, CUBE),
    "longer": (12, CUBE),
    "tensor": (8, {"tensor": (SEQUENCE, {"data": 2, "tensor": 2})}),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_maps_may_be_given_other_rows(shape):
    """Also where as many rows as positions lie on devices, of several places."""
    length, cases = SHAPES[shape]
    with jax.enable_x64(True):
        found = assert_strategies_agree(
            lambda rngs: Square(rngs=rngs), next_token_loss, tokens(8, length), cases,
            precision="fp64", unroll=1, steps=1,
        )  # fmt: skip
    assert max(found.values()) < 1e-9


class HeadOfOthers(GPT):
    """A head that is given rows twice, and half of them."""

    def head(self, stream):
        outputs = lambda x: self.kernels.outputs(x, self.tokens[...], 24)
        x = self.norm(stream)
        both = outputs(jnp.concatenate([x, 2 * x]))
        return both[: len(x)] + both[len(x) :] + outputs(x.swapaxes(0, 1)).swapaxes(0, 1)


def by_logits(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return hfjax.Mean(losses.sum(), jnp.asarray(losses.size, losses.dtype))


@pytest.mark.slow
def test_a_head_may_be_given_other_rows():
    agree(lambda rngs: HeadOfOthers(CONFIG, rngs=rngs), CUBE, by_logits)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"fsdp": 2}, {"data": 2}])
def test_a_model_that_sees_its_own_rows_does_so_on_a_grid(more):
    told = []
    plain_one, on_grid = (hfjax.DDP, hfjax.GRID) if "data" in more else (hfjax.FSDP, BOTH)
    for strategy, sizes in ((plain_one, more), (on_grid, more | {"row": 2, "tensor": 2})):
        mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        model = lambda rngs: GPT(CONFIG, rngs=rngs)
        step = hfjax.train_step(
            hfjax.layout(model, optax.sgd(0.1), mesh, strategy), next_token_loss, batch_view="local"
        )
        _, metrics = step(hfjax.init(step.layout), tokens())
        told.append((metrics["loss"], metrics["grad_norm"]))
    np.testing.assert_allclose(*told, rtol=1e-5)


class BareTable(GPT):
    """A table whose dimensions have no names, and one that a part of the tokens is looked up in."""

    def __init__(self, *, rngs):
        super().__init__(CONFIG, rngs=rngs)
        self.more = nnx.Param(jnp.ones((24, 24)))

    def embed(self, batch):
        tokens = batch["tokens"][:, :-1]
        found = self.kernels.lookup(self.tokens[...], tokens[:, ::-1])
        return super().embed(batch) + self.kernels.lookup(self.more[...], tokens) + found


@pytest.mark.slow
def test_tables_without_names_are_looked_up():
    agree(lambda rngs: BareTable(rngs=rngs))


@jax.custom_vjp
def straight(x):
    """The identity, whose gradient is over its norm along the width."""
    return x


straight.defvjp(
    lambda x: (x, None), lambda _, g: (g / jnp.sqrt((g**2).sum(-1, keepdims=True) + 1e-6),)
)


@jax.custom_jvp
def centred(x):
    """The identity, whose derivative is less its mean."""
    return x


@centred.defjvp
def _of_centred(primals, tangents):
    ((x,), (dx,)) = primals, tangents
    return x, dx - dx.mean(-1, keepdims=True)


@jax.custom_vjp
def normed_gradient(w):
    """A parameter whose gradient is over its own norm."""
    return w


normed_gradient.defvjp(lambda w: (w, None), lambda _, g: (g / jnp.sqrt((g**2).sum()),))


class OfRules(Layer):
    """A layer whose kernel has a rule of its own, which sees all of it."""

    def __call__(self, x):
        kernel = normed_gradient(self.up.kernel[...])
        return super().__call__(x) + 0.1 * jnp.tanh(x @ kernel)


@pytest.mark.slow
def test_rules_of_derivatives_see_whole_widths():
    rules = (straight, centred)
    blocks = [layers_of(stream=rule) for rule in rules] + [layers_of(inside=rule) for rule in rules]
    agree(lambda rngs: Model(*blocks, OfRules, rngs=rngs), CUBE)


class Head(Model):
    """A model whose logits are more than its operands' product."""

    def __init__(self, more, *, rngs):
        super().__init__(Layer, rngs=rngs)
        self.more = more
        self.bias = nnx.Param(jnp.ones(24), axes=("vocab",))

    def head(self, stream):
        x, kernel = self.norm(stream), self.tokens[...]
        logits = lambda: self.more(x, kernel, self.bias)
        return self.kernels.outputs(x, kernel, 20, logits)  # the other four are padding


def of_each_head(x, w, b):
    capped = 3 * jnp.tanh(x @ w.T / 3)
    masked = jnp.where(jnp.arange(24)[None, None] < 15, x @ w.T, -1e3)
    return capped + x @ w.T + b[...][None, None] + masked * 1e-2


def test_logits_of_the_models_own_are_those_of_one_device():
    agree(lambda rngs: Head(of_each_head, rngs=rngs))


@pytest.mark.slow
def test_no_kernel_takes_the_place_of_logits_of_the_models_own():
    """On any mesh: the model's own logits are made."""
    told = {}
    plan = hfjax.layout(
        lambda rngs: Head(of_each_head, rngs=rngs), optax.sgd(0.1), hfjax.make_mesh(), hfjax.DDP
    )
    state = hfjax.init(plan)
    for word in ("xla", "reference"):
        step = hfjax.eval_step(plan, next_token_loss, kernels={"cross_entropy": word})
        told[word] = step(state, tokens())["loss"]
    np.testing.assert_allclose(told["reference"], told["xla"], rtol=1e-6)


class OwnHead(GPT):
    """A subclass whose head is a linear map by itself, of a stream that is squashed."""

    def __init__(self, *, rngs):
        super().__init__(CONFIG, rngs=rngs)
        self.unembed = Linear((24, 24), ("embed", "vocab"), 1, 0.1, bias=False, rngs=rngs)

    def head(self, stream):
        return self.unembed(self.norm(jax.nn.softmax(stream)))


@pytest.mark.slow
def test_a_head_may_be_a_linear_map():
    agree(lambda rngs: OwnHead(rngs=rngs))


def by_head(q, k, v):
    """Attention that weighs heads by their number, and mixes them."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return y * jnp.arange(v.shape[2])[None, None, :, None] + v.mean(2, keepdims=True)


class TellsApart(nnx.Module):
    """A layer with an attention of its own."""

    def __init__(self, rngs):
        self.up = Linear((24, 12, 6), ("embed", "heads", None), 2, 0.1, rngs=rngs)
        self.down = Linear((12, 2, 24), ("heads", None, "embed"), 1, 0.1, rngs=rngs)
        self.kernels = local_ops

    def __call__(self, x):
        q, k, v = jnp.split(self.up(x), 3, axis=-1)
        return x + self.down(self.kernels.attention(by_head)(q, k, v))


@pytest.mark.slow
def test_an_attention_may_tell_heads_apart():
    agree(lambda rngs: Model(TellsApart, rngs=rngs))


def test_tokens_in_the_padding_of_the_vocabulary_or_below_0_are_as_on_one_device():
    config = GPTConfig.tiny(vocab=22, pad_vocab_to=24, length=12, layers=2, embed=24, heads=12)
    padding, negative = tokens(), {"tokens": tokens()["tokens"] % 22}
    padding["tokens"][0, 3] = 23
    negative["tokens"][:, 3] = -2  # no target, and read from the end
    losses = []
    for strategy, sizes in ((hfjax.DDP, {"data": 1}), (hfjax.GRID, {"row": 2, "tensor": 2})):
        mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        model = lambda rngs: Model(Layer, rngs=rngs, config=config)
        plan = hfjax.layout(model, optax.sgd(0.1), mesh, strategy)
        step, state = hfjax.eval_step(plan, next_token_loss), hfjax.init(plan)
        losses.append([step(state, given)["loss"] for given in (padding, negative)])
    assert np.isfinite(losses[0]).tolist() == [False, True]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def every_output(model, batch):
    x = model.embed(batch)
    return {
        "a mean of the stream": x.mean(1),
        "a norm of the width": norm(x),
        "twice": (x[:, :, None] * jnp.ones((1, 1, 2, 1))).reshape(*x.shape[:2], -1),
        "pairs": interleaved(x),
        "all in one": x.reshape(x.shape[0], -1),
        "positions and pairs": x.reshape(*x.shape[:2], -1, 2).swapaxes(2, 3).reshape(len(x), -1, 1),
        "rows and positions": x.reshape(-1, x.shape[-1]),
    }


@pytest.mark.slow
def test_outputs_are_those_of_one_device():
    found = []
    for strategy, sizes in ((hfjax.DDP, {"data": 1}), (BOTH, {"fsdp": 2, "row": 2, "tensor": 2})):
        mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        plan = hfjax.layout(lambda rngs: GPT(CONFIG, rngs=rngs), optax.sgd(0.1), mesh, strategy)
        found.append(hfjax.predict_step(plan, every_output)(hfjax.init(plan), tokens()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *found)


@pytest.mark.slow
def test_noise_from_keys_of_rows_and_of_the_step_is_that_of_one_device():
    def noisy(model, batch, key, example_keys):
        x = model.embed(batch)
        draw = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))
        return model.head(x + draw(example_keys) + jax.random.normal(key, x.shape))

    told = []
    for strategy, sizes in ((hfjax.DDP, {"data": 1}), (BOTH, {"fsdp": 2, "row": 2, "tensor": 2})):
        mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
        model = lambda rngs: GPT(CONFIG, rngs=rngs)
        plan = hfjax.layout(model, optax.sgd(0.1), mesh, strategy, forward=noisy)
        step = hfjax.train_step(plan, next_token_loss)
        _, metrics = step(hfjax.init(plan), tokens())
        told.append((metrics["loss"], metrics["grad_norm"]))
    np.testing.assert_allclose(*told, rtol=1e-5)


class Counts(Layer):
    """A layer that keeps a running mean of what it is given."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = nnx.BatchStat(jnp.zeros((1, 1, 24)))

    def __call__(self, x):
        self.seen[...] = 0.9 * self.seen[...] + 0.1 * x.mean((0, 1), keepdims=True)
        return super().__call__(x - self.seen[...])


@pytest.mark.slow
def test_statistics_that_a_model_writes_are_those_of_one_device():
    agree(lambda rngs: Model(Counts, Counts, rngs=rngs), CUBE, steps=2)


def test_what_meets_across_widths_is_told():
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], row=2, tensor=2)
    model = lambda rngs: Model(layers_of(stream=lambda x: jnp.sort(x, -1)), rngs=rngs)
    step = hfjax.train_step(hfjax.layout(model, optax.sgd(0.1), mesh, hfjax.GRID), next_token_loss)
    step.trace(tokens())
    assert "sort" in str(step.sequence_comms)
    assert "test_grid_programs.py" in str(step.sequence_comms)
