"""With torch and transformers at hand: each family goes in, trains a step, and comes out as theirs.

Slow, and skipped where they are not installed; tests/pretrained has what they computed before.
"""

import jax
import numpy as np
import optax
import pytest

import hfjax
from hfjax.models.loss import next_token_loss

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.pretrained.make_fixtures import FAMILIES, LENGTH, ROWS, filled  # noqa: E402
from tests.pretrained.weights_of import tokens  # noqa: E402

SPLIT = hfjax.FSDP.edit(replicate_below=0)


def logits_of(folder, rows):
    """What transformers computes with what is in a folder."""
    how = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not any(told.values()), told
    with torch.no_grad():
        given = torch.from_numpy(rows[:, :-1].astype(np.int64))
        return model.eval()(input_ids=given, use_cache=False).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_in_trains_and_comes_out_as_transformers_loads_it(family, dtype, tmp_path):
    torch.manual_seed(0)
    made = filled(family).to(getattr(torch, dtype))
    made.save_pretrained(tmp_path / "in", max_shard_size="50KB")
    model = hfjax.pretrained(tmp_path / "in", pad_vocab_to=4)
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], fsdp=2, tensor=2)
    layout = hfjax.layout(model.create, optax.adamw(1e-2), mesh, SPLIT | hfjax.TENSOR)
    state = hfjax.init(layout, parameters=model.weights)
    rows = tokens(model.config.vocab, ROWS, LENGTH)
    predict = hfjax.predict_step(layout)
    vocab = model.config.vocab

    def agree(folder, state):
        theirs, ours = logits_of(folder, rows), predict(state, {"tokens": rows})
        ours = np.asarray(ours)[..., :vocab]
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)

    agree(tmp_path / "in", state)
    state, _ = hfjax.train_step(layout, next_token_loss)(state, {"tokens": rows})
    hfjax.export(tmp_path / "out", layout, state, like=model, dtype="float32", shard="100kB")
    agree(tmp_path / "out", state)
