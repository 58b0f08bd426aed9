"""A configuration of DeepSpeed, read as it is: each key, what is refused, rates, a real step."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax.__main__ import main
from hfjax.compat.deepspeed.config_file import read_config
from hfjax.compat.deepspeed.convert import parse_config
from hfjax.compat.deepspeed.key_entries import REFUSED, find_entry, is_section
from hfjax.compat.deepspeed.known_keys import TABLE, usual_name
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.precision.dtypes import LossScale, Precision
from hfjax.trainer.config import MeshConfig, OffloadConfig, TrainConfig
from hfjax.trainer.config_io import parse_dataclass
from hfjax.trainer.deepspeed_flags import with_deepspeed_file
from hfjax.trainer.old_config import translate
from hfjax.trainer.strategy import choose_strategy, mesh_sizes
from tests.make_deepspeed import LR, RATES, TORCH, gradient
from tests.small_gpt import mlps, tokens

ROOT = Path(__file__).parents[1]

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples/deepspeed_config.json"
KEYS = (HERE / "deepspeed_keys.txt").read_text().split()
ADAM = {"type": "Adam", "params": {"lr": LR}}


def example(**changes):
    """Return the example in float32, or in what is given instead."""
    given = json.loads(EXAMPLE.read_text())
    return {name: x for name, x in {**given, "fp16": None, **changes}.items() if x is not None}


def setup(world=8, **keys):
    return hfjax.compat.from_deepspeed({"train_batch_size": 8 * world, **keys}, world)


def zero(stage, **keys):
    return {"zero_optimization": {"stage": stage, **keys}}


# -- every key ----------------------------------------------------------------------------


def test_every_key_of_deepspeed_and_of_its_page_has_a_row():
    usual = [usual_name(key, ()) for key in KEYS]
    missing = [
        key for key in usual if find_entry(TABLE, key) is None and not is_section(TABLE, key)
    ]
    assert missing == []
    assert len(KEYS) > 500


def test_what_may_be_refused_is_let_through_with_the_default_of_deepspeed():
    for key, row in TABLE.items():
        if row.verdict == REFUSED and "*" not in key and "(" not in key:
            given: Any = None if isinstance(row.default, type) else row.default
            for name in reversed(key.split(".")):
                given = {name: given}
            assert "ignored because" in str(setup(**given)), key


TABLE_OF_EXAMPLE = """
train_batch_size 32 taken as global_batch_size=32
gradient_accumulation_steps 2 taken as gradient_accumulation_steps=2
steps_per_print 10 ignored because it only changes what is told
optimizer.type "Adam" taken as optax.adamw
optimizer.params.lr 0.001 ignored because WarmupLR says the rate
optimizer.params.betas [0.8, 0.999] taken as [0.8, 0.999]
scheduler.type "WarmupLR" taken as DeepSpeed's WarmupLR, equal at every update
scheduler.params.warmup_num_steps 1000 taken as part of the rate
gradient_clipping 1.0 taken as max_grad_norm=1.0: norms above are divided by norm, there + 1e-6
fp16.enabled true taken as Precision(compute="float16", scale=…)
fp16.loss_scale 0 taken as a scale that moves, at most 16777216 (DeepSpeed: no limit)
fp16.loss_scale_window 500 taken as LossScale(window=500)
fp16.initial_scale_power 15 taken as LossScale(initial=2**15)
zero_optimization.stage 2 taken as ZERO2
zero_optimization.offload_optimizer.device "cpu" taken as HOST_OPTIMIZER
zero_optimization.overlap_comm true ignored because XLA schedules the program
""".strip().splitlines()


def test_the_table_says_what_becomes_of_each_key_of_the_example():
    made = hfjax.compat.from_deepspeed(EXAMPLE, world=8)
    lines = [re.sub(" +", " ", line) for line in str(made).splitlines()]
    assert lines[0].endswith("ZERO2|HOST_OPTIMIZER on data=8, 32 examples in 2 microbatches")
    for line in TABLE_OF_EXAMPLE:
        assert any(found.startswith(line) for found in lines), line
    assert len(lines) == 30  # a title, the head, and a line for each key
    assert made.mesh == {"data": 8}
    assert made.global_batch_size == 32
    scale = LossScale(2.0**15, 500, 2, 1.0)
    precision = Precision(compute="float16", scale=scale)
    assert made.execution == {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "precision": precision,
    }


# -- what is taken ------------------------------------------------------------------------


PLACES = [
    ({}, hfjax.DDP, {"data": 8}),
    (zero(0), hfjax.DDP, {"data": 8}),
    (zero(1), hfjax.ZERO1, {"data": 8}),
    (zero(2, cpu_offload=True), hfjax.ZERO2 | hfjax.HOST_OPTIMIZER, {"data": 8}),
    (zero(3), hfjax.FSDP, {"fsdp": 8}),
    (zero(3, mics_shard_size=4), hfjax.HSDP, {"data": 2, "fsdp": 4}),
    (zero(3, zero_hpz_partition_size=2), hfjax.HSDP, {"data": 4, "fsdp": 2}),
    (
        zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
        hfjax.FSDP | hfjax.HOST_OPTIMIZER | hfjax.HOST_PARAMETERS,
        {"fsdp": 8},
    ),
    (
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.25}),
        (hfjax.FSDP | hfjax.HOST_OPTIMIZER).edit(memory={"optimizer_state": 0.25}),
        {"fsdp": 8},
    ),
    (zero(3, param_persistence_threshold=7), hfjax.FSDP.edit(replicate_below=7), {"fsdp": 8}),
    (
        zero(3, stage3_param_persistence_threshold=1e4),
        hfjax.FSDP.edit(replicate_below=1e4),
        {"fsdp": 8},
    ),
    (
        {**zero(1), "tensor_parallel": {"autotp_size": 2}},
        hfjax.ZERO1 | hfjax.TENSOR,
        {"data": 4, "tensor": 2},
    ),
    (
        {**zero(3), "expert_parallel": {"enabled": True, "autoep_size": 4}},
        hfjax.FSDP | hfjax.EXPERT,
        {"fsdp": 2, "expert": 4},
    ),
    (
        {"pipeline": {"stages": 4}, "gradient_accumulation_steps": 8},
        hfjax.DDP | hfjax.PIPE,
        {"pipe": 4, "data": 2},
    ),
]


@pytest.mark.parametrize(("keys", "strategy", "mesh"), PLACES)
def test_where_everything_lies(keys, strategy, mesh, tmp_path):
    made = setup(**keys)
    assert made.strategy == strategy
    assert made.mesh == mesh
    if "pipe" in mesh:
        assert made.execution["schedule"] == hfjax.Schedule("1f1b", 8)
        assert made.execution["gradient_accumulation_steps"] == 1
    path = written(tmp_path / "ds.json", train_batch_size=64, **keys)
    config, _ = with_deepspeed_file(TrainConfig(deepspeed=path), [], 8)
    sizes = {axis: size for axis, size in mesh_sizes(config.mesh, 8).items() if size > 1}
    assert (choose_strategy(config).name, sizes) == (strategy.name, mesh)
    again, _ = with_deepspeed_file(config, [], 16)  # it goes on with more devices
    assert (choose_strategy(again), again.mesh) == (choose_strategy(config), config.mesh)


@pytest.mark.parametrize(("keys", "strategy", "mesh"), PLACES)
def test_a_run_of_before_goes_on_in_the_same_layout(keys, strategy, mesh, tmp_path):
    path = written(tmp_path / "ds.json", train_batch_size=64, **keys)
    names = parse_config(read_config(path)).parallelism.names
    rest = "fsdp" if names[0] == "fsdp" else "data"  # which a run did not record
    sizes = {axis: mesh.get(axis, 1) for axis in hfjax.make_mesh().shape if axis != rest}
    recorded = {"strategy": "+".join(names), "mesh": sizes, "deepspeed": str(path), "batch": 64}
    old = parse_dataclass(TrainConfig, translate(recorded)[0], "config.yaml")
    new = TrainConfig(deepspeed=path)
    assert with_deepspeed_file(old, [], 8)[0] == with_deepspeed_file(new, [], 8)[0]


def test_parameters_are_sharded_over_experts_alone(tmp_path):
    keys = {**zero(3), "expert_parallel": {"enabled": True, "autoep_size": 4}}
    path = written(tmp_path / "ds.json", train_batch_size=8, **keys)
    for given in (
        TrainConfig(mesh=MeshConfig(expert=4), zero=3),
        TrainConfig(mesh=MeshConfig(expert=4, fsdp=-1)),
        TrainConfig(),
    ):
        config, made = with_deepspeed_file(replace(given, deepspeed=path), [], 4)
        assert made is not None
        assert (made.flags["zero"], made.flags["mesh.fsdp"], made.mesh["fsdp"]) == (3, 1, 1)
        assert choose_strategy(config) == hfjax.FSDP | hfjax.EXPERT
        assert mesh_sizes(config.mesh, 8)["fsdp"] == 2


@pytest.mark.parametrize(
    ("keys", "execution"),
    [
        ({}, {"max_grad_norm": 1.0}),
        ({"gradient_clipping": 0}, {"max_grad_norm": None}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16", "on_nonfinite": "skip"}),
        ({"bfloat16": {"enabled": True}}, {"precision": "bf16", "on_nonfinite": "skip"}),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            {"precision": "bf16", "on_nonfinite": "stop"},
        ),
        ({"fp16": {"enabled": False, "hysteresis": 5}}, {"max_grad_norm": 1.0}),
        (
            {"communication_data_type": "fp32", "bf16": {"enabled": True}},
            {"precision": Precision(compute="bfloat16", reduce="float32")},
        ),
        (
            {"fp16": {"enabled": True}},
            {"precision": Precision(compute="float16", scale=LossScale())},
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128.0, "hysteresis": 4}},
            {"precision": Precision(compute="float16", scale=LossScale(128.0, window=None))},
        ),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"offload": 1.0}),
        ({"pipeline": {"activation_checkpoint_interval": 2}}, {"remat": "group:2"}),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, {"remat": "full"}),
    ],
)
def test_how_a_step_computes(keys, execution):
    found = setup(**keys).execution
    assert {name: found.get(name) for name in execution} == execution


@pytest.mark.parametrize(
    ("sizes", "rows", "times"),
    [
        *[((64, None, None), 64, 1), ((64, 2, None), 64, 4), ((64, None, 8), 64, 8)],
        *[((None, 3, None), 24, 1), ((None, 3, 2), 48, 2), ((64, 4, 2), 64, 2)],
    ],
)
def test_rows_are_those_of_a_device_times_microbatches_times_devices(sizes, rows, times):
    names = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps".split()
    given = dict(zip(names, sizes, strict=True))
    made = hfjax.compat.from_deepspeed(
        {name: x for name, x in given.items() if x is not None}, world=8
    )
    assert (made.global_batch_size, made.execution["gradient_accumulation_steps"]) == (rows, times)
    tensor = {"tensor_parallel": {"autotp_size": 2}}
    assert hfjax.compat.from_deepspeed({names[1]: 3, **tensor}, world=8).global_batch_size == 12


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (zero(2, cpu_offload=False), "cpu_offload +false +ignored because it is false"),
        (zero(2, offload_optimizer={"device": "none", "ratio": 0.5}), "ratio +0.5 +ignored"),
        (zero(1, stage3_param_persistence_threshold=9), "9 +ignored because only stage 3 divides"),
        ({"fp16": {"loss_scale": 3}}, "loss_scale +3 +ignored because fp16.enabled is not true"),
        ({"fp16": {"enabled": True}}, "without ZeRO DeepSpeed has no hysteresis and no stop"),
        ({}, "gradient_clipping +not there +taken as max_grad_norm=1.0, DeepSpeed's default"),
        ({"optimizer": {"type": "adam"}}, "optimizer.type +.adam. +taken as optax.adamw"),
        (zero(3, max_reuse_distance=7), "zero_optimization.max_reuse_distance +7 +ignored because"),
        (zero(3, gather_16bit_weights_on_model_save=True), "gather_16bit.* +true +ignored because"),
        ({"bfloat16": {"enabled": True}}, 'bfloat16.enabled +true +taken as precision="bf16"'),
        (
            {"tensor_parallel": {"tensor_parallel": {"tp_size": 2}}},
            "tensor_parallel.tensor_parallel.tp_size +2 +taken as TENSOR, tensor=2",
        ),
        (
            {"scheduler": {"type": "LRRangeTest", "params": {"last_batch_iteration": -1}}},
            "last_batch_iteration +-1 +ignored because it is the default",
        ),
        ({"_comment": "x"}, "_comment +.x. +ignored because DeepSpeed has no such key, and passes"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 1}}},
            "taken as optax.adam, decay added to gradients",
        ),
    ],
)
def test_the_table_says_when_a_key_does_nothing(keys, words):
    assert re.search(words, str(setup(**keys)))


# -- what is not --------------------------------------------------------------------------

NO_KEY = "refused because DeepSpeed has no such key"
NO_NORM = 'refused because it is no parameter of an optimizer: write "gradient_clipping"'
REFUSALS = [
    ({"train_batchsize": 8}, f"train_batchsize +8 +{NO_KEY}, .* it. Did you mean train_batch_size"),
    (
        {"stage": 2},
        rf"stage +2 +{NO_KEY}, .* Did you mean zero_optimization.stage\? If not, remove",
    ),
    (
        zero(1, stag=2),
        rf"zero_optimization.stag +2 +{NO_KEY}. Did you mean zero_optimization.stage",
    ),
    ({"fp16.enabled": True}, f'"fp16.enabled" +true +{NO_KEY}: nest objects'),
    (zero("auto"), r'stage +"auto" .* it is "auto", which a Trainer fills in: write 0 \(Deep'),
    ({"gradient_clipping": "auto"}, r'"auto", which a Trainer fills in: write 1.0 \(DeepSpeed'),
    (
        {"gradient_clipping": "1e-3"},
        r'"1e-3" +refused because a number from 0 to 3.4e\+38 is expected. Write 1e-3 without quo',
    ),
    (
        {"gradient_clipping": -1},
        r"_clipping +-1 +refused because a number from 0 to 3.4e\+38 is exp",
    ),
    (zero(2.5), r"stage +2.5 +refused because a whole number from 0 to 1e\+18 is expected"),
    ({"steps_per_print": 2.5}, "steps_per_print +2.5 +refused because a whole number is expected"),
    ({"fp16": True}, "fp16 +true +refused because an object is expected"),
    (zero(4), r"stage +4 +refused because the stages are 0 \(DDP\), 1, 2 \(ZERO1, ZERO2\) and 3"),
    (zero(2, offload_param={"device": "cpu"}), "stage is 2, and offload of parameters needs stage"),
    (zero(0, offload_optimizer={"device": "cpu"}), "offload of the optimizer needs stage 1, 2"),
    (zero(3, offload_param={"device": "nvme"}), 'NVMe is not here: write "cpu"'),
    (zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "a part below 1 needs stage 3"),
    (
        zero(3, offload_optimizer={"device": "cpu", "ratio": 1.5}),
        "ratio +1.5 .* from 0 to 1 is exp",
    ),
    (
        zero(2, cpu_offload=True, offload_optimizer={"device": "none"}),
        "cpu_offload +true +refused because offload_optimizer is there too, which replaces it",
    ),
    (zero(3, cpu_offload_param=False, offload_param={}), "false +refused because offload_param is"),
    (
        zero(3, max_live_parameters=1, stage3_max_live_parameters=2),
        "n.max_live_parameters +1 +refused because zero_optimization.stage3_max_.* is the same",
    ),
    (
        {"bfloat16": {"enabled": True}, "bf16": {}},
        "bfloat16.enabled +true +refused because bf16.en",
    ),
    (zero(2, zero_quantized_gradients=True), "refused because it rounds what is sent"),
    (zero(2, mics_shard_size=2), "groups of devices need stage 3"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "hysteresis +0 +refused because a number fro"),
    ({"fp16": {"enabled": True, "min_loss_scale": 2**17}}, r"at most 2\*\*16, the first"),
    ({"fp16": {"enabled": True, "initial_scale_power": 200}}, r"holds scales up to 2\*\*126"),
    ({"communication_data_type": "fp16"}, "float16 overflows in a sum over devices"),
    ({"gradient_allreduce_op": "sum"}, "hfjax takes the mean"),
    ({"optimizer": {"type": "OneBitAdam"}}, "refused because it compresses gradients"),
    (
        {"optimizer": {"type": "Muon"}},
        r"corrects the bias of its momentum \(DeepSpeed's does not\).* hfjax\.optimizers\.muon",
    ),
    (
        {"optimizer": {"type": "RMSprop", "params": {"alpha": 0.9}}},
        "type +.RMSprop. +refused because there are Adam, AdamW, Lamb, Lion, Adagrad, SGD; give",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
        "no such key. Did you mean warmup_num_steps",
    ),
    ({"optimizer": {"type": "Admw"}}, "give others yourself. Did you mean Adam"),
    (
        {"optimizer": {"type": "SGD", "params": {"betas": [0, 1]}}},
        r"betas +.0, 1. +refused because optimizer.SGD..params has no such key. There are lr, w",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
        "two numbers from 0 to below 1 a",
    ),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}, "from 0 to below 1 are exp"),
    ({"optimizer": {"type": "lamb", "params": {"betas": [1, 0]}}}, "numbers from 0 to below 1 are"),
    (
        {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "bias_correction": False}}},
        "bias_correction +false +refused because torch's Adam has no such parameter",
    ),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "true +.* a momentum above 0"),
    *(
        ({"optimizer": {"type": name, "params": {"max_grad_norm": norm}}}, rf"{norm} +{NO_NORM}")
        for name, norm in (("Adam", 1.0), ("Lamb", 0.0), ("SGD", 2))
    ),
    ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad +true +refused"),
    ({"scheduler": {"type": "Warmup"}}, "there are WarmupLR, .* Did you mean WarmupLR"),
    ({"scheduler": {"type": "WarmupLR"}}, "highest rate is not in the file: write warmup_max_lr"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params needs total_num_steps"),
    (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 2}}},
        'cycle_momentum +not there +refused because .* write "cycle_momentum": false',
    ),
    ({"torch_autocast": {"enabled": True}}, "torch's types by operation are not here: write bf16"),
    ({"sparse_attention": {"mode": "fixed"}}, "attention is the model's"),
    ({"compression_training": {"layer_reduction": {"enabled": True}}}, "compresses no model"),
    (
        {**zero(2), "pipeline": {"stages": 2}},
        "DeepSpeed's pipelines take stage 0 or 1, and stage is 2",
    ),
    ({"tensor_parallel": {"autotp_size": 3}}, "8 devices do not divide by 3: DDP.TENSOR has"),
    (
        {"train_batch_size": 30},
        r"30 is not 3 examples \* 1 microbatches \* 8 devices .*= 24. Write",
    ),
    (
        {"train_batch_size": 0},
        r"train_batch_size +0 +refused because a whole number from 1 to 1e.18",
    ),
    (
        {"train_micro_batch_size_per_gpu": 9},
        r"64 is not 9 examples \* 1 microbatches .* = 72. Write tra",
    ),
    (
        {"gradient_accumulation_steps": 16, "train_batch_size": 64},
        "is not 0 examples .* Write train",
    ),
    (
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
        r"64 is not 4 examples \* 1 microbatches \* 8 devices .* = 32. Write train_batch_size 32",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSALS)
def test_what_is_not_here_is_an_error_with_what_to_write(keys, message):
    with pytest.raises(ValueError, match=message):
        setup(**keys)


def test_a_refused_parameter_does_not_blame_the_rate_that_needs_the_optimizer():
    params = {"lr": 1e-3, "betas": [0.9]}
    with pytest.raises(ValueError, match=r"^the configuration: optimizer.params.betas: refused"):
        setup(optimizer={"type": "Adam", "params": params}, scheduler={"type": "WarmupLR"})


@pytest.mark.parametrize(
    "keys", [{"stage": 2}, {"train_batch_size": 30}, {"fp16": {"enabled": True, "hysteresis": 0}}]
)
def test_the_error_has_a_line_for_each_key(keys):
    """Of an unknown key, of numbers that do not fit together, of what is refused."""
    with pytest.raises(ValueError, match="the configuration: ") as caught:
        setup(bf16={"enabled": False}, steps_per_print=5, note_of_mine={"by": "me"}, **keys)
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert any(line.startswith("train_batch_size ") for line in lines[1:])
    assert "steps_per_print 5 ignored because it only changes what is told" in " ".join(lines)
    mine = 'note_of_mine.by "me" ignored because DeepSpeed has no such key, and passes over it too'
    assert mine in lines
    assert sum("bf16.enabled false" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "bf16": {}, // mine\n "a": 1}', "line 2: JSON has no comments: remove it"),
        ('{"steps_per_print": 1,}', "line 1: it is no JSON"),
        ('{"a": {"stage": 1, "stage": 2}}', r"the key stage is there twice, 1 and 2: keep one"),
        ('{"gradient_clipping": NaN}', "NaN is no number of JSON"),
        ("[1]", r"an object of JSON is expected, found \[1\]"),
        ("", "line 1: it is no JSON"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"a": ' * 950 + "1" + "}" * 950, r"(.|\n)*DeepSpeed has no such key|nested too d"),
    ],
)
def test_a_file_that_is_no_json_is_told(tmp_path, text, message):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"ds.json.*{message}"):
        hfjax.compat.from_deepspeed(path)


def test_a_number_of_devices_is_one():
    with pytest.raises(ValueError, match="world=0: a number of devices is expected"):
        hfjax.compat.from_deepspeed({}, world=0)
    with pytest.raises(ValueError, match="neither train_batch_size nor train_micro_batch_size"):
        hfjax.compat.from_deepspeed({}, world=1)


# -- numbers ------------------------------------------------------------------------------

REFERENCE = np.load(HERE / "deepspeed_rates.npz")


@pytest.mark.parametrize("name", RATES)
def test_a_rate_is_that_of_deepspeed_in_2000_updates(name):
    kind, params = RATES[name]
    rate = setup(optimizer=ADAM, scheduler={"type": kind, "params": params}).rate
    assert rate is not None
    found = jax.jit(jax.vmap(rate))(jnp.arange(2000))
    most = float(REFERENCE[name].max())
    np.testing.assert_allclose(found, REFERENCE[name], rtol=1e-6, atol=1e-6 * most)


def stairs_of(kind, params, updates):
    """Return on how many stairs each of some updates is, in a jitted step, as whole numbers."""
    rate = setup(optimizer=ADAM, scheduler={"type": kind, "params": params}).rate
    assert rate is not None
    heights = jax.jit(jax.vmap(rate))(jnp.array(updates, jnp.int32))
    least, most = params.get("cycle_min_lr", 1.0), params.get("cycle_max_lr", 2.0)
    return (np.asarray(heights, np.float64) - least) / (most - least)


@pytest.mark.parametrize("size", [3, 7, 41, 49, 237.0, 2000])
def test_a_range_test_goes_up_with_the_first_update_of_each_stair(size):
    names = ("min_lr", "step_size", "step_rate", "staircase")
    params = zip((f"lr_range_test_{name}" for name in names), (1.0, size, 1.0, True), strict=True)
    found = stairs_of("LRRangeTest", dict(params), range(2**15))
    np.testing.assert_array_equal(found, np.arange(2**15) // size)


def cycle(first, stairs, second=None, later=None):
    """Return the parameters of a OneCycle from 0 to as many stairs as it has."""
    sizes = {"first_step_size": first, "first_stair_count": stairs}
    sizes |= {"second_step_size": second, "second_stair_count": later}
    sizes = {f"cycle_{name}": x for name, x in sizes.items() if x is not None}
    return {**sizes, "cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_momentum": False}


@pytest.mark.parametrize(
    ("first", "stairs"),
    [(237, 5), (996, 7), (996.0, 83), (41, 41), (3, 10), (100_000, 50_000), (10**9, 10**6)],
)
def test_a_cycle_goes_up_and_down_with_the_first_update_of_each_stair(first, stairs):
    """In whole numbers: also where updates * stairs have more than 32 bits."""
    whole = int(first)
    updates = np.unique(np.linspace(0, whole, 5000).astype(np.int64))
    edges = -(-np.arange(1, stairs + 1, max(1, stairs // 999)) * whole // stairs)
    updates = np.unique(np.clip([*updates, *edges, *(edges - 1)], 0, whole))
    want = [int(n) * stairs // whole for n in updates]
    found = stairs_of("OneCycle", cycle(first, stairs), updates)
    np.testing.assert_array_equal(np.rint(found * stairs), want)
    np.testing.assert_allclose(found * stairs, want, rtol=1e-6)
    down = stairs_of("OneCycle", cycle(7, 1, first, stairs), 7 + whole - updates[:-1])
    np.testing.assert_array_equal(np.rint(down * stairs), want[:-1])


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("WarmupLR, by default", {"warmup_steps": 1000, "type": "constant"}),
        (
            "WarmupDecayLR, by default",
            {"warmup_steps": 1000, "stable_steps": 1, "steps": 1701, "type": "linear"},
        ),
        ("WarmupCosineLR", {"warmup_steps": 1000, "steps": 1900, "final_fraction": 0.0001}),
    ],
)
def test_the_rows_of_the_page_on_optimizers_are_the_classes_of_deepspeed(name, rate):
    found = jax.vmap(hfjax.lr_schedule(1e-3 if "Decay" in name else LR, warmup_type="log", **rate))
    np.testing.assert_allclose(found(jnp.arange(2000)), REFERENCE[name], rtol=1e-6, atol=1e-9)


def walk(optimizer, steps):
    x = np.array([1.0, 2.0, 3.0], np.float32)
    state, found = optimizer.init(x), []
    for _ in range(steps):
        updates, state = optimizer.update(gradient(x), state, x)
        x = np.asarray(optax.apply_updates(x, updates))
        found.append(x)
    return np.array(found)


@pytest.mark.parametrize("name", TORCH)
def test_an_optimizer_goes_where_that_of_torch_goes(name):
    _, params, more = TORCH[name]
    given = {"type": name.partition(",")[0], "params": {"lr": LR, **params, **more}}
    found = walk(setup(optimizer=given).optimizer, 20)
    np.testing.assert_allclose(found, REFERENCE[f"optimizer {name}"], rtol=1e-6)


def test_torch_adam_brings_the_decay_that_torch_has_by_default():
    plain = setup(optimizer={"type": "AdamW", "params": {"torch_adam": True}}).optimizer
    np.testing.assert_array_equal(walk(plain, 3), walk(optax.adamw(1e-3, weight_decay=1e-2), 3))


def test_lion_and_lamb_are_those_of_the_kernels_of_deepspeed():
    lion = setup(optimizer={"type": "Lion", "params": {"lr": 0.1, "weight_decay": 0.1}}).optimizer
    np.testing.assert_array_equal(
        walk(lion, 3), walk(optax.lion(0.1, 0.9, 0.999, weight_decay=0.1), 3)
    )
    given = {"lr": 0.1, "weight_decay": 0.1, "max_coeff": 0.5}
    found = walk(setup(optimizer={"type": "lamb", "params": given}).optimizer, 5)
    x, m, v = np.array([1.0, 2.0, 3.0]), 0.0, 0.0
    for t in range(1, 6):
        g = gradient(x)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        moved = m / (np.sqrt(v) + 1e-8) + 0.1 * x
        ratio = min(max(np.linalg.norm(x) / np.linalg.norm(moved), 0.01), 0.5)
        x = x - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * ratio * moved
        np.testing.assert_allclose(found[t - 1], x, rtol=1e-5)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_correction_of_its_bias_is_that_of_the_kernel(decoupled):
    given = {"lr": 0.1, "weight_decay": 0.2, "bias_correction": False, "adam_w_mode": decoupled}
    found = walk(setup(optimizer={"type": "Adam", "params": given}).optimizer, 5)
    x, m, v = np.array([1.0, 2.0, 3.0]), 0.0, 0.0
    for t in range(5):
        g = gradient(x) + (0.0 if decoupled else 0.2 * x)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x - 0.1 * (m / (np.sqrt(v) + 1e-8) + (0.2 * x if decoupled else 0.0))
        np.testing.assert_allclose(found[t], x, rtol=1e-5)


BY_HAND = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("section", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_the_example_trains_as_what_is_written_by_hand(section):
    """ZeRO-2, the optimizer on the host, Adam(0.8, 0.999), WarmupLR, clipping."""
    made = hfjax.compat.from_deepspeed(example(**section), world=4)
    rate = hfjax.lr_schedule(1e-3, warmup_steps=1000, type="constant", warmup_type="log")
    mine = optax.adamw(rate, 0.8, 0.999, 1e-8, weight_decay=3e-7)
    types = {"precision": "bf16", "on_nonfinite": "skip"} if section else {}
    results = []
    for strategy, optimizer, execution in (
        (made.strategy, made.optimizer, made.execution),
        (hfjax.ZERO2 | hfjax.HOST_OPTIMIZER, mine, {**BY_HAND, **types}),
    ):
        mesh = hfjax.make_mesh(devices=jax.devices()[:4], **made.mesh)
        layout = hfjax.layout(mlps(layers=1), optimizer, mesh, strategy)
        step, state = hfjax.train_step(layout, next_token_loss, **execution), hfjax.init(layout)
        losses = []
        for _ in range(5):
            state, metrics = step(state, tokens(rows=made.global_batch_size))
            losses.append(float(metrics["loss"]))
        results.append((jax.device_get(state.params), losses))
    assert results[0][1] == results[1][1]
    jax.tree.map(np.testing.assert_array_equal, *(params for params, _ in results))


# -- hfjax train --------------------------------------------------------------------------


def written(path, **keys):
    path.write_text(json.dumps(keys))
    return path


def test_a_run_is_configured_by_the_file_and_flags_that_say_the_same(tmp_path):
    path = written(tmp_path / "ds.json", **example(bf16={"enabled": True}))
    given = TrainConfig(deepspeed=path, zero=2, offload=OffloadConfig(optimizer=True), steps=7)
    typed = ["--zero", "--offload.optimizer", "--steps"]
    config, made = with_deepspeed_file(given, typed, 8)
    assert made is not None
    assert (config.global_batch_size, config.gradient_accumulation_steps) == (32, 2)
    assert (config.steps, config.precision) == (7, "bf16")
    assert (config.zero, config.offload) == (2, OffloadConfig(optimizer=True))
    assert choose_strategy(config) == made.strategy
    assert (config.mesh.data, config.mesh.fsdp) == (None, 1)  # on other devices too
    assert (config.optimizer.max_grad_norm, config.lr_schedule.warmup_steps) == (1.0, 1000)
    assert with_deepspeed_file(config, [], 8)[0] == config  # a run that goes on
    assert with_deepspeed_file(TrainConfig(), ["--steps"], 8) == (TrainConfig(), None)


@pytest.mark.parametrize(
    ("changes", "typed", "message"),
    [
        (
            {},
            "--global-batch-size",
            "--global-batch-size 32: --deepspeed .*ds.json says something else for 8 devices, 16",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "",
            "--gradient-accumulation-steps 4: --deepspeed .* says something else for 8 devices, 2",
        ),
        ({"mesh": MeshConfig(fsdp=-1)}, "--mesh.fsdp", r"--mesh.fsdp -1: .* 8 devices, 1\. "),
        ({"mesh": MeshConfig(data=4)}, "--mesh.data", r"--mesh.data 4: .* 8 devices, 8\. "),
        ({"zero": 1}, "--zero", r"--zero 1: .* 8 devices, 2\. "),
        ({}, "--offload.no-optimizer", "--offload.no-optimizer: .* devices, --offload.optimizer"),
        (
            {"offload": OffloadConfig(parameters=True)},
            "",
            "--offload.parameters: .* 8 devices, --offload.no-parameters",
        ),
        ({"strategy": "mine.py:rules"}, "--strategy", "--strategy mine.py:rules: .* 8 devices, No"),
        ({}, "--precision", "--precision auto: .* 8 devices, bf16"),
        ({}, "--optimizer.learning-rate", "--optimizer.learning-rate 0.003: .* 8 devices, 0.001"),
        (
            {},
            "--lr-schedule.stable-steps=0",
            "--lr-schedule.stable-steps 0: .* 8 devices, as WarmupLR does",
        ),
    ],
)
def test_a_flag_that_says_something_else_is_an_error_with_both_values(
    tmp_path, changes, typed, message
):
    keys = example(bf16={"enabled": True}, train_batch_size=16)
    path = written(tmp_path / "ds.json", **keys)
    with pytest.raises(ValueError, match=message):
        with_deepspeed_file(TrainConfig(deepspeed=path, **changes), [typed], 8)


def test_the_command_trains_evaluates_and_refuses(tmp_path, capsys):
    path = written(tmp_path / "ds.json", **example(train_batch_size=16))
    small = "--model.num-layers 1 --model.hidden-size 16 --model.num-heads 2 --model.seq-len 16"
    run = ["--run-dir", str(tmp_path / "run"), "--eval.interval", "0", *small.split()]
    run += ["--log.sample-tokens", "0"]
    run += ["--devices", "2", "--steps", "2"]
    assert main(["train", "--deepspeed", str(path), *run]) == 0
    told = capsys.readouterr().out
    assert re.search(r'zero_optimization.offload_optimizer.device +"cpu" +taken as HOST_OPT', told)
    path.unlink()  # the run has its own copy
    assert main(["eval", str(tmp_path / "run"), "--max-batches", "1", "--devices", "1"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["train", "--deepspeed", str(path), *run])
    assert "ds.json: there is no such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--deepspeed", str(EXAMPLE), "--lr", "0.003", *run])
    assert "--optimizer.learning-rate 0.003: --deepspeed" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_falls_in_float16_as_in_float32(tmp_path):
    """50 steps on 2 processes; the fall of the loss within 1 %."""
    given = json.loads((ROOT / "examples/deepspeed_config.json").read_text())
    falls = []
    for enabled in (True, False):
        file, out = tmp_path / f"{enabled}.json", tmp_path / str(enabled)
        file.write_text(json.dumps(given | {"fp16": given["fp16"] | {"enabled": enabled}}))
        words = ["--deepspeed", str(file), "--steps", "50", "--run-dir", str(out)]
        quiet = ["--cpu-devices", "1", "--eval.max-batches", "1"]
        train = [sys.executable, "-m", "hfjax", "train", *words, *quiet]
        launch = [sys.executable, "-m", "hfjax", "launch", "-n", "2", "--", *train]
        subprocess.run(launch, check=True, cwd=ROOT, capture_output=True, timeout=600)
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses = [row["loss"] for row in rows if "grad_norm" in row]
        falls.append(losses[0] - sum(losses[-5:]) / 5)
    assert abs(falls[0] / falls[1] - 1) < 0.01
