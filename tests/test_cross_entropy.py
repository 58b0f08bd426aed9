"""Cross entropy without logits: its plain form, and how it lies on devices, against float64."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from hfjax.pallas_kernels.cross_entropy import loss as forms
from hfjax.pallas_kernels.cross_entropy.logits import Columns, Tuning
from tests.kernels import gaussian, relative

SMALL = Tuning(num_parts=4, min_columns=8)


@dataclass(frozen=True)
class Case:
    """x, w, labels and the losses' cotangents; `vocab` columns are real."""

    x: jax.Array
    w: jax.Array
    labels: jax.Array
    g: jax.Array
    vocab: int

    @classmethod
    def of(cls, rows, columns, width, vocab=None, dtype=jnp.float32):
        vocab = vocab or columns
        labels = np.random.default_rng(3).integers(0, vocab, rows, np.int32)
        labels[rows // 2] = -1
        x, w = gaussian(1, (rows, width), dtype), gaussian(2, (columns, width), dtype)
        return cls(x, w, jnp.asarray(labels), gaussian(4, (rows,)), vocab)

    @property
    def operands(self):
        return self.x, self.w, self.labels, self.g


def oracle(case):
    """Return losses, dx and dw in float64, from logits."""
    x, w, g = (np.asarray(a, np.float64) for a in (case.x, case.w, case.g))
    labels = np.asarray(case.labels)
    logits = x @ w[: case.vocab].T
    most = logits.max(1, keepdims=True)
    logsumexp = most + np.log(np.exp(logits - most).sum(1, keepdims=True))
    onehot = np.arange(case.vocab) == labels[:, None]
    there = labels >= 0
    losses = np.where(there, logsumexp[:, 0] - (logits * onehot).sum(1), 0)
    slopes = (np.exp(logits - logsumexp) - onehot) * (g * there)[:, None]
    dw = np.zeros_like(w)
    dw[: case.vocab] = slopes.T @ x
    return losses, slopes @ w[: case.vocab], dw


def with_gradients(form, **fields):
    """Return (x, w, labels, g) -> losses, dx, dw."""

    def run(x, w, labels, g):
        losses, back = jax.vjp(lambda x, w: form(x, w, labels, **fields), x, w)
        return losses, *back(g.astype(losses.dtype))

    return run


def assert_equal(found, case, *bounds):
    for name, a, b, bound in zip(("loss", "dx", "dw"), found, oracle(case), bounds, strict=True):
        assert relative(a, b) < bound, (name, relative(a, b))


def check(case, bounds=(1e-5, 1e-5, 1e-5), tuning=SMALL):
    run = with_gradients(forms.reference, vocab=case.vocab, tuning=tuning)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(run)(*case.operands)
    assert_equal(found, case, *bounds)
    return found


@pytest.mark.parametrize("shape", [(203, 152, 24), (1, 1, 1), (17, 1000, 8), (300, 9, 5)])
def test_value_and_gradients_equal_those_from_logits(shape):
    check(Case.of(*shape))


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_padding_of_the_vocabulary_is_not_there(parts):
    case = Case.of(33, 96, 8, vocab=71)
    _, _, dw = check(case, tuning=Tuning(num_parts=parts, min_columns=8))
    assert not np.asarray(dw)[71:].any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_sums_in_float32(dtype):
    losses, dx, dw = check(Case.of(64, 200, 32, dtype=dtype), (1e-5, 1e-2, 1e-2))
    assert (losses.dtype, dx.dtype, dw.dtype) == (jnp.float32, dtype, dtype)


def test_small_cotangents_are_not_lost_in_float16():
    case = Case.of(64, 200, 32, dtype=jnp.float16)
    run = jax.jit(with_gradients(forms.reference, tuning=SMALL))
    _, _, large = run(*case.operands)
    _, _, small = run(case.x, case.w, case.labels, case.g * 2.0**-7)
    assert relative(np.asarray(small, np.float64) * 2**7, large) < 1e-3


def test_float64_stays_float64():
    with jax.enable_x64(True):
        case = Case.of(40, 72, 16, dtype=jnp.float64)
        found = check(case, (1e-13, 1e-13, 1e-13))
        assert {a.dtype for a in found} == {np.dtype("float64")}


def test_large_logits_do_not_overflow():
    case = Case.of(32, 64, 16)
    check(Case(case.x * 300, case.w * 300, case.labels, case.g, 64))


def test_a_negative_label_is_ignored():
    case = Case.of(9, 64, 8)
    losses, dx, _ = check(case)
    assert case.labels[4] == -1
    assert losses[4] == 0
    assert not np.asarray(dx)[4].any()


def test_a_label_beyond_the_vocabulary_is_not_a_number():
    case = Case.of(9, 64, 8, vocab=60)
    run = with_gradients(forms.reference, vocab=60, tuning=SMALL)
    losses, dx, dw = jax.jit(run)(case.x, case.w, case.labels.at[2].set(60), case.g)
    np.testing.assert_array_equal(np.isnan(losses), np.arange(9) == 2)
    np.testing.assert_array_equal(np.isnan(dx).any(1), np.arange(9) == 2)
    assert np.isnan(dw).all()


def test_mixed_dtypes_are_computed_in_the_wider_one():
    case = Case.of(24, 40, 8)
    mixed = Case(case.x.astype(jnp.bfloat16), case.w, case.labels, case.g, 40)
    _, dx, dw = check(mixed, (1e-5, 1e-2, 1e-5))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)


def test_columns_of_each_part_are_all_columns_once():
    labels = np.arange(-1, 40, dtype=np.int32)
    columns = Columns(10, 21)
    owners = []
    parts = jax.jit(lambda labels: [columns.part_labels(labels, part, 4) for part in range(4)])
    for part, (found, real) in enumerate(parts(labels)):
        owners += [10 + int(c) * 4 + part for c in np.asarray(found) if c >= 0]
        assert real == len(range(part, 21, 4))
    assert sorted(owners) == list(range(10, 31))


# -- on devices -----------------------------------------------------------------------------------


def mesh_of(**sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    auto = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), auto, devices=devices)


def sharded(form, mesh, axis, **fields):
    """Return (x, w, labels, g) -> losses, dx, dw; rows over data, unless the vocabulary is."""
    rows = P("data") if "data" in mesh.shape and "data" not in axis else P()
    check_vma = fields.pop("check_vma", True)
    losses = lambda x, w, labels: form(x, w, labels, axis=axis, **fields)
    specs = {"in_specs": (rows, P(axis), rows), "out_specs": rows}
    return with_gradients(jax.shard_map(losses, mesh=mesh, check_vma=check_vma, **specs))


MESHES = {
    "1": ({"tensor": 1}, "tensor"),
    "2": ({"tensor": 2}, "tensor"),
    "4": ({"tensor": 4}, "tensor"),
    "8": ({"tensor": 8}, "tensor"),
    "one of 2 x 4": ({"data": 2, "tensor": 4}, "tensor"),
    "both of 2 x 4": ({"data": 2, "tensor": 4}, ("data", "tensor")),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("sizes", "axis"), MESHES.values(), ids=MESHES)
@pytest.mark.short("1-True", "both of 2 x 4-False")
def test_a_vocabulary_split_over_devices_is_one_vocabulary(sizes, axis, check_vma):
    case = Case.of(64, 96, 8, vocab=75)  # the last of 8 devices has only padding
    fields = {"vocab": 75, "tuning": Tuning(num_parts=2, min_columns=4), "check_vma": check_vma}
    run = sharded(forms.reference, mesh_of(**sizes), axis, **fields)
    with jax.default_matmul_precision("highest"):
        assert_equal(jax.jit(run)(*case.operands), case, 1e-5, 1e-5, 1e-5)


def test_gradients_taken_inside_shard_map_are_summed_by_the_types():
    case, mesh = Case.of(64, 96, 8), mesh_of(data=2, tensor=4)

    def device(x, w, labels, g):
        total = lambda x, w: (forms.reference(x, w, labels, "tensor", tuning=SMALL) * g).sum()
        return jax.grad(total, (0, 1))(x, w)

    rows, specs = P("data"), (P("data"), P("tensor"))
    run = jax.shard_map(device, mesh=mesh, in_specs=(*specs, rows, rows), out_specs=specs)
    with jax.default_matmul_precision("highest"):
        dx, dw = jax.jit(run)(*case.operands)
    assert_equal((oracle(case)[0], dx, dw), case, 1e-5, 1e-5, 1e-5)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "tensor": 4}])
def test_shardings_chosen_by_the_compiler_change_nothing(sizes):
    case, mesh = Case.of(64, 96, 8, vocab=75), mesh_of(**sizes)
    rows, w = P("data"), P("tensor") if "tensor" in sizes else P(None, "data")
    places = [NamedSharding(mesh, spec) for spec in (rows, w, rows, rows)]
    operands = jax.device_put(case.operands, tuple(places))
    run = with_gradients(forms.reference, vocab=75, tuning=Tuning(num_parts=2, min_columns=4))
    with jax.default_matmul_precision("highest"):
        assert_equal(jax.jit(run)(*operands), case, 1e-5, 1e-5, 1e-5)


# -- what is refused ------------------------------------------------------------------------------

SHAPE = jax.ShapeDtypeStruct
HALF = SHAPE((8, 64), jnp.bfloat16)
LABELS = SHAPE((8,), jnp.int32)


def test_operands_that_fit_are_not_refused():
    assert forms.refuses(HALF, SHAPE((50257, 64), jnp.bfloat16), LABELS) is None


@pytest.mark.parametrize(
    ("x", "w", "labels", "why"),
    [
        (HALF, SHAPE((9, 32), jnp.bfloat16), LABELS, r"w \(9, 32\).*Reshape them, or transpose w"),
        (SHAPE((2, 4, 64), jnp.bfloat16), HALF, LABELS, r"x \(2, 4, 64\).*x is \[N, D\]"),
        (HALF, HALF, SHAPE((7,), jnp.int32), r"labels \(7,\) int32"),
        (HALF, HALF, SHAPE((8,), jnp.float32), r"\[N\] integers"),
        (HALF, SHAPE((9, 64), jnp.float32), LABELS, "w is float32.*Cast them, or use `reference`"),
        (SHAPE((8, 80), jnp.float16), SHAPE((9, 80), jnp.float16), LABELS, "multiples of 64"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(x, w, labels, why):
    x, w, labels = (jnp.zeros(a.shape, a.dtype) for a in (x, w, labels))
    with pytest.raises(ValueError, match=why):
        forms.cross_entropy(x, w, labels)


def test_the_plain_form_takes_any_width_and_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="transpose w"):
        forms.reference(jnp.ones((8, 5)), jnp.ones((5, 9)), jnp.zeros(8, int))


def test_impossible_tunings_are_refused():
    with pytest.raises(ValueError, match="columns are 64, 128, 192 or 256"):
        Tuning(columns=100)
    with pytest.raises(ValueError, match="at least 2 stages"):
        Tuning(stages=1)
