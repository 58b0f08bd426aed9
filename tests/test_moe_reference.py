"""The numpy re-telling of mixtures of experts, against numbers worked out by hand."""

import numpy as np
import pytest

from tests.moe_reference import (
    batch_loss,
    capacity_of,
    deepseek_v3,
    experts_layer,
    gate_logits,
    largest,
    mixtral,
    qwen3_moe,
    residual,
    sequence_loss,
    sigmoid,
    softmax,
    swiglu,
    top1,
    top2,
    topk,
    updated_bias,
    z_loss,
)

# Probabilities of experts; their logarithms are logits that have them as softmax.
FOUR = np.log([[0.8, 0.2], [0.6, 0.4], [0.9, 0.1], [0.3, 0.7]])
THREE = np.log([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])


def equal(found, **wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(getattr(found, name), value, atol=1e-12, err_msg=name)


def column(*values):
    return np.array(values)[:, None]


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "minimum", "capacity"),
    [(4, 2, 1.0, 0, 2), (5, 2, 1.0, 0, 3), (4, 2, 1.0, 4, 4), (10, 4, 1.25 * 2, 4, 7)],
)
def test_capacity_is_rounded_up_and_has_a_minimum(tokens, experts, factor, minimum, capacity):
    assert capacity_of(tokens, experts, factor, minimum) == capacity


def test_capacity_is_computed_in_float32():
    assert (capacity_of(25, 1, 1.2, 0), int(np.ceil(25 * 1.2))) == (31, 30)
    assert (capacity_of(25, 1, 2.2, 0), int(np.ceil(25 * 2.2))) == (55, 56)


def test_the_jitter_changes_what_the_router_sees():
    x, router = np.array([[1.0, 2.0]]), np.array([[1.0, 0.0], [1.0, 3.0]])
    np.testing.assert_allclose(gate_logits(x, router), [[3, 6]])
    np.testing.assert_allclose(gate_logits(x, router, np.array([[1.01, 0.99]])), [[2.99, 5.94]])


# Means of probabilities .65 and .35, of choices .75 and .25: 2 * (.65 * .75 + .35 * .25) = 1.15.


def test_top1_gives_capacity_to_the_earliest():
    equal(
        top1(FOUR, 1.0, 0),
        experts=column(0, 0, 0, 1),
        kept=column(1, 1, 0, 1),
        places=column(0, 1, -1, 0),
        weights=column(0.8, 0.6, 0, 0.7),  # not divided by their sum
        counts=[3, 1],
        capacity=2,
        l_aux=1.15,
        dropped=1,
    )


def test_top1_gives_capacity_to_the_highest_priorities_and_places_by_position():
    priorities = np.array([[0.1, 0.9], [0.5, 0.9], [0.9, 0.9], [0.95, 0.1]])
    equal(
        top1(FOUR, 1.0, 0, priorities=priorities),
        kept=column(0, 1, 1, 1),
        places=column(-1, 0, 1, 0),
        weights=column(0, 0.6, 0.9, 0.7),
        l_aux=1.15,
    )


def test_top1_chooses_with_noise_and_weighs_without():
    noise = np.array([[0, 0], [0, 1.0], [0, 0], [0, 0]])  # .4 e > .6
    equal(
        top1(FOUR, 1.0, 0, gumbel=noise),
        experts=column(0, 1, 0, 1),
        weights=column(0.8, 0.4, 0.9, 0.7),
        counts=[2, 2],
        l_aux=1.0,
        dropped=0,
    )


def test_top1_without_a_token_that_is_not_used():
    equal(
        top1(FOUR, 1.0, 0, used=np.array([0, 1, 1, 1])),
        kept=column(0, 1, 1, 1),
        places=column(-1, 0, 1, 0),
        counts=[2, 1],
        l_aux=2 * (0.65 * 0.5 + 0.35 * 0.25),  # of four tokens
        dropped=0,
    )


def test_top1_that_drops_nothing_has_the_capacity_of_the_largest_count():
    equal(top1(FOUR, 1.0, 4), capacity=4, dropped=0)
    equal(top1(FOUR, 1.0, 4, drop=False), capacity=3, places=column(0, 1, 2, 0), dropped=0)


# Means of probabilities 1.3 / 3, 1.1 / 3 and .6 / 3. First choices 0, 0, 1; second ones 1, 1, 2.


def test_top2_gives_all_first_choices_a_place_before_any_second_one():
    equal(
        top2(THREE, 0.5, 0),
        experts=[[0, 1], [0, 1], [1, 2]],
        places=[[0, -1], [-1, -1], [0, 0]],
        weights=[[1, 0], [0, 0], [0.5 / 0.8, 0.3 / 0.8]],  # of what is kept
        counts=[2, 3, 1],
        capacity=1,
        l_aux=3 * (1.3 / 3 * 2 / 3 + 1.1 / 3 * 1 / 3),  # of first choices
        dropped=3,
    )


def test_top2_counts_dropped_first_choices_before_second_ones():
    logits = np.log([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.1, 0.3, 0.6]])
    found = top2(logits, 0.375, 0)  # 4 / 3 * .75: one place
    equal(found, places=[[0, -1], [-1, -1], [0, -1], [0, -1]])
    assert top2(logits, 0.75, 0).places.tolist() == [[0, 1], [1, -1], [0, -1], [0, -1]]


def test_top2_draws_the_second_expert_with_noise():
    noise = np.array([[0, 0, 1.0], [9, 0, 0], [0, 0, 0]])  # .2 e > .3; the first stays the first
    equal(
        top2(THREE, 0.5, 0, gumbel=noise, drop=False),
        experts=[[0, 2], [0, 1], [1, 2]],
        places=[[0, 0], [1, 1], [0, 1]],
        weights=[[5 / 7, 2 / 7], [2 / 3, 1 / 3], [5 / 8, 3 / 8]],
        counts=[2, 2, 2],
        capacity=2,
    )


def test_topk_gives_capacity_to_the_earliest_of_all_choices():
    equal(
        topk(THREE, 2, 0.5, 0, policy="position"),
        experts=[[0, 1], [0, 1], [1, 2]],
        places=[[0, 0], [-1, -1], [-1, 0]],
        weights=[[0.5 / 0.8, 0.3 / 0.8], [0, 0], [0, 1]],
        counts=[2, 3, 1],
        capacity=1,
        l_aux=3 / 2 * (1.3 / 3 * 2 / 3 + 1.1 / 3 + 0.6 / 3 * 1 / 3),  # of all choices, over k
    )


def test_topk_gives_capacity_to_the_most_probable_of_all_choices():
    equal(
        topk(THREE, 2, 0.5, 0),
        places=[[-1, -1], [0, -1], [0, 0]],
        weights=[[0, 0], [1, 0], [0.5 / 0.8, 0.3 / 0.8]],
    )
    equal(topk(THREE, 2, 1.0, 0), places=[[0, 0], [1, -1], [1, 0]])  # by position
    equal(topk(THREE, 2, 0.5, 0, drop=False), capacity=3, places=[[0, 0], [1, 1], [2, 0]])


def test_the_residual_mixes_experts_first_and_the_mlp_second():
    x, weight = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[np.log(3), 0.0], [0.0, 0.0]])
    mixed = residual(x, np.full((2, 2), 8.0), np.full((2, 2), 4.0), weight, np.zeros(2))
    np.testing.assert_allclose(mixed, [[7, 7], [6, 6]])


def test_a_softmax_after_top_k_equals_one_before_that_is_divided_by_its_sum():
    wanted = [[0.5 / 0.8, 0.3 / 0.8], [0.6 / 0.9, 0.3 / 0.9], [0.5 / 0.8, 0.3 / 0.8]]
    for found in (mixtral(THREE, 2), qwen3_moe(THREE, 2)):
        equal(found, experts=[[0, 1], [0, 1], [1, 2]], weights=wanted, dropped=0)
        equal(found, places=[[0, 0], [1, 1], [2, 0]], counts=[2, 3, 1], capacity=3)
    equal(qwen3_moe(THREE, 2, normalise=False), weights=[[0.5, 0.3], [0.6, 0.3], [0.5, 0.3]])


def logits_of(scores):
    """Return what has these sigmoids."""
    scores = np.array(scores)
    return np.log(scores / (1 - scores))


def test_deepseek_chooses_groups_by_their_two_best_and_experts_inside():
    logits = logits_of([[0.9, 0.1, 0.6, 0.5]])
    equal(deepseek_v3(logits, 2), experts=[[0, 2]], weights=[[1.5, 1.0]])
    found = deepseek_v3(logits, 2, groups=2, chosen_groups=1)  # 1.0 and 1.1
    equal(found, experts=[[2, 3]], weights=[[2.5 * 0.6 / 1.1, 2.5 * 0.5 / 1.1]])


def test_deepseek_s_bias_decides_and_does_not_weigh():
    logits, bias = logits_of([[0.9, 0.1, 0.6, 0.5]]), np.array([0, 0.2, 0, 0])
    found = deepseek_v3(logits, 2, bias, groups=2, chosen_groups=1, scale=1.0)  # 1.2 and 1.1
    equal(found, experts=[[0, 1]], weights=[[0.9, 0.1]])
    found = deepseek_v3(logits, 2, -np.ones(4), groups=2, chosen_groups=1)  # all are negative
    equal(found, experts=[[2, 3]])


def test_the_bias_rises_where_fewer_tokens_went():
    bias, counts = np.zeros(4), np.array([4, 1, 1, 2])
    np.testing.assert_allclose(updated_bias(bias, counts, 0.1, False), [-0.1, 0.1, 0.1, 0])
    np.testing.assert_allclose(updated_bias(bias, counts, 0.1), [-0.125, 0.075, 0.075, -0.025])


def test_the_loss_of_a_sequence_is_of_scores_over_their_sum():
    logits = logits_of([[0.6, 0.2], [0.6, 0.3]])  # both tokens choose expert 0
    assert sequence_loss(logits, 1) == pytest.approx(2 * (0.75 + 2 / 3) / 2)
    assert sequence_loss(logits, 2) == pytest.approx(1)


def test_the_z_loss_is_of_squares():
    logits = np.array([[np.log(2), np.log(6)], [1000.0, -1000.0]])
    assert z_loss(logits) == pytest.approx((np.log(8) ** 2 + 1e6) / 2)


def test_the_loss_of_a_batch_joins_tokens_and_layers():
    assert batch_loss([FOUR], 1) == pytest.approx(1.15)
    assert batch_loss([FOUR], 2) == pytest.approx(2)  # over both choices, not divided
    swapped = FOUR[:, ::-1]
    assert batch_loss([FOUR, swapped], 1) == pytest.approx(1)  # not the mean of 1.15 and 1.15
    mask = np.array([1, 1, 0, 0])  # all choose expert 0, with .7
    assert batch_loss([FOUR], 1, mask) == pytest.approx(2 * 0.7)


# An expert of width 1 with gates and ups of 1 maps 1 to silu(1) times its down.

SILU = 1 / (1 + np.exp(-1))
ONES, DOWN = np.ones((2, 1, 1)), np.array([[[10.0]], [[100.0]]])


def test_a_layer_weighs_outputs_and_adds_nothing_for_what_is_dropped():
    x = np.ones((4, 1))
    y = experts_layer(x, top1(FOUR, 1.0, 0), ONES, ONES, DOWN)
    np.testing.assert_allclose(y, SILU * column(8, 6, 0, 70))
    y = experts_layer(x, top1(FOUR, 1.0, 0), ONES, ONES, DOWN, (ONES[0], ONES[0], ONES[0]))
    np.testing.assert_allclose(y, SILU * column(9, 7, 1, 71))
    y = experts_layer(x, mixtral(FOUR, 2), ONES, ONES, DOWN)
    np.testing.assert_allclose(y, SILU * column(28, 46, 19, 73))


def test_a_layer_that_drops_nothing_equals_the_sum_over_the_chosen_experts():
    draw = np.random.default_rng(0).normal
    x, router = draw(size=(12, 3)), draw(size=(3, 5))
    gate, up, down = draw(size=(5, 3, 4)), draw(size=(5, 3, 4)), draw(size=(5, 4, 3))
    logits = gate_logits(x, router)
    every = np.stack([swiglu(x, *expert) for expert in zip(gate, up, down, strict=True)], 1)
    for found in (
        *(top1(logits, 1, 0, drop=False), top2(logits, 1, 0, drop=False)),
        *(topk(logits, 3, 1, 0, drop=False), mixtral(logits, 3), deepseek_v3(logits, 3)),
    ):
        of_chosen = np.take_along_axis(every, found.experts[..., None], 1)
        wanted = (found.weights[..., None] * of_chosen).sum(1)
        np.testing.assert_allclose(experts_layer(x, found, gate, up, down), wanted)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_expert_takes_more_than_its_capacity_and_no_place_twice(k):
    rng = np.random.default_rng(k)
    for _ in range(20):
        logits = rng.normal(size=(24, 6)) * 2
        for found in (
            top1(logits, 0.5, 1, priorities=rng.random((24, 6))),
            *(top2(logits, 0.5, 1), topk(logits, k, 0.5, 1)),
            topk(logits, k, 0.5, 1, policy="position"),
        ):
            slots = found.experts[found.kept] * found.capacity + found.places[found.kept]
            assert len(set(slots)) == len(slots)
            assert (found.places < found.capacity).all()
            assert ((found.places >= 0) == found.kept).all()


def test_of_equals_the_first_wins():
    assert largest(np.array([1.0, 2, 2, 2]), 2).tolist() == [1, 2]
    np.testing.assert_allclose(softmax(np.zeros(4)), 0.25)
    assert sigmoid(np.zeros(1)) == 0.5
