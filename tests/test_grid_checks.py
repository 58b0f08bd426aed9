"""What computes something else with parts than with the whole is refused on a grid, and why."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.parts import STREAM, Dropout, Linear, plain, stacked
from hfjax.testing import assert_strategies_agree

CONFIG = GPTConfig.tiny(vocab=24, length=12, layers=2, embed=24, heads=12)


def tokens(rows=8, length=12):
    drawn = np.random.default_rng(0).integers(0, 24, (rows, length + 1))
    return {"tokens": drawn.astype(np.int32)}


class Model(GPT):
    """A GPT with layers of its own."""

    def __init__(self, block, *, rngs, config=CONFIG):
        super().__init__(config, rngs=rngs)
        self.layers = stacked(2, block, rngs)


class Layer(nnx.Module):
    """Two linear maps, and something in the stream and between them."""

    def __init__(self, rngs, stream=None, inside=None):
        self.up = Linear((24, 24), ("embed", "mlp"), 1, 0.1, rngs=rngs)
        self.down = Linear((24, 24), ("mlp", "embed"), 1, 0.1, rngs=rngs)
        self.stream, self.inside = stream or (lambda x: x), inside or (lambda x: x)

    def __call__(self, x):
        return x + self.down(self.inside(self.up(self.stream(x))))


def step_of(model, forward=None, **options):
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], row=2, tensor=2)
    plan = hfjax.layout(model, optax.sgd(0.1), mesh, hfjax.GRID, forward=forward)
    return hfjax.train_step(plan, next_token_loss, **options)


def refused(model, said, **options):
    with pytest.raises(ValueError, match=said):
        step_of(model, **options).trace(tokens())


def norm(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def only_if_wide(x):
    return jnp.tanh(x) if x.shape[-1] > 12 else x


def interleaved(x):
    """Pairs that the whole forms of its two halves, and a part of its own two."""
    halves = x.reshape(*x.shape[:-1], 2, -1)
    return halves.swapaxes(-1, -2).reshape(x.shape)


IN_THE_STREAM = {
    "a norm": (norm, "reduces entries of embed"),
    "the width": (lambda x: x / math.sqrt(x.shape[-1]), "the number of entries of embed"),
    "a branch": (only_if_wide, "something else with another number of entries of embed"),
    "a rank": (lambda x: x * jnp.arange(x.shape[-1])[None, None], "counts entries of embed"),
    "numbers": (lambda x: x * np.linspace(0, 1, x.shape[-1])[None, None], "embed"),
    "shifts": (lambda x: jnp.roll(x, 1, axis=1), "cuts or joins positions of the residual"),
    "a mean of positions": (lambda x: x - x.mean(1, keepdims=True), "reduces positions of the"),
    "pairs": (interleaved, "rearranges entries of embed"),
    "a constant of one device": (
        lambda x: x * jnp.ones((1, 1, 24)),
        r"no parts .* JAX says .*\b24\b",
    ),
    "sorting": (lambda x: jnp.sort(x, axis=-1), "sorts entries of embed"),
    "the greatest": (lambda x: jnp.where(x == x.max(-1, keepdims=True), x, 0), "reduces .* embed"),
    "a mean under another name": (lambda x: x - plain_mean(x), "reduces entries of embed"),
}
INSIDE = {
    "softmax": (jax.nn.softmax, "reduces entries of mlp"),
    "rows": (lambda x: x - x.mean(0, keepdims=True), "reduces rows inside of attention and MLP"),
    "the width": (lambda x: x * x.shape[-1], "the number of entries of mlp"),
    "a count of rows": (lambda x: x * x.shape[0], "the number of rows inside"),
    "halves": (lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1), "cuts or joins .* mlp"),
    "accumulating": (lambda x: jnp.cumsum(x, -1), "accumulates entries of mlp"),
}


def plain_mean(x):
    return plain.mean(x, "embed")  # not the step's own: `self.kernels` would be


@pytest.mark.parametrize("case", IN_THE_STREAM)
def test_what_needs_the_whole_stream_is_refused_with_its_line(case):
    function, said = IN_THE_STREAM[case]
    refused(lambda rngs: Model(lambda rngs: Layer(rngs, stream=function), rngs=rngs), said)


@pytest.mark.parametrize("case", INSIDE)
def test_what_needs_the_whole_inside_is_refused_with_its_line(case):
    function, said = INSIDE[case]
    refused(lambda rngs: Model(lambda rngs: Layer(rngs, inside=function), rngs=rngs), said)


def along_the_sequence(x):
    """Inside, sequences are whole: anything may be done along them."""
    number = jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None]
    return jnp.cumsum(jnp.roll(x, 1, axis=1), axis=1) / (1 + number) + x.mean(1, keepdims=True)


def in_heads(x):
    """Parts of a dimension stay its outer part."""
    return jnp.sort(x.reshape(*x.shape[:2], -1, 2), axis=-1).reshape(x.shape)


def test_what_is_right_for_parts_trains_as_on_one_device():
    """Elements, sequences inside, pairs of neighbours."""
    stream = lambda x: in_heads(jnp.tanh(x))
    inside = lambda x: in_heads(along_the_sequence(jax.nn.silu(x)))
    model = lambda rngs: Model(lambda rngs: Layer(rngs, stream, inside), rngs=rngs)
    grid = {"grid": (hfjax.GRID.edit(replicate_below=0), {"row": 2, "tensor": 2})}
    with jax.enable_x64(True):
        found = assert_strategies_agree(
            model, next_token_loss, tokens(), grid, precision="fp64", unroll=1, steps=1
        )
    assert max(found.values()) < 1e-9


class Twice(Layer):
    """A second map into what the first one made: of the same width, so that shapes would fit."""

    def __call__(self, x):
        return x + self.down(self.up(self.up(x)))


class Asks(Layer):
    """A layer that asks the step's kernels."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.kernels = plain


class MeanInside(Asks):
    """The step's mean over the stream's width, asked for inside."""

    def __call__(self, x):
        y = self.up(x)
        return x + self.down(y - self.kernels.mean(y, "embed"))


class DropsRoutes(Layer):
    """Dropout of something in the stream that has not its width."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.up.kernels.mean(x, "embed"))


class Positions(Asks):
    """The stream's positions, asked for inside."""

    def __call__(self, x):
        y = self.up(x)
        at = self.kernels.positions(y.shape[1], STREAM)
        return x + self.down(y if at is None else y * at[None, :, None])


class Bare(Layer):
    """A parameter whose dimension has no name."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.scale = nnx.Param(jnp.ones(24))

    def __call__(self, x):
        return super().__call__(x * self.scale[...][None, None])


class BareTable(GPT):
    """A table whose dimensions have no names."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.more = nnx.Param(jnp.ones((24, 24)))

    def embed(self, batch):
        return super().embed(batch) + self.kernels.lookup(self.more[...], batch["tokens"][:, :-1])


def test_a_table_without_names_is_refused():
    refused(
        lambda rngs: BareTable(CONFIG, rngs=rngs), "dimensions are not named vocab and embed, in"
    )


MISUSED = {
    "a map inside": (Twice, "a linear map that is not given what it leads from"),
    "a mean inside": (MeanInside, "of an array whose last dimension is not embed"),
    "dropout of means": (DropsRoutes, "dropout of an array whose last dimension is not embed"),
    "positions inside": (Positions, "or dropout, of what is not the residual stream"),
    "no name": (Bare, "an array whose dimension has no name"),
}


@pytest.mark.parametrize("case", MISUSED)
def test_parts_that_are_asked_for_what_they_do_not_have_are_refused(case):
    block, said = MISUSED[case]
    refused(lambda rngs: Model(block, rngs=rngs), said)


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


@pytest.mark.parametrize("rule", [straight, centred])
@pytest.mark.parametrize("where", ["stream", "inside"])
def test_rules_of_derivatives_are_looked_at(rule, where):
    split = {"stream": "embed", "inside": "mlp"}[where]
    model = lambda rngs: Model(lambda rngs: Layer(rngs, **{where: rule}), rngs=rngs)
    refused(model, f"in a gradient reduces entries of {split}")


class Head(Model):
    """A subclass whose logits are more than its operands' product."""

    def __init__(self, more, *, rngs):
        super().__init__(Layer, rngs=rngs)
        self.more = more
        self.bias = nnx.Param(jnp.ones(24), axes=("vocab",))

    def head(self, stream):
        x, kernel = self.norm(stream), self.tokens[...]
        logits = lambda: self.more(x, kernel, self.bias)
        return self.kernels.outputs(x, kernel, 20, logits)  # the other four are padding


HEADS = {
    "a soft cap": lambda x, w, b: 3 * jnp.tanh(x @ w.T / 3),
    "a bias": lambda x, w, b: x @ w.T + b[...][None, None],
    "a mask of its own": lambda x, w, b: jnp.where(jnp.arange(24)[None, None] < 5, x @ w.T, -1e9),
    "nothing more": lambda x, w, b: x @ w.T,
}


@pytest.mark.parametrize("case", HEADS)
def test_logits_of_the_models_own_are_refused_with_the_remedy(case):
    refused(lambda rngs: Head(HEADS[case], rngs=rngs), "Leave out the function")


def test_no_kernel_takes_the_place_of_logits_of_the_models_own():
    """On any mesh: the model's own logits are made."""
    capped, told = HEADS["a soft cap"], {}
    plan = hfjax.layout(
        lambda rngs: Head(capped, rngs=rngs), optax.sgd(0.1), hfjax.make_mesh(), hfjax.DDP
    )
    state = hfjax.init(plan)
    for word in ("xla", "reference"):
        step = hfjax.eval_step(plan, next_token_loss, kernels={"cross_entropy": word})
        told[word] = step(state, tokens())["loss"]
    np.testing.assert_allclose(told["reference"], told["xla"], rtol=1e-6)


class LocalRows(GPT):
    """A head that takes the rows of a part for the vocabulary."""

    def head(self, stream):
        x, kernel = self.norm(stream), self.tokens[...]
        return self.kernels.outputs(x, kernel, kernel.shape[0], lambda: x @ kernel.T)


class PartOfTokens(GPT):
    """Looks up only the tokens of the positions that are here."""

    def embed(self, batch):
        return self.kernels.lookup(self.tokens[...], self.kernels.of_stream(batch["tokens"]))


def test_misuse_of_lookup_and_outputs_is_refused():
    refused(lambda rngs: LocalRows(CONFIG, rngs=rngs), "the whole vocabulary, which is up to 24")
    refused(lambda rngs: PartOfTokens(CONFIG, rngs=rngs), "tokens that are a part of their rows")


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


def test_what_is_printed_changes_nothing():
    def shown(x):
        jax.debug.print("here")
        return x

    model = lambda rngs: Model(lambda rngs: Layer(rngs, stream=shown), rngs=rngs)
    step_of(model).trace(tokens())


class OwnHead(GPT):
    """A subclass whose head is a linear map by itself."""

    def __init__(self, *, rngs):
        super().__init__(CONFIG, rngs=rngs)
        self.unembed = Linear((24, 24), ("embed", "vocab"), 1, 0.1, bias=False, rngs=rngs)

    def head(self, stream):
        return self.unembed(self.norm(stream))


class Squashed(GPT):
    """A subclass that does something along the width before its head."""

    def head(self, stream):
        return super().head(jax.nn.softmax(stream))


def test_heads_of_a_subclass_are_looked_at_too():
    refused(lambda rngs: OwnHead(rngs=rngs), r"in place of self.kernels.outputs\(…\)")
    refused(lambda rngs: Squashed(CONFIG, rngs=rngs), "reduces entries of embed")


OUTPUTS = {
    "a mean of the stream": (lambda x: x.mean(1), "reduces positions of the residual stream"),
    "a norm of the width": (norm, "reduces entries of embed"),
    "twice": (
        lambda x: (x[:, :, None] * jnp.ones((1, 1, 2, 1))).reshape(*x.shape[:2], -1),
        "rearranges entries of embed",
    ),
    "pairs": (interleaved, "rearranges entries of embed"),
    "all in one": (
        lambda x: x.reshape(x.shape[0], -1),
        r"joins positions of the residual stream and embed with something else in dimension 1 of 2",
    ),
    "positions and pairs": (
        lambda x: x.reshape(*x.shape[:2], -1, 2).swapaxes(2, 3).reshape(x.shape[0], -1, 1),
        "positions of the residual stream",
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_parts_do_not_make_are_refused(case):
    made, said = OUTPUTS[case]
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], row=2, tensor=2)
    plan = hfjax.layout(lambda rngs: GPT(CONFIG, rngs=rngs), optax.sgd(0.1), mesh, hfjax.GRID)
    predict = hfjax.predict_step(plan, lambda model, batch: made(model.embed(batch)))
    with pytest.raises(ValueError, match=said):
        predict(hfjax.init(plan), tokens())


def noisy(model, batch, row_keys):
    """Noise for each row, the same on all devices of a grid: each would add it to its own part."""
    x = model.embed(batch)
    draw = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))
    return model.head(x + draw(row_keys))


def test_noise_that_all_devices_would_draw_alike_is_refused():
    said = r"draws random numbers for a part of an array \(.*test_grid_checks"
    refused(lambda rngs: GPT(CONFIG, rngs=rngs), said, forward=noisy)


def test_evaluations_are_looked_at_as_well():
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], row=2, tensor=2)
    model = lambda rngs: Model(lambda rngs: Layer(rngs, stream=norm), rngs=rngs)
    plan = hfjax.layout(model, optax.sgd(0.1), mesh, hfjax.GRID)
    with pytest.raises(ValueError, match="reduces entries of embed"):
        hfjax.eval_step(plan, next_token_loss)(hfjax.init(plan), tokens())
