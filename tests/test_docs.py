"""The README and docs/ do what they say: every command and every Python block of them is run."""

import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from PIL import Image

import hfjax
from hfjax.data import prepare
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from tests.h200 import h200s
from tests.model_folders import CONFIGS, drawn, written
from tests.pages import FENCE, Page, blocks, commands, output_of
from tests.small_checkpoint import EVERYTHING, Two
from tests.small_folder import LLAMA, small_folder
from tests.small_gpt import MLPs
from tests.small_images import photos
from tests.small_run import MODEL
from tests.test_checkpoint_damage import flip
from tests.workers import environment

ROOT = Path(__file__).parents[1]
PAGES = sorted(["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
SMALL_GPT = "--model.length 16 --model.layers 1 --model.heads 2 --model.embed 32"
EIGHT = 'jax.config.update("jax_num_cpu_devices", 8)'  # conftest.py has done it
SMALL = {  # what is too long for a test, and what stands for it
    "README.md": {
        EIGHT: "",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1)",
        "hfjax train     ": f"hfjax train --steps 2 --log.sample 4 {SMALL_GPT}     ",
        "--out runs/books\n": f"--out runs/books --steps 2 --log.sample 0 {SMALL_GPT}\n",
        "--out runs/four\n": f"--out runs/four --steps 2 --log.sample 0 {SMALL_GPT}\n",
        "--valid 0.01": "--valid 0.1",
        '--prompt "Once "': '--prompt "Once " --tokens 4',
        "--gpu h200 --count 8": "--gpu here --compare none",
        "yaml --count 8  #": "yaml --count 2 --batch 2 --compile 0  #",
        "qwen3/ --optimizer.rate 1e-5 ": "qwen3/ --data.train data/qwen3 --steps 2 --log.sample 0 ",
    },
    "docs/ahead_of_time.md": {'"h200", 512), data=64': '"h200", 16), data=2'},
    "docs/data.md": {
        "/usr/lib/python3.11": "texts",
        "--vocab 4096": "--vocab 300",
        "--valid 0.05": "--valid 0.2",
        "seed=0)": "seed=0, epochs=1)",
        "rows=32, length=256": "rows=8, length=16",
        "share(32": "share(8",
    },
    "docs/choose.md": {
        "--model.preset llama3-8b --vocab 128256": f"{SMALL_GPT} --vocab 512",
        "--count 8 --tokens-per-step 1M": "--count 8 --batch 8",
    },
    "docs/evaluate.md": {
        EIGHT: "",
        "--cpu-devices 8 --log.sample 0": f"--log.sample 0 {SMALL_GPT}",
        "eval runs/first\n": "eval runs/first --batch 2048\n",
        "GPTConfig.tiny()": "GPTConfig.tiny(length=16, layers=1, heads=2, embed=32)",
        "rows=32, length=64": "rows=2048, length=16",
        "after 'import os, sys' comes b'e'": "…",
    },
    "docs/first_gpu_run.md": {
        "gpt-small --model.length 1024 --batch 16 --precision bf16 --gpu": (
            f"gpt-tiny {SMALL_GPT} --vocab 512 --batch 16 --compare none --precision bf16 --gpu"
        ),
        "gpt-small --model.length 1024": f"gpt-tiny {SMALL_GPT} --log.sample 0",
        "--steps 300 --profile 50:53": "--steps 6 --profile 3:5",
    },
    "docs/long_sequences.md": {EIGHT: "", "length=256, layers=2": "length=256, layers=1"},
    "docs/memory.md": {
        "gpt-medium --model.length 4096 --vocab 50304": f"gpt-tiny {SMALL_GPT} --vocab 512",
        "8GiB": "1MiB",
    },
    "docs/migration.md": {
        EIGHT: "",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1, embed=32)",
        "GPTConfig.tiny(layers=8)": "GPTConfig.tiny(layers=4, embed=32)",
        "--model.layers 8 --model.embed 128": "--model.layers 4 --model.embed 32",
        "zero2.json --cpu-devices 8": f"zero2.json {SMALL_GPT} --cpu-devices 8",
        "--cpu-devices 8": "--steps 2 --log.sample 0 --log.valid-every 0",
    },
    "docs/plain_jax.md": {EIGHT: ""},
    "docs/plan.md": {
        "gpt-medium --vocab 50304": f"gpt-tiny {SMALL_GPT} --vocab 512",
        "--count 8 --batch 64": "--count 2 --batch 4",
        'tensor=8"\n': 'tensor=2"\n',
        "batch=16, ": "batch=4, ",
        "count=4": "count=2",
    },
    "docs/pretrained.md": {
        "--valid 0.01": "--valid 0.1",
        "--optimizer.rate 1e-5\n": "--steps 2 --log.sample 0 --model.length 16\n",
        "DDP on one device (NVIDIA H100 80GB HBM3)": "DDP on data=8 (cpu)",
        '--prompt "Once "': '--prompt "Once " --tokens 4',
    },
    "docs/processes.md": {
        "-n 8 -- python": "-n 1 -- python",
        "range(40)": "range(3)",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1, embed=32)",
    },
    "docs/profile_and_tune.md": {
        EIGHT: "",
        "--steps 60 --profile 50:53": f"--steps 6 --profile 3:5 {SMALL_GPT}",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1)",
    },
    "docs/quickstart.md": {
        EIGHT: "",
        "--cpu-devices 8 --log.sample 0": f"--log.sample 0 {SMALL_GPT}",
        "eval runs/first\n": "eval runs/first --batch 2048\n",
        "def gerdtma n ng ane s  fceveler.pede nes os": "…",
    },
    "docs/troubleshooting.md": {
        "--model.preset gpt-small": f"--model.preset gpt-tiny {SMALL_GPT} --vocab 512",
        "--gpu h200 --count 8": "--gpu here --compare none",
    },
    "docs/tutorial.md": {EIGHT: ""},
    "docs/training.md": {
        "launch -n 4": "launch -n 2",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1)",
        "hfjax train\n": f"hfjax train --steps 30 --log.sample 4 {SMALL_GPT}\n",
        "DDP on one device (cpu)": "DDP on data=8 (cpu)",
        "def iled_mactiond)\ndef _file_par.pode_seyt__ycoptEror(seques=": "…",
        "       None:\n                         indeff condiss:\n": "",
        "steps: 2000": "steps: 2",
        "preset: gpt-small, length: 512": "preset: gpt-tiny, length: 16, layers: 1",
        "warmup: 100": "warmup: 1",
        "eval runs/gpt-tiny\n": "eval runs/gpt-tiny --batch 2048\n",
        "--tokens 60": "--tokens 6",
        "class is demaction and self, velil.pode_seyp_syceptEror(')": "…",
        "-- hfjax train --strategy fsdp": f"-- hfjax train --strategy fsdp --steps 2 {SMALL_GPT}",
        "steps=200, strategy": "steps=2, model=SMALL_MODEL, strategy",
        "int(state.step), 200)": "int(state.step), 4)",
    },
}

ELSEWHERE = {  # commands that are not run here, and where they are
    "hfjax demo": "test_the_demo_ends_with_the_table_of_the_readme",
    "--out to-evaluate": "docs/pretrained.md exports a run",
    "--offload auto": "below: it needs what compiles for GPUs",
    "train.py trouble": "a process is killed: tests/test_run_processes.py",
    "--max-restarts 3 -- python train.py": "Ctrl-C: tests/test_run_processes.py",
}


def names_of(page: str) -> dict[str, Any]:
    """Return what a page takes for granted: the names that its blocks use and do not make."""
    config = GPTConfig.tiny(layers=2, embed=32, heads=4, vocab=512, length=64)
    init = lambda rngs: GPT(config, rngs=rngs)
    names: dict[str, Any] = {"hfjax": hfjax, "jax": jax, "np": np, "optax": optax, "P": P}
    names |= {"GPT": GPT, "config": config, "init": init, "model_init": init, "rate": 1e-3}
    names |= {"next_token_loss": next_token_loss, "loss": next_token_loss}
    names["batch"] = {"tokens": np.ones((32, 65), np.int32)}
    return names | MAKES.get(page, lambda names: {})(names)


def trained(names: dict[str, Any]) -> dict[str, Any]:
    mesh = hfjax.make_mesh(fsdp=8)
    layout = hfjax.layout(names["init"], optax.adamw(1e-3), mesh, hfjax.FSDP)
    step = hfjax.train_step(layout, names["loss"])
    return {"mesh": mesh, "layout": layout, "step": step, "state": hfjax.init(layout)}


def for_checkpoints(names: dict[str, Any]) -> dict[str, Any]:
    mesh = hfjax.make_mesh(fsdp=8)
    model = lambda dtype: lambda rngs: Two(rngs, dtype=dtype)
    forward: Any = {"forward": lambda model, batch: model.second(model.first(batch["x"]))}
    adam = optax.adam(1e-3)
    layout = hfjax.layout(model(jnp.float32), adam, mesh, EVERYTHING, **forward)
    half = hfjax.layout(model(jnp.bfloat16), adam, mesh, EVERYTHING, **forward)
    sgd = hfjax.layout(model(jnp.float32), optax.sgd(1e-3, 0.9), mesh, EVERYTHING, **forward)

    def turn_a_bit_of(step: str) -> None:
        flip(max(Path(step).glob("state/ocdbt.process_0/d/*"), key=lambda p: p.stat().st_size))

    return {
        "turn_a_bit_of": turn_a_bit_of,
        **{"layout": layout, "in_bfloat16": half, "with_sgd": sgd, "state": hfjax.init(layout)},
        "step": hfjax.train_step(layout, lambda outputs, _: jnp.mean(outputs**2)),
        "batch": lambda number: {"x": np.full((8, 8), number, np.float32)},
    }


def for_data(names: dict[str, Any]) -> dict[str, Any]:
    Path("texts").mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("__future__", "abc", "bisect", "keyword", "opcode", "sched", "this", "token"):
        shutil.copy(library / f"{name}.py", "texts")
    return trained({**names, "init": lambda rngs: MLPs(names["config"], rngs=rngs)})


def for_memory(names: dict[str, Any]) -> dict[str, Any]:
    block, schedule = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), hfjax.Schedule("1f1b", 8)
    mesh = hfjax.make_mesh(pipe=4, data=2)
    config = replace(names["config"], layers=4)
    staged = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, hfjax.PIPE)
    return trained(names) | {"block": block, "schedule": schedule, "staged": staged}


def for_migration(names: dict[str, Any]) -> dict[str, Any]:
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    Path("zero2.json").write_text(re.findall(r"(?s)```json\n(.*?)```", page)[0])
    return {}


def for_optimizers(names: dict[str, Any]) -> dict[str, Any]:
    root = lambda outputs, batch: jnp.sqrt(0 * outputs).mean()
    return trained(names) | {"with_a_square_root_of_zero": root}


def for_pipelines(names: dict[str, Any]) -> dict[str, Any]:
    width, rngs = 8, nnx.Rngs(0)
    config = replace(names["config"], layers=8)
    init = lambda rngs: GPT(config, rngs=rngs)
    return {
        **{"other_layout": trained({**names, "init": init})["layout"], "model_init": init},
        "layers": [nnx.Linear(width, width, rngs=rngs) for _ in range(8)],
        "optimizer": optax.adam(1e-3),
        **{"x": np.ones((64, width), np.float32), "y": np.ones((64, width), np.float32)},
        "criterion": lambda outputs, y: jnp.mean((outputs - y) ** 2),
    }


def for_processes(names: dict[str, Any]) -> dict[str, Any]:
    page = Page(ROOT / "docs/processes.md", SMALL["docs/processes.md"], names)
    Path("train.py").write_text(page.blocks[0].text)
    return {}


def texts(folder: str) -> None:
    Path(folder).mkdir()
    for number in range(40):
        Path(f"{folder}/{number}.txt").write_text(f"Once upon a time there were {number} of them. ")


def for_pretrained_cli(names: dict[str, Any]) -> dict[str, Any]:
    small_folder(Path("qwen3"), LLAMA | {"model_type": "qwen3"})
    texts("texts")
    return {}


def for_readme(names: dict[str, Any]) -> dict[str, Any]:
    for_pretrained_cli(names)
    texts("books")
    prepare("texts", "data/qwen3", tokenizer="qwen3", valid=0.1)
    return {}


def for_pretrained(names: dict[str, Any]) -> dict[str, Any]:
    for_pretrained_cli(names)
    written(Path("llama-3.2-1b"), CONFIGS["llama"], drawn())
    return {}


def for_vision(names: dict[str, Any]) -> dict[str, Any]:
    for part, each in (("train", 12), ("valid", 4)):
        photos(Path("photos") / part, each, ("cat", "dog"))
    Path("photos/train/notes.txt").write_text("Drawn for a test.")
    Image.new("L", (40, 30)).save("photos/train/cat/1.png")
    return {}


MAKES = {
    "README.md": for_readme,
    "docs/checkpoints.md": for_checkpoints,
    "docs/data.md": for_data,
    "docs/kernels.md": trained,
    "docs/memory.md": for_memory,
    "docs/migration.md": for_migration,
    "docs/optimizers.md": for_optimizers,
    "docs/pipelines.md": for_pipelines,
    "docs/pretrained.md": for_pretrained,
    "docs/processes.md": for_processes,
    "docs/strategies.md": trained,
    "docs/training.md": lambda names: {"SMALL_MODEL": MODEL},
    "docs/vision.md": for_vision,
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.drawn(2)
def test_what_a_page_says_can_be_done(page, tmp_path, monkeypatch):
    if page == "docs/ahead_of_time.md":
        h200s()
    monkeypatch.chdir(tmp_path)
    made = Page(ROOT / page, SMALL.get(page, {}), names_of(page))
    made.run(wanted=lambda command: not any(words in command for words in ELSEWHERE))


def anchors(text: str) -> set[str]:
    """Return what the headings of a page are called in links, as GitHub makes it."""
    heads = re.findall(r"(?m)^#+ (.*)$", re.sub(FENCE, "", text))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(FENCE, "", (ROOT / page).read_text(encoding="utf-8"))
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    for path, _, anchor in [link.partition("#") for link in links]:
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), anchor


@pytest.mark.slow
def test_the_demo_ends_with_the_table_of_the_readme():
    """Collectives, bytes and losses, number for number."""
    told = subprocess.run(
        [sys.executable, "-m", "hfjax", "demo"],
        env=environment(XLA_FLAGS=""),
        check=True,
        text=True,
        capture_output=True,
    ).stdout
    even = lambda text: [" ".join(line.split()) for line in text.splitlines()]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [table] = [block.text for block in blocks(text) if "TENSOR+SEQUENCE  " in block.text]
    rows = [line for line in even(table) if "MiB" in line or "KiB" in line]
    assert len(rows) == 10
    assert not [row for row in rows if row not in even(told)], told


@pytest.mark.cuda
def test_the_least_offload_is_found_by_the_command_of_the_page(tmp_path, monkeypatch):
    h200s()
    monkeypatch.chdir(tmp_path)
    page = Page(ROOT / "docs/memory.md", SMALL["docs/memory.md"], {})
    [(command, printed)] = [found for block in page.blocks for found in commands(block)]
    told = output_of(command)
    for start in ("from the layout", "from the trace", "from the compiler", "on the host"):
        assert start in told
        assert any(line.startswith(start) for line in printed)
    assert "* offload auto: " in told
    assert Path("memory.png").exists()
