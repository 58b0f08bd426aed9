"""A config.json: both spellings are one shape, published sizes, and what cannot be read is said."""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportFunctionMemberAccess=false
# pyright: reportArgumentType=false

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfjax.models.attention import rotate
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.llama import Llama
from hfjax.models.moe.moe_llama import MoEConfig, MoELlama
from hfjax.models.rope import Rope
from hfjax.weights.families import FAMILIES, parse_config

FOLDER = Path(__file__).with_name("pretrained")
read = lambda name: json.loads((FOLDER / name).read_text(encoding="utf-8"))
PUBLISHED, ROPE = read("published.json"), read("rope.json")
SIZES = {
    "gpt2": 124_439_808,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", SIZES)
def test_models_have_as_many_parameters_as_published(name):
    config = parse_config(PUBLISHED[name])
    kind = {GPTConfig: GPT, MoEConfig: MoELlama}.get(type(config), Llama)
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    parameters = nnx.state(model, nnx.Param)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(parameters)) == SIZES[name]


@pytest.mark.parametrize("name", ROPE)
def test_both_spellings_are_one_shape(name):
    assert parse_config(ROPE[name]["saved"]) == parse_config(PUBLISHED[name])


def ropes_of(name):
    """Return our rotary positions, the speeds of transformers and its factor, of each kind."""
    config, made = parse_config(PUBLISHED[name]), ROPE[name]
    kinds = {"": config.rotary}
    if "inv_freq" not in made:
        kinds = {"full_attention_": config.rotary, "sliding_attention_": config.local.rotary}
    for kind, rope in kinds.items():
        yield rope, np.float32(made[f"{kind}inv_freq"]), made[f"{kind}attention_scaling"]


@pytest.mark.parametrize("name", ROPE)
def test_rotary_positions_turn_as_fast_as_in_transformers(name):
    for rope, speeds, factor in ropes_of(name):
        found = np.asarray(rope.frequencies(len(speeds), np.float32))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, speeds, rtol=2.5e-7)  # its last two bits
        assert rope.attention_scaling == pytest.approx(factor, rel=1e-15)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "yarn, all its keys"])
def test_far_positions_are_turned_as_in_transformers(name):
    """Float32 knows an angle to its last bit: what a bit of the speed makes is allowed."""
    for rope, speeds, factor in ropes_of(name):
        at = np.float32([0, 1, rope.original, 16 * rope.original - 1])
        angles = np.outer(at, speeds).astype(np.float32)
        one = jnp.ones((1, len(at), 1, 2 * len(speeds)))
        found = np.asarray(rotate(one, rope, jnp.asarray(at)))[0, :, 0]
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        allowed = np.abs(angles) * 4e-7 + 1e-6
        assert (np.abs(found[:, : len(speeds)] - (cos - sin)) <= allowed).all()
        assert (np.abs(found[:, len(speeds) :] - (cos + sin)) <= allowed).all()


def test_kinds_of_layers():
    of = lambda name, **keys: parse_config(PUBLISHED[name] | keys)
    gemma = of("gemma-3-1b")
    assert [i for i in range(26) if i not in gemma.local.layers] == [5, 11, 17, 23]
    assert gemma.local.attention.window == 512
    assert of("gemma-2-2b").local.attention.cap == 50.0
    qwen = of("qwen3-8b", use_sliding_window=True, sliding_window=64, max_window_layers=30)
    assert qwen.local.layers == tuple(range(30, 36))
    assert of("qwen3-8b", use_sliding_window=True, sliding_window=64).local is None
    every = of("qwen2.5-7b", use_sliding_window=True, sliding_window=64, max_window_layers=0)
    assert every.local is None
    assert every.attention.window == 64
    assert of("mistral-7b", sliding_window=None) == of(
        "mistral-7b", sliding_window=None, head_dim=128
    )
    types = ["full_attention", "sliding_attention"] * 13
    assert of("gemma-2-2b", layer_types=types).local.layers == tuple(range(1, 26, 2))


def test_experts_by_either_name_and_in_some_layers():
    of = lambda **keys: parse_config(PUBLISHED["qwen3-30b-a3b"] | keys)
    assert of() == of(num_experts=None, num_local_experts=128)
    some = of(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert some.experts == (0, 128, 0, 0)
    assert some.dense == 6144
    assert of(norm_topk_prob=False).router.normalise == "none"
    told = of(output_router_logits=True)
    assert told.router.balance_loss == 0.001 * told.top_k
    assert told.router.pools_layers
    assert of().router.balance_loss == 0


def test_an_activation_has_every_name_of_its_function():
    for name, key, words in (
        ("llama-3.1-8b", "hidden_act", ["silu", "swish"]),
        ("mixtral-8x7b", "hidden_act", ["silu", "swish", None]),
        ("gemma-2-2b", "hidden_activation", ["gelu_pytorch_tanh", "gelu_new", "gelu_fast"]),
        ("gpt2", "activation_function", ["gelu_new", "gelu_pytorch_tanh", "gelu_accurate", None]),
    ):
        shapes = [parse_config(PUBLISHED[name] | {key: word}) for word in words]
        assert all(shape == parse_config(PUBLISHED[name]) for shape in shapes)


def test_a_model_of_pictures_has_a_part_that_reads_text():
    text = PUBLISHED["gemma-3-4b, text"]
    assert parse_config({"model_type": "gemma3", "text_config": text}) == parse_config(text)
    with pytest.raises(ValueError, match="text_config is absent: the keys of the part"):
        parse_config({"model_type": "gemma3"})


ROPES = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
REFUSED = [
    ("llama-3.1-8b", {"model_type": "llama9"}, "'llama9': one of gpt2, llama, mistral, qwen2"),
    ("llama-3.1-8b", {"model_type": None}, "model_type is None: one of gpt2"),
    ("llama-3.1-8b", {"model_type": "deepseek_v3"}, "'deepseek_v3': its attention has latent"),
    ("llama-3.1-8b", {"quantization_config": {"bits": 4}}, "quantization_config .*before it was"),
    ("llama-3.1-8b", {"hidden_size": "4096"}, "hidden_size is '4096': a whole number, at least 1"),
    ("llama-3.1-8b", {"hidden_size": None}, "hidden_size is None: a whole number"),
    ("llama-3.1-8b", {"rms_norm_eps": True}, "rms_norm_eps is True: a finite number above 0"),
    ("llama-3.1-8b", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': true or false"),
    ("llama-3.1-8b", {"hidden_act": "relu"}, "'relu': one of silu, swish, gelu_pytorch_tanh"),
    ("llama-3.1-8b", {"attention_bias": True}, "attention_bias is True: only queries, keys"),
    ("llama-3.1-8b", {"mlp_bias": True}, "mlp_bias is True: only queries"),
    ("llama-3.1-8b", {"rope_scaling": [1]}, r"rope_scaling is \[1\]: keys and values, or null"),
    ("llama-3.1-8b", {"rope_scaling": ROPES}, "rope_scaling: high_freq_factor is absent: a finite"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "ntk"}}, "type is 'ntk': one of default, linear"),
    ("llama-3.1-8b", {"rope_scaling": {"rope_type": "dynamic"}}, "kind dynamic are not read"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "longrope"}}, "kind longrope are not read"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "proportional"}}, "kind proportional are not"),
    ("llama-3.1-8b", {"rope_scaling": {"type": "mrope"}}, "kind mrope are not read"),
    ("qwen3-8b", {"rope_parameters": {"mrope_section": [1]}}, "mrope_section is .* kind mrope are"),
    ("llama-3.1-8b", {"partial_rotary_factor": 0.5}, "all dimensions .* 1.0 can be read"),
    ("qwen3-8b", {"rope_parameters": {"full_attention": {"a": 1}}}, "share one set of rotary"),
    ("gemma-3-1b", {"rope_parameters": {"factor": 2}}, "keys are full_attention and sliding_at"),
    ("gemma-3-1b", {"use_bidirectional_attention": True}, "attention is causal: take false"),
    ("gemma-3-1b", {"hidden_activation": None}, "hidden_activation is None: one of silu"),
    ("gemma-2-2b", {"sliding_window": None}, "layer_types is absent: layers see a window, and"),
    ("gemma-2-2b", {"layer_types": ["full_attention"]}, "26 words, each of full_attention"),
    ("mistral-7b", {"layer_types": ["full_attention"] * 32}, "alike: sliding_attention"),
    ("mixtral-8x7b", {"router_jitter_noise": 0.1}, r"router_jitter_noise is 0.1: take 0; Router"),
    ("mixtral-8x7b", {"hidden_act": "gelu_pytorch_tanh"}, "tanh': one of silu, swish is expected"),
    ("mixtral-8x7b", {"num_experts_per_tok": 9}, "is 9: at most the number of experts, 8, is exp"),
    ("qwen3-30b-a3b", {"num_experts": 4}, "tok is 8: at most the number of experts, 4, is exp"),
    ("qwen3-30b-a3b", {"mlp_only_layers": [48]}, "a list of whole numbers from 0 to 47"),
    ("gpt2", {"activation_function": "gelu"}, "'gelu': one of gelu_pytorch_tanh, gelu_new, "),
    ("gpt2", {"n_inner": 100}, "four times as wide as the residual stream: 3072 can be read"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "one epsilon: 1e-05 can be read"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "alike in all layers: False can be"),
    ("gpt2", {"scale_attn_weights": False}, "scores of attention are scaled: True can be read"),
    ("gpt2", {"add_cross_attention": True}, "a decoder by itself: False can be read"),
    ("gpt2", {"tie_word_embeddings": False}, "head is its embedding: True can be read"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_what_cannot_be_read_is_said(name, keys, message):
    with pytest.raises(ValueError, match=message):
        parse_config(PUBLISHED[name] | keys)


def test_every_family_is_tried():
    tried = {json.loads(p.read_text())["model_type"] for p in FOLDER.glob("*/config.json")}
    assert tried == set(FAMILIES) - {"gemma3"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "ntk"}, "one of default, linear, llama3, yarn"),
        ({"base": 0}, "base=0.: a finite number is expected, above 0"),
        ({"kind": "yarn", "original": 0.5}, "original=0.5.*at least 1"),
        ({"kind": "llama3", "low": 4.0}, "low=4.0, high=4.0.: waves"),
        ({"kind": "yarn", "truncate": 1}, "truncate=1.: true or false"),
        ({"factor": 2.0}, "factor=2.0.: the kind default stretches nothing"),
    ],
)
def test_rotary_positions_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Rope(**fields)
