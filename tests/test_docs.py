"""The README and docs/ do what they say: every command and every Python block of them is run."""

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.h200 import h200s
from tests.model_folders import CONFIGS, drawn, written
from tests.pages import FENCE, Page, blocks, commands, output_of, write_file
from tests.small_images import photos
from tests.small_model_folder import LLAMA, small_folder
from tests.workers import environment

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.md",
        *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
    ]
)
SMALL_GPT = "--model.seq-len 16 --model.num-layers 1 --model.num-heads 2 --model.hidden-size 32"
SMALL = {  # what is too long for a test, and what stands for it
    "README.md": {
        "--run-dir runs/tiny ": f"--run-dir runs/tiny --steps 2 --log.sample-tokens 0 {SMALL_GPT} ",
        "--cpu-devices 8 --run-dir runs/fsdp": (
            f"--run-dir runs/fsdp --steps 2 --log.sample-tokens 0 {SMALL_GPT}"
        ),
        "eval runs/tiny ": "eval runs/tiny --max-batches 2 ",
        '--prompt "def "': '--prompt "def " --tokens 4',
        "gpt-medium --precision bf16": "gpt-tiny --global-batch-size 8",
    },
    "docs/ahead_of_time.md": {'"h200", 512), data=64': '"h200", 16), data=2'},
    "docs/data.md": {
        "vocab=4096, length=256)": "vocab=4096, length=16, layers=1, embed=32, heads=2)",
        "/usr/lib/python3.11": "texts",
        "--vocab 4096": "--vocab 300",
        "--valid 0.05": "--valid 0.2",
        "seed=0)": "seed=0, epochs=1)",
        "batch_size=32, seq_len=256": "batch_size=8, seq_len=16",
        "share(32": "share(8",
        "--steps 300": "--steps 4",
    },
    "docs/choose.md": {
        "--model.preset llama3-8b --vocab 128256": f"{SMALL_GPT} --vocab 512",
        "--tokens-per-step 1M": "--global-batch-size 8",
    },
    "docs/evaluate.md": {
        "--cpu-devices 8 --log.sample-tokens 0": f"--log.sample-tokens 0 {SMALL_GPT}",
        "eval runs/first\n": "eval runs/first --batch-size 2048\n",
        "GPTConfig.tiny()": "GPTConfig.tiny(length=16, layers=1, heads=2, embed=32)",
        "batch_size=32, seq_len=64": "batch_size=2048, seq_len=16",
        "after 'import os, sys' comes b'e'": "…",
    },
    "docs/first_gpu_run.md": {
        "gpt-small --model.seq-len 1024 --global-batch-size 16 --gpu": (
            f"gpt-tiny {SMALL_GPT} --vocab 512 --global-batch-size 16 --compare none --gpu"
        ),
        "gpt-small --model.seq-len 1024": f"gpt-tiny {SMALL_GPT} --log.sample-tokens 0",
        "--steps 300 --profile 50:53": "--steps 6 --profile 3:5",
    },
    "docs/long_sequences.md": {"length=256, layers=2": "length=256, layers=1"},
    "docs/memory.md": {
        "gpt-medium --model.seq-len 4096 --vocab 50304": f"gpt-tiny {SMALL_GPT} --vocab 512",
        "8GiB": "1MiB",
    },
    "docs/migration.md": {
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1, embed=32)",
        "GPTConfig.tiny(layers=8)": "GPTConfig.tiny(layers=4, embed=32)",
        "--model.num-layers 8": "--model.num-layers 4",
        "--model.hidden-size 128": "--model.hidden-size 32",
        "zero2.json --cpu-devices 8": f"zero2.json {SMALL_GPT} --cpu-devices 8",
        "--cpu-devices 8": "--steps 2 --log.sample-tokens 0 --eval.interval 0",
    },
    "docs/pipelines.md": {
        "GPTConfig.tiny(layers=8)": "GPTConfig.tiny(layers=8, embed=32)",
    },
    "docs/plan.md": {
        "gpt-medium --vocab 50304": f"gpt-tiny {SMALL_GPT} --vocab 512",
        "--global-batch-size 64": "--global-batch-size 8",
        "--mesh.tensor 8\n": "--mesh.tensor 2\n",
        "batch_size=16": "batch_size=8",
        "count=4": "count=8",
    },
    "docs/adapters.md": {
        "--valid 0.01": "--valid 0.1",
        "--lr 1e-4": "--lr 1e-4 --steps 2 --log.sample-tokens 0 --model.seq-len 16",
    },
    "docs/pretrained.md": {
        "--valid 0.01": "--valid 0.1",
        "--lr 1e-5 --precision": "--steps 2 --log.sample-tokens 0 --model.seq-len 16 --precision",
        "DDP on one device (NVIDIA H100 80GB HBM3)": "DDP on data=8 (cpu)",
        '--prompt "Once "': '--prompt "Once " --tokens 4',
    },
    "docs/processes.md": {
        "-n 8 -- python": "-n 1 -- python",
        "range(40)": "range(3)",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1, embed=32)",
    },
    "docs/profile_and_tune.md": {
        "--steps 60 --profile 50:53": f"--steps 6 --profile 3:5 {SMALL_GPT}",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1)",
    },
    "docs/quickstart.md": {
        "--cpu-devices 8 --log.sample-tokens 0": f"--log.sample-tokens 0 {SMALL_GPT}",
        "eval runs/first\n": "eval runs/first --batch-size 2048\n",
        "def gerdtma n ng ane s  fceveler.pede nes os": "…",
    },
    "docs/troubleshooting.md": {
        "--model.preset gpt-small": f"--model.preset gpt-tiny {SMALL_GPT} --vocab 512",
        "--mesh.fsdp -1 --gpu h200": "--mesh.fsdp -1 --gpu here --compare none",
    },
    "docs/training.md": {
        "launch -n 4": "launch -n 2",
        "GPTConfig.tiny()": "GPTConfig.tiny(layers=1)",
        "hfjax train\n": f"hfjax train --steps 30 --log.sample-tokens 4 {SMALL_GPT}\n",
        "DDP on one device (cpu)": "DDP on data=8 (cpu)",
        "def iled_mactiond)\ndef _file_par.pode_seyt__ycoptEror(seques=": "…",
        "       None:\n                         indeff condiss:\n": "",
        "steps: 2000": "steps: 2",
        "preset: gpt-small, seq_len: 512": "preset: gpt-tiny, seq_len: 16, num_layers: 1",
        "warmup_steps: 100": "warmup_steps: 1",
        "eval runs/gpt-tiny\n": "eval runs/gpt-tiny --batch-size 2048\n",
        "--tokens 60": "--tokens 6",
        "class is demaction and self, velil.pode_seyp_syceptEror(')": "…",
        "-- hfjax train --mesh.fsdp -1": f"-- hfjax train --mesh.fsdp -1 --steps 2 {SMALL_GPT}",
        "import MeshConfig, Opt": "import MeshConfig, ModelConfig, Opt",
        "steps=200,": "steps=2, model=ModelConfig(seq_len=16, num_layers=1, hidden_size=32),",
        "int(state.step), 200)": "int(state.step), 4)",
    },
}

ELSEWHERE = {  # commands that are not run here, and where they are
    "hfjax demo": "test_the_demo_ends_with_the_table_of_the_page",
    "--export-dir to-evaluate": "docs/pretrained.md exports a run",
    "--offload.activations auto": "below: it needs what compiles for GPUs",
    "-- hfjax train --config runs/fsdp/config.yaml": "tests/test_run_processes.py",
    "train.py trouble": "a process is killed: tests/test_run_processes.py",
    "--data.train chats.jsonl": "tests/test_chat_runs.py",
    "Qwen/Qwen3-0.6B": "tests/test_hub.py has a server of such names",
    "--max-restarts 3 -- python train.py": "Ctrl-C: tests/test_run_processes.py",
}


def assumed(page: str) -> dict[str, Any]:
    """Return the names that a page goes on from: those of docs/assumed.md, if it links to it."""
    if "(assumed.md)" not in (ROOT / page).read_text(encoding="utf-8"):
        return {}
    lines = Page(ROOT / "docs/assumed.md", {}, {})
    lines.run()
    return lines.names


def for_data() -> None:
    Path("texts").mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("__future__", "abc", "bisect", "keyword", "opcode", "sched", "this", "token"):
        shutil.copy(library / f"{name}.py", "texts")
    Path("examples").symlink_to(ROOT / "examples")


def for_migration() -> None:
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    Path("zero2.json").write_text(re.findall(r"(?s)```json\n(.*?)```", page)[0])


def for_processes() -> None:
    page = Page(ROOT / "docs/processes.md", SMALL["docs/processes.md"], {})
    Path("train.py").write_text(page.blocks[0].text)


def texts(folder: str) -> None:
    Path(folder).mkdir()
    for number in range(40):
        Path(f"{folder}/{number}.txt").write_text(f"Once upon a time there were {number} of them. ")


def for_pretrained_cli() -> None:
    small_folder(Path("qwen3"), LLAMA | {"model_type": "qwen3"})
    texts("texts")


def for_pretrained() -> None:
    for_pretrained_cli()
    written(Path("llama-3.2-1b"), CONFIGS["llama"], drawn())


def for_vision() -> None:
    for part, each in (("train", 12), ("valid", 4)):
        photos(Path("photos") / part, each, ("cat", "dog"))
    Path("photos/train/notes.txt").write_text("Drawn for a test.")
    Image.new("L", (40, 30)).save("photos/train/cat/1.png")


FILES = {  # what a page's commands read of yours: texts, images, models' folders
    "docs/adapters.md": for_pretrained_cli,
    "docs/data.md": for_data,
    "docs/migration.md": for_migration,
    "docs/pretrained.md": for_pretrained,
    "docs/processes.md": for_processes,
    "docs/vision.md": for_vision,
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.short("README.md", "docs/install.md", "docs/tutorial.md", "docs/quickstart.md")
def test_what_a_page_says_can_be_done(page, tmp_path, monkeypatch):
    if page == "docs/ahead_of_time.md":
        h200s()
    monkeypatch.chdir(tmp_path)
    FILES.get(page, lambda: None)()
    made = Page(ROOT / page, SMALL.get(page, {}), assumed(page))
    made.run(wanted=lambda command: not any(words in command for words in ELSEWHERE))


@pytest.mark.parametrize("page", SMALL)
def test_a_page_says_that_tests_run_it_smaller(page):
    if SMALL[page]:
        assert "tests run" in (ROOT / page).read_text(encoding="utf-8")


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
def test_the_demo_ends_with_the_table_of_the_page():
    """Collectives, bytes and losses, number for number."""
    told = subprocess.run(
        [sys.executable, "-m", "hfjax", "demo"],
        env=environment(XLA_FLAGS=""),
        check=True,
        text=True,
        capture_output=True,
    ).stdout
    even = lambda text: [" ".join(line.split()) for line in text.splitlines()]
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    [table] = [block.text for block in blocks(text) if "TENSOR+SEQUENCE  " in block.text]
    rows = [line for line in even(table) if "MiB" in line or "KiB" in line]
    assert len(rows) == 10
    assert not [row for row in rows if row not in even(told)], told


@pytest.mark.cuda
def test_the_least_offload_is_found_by_the_command_of_the_page(tmp_path, monkeypatch):
    h200s()
    monkeypatch.chdir(tmp_path)
    page = Page(ROOT / "docs/memory.md", SMALL["docs/memory.md"], {})
    for block in page.blocks:
        if block.language == "yaml":
            write_file(block)
    [(command, printed)] = [found for block in page.blocks for found in commands(block)]
    told = output_of(command)
    for start in ("from the layout", "from the trace", "from the compiler", "on the host"):
        assert start in told
        assert any(line.startswith(start) for line in printed)
    assert "* --offload.activations auto: " in told
    assert Path("memory.png").exists()
