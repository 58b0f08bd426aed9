"""A strategy is a table: it prints, combines, and refuses what it cannot mean."""

import re
from typing import Any

import pytest

import hfjax
from hfjax.parallel.strategy import DDP, FSDP, SEQUENCE, TENSOR, ZERO1, ZERO2, ZERO3, Strategy


def test_zero_stages_are_nothing_but_columns():
    everywhere = {"*": ("context", "expert", "fsdp", "data")}
    assert (dict(DDP.parameters), dict(DDP.gradients), dict(DDP.optimizer_state)) == ({}, {}, {})
    assert (dict(ZERO1.gradients), dict(ZERO1.optimizer_state)) == ({}, everywhere)
    assert (dict(ZERO2.gradients), dict(ZERO2.optimizer_state)) == (everywhere, everywhere)
    assert dict(FSDP.parameters) == {"*": ("fsdp", "expert", "context")}
    assert ZERO3 is FSDP


def test_a_row_that_only_one_side_sets_wins_and_equal_rows_agree():
    both = FSDP | TENSOR
    assert both.parameters == {**FSDP.parameters, **TENSOR.parameters}
    assert both.activations["batch"] == ("data", "fsdp", "expert")
    assert both.name == "FSDP|TENSOR"


def test_a_row_that_both_sides_set_differently_is_refused_with_both():
    with pytest.raises(
        ValueError,
        match=r"optimizer_state row '\*': ZERO1 says context\+expert\+fsdp\+data, mine says fsdp",
    ):
        _ = ZERO1 | Strategy("mine", optimizer_state={"*": "fsdp"})


def test_a_sum_is_told_to_be_a_union():
    with pytest.raises(
        TypeError, match=r"^FSDP \+ TENSOR: strategies are joined by \|: FSDP \| TEN"
    ):
        _ = FSDP + TENSOR


def test_a_size_that_one_side_sets_is_kept_and_two_different_ones_are_refused():
    assert (FSDP.edit(replicate_below=0) | TENSOR).smallest == 0
    with pytest.raises(ValueError, match=r"replicate_below is \[0, 5\]"):
        _ = FSDP.edit(replicate_below=0) | TENSOR.edit(replicate_below=5)


def test_whole_gradients_stand_alone():
    with pytest.raises(ValueError, match=r"gradients row .* -> whole stands alone"):
        FSDP.edit(gradients={"*": (), "mlp": "data"})


def test_an_unknown_mesh_axis_in_a_row_is_refused():
    with pytest.raises(
        ValueError, match=r"row mlp -> .*unknown mesh axis 'model'. Axes: pipe, data"
    ):
        Strategy("mine", parameters={"mlp": "model"})


def test_an_edit_adds_rows_and_an_unknown_field_is_refused():
    edited = FSDP.edit(parameters={"mlp": "tensor"}, replicate_below=0)
    assert dict(edited.parameters) == {"*": ("fsdp", "expert", "context"), "mlp": ("tensor",)}
    with pytest.raises(
        TypeError, match=r"no keyword 'momenta'\. Did you mean optimizer_state\? All: name"
    ):
        FSDP.edit(momenta={})


@pytest.mark.parametrize("given", [float("nan"), -5, True, "3"])
def test_a_size_that_is_none_is_refused(given):
    wanted = rf"replicate_below={given!r}: a number of elements, at least 0"
    with pytest.raises(ValueError, match=wanted):
        FSDP.edit(replicate_below=given)
    whole: Any = float("inf")
    assert "arrays below inf elements stay whole" in str(FSDP.edit(replicate_below=whole))


def test_a_strategy_prints_a_line_for_each_rule_and_a_column_for_each_kind_of_array():
    assert str(hfjax.ZERO1 | TENSOR | SEQUENCE | hfjax.HOST_OPTIMIZER).splitlines() == [
        "ZERO1|TENSOR|SEQUENCE|HOST_OPTIMIZER  (arrays below 16384 elements stay whole)",
        "  rule   parameters  gradients      optimizer_state           activations",
        "  vocab  tensor      as parameters  as parameters             tensor",
        "  heads  tensor      as parameters  as parameters             tensor",
        "  mlp    tensor      as parameters  as parameters             tensor",
        "  *      -           -              context+expert+fsdp+data  -",
        "  batch  -           -              -                         data+fsdp+expert",
        "  seq    -           -              -                         tensor",
        "  memory: optimizer_state -> host, master -> host",
    ]
    assert str(hfjax.HOST_PARAMETERS).splitlines()[1:] == [
        "  splits no array",
        "  memory: parameters -> host",
    ]


def test_the_print_says_what_gradients_and_moments_are_split_as():
    def shown(strategy: Strategy, rule: str = "*") -> list[str]:
        lines = [re.split(r" {2,}", line.strip()) for line in str(strategy).splitlines()]
        return next((cells[2:4] for cells in lines if cells[0] == rule), [])

    every, same = "context+expert+fsdp+data", "as parameters"
    assert shown(FSDP) == [same, same]
    assert shown(hfjax.DDP) == []  # no such rule
    assert shown(hfjax.DDP, "batch") == ["-", "-"]
    assert shown(ZERO2) == shown(ZERO2 | TENSOR) == [every, every]
    assert shown(ZERO2 | TENSOR, "mlp") == [same, same]
    assert shown(FSDP | ZERO2) == [f"{same}, then {every}"] * 2
    assert shown(DDP.edit(gradients={"*": "fsdp"})) == ["fsdp", "as gradients"]
    both = DDP.edit(gradients={"*": "fsdp"}, optimizer_state={"*": "data"})
    assert shown(both) == ["fsdp", "as gradients, then data"]
    whole = (FSDP | TENSOR).edit(gradients={"*": ()})
    assert shown(whole) == shown(whole, "mlp") == ["whole", same]
    assert shown(whole, "batch") == ["-", "-"]
    assert shown(ZERO1.edit(gradients={"*": ()})) == ["whole", every]
    assert shown(FSDP.edit(gradients={"mlp": ()}), "mlp") == ["-", "-"]
    assert "  mlp    whole " in str(FSDP.edit(parameters={"mlp": ()}))


def test_execution_refuses_what_it_does_not_know():
    given: Any
    for field, given, message in (
        ("gradient_accumulation_steps", 0, "a positive number of microbatches"),
        ("max_grad_norm", 0.0, "a positive norm"),
        ("precision", "fp8", "one of auto, stored, fp32, bf16, fp16, fp64"),
        ("remat", "some", "one of none, dots, full"),
        ("gradient_reduction", "tree", "one of flat, hierarchical"),
        ("max_grad_norm", float("nan"), "a positive norm"),
        ("max_grad_norm", "3", "a positive norm"),
        ("max_grad_norm", True, "a positive norm"),
        ("unroll", -5, "a positive number of layers"),
        ("unroll", 0, "a positive number of layers"),
        ("unroll", 1.5, "a positive number of layers"),
        ("unroll", "3", "a positive number of layers"),
        ("reshard_after_forward", "no", "true or false"),
    ):
        with pytest.raises(ValueError, match=f"{field}=.*{message}"):
            hfjax.Execution(**{field: given})
    with pytest.raises(ValueError, match=r"compute=float16 without a loss scale"):
        hfjax.Precision(compute="float16")


def test_a_union_knows_what_it_joins_until_its_rows_are_edited():
    names = lambda strategy: [part.name for part in strategy.parts]
    three = FSDP.edit(replicate_below=0) | TENSOR | SEQUENCE
    assert names(three) == ["FSDP", "TENSOR", "SEQUENCE"]
    assert names(three.edit(name="mine", memory={"optimizer_state": "host"})) == names(three)
    assert names(three.edit(name="mine", parameters={"mlp": ()})) == ["mine"]
    assert names(FSDP.edit(name="own") | DDP) == ["own", "DDP"]
    with pytest.raises(TypeError, match="no keyword 'joined'"):
        FSDP.edit(joined=())
