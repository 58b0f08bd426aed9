"""The mixture of experts against its numpy re-telling: DeepSpeed's gates and today's routing.

[B] rows, [S] tokens of each, [D] their width, [F] that inside an expert, [E]xperts, [k] choices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfjax.models.layers import LocalOps
from hfjax.models.moe import MoE, MoEConfig, MoELlama, Router, RouterMetrics, after_step, over_batch
from hfjax.models.moe.experts import DroplessRouting
from hfjax.models.moe.router import RouterNoise
from hfjax.utils.paths import flatten
from tests import moe_reference as reference
from tests.moe_reference import Routing
from tests.test_context_parallel import doubled

B, S, D, F, E = 2, 24, 8, 5, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, S, D))
UNUSED = RNG.random((B, S)) > 0.25
of = Router.preset


class Case(NamedTuple):
    """A layer, and what it is compared with."""

    mixing: dict[str, Any]  # keywords of MoE
    route: Callable[..., Routing]  # (logits, drawn) of a group -> its routing
    loss: Callable[..., float] = lambda logits, routing: routing.l_aux  # of a group, or a row
    train: bool = True
    shape: tuple[int, ...] = (B, S, D)


def top1(factor: float = 1.0, least: int = 4, **named: Any) -> Callable[..., Routing]:
    """Return DeepSpeed's `top1gating`."""

    def route(logits, drawn):
        priority = drawn.priority
        priorities = None if priority is None else np.broadcast_to(priority, logits.shape)
        given = {"gumbel": drawn.first, "priorities": priorities}
        return reference.top1(logits, factor, least, **given, **named)

    return route


def top2(factor: float = 1.0, least: int = 4, **named: Any) -> Callable[..., Routing]:
    """Return DeepSpeed's `top2gating`."""
    return lambda logits, drawn: reference.top2(logits, factor, least, gumbel=drawn.second, **named)


def topk(factor: float = 1.0, least: int = 4, **named: Any) -> Callable[..., Routing]:
    """Return DeepSpeed's `topkgating` for three choices."""
    return lambda logits, _: reference.topk(logits, 3, factor, least, **named)


def plain(route: Callable[..., Routing], *given: Any, **named: Any) -> Callable[..., Routing]:
    """Return a routing that draws nothing."""
    return lambda logits, _: route(logits, *given, **named)


ONE, TWO = {"top_k": 1, "capacity": 1.0}, {"top_k": 2, "capacity": 1.0}
THREE = {"top_k": 3, "capacity": 1.0}
RANDOM = {**ONE, "router": of("deepspeed-top1")}  # random token selection
FIRST = Router(normalise="none")  # the earliest tokens
TOP2 = Router(normalise="kept", priority="choice", first_choices_only=True)
BY_PLACE = Router(normalise="kept")
V3 = Router(scores="sigmoid", scale=2.5, bias_rate=1e-3, balance_loss=0.1, balance_over="row")
BIAS = RNG.normal(size=E)
NO_LOSS = lambda logits, routing: 0.0

CASES = {
    "top-1, random token selection": Case(RANDOM, top1()),
    "top-1, RSample": Case({**ONE, "router": Router(normalise="none", noise="rsample")}, top1()),
    "top-1, both": Case(
        {**ONE, "router": Router(normalise="none", noise="rsample", priority="random")}, top1()
    ),
    "top-1, the earliest": Case({**ONE, "router": FIRST}, top1()),
    "top-1, Jitter": Case({**ONE, "router": Router(normalise="none", noise="jitter")}, top1()),
    "a capacity factor": Case({**RANDOM, "capacity": 0.6, "min_capacity": 1}, top1(0.6, 1)),
    "a least capacity": Case({**RANDOM, "capacity": 0.5, "min_capacity": 5}, top1(0.5, 5)),
    "a least capacity of 0 is one place": Case(
        {**ONE, "router": FIRST, "capacity": 0.1, "min_capacity": 0}, top1(0.1, 0)
    ),
    "a capacity of evaluations": Case(
        {**ONE, "router": FIRST, "eval_capacity": 0.5, "min_capacity": 1},
        top1(0.5, 1), NO_LOSS, train=False,
    ),
    "nothing is drawn in evaluations": Case(
        {**ONE, "router": Router("softmax", "none", noise="rsample", priority="random")},
        top1(), NO_LOSS, train=False,
    ),
    "top-1, nothing dropped": Case({**RANDOM, "capacity": None}, top1(drop=False)),
    "top-1 of groups": Case({**RANDOM, "group": 8, "min_capacity": 1}, top1(least=1)),
    "top-1 of whole rows": Case({**RANDOM, "group": B * S}, top1()),
    "top-1 of rows without a sequence": Case(
        {**RANDOM, "group": 12}, top1(), shape=(B * S, D)
    ),
    "top-2": Case({**TWO, "router": of("deepspeed-top2")}, top2()),
    "top-2, the second by its score": Case({**TWO, "router": TOP2}, top2()),
    "top-2, few places": Case({**TWO, "capacity": 0.5, "router": TOP2}, top2(0.5)),
    "top-2, nothing dropped": Case(
        {**TWO, "capacity": None, "router": of("deepspeed-top2")}, top2(drop=False)
    ),
    "top-k by probability": Case({**THREE, "router": of("deepspeed-topk")}, topk()),
    "top-k, few places": Case(
        {**THREE, "capacity": 0.4, "router": of("deepspeed-topk")}, topk(0.4)
    ),
    "top-k by position": Case({**THREE, "router": BY_PLACE}, topk(policy="position")),
    "top-k, nothing dropped": Case(
        {**THREE, "capacity": None, "router": of("deepspeed-topk")}, topk(drop=False)
    ),
    "residual experts": Case({**RANDOM, "residual": True}, top1()),
    "Mixtral": Case(
        {"capacity": None, "router": of("mixtral")}, plain(reference.mixtral, 2), NO_LOSS
    ),
    "Qwen3-MoE": Case(
        {"capacity": None, "top_k": 3, "router": of("qwen3")},
        plain(reference.qwen3_moe, 3), NO_LOSS,
    ),
    "Qwen3-MoE, not normalised": Case(
        {"capacity": None, "top_k": 3, "router": Router(normalise="none", balance_loss=0)},
        plain(reference.qwen3_moe, 3, normalise=False), NO_LOSS,
    ),
    "DeepSeek-V3": Case(
        {"capacity": None, "shared": 2, "router": V3},
        plain(reference.deepseek_v3, 2, BIAS),
        lambda logits, _: reference.sequence_loss(logits, 2),
    ),
    "DeepSeek-V3, groups of experts": Case(
        {"capacity": None, "shared": 1, "router": replace(V3, groups=3, best_groups=2)},
        plain(reference.deepseek_v3, 2, BIAS, groups=3, chosen_groups=2),
        lambda logits, _: reference.sequence_loss(logits, 2),
    ),
    "z-loss": Case(
        {"capacity": None, "router": Router(balance_loss=0, z_loss=0.1)},
        plain(reference.mixtral, 2), lambda logits, _: reference.z_loss(logits),
    ),
}  # fmt: skip


class Watching(LocalOps):
    """Remembers what experts were given, and gives a loss what routers tell."""

    def __init__(self):
        self.tokens: list[jax.Array] = []
        self.routed: Any = None

    def experts(self, mixture, x_GTD, routing):
        self.tokens.append(x_GTD)
        self.routed = routing
        return mixture.run_all(x_GTD, routing)

    def add_router_metrics(self, outputs, add_metrics, require_metrics):
        assert require_metrics
        return add_metrics(outputs)


def layer(mixing: dict[str, Any]) -> Any:
    """Return a layer whose tokens choose very differently."""
    made = MoE(D, F, E, rngs=nnx.Rngs(0), **mixing)
    moe: Any = doubled(made) if jnp.ones(()).dtype == np.float64 else made
    for _, parameter in nnx.to_flat_state(nnx.state(moe, nnx.Param)):
        parameter[...] = parameter[...] * 25
    if moe.router_bias is not None:
        moe.router_bias[...] = jnp.asarray(BIAS)
    moe.kernels = Watching()
    return moe


def program_of(run: Callable[..., Any], moe: Any) -> Callable[..., Any]:
    """Return arrays -> run(layer, arrays), for one program."""
    graph, state = nnx.split(moe)
    return lambda *given: run(nnx.merge(graph, state), *given)


def swiglu(arrays: dict[str, Any], name: str) -> tuple:
    """Return gate, up and down of an MLP, or of experts."""
    last = "/kernel" if f"{name}/gate_up/kernel" in arrays else ""
    gate_up, down = (arrays[f"{name}/{part}{last}"] for part in ("gate_up", "down"))
    return gate_up[..., 0], gate_up[..., 1], down


def retold(case: Case, moe: Any, arrays: dict[str, Any], drawn: Any) -> tuple:
    """Return what numpy makes of a layer: outputs, losses of groups, and routing of groups."""
    x, router = arrays["x"], moe.router
    cut: Any = lambda size: lambda a: None if a is None else np.reshape(a, (-1, size, a.shape[-1]))
    row = x[..., 0].size // len(x)
    by_group = cut(moe.mixing.group or row)
    by_loss = cut(row) if router.balance_over == "row" else by_group
    logits = reference.gate_logits(x, arrays["router_kernel"], drawn.jitter)
    found, outputs = [], []
    for number, (tokens, of_group) in enumerate(zip(by_group(x), by_group(logits), strict=True)):
        of_tokens = [None if a is None else by_group(a)[number] for a in drawn]
        found.append(case.route(of_group, type(drawn)(*of_tokens)))
        made = reference.experts_layer(tokens, found[-1], *swiglu(arrays, "each"))
        outputs.append(made)
    y = np.reshape(outputs, x.shape)
    if moe.shared is not None:
        y = y + reference.swiglu(x, *swiglu(arrays, "shared"))
    if moe.residual is not None:
        mlp = reference.swiglu(x, *swiglu(arrays, "residual"))
        y = reference.residual(x, y, mlp, *(arrays[f"mix/{name}"] for name in ("kernel", "bias")))
    each = by_loss(logits)
    of_row = found if len(found) == len(each) else [None] * len(each)
    return y, np.array([case.loss(*pair) for pair in zip(each, of_row, strict=True)]), found


def check_routing(routed: Any, found: list[Routing], told: Any) -> None:
    """Compare where tokens went, what they weigh, and what is counted."""
    if isinstance(routed, DroplessRouting):
        kept, chosen = np.full(routed.experts.shape, True), routed.experts
    else:
        _, count, capacity = routed.choice_at.shape
        assert capacity == min(found[0].capacity, routed.slot_of.shape[1])
        kept, chosen = routed.slot_of < count * capacity, routed.slot_of // capacity
    wanted = {name: np.array([getattr(r, name) for r in found]) for name in ("kept", "experts")}
    np.testing.assert_array_equal(kept, wanted["kept"])
    np.testing.assert_array_equal(chosen[kept], wanted["experts"][kept])
    np.testing.assert_allclose(routed.weights, [r.weights for r in found], atol=1e-12)
    np.testing.assert_array_equal(told.load.sum((0, 1)), sum(r.counts for r in found))
    assert float(told.dropped.sum()) == sum(r.dropped for r in found)


def ran(moe: Any, x: np.ndarray, along: np.ndarray) -> tuple:
    """Return gradients of y * along + the losses, and (y, told, where tokens went, what is drawn).

    All arrays are in host memory, gradients by path.
    """
    graph, parameters, others = nnx.split(moe, nnx.Param, ...)

    def total(x, parameters):
        module: Any = nnx.merge(graph, parameters, others)
        drawn = RouterNoise() if module.deterministic else module._draw_noise(x)
        y, told = module(x)
        return (y * along).sum() + told.loss.sum(), (y, told, module.kernels.routed, drawn)

    step = jax.jit(jax.grad(total, (0, 1), has_aux=True))
    (of_x, of_parameters), found = jax.device_get(step(x, parameters))
    return {"x": of_x} | flatten(nnx.to_pure_dict(of_parameters)), found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("top-1, random token selection", "top-1 of rows without a sequence", "z-loss")
def test_a_layer_equals_its_numpy_retelling_and_so_does_its_gradient(name):
    case, along = CASES[name], RNG.normal(size=CASES[name].shape)
    x = X.reshape(case.shape)
    with jax.enable_x64(True):
        moe = layer(case.mixing)
        moe.train() if case.train else moe.eval()
        gradients, (y, told, routed, drawn) = ran(moe, x, along)
        arrays = {"x": x} | flatten(nnx.to_pure_dict(nnx.state(moe, nnx.Param)))
    arrays = {path: np.asarray(a) for path, a in arrays.items()}
    coefficient = moe.router.z_loss or moe.router.balance_loss
    wanted, losses, found = retold(case, moe, arrays, drawn)
    check_routing(routed, found, told)
    np.testing.assert_allclose(y, wanted, atol=1e-12)
    mean = told.loss.reshape(len(losses), -1).mean(1)
    np.testing.assert_allclose(mean, coefficient * losses, atol=1e-12)

    def total(changed):
        y, losses, _ = retold(case, moe, arrays | changed, drawn)
        return (y * along).sum() + coefficient * losses.mean() * x[..., 0].size

    for path, gradient in gradients.items():
        step = 1e-6 * RNG.normal(size=gradient.shape)
        up, down = (total({path: arrays[path] + sign * step}) for sign in (1, -1))
        assert (gradient * step).sum() == pytest.approx((up - down) / 2, rel=1e-6), path


def test_tokens_that_are_not_used_go_nowhere_and_are_in_no_loss():
    case = Case({**ONE, "capacity": 0.8, "min_capacity": 1, "router": FIRST}, top1())
    with jax.enable_x64(True):
        moe = layer(case.mixing)
        run = jax.jit(program_of(lambda moe, x, used: moe(x, used=used), moe))
        y, told = jax.device_get(run(X, UNUSED))
        router = np.asarray(moe.router_kernel[...])
    for row, used in enumerate(UNUSED):
        logits = X[row] @ router
        found = reference.top1(logits, 0.8, 1, used=used)
        assert not y[row][~found.kept[:, 0]].any()
        assert y[row][found.kept[:, 0]].any(-1).all()
        np.testing.assert_array_equal(told.load[row, 0], found.counts)
        assert told.dropped[row, 0] == found.dropped > 0
        # DeepSpeed's mean of scores has those tokens too; ours is of the tokens that count.
        alone = reference.top1(logits[used], 0.8, 1).l_aux
        np.testing.assert_allclose(told.loss[row], 0.01 * alone * used, atol=1e-12)


def test_an_expert_takes_at_most_as_many_tokens_as_a_group_has():
    moe = layer({**ONE, "group": 4, "min_capacity": 8, "router": FIRST})
    with pytest.warns(UserWarning, match="the 6 experts have 24 places for them, 4 each"):
        jax.eval_shape(program_of(lambda moe, x: moe(x), moe), X.astype(np.float32))
    assert moe.kernels.routed.choice_at.shape == (B * S // 4, E, 4)  # DeepSpeed pads to 8


def test_tokens_in_a_plane_are_those_of_a_row():
    moe = layer({**TWO, "router": Router(noise="jitter", priority="random", balance_over="row")})
    run, x = jax.jit(program_of(lambda moe, x: moe(x), moe)), X.astype(np.float32)
    y, told = run(x)
    z, plane = run(x.reshape(B, 4, 6, D))
    np.testing.assert_array_equal(z.reshape(y.shape), y)
    np.testing.assert_array_equal(plane.loss.reshape(B, S), told.loss)
    np.testing.assert_array_equal(plane.load, told.load)


def test_what_is_drawn_differs_by_row_and_position_and_has_the_spread_that_deepspeed_gives_it():
    router = Router(normalise="none", noise="jitter", sample_second=True, priority="random")
    draw = lambda moe, x: moe._draw_noise(x)
    run = jax.jit(program_of(draw, layer({"top_k": 2, "router": router})))
    drawn = run(np.zeros((20, 50, D), np.float32))
    jitter, gumbel, uniform = map(np.asarray, (drawn.jitter, drawn.second, drawn.priority))
    assert drawn.first is None
    assert 0.99 <= jitter.min() < 0.9901 < 1.0099 < jitter.max() <= 1.01
    assert gumbel.mean() == pytest.approx(np.euler_gamma, abs=0.05)
    assert 0 <= uniform.min() < 0.01 < 0.99 < uniform.max() < 1
    assert len(np.unique(gumbel[..., 0])) > 990
    other = program_of(draw, layer({"top_k": 1, "router": Router(noise="rsample")}))
    drawn = jax.eval_shape(other, np.zeros((2, 3, D), np.float32))
    assert [np.shape(x) for x in drawn if x is not None] == [(2, 3, E)]


def test_a_loss_over_the_batch_is_that_of_each_layer_and_they_add_up():
    """transformers takes both means over the tokens of all layers together, and multiplies by k."""
    router = Router(balance_loss=0.1, balance_over="batch")
    shape: Any = {"vocab": 32, "length": 12, "layers": 2, "heads": 2, "kv_heads": 1, "embed": D}
    config = MoEConfig(**shape, mlp=F, experts=(6, 4), router=router, capacity=None)

    with jax.enable_x64(True):
        model: Any = doubled(MoELlama(config, rngs=nnx.Rngs(0)))
        kernels = model.kernels = Watching()
        for block in model.layers:
            block.mlp.router_kernel[...] = block.mlp.router_kernel[...] * 25
            block.mlp.kernels = kernels
        graph, state = nnx.split(model)
        batch = {"tokens": RNG.integers(0, 32, (3, 13))}
        run = lambda state: (nnx.merge(graph, state)(batch).router_metrics.loss, kernels.tokens)
        loss, tokens = jax.jit(run)(state)
    routers = [np.asarray(block.mlp.router_kernel[...]) for block in model.layers]
    logits = [np.asarray(x) @ kernel for x, kernel in zip(tokens, routers, strict=True)]
    of_layers = [x.reshape(-1, x.shape[-1]) for x in logits]
    wanted = sum(reference.batch_loss([x], 2) / 2 for x in of_layers)
    np.testing.assert_allclose(loss, 0.1 * wanted * np.ones((3, 12)), rtol=1e-12)


def test_losses_of_layers_add_up_and_an_evaluation_adds_none():
    told = lambda layers: RouterMetrics.start(jnp.zeros((2, 3, D)), layers, E, scores=True)
    layer, router = jax.tree.map(np.ones_like, told(1)), Router(balance_over="batch")
    both = told(2).append(layer).append(layer)
    np.testing.assert_array_equal(both.loss, np.full((2, 3), 2))
    np.testing.assert_array_equal(over_batch(both, router, training=False).loss, both.loss)
    assert (over_batch(both, router).loss > both.loss).all()


def test_a_loss_of_all_layers_together_is_that_of_transformers():
    """It is theirs over k: a choice counts as one there, and as 1 / k here."""
    logits = [RNG.normal(size=(3, 5, E)) for _ in range(2)]
    gates = np.stack([reference.softmax(x) for x in logits], 1)  # [rows, layers, tokens, E]
    chosen = reference.mask_of(reference.largest(gates.reshape(-1, E), 2), E).reshape(gates.shape)
    told = RouterMetrics.start(jnp.zeros((3, 5, D)), 2, E, scores=True)
    told = replace(told, load=jnp.asarray(chosen.sum(2)), scores=jnp.asarray(gates.sum(2)))
    router = Router(balance_loss=0.1, balance_over="batch", pools_layers=True)
    wanted = reference.batch_loss([x.reshape(-1, E) for x in logits], 2) / 2
    np.testing.assert_allclose(over_batch(told, router).loss, 0.1 * wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="only the loss over the batch is added when all layers"):
        Router(balance_over="row", pools_layers=True)


@pytest.mark.parametrize("recentred", [False, True])
def test_biases_move_towards_even_loads(recentred):
    """As many tokens as the mean: no move, though a third of them is rounded."""
    counts = np.array([[1, 2, 3], [3, 3, 3], [0, 9, 0], [1, 1, 7], *RNG.integers(0, 9, (60, 3))])
    counts += 1
    bias = jnp.asarray(RNG.normal(size=(len(counts), 3)), "float32")
    load = jnp.asarray(counts / counts.sum(1, keepdims=True), "float32")
    metrics = {"expert_load": load, "dropped": jnp.zeros(3), "router_entropy": jnp.ones(3)}
    found, told = after_step({"layers/mlp/router_bias": bias}, metrics, 0.5, recentred)
    rows = zip(bias, counts, strict=True)
    wanted = [reference.updated_bias(*row, rate=0.5, recentred=recentred) for row in rows]
    np.testing.assert_allclose(found["layers/mlp/router_bias"], wanted, atol=1e-6)
    assert float(told["load_max_over_mean"]) == pytest.approx((load.max(1) * 3).max())


def test_biases_of_a_list_are_moved_by_their_own_layers_load():
    load = jnp.array([[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0]])
    metrics = {"expert_load": load, "dropped": jnp.zeros(3), "router_entropy": jnp.ones(3)}
    names = ("layers/2/mlp/router_bias", "layers/10/mlp/router_bias", "layers/1/mlp/router_bias")
    widths = dict(zip(names, (3, 4, 2), strict=True))
    biases = {path: jnp.zeros(width) for path, width in widths.items()}
    found, told = after_step(biases, metrics, 1.0, recentre=False, counts=(2, 3, 4))
    assert {path: x.tolist() for path, x in found.items()} == {
        "layers/1/mlp/router_bias": [-1, 1],
        "layers/2/mlp/router_bias": [1, -1, -1],
        "layers/10/mlp/router_bias": [1, 1, -1, 1],
    }
    assert float(told["load_max_over_mean"]) == 4
    with pytest.raises(ValueError, match=r"1 layers have a router_bias, and 3 told their load"):
        after_step({"mlp/router_bias": jnp.zeros(4)}, metrics, 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capacity": 0}, r"capacity=0 of a mixture: a positive factor .* or None"),
        ({"eval_capacity": -1.0}, r"eval_capacity=-1.0 of a mixture: a positive factor"),
        ({"min_capacity": -1}, r"min_capacity=-1 of a mixture: a whole number, at least 0"),
        ({"group": 0}, r"group=0 of a mixture: a whole number, at least 1. None: a row"),
        ({"top_k": 7}, r"MoE\(experts=6, top_k=7\): .* Choose top_k from 1 to the number of ex"),
        ({"top_k": True}, r"top_k=True of a mixture: a whole number, at least 1"),
        ({"router": Router(groups=4)}, r"groups=4\) of 6 experts: .* a number that divides 6"),
        (
            {"top_k": 3, "router": Router(groups=3)},
            r"top_k=3\): Router\(groups=3, best_groups=1\) leaves 2 of 6 experts",
        ),
        ({"capacity": True}, r"capacity=True of a mixture: a positive factor"),
        ({"capacity": float("nan")}, r"capacity=nan of a mixture: a positive factor"),
        ({"capacity": float("inf")}, r"capacity=inf of a mixture: a positive factor"),
        ({"residual": "no"}, r"residual='no' of a mixture: true or false"),
        ({"router": 1.5}, r"router=1.5 of a mixture: a hfjax.models.moe.Router, or the name"),
        ({"router": "gshard"}, r"router preset 'gshard': one of mixtral, qwen3, deepseek-v3"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        MoE(D, F, E, rngs=nnx.Rngs(0), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scores": "tanh"}, r"Router\(scores='tanh'\): one of softmax, sigmoid"),
        ({"noise": "gaussian"}, r"noise='gaussian'\): one of None, jitter, rsample"),
        ({"z_loss": -1}, r"Router\(z_loss=-1\): a finite number, at least 0"),
        ({"scale": "3"}, r"Router\(scale='3'\): a finite number, at least 0"),
        ({"bias_rate": float("nan")}, r"Router\(bias_rate=nan\): a finite number"),
        ({"balance_loss": True}, r"Router\(balance_loss=True\): a finite number"),
        ({"balance_loss": float("inf")}, r"Router\(balance_loss=inf\): a finite number"),
        ({"groups": 1.5}, r"groups=1.5, best_groups=1\): a token chooses .* whole numbers"),
        ({"groups": float("inf")}, r"groups=inf, best_groups=1\): .* Give whole numbers"),
        ({"groups": "3"}, r"groups='3', best_groups=1\): .* Give whole numbers"),
        ({"recentre": "no"}, r"Router\(recentre='no'\): true or false"),
        ({"groups": 2, "best_groups": 3}, r"best_groups=3\): a token chooses at least one group"),
    ],
)
def test_a_router_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Router(**given)


@pytest.mark.parametrize(
    ("shape", "group", "fits"),
    [((2, 24, D), 5, "4, 6, 8, 12, 24, 48"), ((2, 24, D), 72, "24, 48"), ((12, D), 5, "4, 6, 12")],
)
def test_groups_that_do_not_divide_are_refused_with_those_that_do(shape, group, fits):
    moe = MoE(D, F, E, group=group, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"MoE\(group={group}\): .* choose one of .*{fits}\."):
        moe(jnp.zeros(shape))


def test_an_expert_of_ones_own_has_parameters_alone():
    norm = lambda rngs: nnx.BatchNorm(D, rngs=rngs)
    with pytest.raises(ValueError, match=r"an expert holds \w+, which is no parameter"):
        MoE(D, F, E, expert=norm, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ((4,), r"experts=\(4,\) are 1 numbers for 2 layers"),
        ((0, 0), "no layer has experts"),
        (-5, "experts=-5: a whole number, at least 0, or one for each layer"),
        (1.5, "experts=1.5: a whole number, at least 0"),
        (True, "experts=True: a whole number, at least 0"),
        ((4, float("nan")), r"experts=\(4, nan\): a whole number, at least 0"),
    ],
)
def test_numbers_of_experts_that_do_not_fit_the_layers_are_refused(experts, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(layers=2, experts=experts)
