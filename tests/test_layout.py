"""Where everything lives: derived from the table, editable by entry, checked before tracing."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.models.gpt import GPT, next_token_loss
from hfjax.parallel.param_specs import Array, check_spec, num_shards, spec_from_rules
from hfjax.parallel.strategy import (
    CONTEXT,
    DDP,
    FSDP,
    HSDP,
    PIPE,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    Strategy,
)
from hfjax.utils.paths import flatten
from hfjax.utils.renamed import MARKS
from tests.small_gpt import gpt_layout, mlp_layout, tokens

MESH = hfjax.make_mesh(data=2, fsdp=2, tensor=2)
ALL = {"replicate_below": 0}
UP = "layers/mlp/up/kernel"  # ("layers", "embed", "mlp"), 2 x 32 x 128


def test_rows_name_dimensions_and_the_star_takes_the_first_free_one_that_divides():
    three = FSDP.edit(**ALL) | TENSOR
    layout = gpt_layout(three.edit(**ALL), MESH.shape)
    assert layout.specs[UP] == P(None, "fsdp", "tensor")
    assert layout.specs["layers/mlp/down/kernel"] == P(None, "tensor", "fsdp")
    assert layout.specs["layers/attention/qkv/kernel"] == P(None, "fsdp", "tensor")
    assert layout.specs["tokens"] == P("tensor", "fsdp")
    assert layout.specs["norm/scale"] == P("fsdp")


def test_arrays_below_the_threshold_stay_whole_layer_by_layer():
    layout = gpt_layout(FSDP.edit(replicate_below=32 * 128), {"fsdp": 8})
    assert layout.specs[UP] == P(None, "fsdp")
    assert layout.specs["layers/attention/out/kernel"] == P()


def test_an_array_that_no_dimension_divides_stays_whole():
    array = Array("w", (3, 5), (None, None))
    assert spec_from_rules(array, FSDP.parameters, MESH) == P()


@pytest.mark.parametrize(
    ("strategy", "sizes", "counts"),
    [
        (DDP, {"data": 8}, (1, 1, 1)),
        (ZERO1, {"data": 8}, (1, 1, 8)),
        (ZERO2, {"data": 2, "fsdp": 4}, (1, 8, 8)),
        (FSDP, {"fsdp": 8}, (8, 8, 8)),
        (FSDP, {"data": 2, "fsdp": 4}, (4, 4, 4)),
        (FSDP.edit(gradients={"*": ()}), {"fsdp": 8}, (8, 1, 8)),
        (FSDP | TENSOR, {"fsdp": 2, "tensor": 4}, (8, 8, 8)),
        (ZERO2 | TENSOR, {"data": 2, "fsdp": 2, "tensor": 2}, (2, 8, 8)),
    ],
)
@pytest.mark.short("strategy0-sizes0-counts0", "strategy7-sizes7-counts7")
def test_bytes_of_each_zero_stage_are_those_of_the_formula(strategy, sizes, counts):
    """A stage divides the matrices of a column by its devices."""
    layout = mlp_layout(strategy.edit(**ALL), sizes)
    matrices = [p for p in layout.param_specs.values() if p.path.endswith("kernel")]
    whole = sum(4 * math.prod(p.shape) for p in matrices)
    state, paths = hfjax.init(layout), {p.path for p in matrices}
    held = lambda tree: sum(
        x.addressable_shards[0].data.nbytes for path, x in flatten(tree).items() if path in paths
    )
    moments = state.optimizer[0]
    assert held(state.params) == whole // counts[0]
    assert sum(4 * math.prod(p.shape) // num_shards(p.gradient, layout.mesh) for p in matrices) == (
        whole // counts[1]
    )
    assert held(moments.mu) == held(moments.nu) == whole // counts[2]


def test_the_totals_printed_are_the_bytes_of_the_arrays():
    layout = mlp_layout((FSDP | TENSOR).edit(**ALL), MESH.shape)
    state = hfjax.init(layout)
    held = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    total = layout.bytes_per_device()
    assert total["parameters"] == held(state.params)
    assert total["optimizer_state"] == held(state.optimizer)
    assert f"parameters {total['parameters'] / 1024:.1f} KiB" in str(layout)


def test_no_device_ever_holds_the_whole_model_while_it_is_born():
    layout = mlp_layout(FSDP.edit(**ALL), {"fsdp": 8}, vocab=512, embed=128)
    lowered = jax.jit(layout.create, out_shardings=layout.shardings()).lower(0)
    whole = sum(int(np.prod(p.shape)) * 4 for p in layout.param_specs.values())
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes < 3 * whole / 8 * 1.1
    assert memory.temp_size_in_bytes < whole / 2


def test_an_edited_spec_moves_the_parameter_and_its_moments_follow():
    layout = mlp_layout(FSDP.edit(**ALL), MESH.shape)
    edited = layout.with_specs({UP: P(None, "fsdp", "tensor")})
    assert edited.param_specs[UP].optimizer_state == P(None, "fsdp", "tensor")
    state = hfjax.init(edited)
    up = state.optimizer[0].mu["layers"]["mlp"]["up"]["kernel"]
    assert up.addressable_shards[0].data.shape == (2, 16, 64)
    assert layout.specs[UP] == P(None, "fsdp")  # the layout given is left as it was


def test_specs_can_be_taken_edited_and_handed_back_whole():
    layout = gpt_layout(DDP, MESH.shape | {"tensor": 1, "fsdp": 4})
    specs = layout.specs | {"tokens": P("fsdp")}
    assert layout.with_specs(specs).specs == specs


@pytest.mark.parametrize(
    ("path", "spec", "message"),
    [
        ("layers/mlp/up/kernl", P(), r"no parameter 'layers/mlp/up/kernl'. Nearest: \['layers/mlp"),
        (UP, P("model"), r"up/kernel \(2, 32, 128\): .*unknown mesh axis 'model'"),
        (UP, P(None, "fsdp", "fsdp"), r"uses mesh axis 'fsdp' twice \(dimensions 1 and 2\)"),
        (UP, P("fsdp"), "dimension 0 stacks the layers .* Split another dimension"),
        (UP, P(None, ("tensor", "fsdp")), r"Write \('fsdp', 'tensor'\)"),
        (UP, P(None, None, None, "fsdp"), "has 4 entries for 3 dimensions"),
        ("norm/scale", P(("data", "fsdp")), None),
    ],
)
def test_a_spec_that_cannot_be_is_refused_before_tracing(path, spec, message):
    layout = gpt_layout(FSDP.edit(**ALL), MESH.shape)
    if message is None:
        assert layout.with_specs({path: spec}).specs[path] == spec
        return
    with pytest.raises(ValueError, match=message):
        layout.with_specs({path: spec})


def test_a_dimension_that_does_not_divide_names_those_that_do():
    array = Array("w", (6, 8), (None, None))
    message = (
        r"w \(6, 8\): .*dimension 0 \(unnamed, 6\) does not divide by 4.*Dimensions that do: \[1\]"
    )
    with pytest.raises(ValueError, match=message):
        check_spec(array, P(("data", "fsdp")), MESH)


def test_a_vocabulary_that_does_not_divide_asks_for_padding():
    with pytest.raises(ValueError, match=r"tokens \(50257, 32\).*vocab, 50257.*vocab=50258"):
        gpt_layout(TENSOR, {"data": 4, "tensor": 2}, vocab=50257)
    padded = gpt_layout(TENSOR, {"data": 4, "tensor": 2}, vocab=50257, pad_vocab_to=128)
    assert padded.param_specs["tokens"].shape == (50304, 32)


def test_heads_that_do_not_divide_are_refused_with_sizes_that_fit():
    with pytest.raises(ValueError, match=r"25 heads need a tensor axis that divides them: .*fit"):
        gpt_layout(TENSOR, {"data": 4, "tensor": 2}, heads=25, embed=50)


def test_two_rows_on_one_axis_of_one_array_are_refused():
    clash = Strategy("clash", parameters={"embed": "tensor", "mlp": "tensor"})
    with pytest.raises(ValueError, match=r"uses mesh axis 'tensor' twice"):
        gpt_layout(clash, {"data": 4, "tensor": 2})


def test_a_strategy_whose_rows_match_nothing_is_refused_and_one_row_is_reported():
    bare = lambda rngs: {"w": np.zeros((8, 8), np.float32)}
    mesh = hfjax.make_mesh(data=4, tensor=2)
    with pytest.raises(
        ValueError, match=r"no parameter has an axis named heads, mlp, vocab.*nnx.Param"
    ):
        hfjax.layout(bare, optax.sgd(0.1), mesh, TENSOR)
    named = hfjax.layout(bare, optax.sgd(0.1), mesh, TENSOR, axes={"w": ("embed", "mlp")})
    assert named.specs["w"] == P(None, "tensor")
    assert "note: row vocab -> tensor of TENSOR matched no parameter" in str(named)


def test_names_for_an_unknown_path_or_of_the_wrong_length_are_refused():
    one = hfjax.make_mesh(devices=jax.devices()[:1])
    bare = lambda rngs: {"w": np.zeros((8, 8), np.float32)}
    with pytest.raises(ValueError, match=r"axes: no parameter 'v'"):
        hfjax.layout(bare, optax.sgd(0.1), one, DDP, axes={"v": ("embed",)})
    with pytest.raises(
        ValueError, match=r"w: axes .* name 1 dimensions, the array has shape \(8, 8\)"
    ):
        hfjax.layout(bare, optax.sgd(0.1), one, DDP, axes={"w": ("embed",)})


@pytest.mark.slow
def test_moments_finer_than_gradients_come_on_top_of_them():
    finer = Strategy("finer", gradients={"*": "fsdp"}, optimizer_state={"*": ("fsdp", "data")})
    layout = mlp_layout(finer, {"data": 2, "fsdp": 4})
    assert layout.param_specs[UP].gradient == P(None, "fsdp")
    assert layout.param_specs[UP].optimizer_state == P(None, "fsdp", "data")
    step = hfjax.train_step(layout, next_token_loss, gradient_accumulation_steps=2)
    step(hfjax.init(layout), tokens())


@pytest.mark.slow
def test_one_dimension_over_fsdp_and_tensor_keeps_its_order():
    layout = mlp_layout(FSDP | TENSOR, {"fsdp": 2, "tensor": 2}, optax.sgd(0.1))
    both = {
        UP: P(None, None, ("fsdp", "tensor")),
        "layers/mlp/down/kernel": P(None, ("fsdp", "tensor")),
        "tokens": P(("fsdp", "tensor")),
    }
    runs = []
    for plan in (layout, layout.with_specs(both)):
        step, state = hfjax.train_step(plan, next_token_loss), hfjax.init(plan)
        state, _ = step(state, tokens())
        state, metrics = step(state, tokens())
        runs.append((float(metrics["loss"]), hfjax.full_array(state.params)))
    np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(close, runs[0][1], runs[1][1])


class OfRngs(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)


@pytest.mark.parametrize(
    ("position", "given", "message"),
    [
        (0, None, "model_init, a function of rngs is expected, found NoneType"),
        (1, "adam", "an optax optimizer is expected, found str"),
        (1, {"lr": 1e-3}, "an optax optimizer is expected, found dict"),
        (2, {"data": 8}, r"a mesh of hfjax.make_mesh or jax.make_mesh is expected, found dict"),
        (3, "FSDP", r"a hfjax.Strategy is expected, found str\. Write hfjax\.FSDP\.$"),
        (3, "fsdp+pipe", r"found str\. Write hfjax\.FSDP \| hfjax\.PIPE\.$"),
        (3, "fast", r"found str\. Write hfjax\.FSDP, for instance\.$"),
        (0, GPT, r"GPT cannot be called as GPT\(rngs\)\. .*: lambda rngs: GPT\(…, rngs=rngs\)"),
        (0, OfRngs, r": lambda rngs: OfRngs\(rngs=rngs\)"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(position, given, message):
    arguments: list = [lambda rngs: {"w": np.zeros(3)}, optax.sgd(0.1), MESH, FSDP]
    arguments[position] = given
    with pytest.raises(ValueError, match=message):
        hfjax.layout(*arguments)


def test_a_model_too_small_to_split_says_so():
    layout = gpt_layout(FSDP.edit(replicate_below=10**6), {"fsdp": 8})
    assert "note: no parameter has 1000000 elements a layer: nothing is split" in str(layout)


def test_a_large_array_that_nothing_divides_is_reported():
    odd = lambda rngs: {"w": np.zeros((7, 9), np.float32)}
    strategy = FSDP.edit(replicate_below=0)
    layout = hfjax.layout(odd, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), strategy)
    assert "note: w (7, 9): no free dimension divides by 8 (fsdp), its parameters stay" in str(
        layout
    )


def test_an_axis_that_splits_nothing_is_refused_when_the_step_is_built():
    layout = gpt_layout(DDP, {"data": 2, "pipe": 4})
    with pytest.raises(
        ValueError, match=r"pipe splits neither the batch nor a parameter under DDP"
    ):
        hfjax.train_step(layout, lambda outputs, batch: outputs.mean())


def test_a_model_init_that_returns_no_model_is_refused():
    one = hfjax.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(
        ValueError, match=r"model_init returned NoneType: an nnx.Module or a pytree"
    ):
        hfjax.layout(lambda rngs: None, optax.sgd(0.1), one, DDP)


def test_the_layout_prints_path_shape_spec_and_bytes():
    text = str(gpt_layout((ZERO2 | TENSOR | SEQUENCE).edit(**ALL), MESH.shape))
    assert text.startswith("ZERO2|TENSOR|SEQUENCE on data=2 x fsdp=2 x tensor=2")
    row = next(line for line in text.splitlines() if UP in line)
    assert " ".join(row.split()) == (
        f'{UP} 2x32x128 P(None, None, "tensor") P(None, ("fsdp", "data"), "tensor") '
        'P(None, ("fsdp", "data"), "tensor") 16.0 KiB'
    )


def test_a_printed_spec_has_no_axis_of_size_one_and_is_python():
    layout = gpt_layout(ZERO2.edit(**ALL), {"data": 8})
    row = next(line for line in str(layout).splitlines() if UP in line)
    assert " ".join(row.split()) == f'{UP} 2x32x128 P() P(None, "data") P(None, "data") 32.0 KiB'
    assert layout.param_specs[UP].optimizer_state == P(
        None, ("fsdp", "data")
    )  # the spec itself keeps both


def test_what_a_mesh_leaves_alike_is_printed_as_the_same():
    finer = gpt_layout(Strategy("finer", {"*": "fsdp"}, optimizer_state={"*": "data"}), {"fsdp": 8})
    row = next(line for line in str(finer).splitlines() if UP in line)
    assert " ".join(row.split()) == f'{UP} 2x32x128 P(None, "fsdp") same same 4.0 KiB'


def test_optimizer_state_that_is_no_copy_of_a_parameter_stays_whole():
    factored = mlp_layout(
        FSDP.edit(**ALL), {"fsdp": 8}, optax.adafactor(1e-3, min_dim_size_to_factor=8)
    )
    specs = [s.spec for s in jax.tree.leaves(factored.shardings().optimizer)]
    assert len(set(specs)) > 1
    hfjax.init(factored)


def test_a_parameter_that_is_not_floating_is_refused():
    one = hfjax.make_mesh(devices=jax.devices()[:1])

    class Whole(nnx.Module):
        def __init__(self):
            self.n = nnx.Param(np.zeros(3, np.int32))

    with pytest.raises(
        ValueError, match=r"n \(3,\) is int32: a parameter is a real floating-point"
    ):
        hfjax.layout(lambda rngs: Whole(), optax.sgd(0.1), one, DDP)


def test_gpt_presets():
    from hfjax.models.gpt import PRESETS, GPTConfig

    assert set(PRESETS) == {"tiny", "small", "medium", "large", "xl", "gpt3-175b"}
    with pytest.raises(ValueError, match=r"GPT preset 'huge': one of tiny"):
        GPTConfig.preset("huge")
    with pytest.raises(ValueError, match=r"embed=100 does not divide by heads=12"):
        GPTConfig(embed=100)


# -- a strategy that splits nothing ---------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "sizes", "message"),
    [
        (
            FSDP,
            {"data": 8},
            r"FSDP on data=8: FSDP .*fsdp=1 and expert=1 and context=1\. Write make_mesh\(fsdp=8\)",
        ),
        (FSDP, {"tensor": 8}, r"Write make_mesh\(fsdp=8\)"),
        (HSDP, {"data": 8}, r"HSDP would .*Write make_mesh\(data=2, fsdp=4\)"),
        (
            ZERO1,
            {"tensor": 8},
            r"because of context=1 and expert=1 and fsdp=1 and data=1\. Write make_mesh\(data=8\)",
        ),
        (TENSOR, {"data": 8}, r"TENSOR would .*tensor=1\. Write make_mesh\(data=4, tensor=2\)"),
        (SEQUENCE, {"data": 4, "fsdp": 2}, r"SEQUENCE .*make_mesh\(data=2, fsdp=2, tensor=2\)"),
        (CONTEXT, {"data": 8}, r"CONTEXT would .*context=1\. Write make_mesh\(data=4, context=2\)"),
        (PIPE, {"data": 6}, r"PIPE .*pipe=1\. Write make_mesh\(pipe=2, data=3\)"),
        (FSDP | TENSOR, {"fsdp": 8}, r": TENSOR .* make_mesh\(fsdp=4, tensor=2\).*, or leave that"),
        (FSDP | TENSOR, {"data": 8}, r"FSDP and TENSOR would .*make_mesh\(fsdp=4, tensor=2\)"),
        (PIPE | FSDP, {"pipe": 2, "data": 4}, r": FSDP .*make_mesh\(pipe=2, fsdp=4\)"),
        (ZERO2 | TENSOR, {"tensor": 8}, r": ZERO2 .*make_mesh\(data=2, tensor=4\)"),
        ((FSDP | TENSOR).edit(**ALL), {"tensor": 2}, "2 devices are too few for all of FSDP"),
    ],
    ids=lambda x: x.name if isinstance(x, Strategy) else "",
)
def test_a_strategy_that_would_split_nothing_is_refused_with_a_mesh_that_it_splits(
    strategy, sizes, message
):
    devices = jax.devices()[: math.prod(sizes.values())]
    with pytest.raises(ValueError, match=message):
        gpt_layout(strategy, sizes, devices=devices)


@pytest.mark.parametrize("strategy", [FSDP, ZERO1, PIPE, TENSOR | SEQUENCE | FSDP])
@pytest.mark.short("strategy2")
def test_on_one_device_a_strategy_that_splits_nothing_warns_and_runs(strategy):
    with pytest.warns(UserWarning, match=r"on one device: .* would split nothing: every array is"):
        layout = mlp_layout(strategy, {}, devices=jax.devices()[:1])
    hfjax.init(layout)


def test_what_needs_no_axis_says_nothing(recwarn):
    gpt_layout(DDP | hfjax.HOST_OPTIMIZER, {}, devices=jax.devices()[:1])
    gpt_layout(ZERO1, {"fsdp": 2}, devices=jax.devices()[:2])  # one of its axes is enough
    assert not recwarn.list


def test_a_union_with_rows_of_its_own_counts_as_one_strategy():
    own = (FSDP | TENSOR).edit(name="own", parameters={"vocab": ()})
    assert gpt_layout(own, {"fsdp": 8}).specs["tokens"] == P("fsdp")
    with pytest.raises(ValueError, match="own on data=8: own would split nothing"):
        gpt_layout(own, {"data": 8})


@pytest.mark.parametrize(("old", "new"), MARKS.items())
def test_an_old_mark_of_a_variable_is_refused_with_the_new_one(old, new):
    class Marked(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(np.zeros((8, 8), np.float32))
            self.noted = nnx.Variable(np.zeros(8, np.float32), **{old: True})

    with pytest.raises(ValueError, match=f"noted is marked {old}=…, which is {new}=… now"):
        hfjax.layout(Marked, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)


def test_variables_are_told_beside_parameters():
    model = lambda rngs: nnx.BatchNorm(8, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=2), hfjax.DDP)
    told = "note: variables, not trained: mean float32[8], var float32[8] (2)"
    assert told in str(layout).splitlines()
