"""Models and data sets by their names on the Hub, from a real server on the loopback.

The client reads HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE when it is imported: each test has one
child process that does all of it.
"""

import errno
import json
import math
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import yaml

import hfjax
from hfjax.data import TokenSet
from hfjax.trainer import TrainConfig, config_io, train
from hfjax.trainer.config import DataConfig, ModelConfig
from hfjax.trainer.train_loop import Run
from hfjax.utils import hub
from tests.hub_server import requests, serve
from tests.small_model_folder import LLAMA, small_folder
from tests.workers import finished, launched, start

OLD, NEW, NEWER = 40 * "a", 40 * "b", 40 * "c"
TEXTS = [f"Once upon a time there was mesh {number}" for number in range(40)]


def model(root: Path, name: str, commit: str = OLD, files: int = 1, **keys) -> Path:
    """Write a model's folder of the server, and the branch main at that commit."""
    folder = small_folder(root / "models" / name / commit, LLAMA | keys, files=files)
    (folder.parent / "main").write_text(commit)
    return folder


def dataset(root: Path, name: str, files: dict[str, list[str]], commit: str = OLD) -> Path:
    """Write a data set of JSONL (or of other files) of the server, and its branch main."""
    folder = root / "datasets" / name / commit
    folder.mkdir(parents=True)
    for path, texts in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": text, "id": n}) for n, text in enumerate(texts)]
        (folder / path).write_text("\n".join(lines))
    (folder / "README.md").write_text("A data set")
    (folder.parent / "main").write_text(commit)
    return folder


def child(source: str, url: str, home: Path, *arguments, **more):
    """Return what a process with this Hub and an own cache prints, by its last line of JSON."""
    env = {"HF_ENDPOINT": url, "HF_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    (result,) = finished(start(source, *arguments, **{**env, **more}), limit=240)
    assert result[0] == 0, result
    return json.loads(result[1].splitlines()[-1]), result[1] + result[2]


# -- models ------------------------------------------------------------------------------------

OPENS = """
import json, logging, os, shutil, sys
from pathlib import Path
import hfjax
os.chdir(sys.argv[2])
logging.basicConfig(level="INFO", format="%(message)s")
told, cache = {}, Path(os.environ["HF_HOME"], "hub", "models--org--llama")
def opens(key, name):
    try:
        model = hfjax.pretrained(name)
        told[key] = [model.folder.hub, sorted(p.name for p in model.folder.path.iterdir())]
    except ValueError as error:
        told[key] = str(error)
for key, name in json.loads(sys.argv[1]).items():
    if key == "half on disk":
        blob = next(cache.glob("snapshots/*/part-1.safetensors")).resolve()
        whole = blob.read_bytes()
        blob.write_bytes(whole[:1000])
    if key == "goes on":
        Path(sys.argv[3], "answers.json").write_text("{}")
    opens(key, name)
    if key == "half on disk":
        blob.unlink()
        blob.with_suffix(".1234abcd.incomplete").write_bytes(whole[:1000])
        opens("half of a download on disk", name)
print(json.dumps(told))
"""
CHUNK = 10 << 20  # bytes that the client writes at once
UNREAD = ("pytorch_model.bin", "x.pth", "consolidated.safetensors", "original/params.json")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """What one process gets for many names, and what it asked the server for."""
    place = tmp_path_factory.mktemp("hub")
    root, here = place / "server", place / "here"
    llama = model(root, "org/llama", files=2)
    for name in (*UNREAD, "chat_template.jinja", "LICENSE.txt", "README.md"):
        (llama / name).parent.mkdir(exist_ok=True)
        (llama / name).write_text(name)
    model(root, "org/broken", files=2)
    (root / "models/org/llama/v1").write_text(OLD)
    for name in ("gated", "forbidden", "token", "down", "mirror"):
        model(root, f"org/{name}")
    pickles = model(root, "org/pickles")
    (pickles / "model.safetensors").rename(pickles / "pytorch_model.bin")
    (model(root, "org/adapter") / "config.json").unlink()
    (model(root, "org/bare") / "model.safetensors").unlink()
    (model(root, "org/index") / "model.safetensors.index.json").write_text("{")
    small_folder(here / "org/folder")
    small_folder(here / "org/llama")
    answers = {
        "org/gated": {"file": [403, "GatedRepo"]},
        "org/forbidden": {"file": [403, "", "no"]},
        "org/token": {"api": [401, "", "Invalid credentials in Authorization header"]},
        "org/down": {"api": [503]},
        "org/mirror": {"no hub": True},
        "org/broken": {"part-1.safetensors": [500]},
    }
    (root / "answers.json").write_text(json.dumps(answers))
    (llama / "notes.txt").write_bytes(bytes(CHUNK + 3000))
    (root / "cuts.json").write_text(json.dumps({"notes.txt": [CHUNK + 1000]}))
    names = {
        **{"llama": "org/llama@main", "again": f"org/llama@{OLD}", "tag": "org/llama@v1"},
        **{"half on disk": "org/llama@main", "folder": "org/folder"},
        **{key: f"org/{key}" for key in ("gated", "forbidden", "token", "down", "mirror", "none")},
        **{key: f"org/{key}" for key in ("pickles", "adapter", "bare", "index")},
        **{"revision": "org/gated@v9", "name": "org/a--b", "broken": "org/broken"},
        "goes on": "org/broken",
    }
    with serve(root) as url:
        told, said = child(OPENS, url, place / "home", json.dumps(names), here, root)
        return told, said, requests(root), url


READ = [
    *("LICENSE.txt", "chat_template.jinja", "config.json", "generation_config.json"),
    "model.safetensors.index.json",
    *("notes.txt", "part-0.safetensors", "part-1.safetensors", "tokenizer.json"),
]


def test_a_model_of_the_hub_is_downloaded_at_a_commit_without_pickles_and_other_weights(opened):
    told, _, asked, _ = opened
    assert told["llama"] == told["again"] == told["tag"] == [f"org/llama@{OLD}", READ]
    of_llama = [line.split()[:2] for line in asked if "/org/llama/" in line]
    got = [path for method, path in of_llama if method == "GET" and "/resolve/" in path]
    names = [path.rpartition("/")[2] for path in got]
    assert sorted({*names}) == READ
    assert {*names[:2]} == {"config.json", "model.safetensors.index.json"}
    assert [path for _, path in of_llama if "/api/" in path][:2] == [
        "/api/models/org/llama/revision/main",
        f"/api/models/org/llama/tree/{OLD}",
    ]


def test_a_download_that_is_cut_off_goes_on_where_it_ended(opened):
    of_file = [line for line in opened[2] if line.startswith("GET") and "notes.txt" in line]
    assert [line.split()[2:] for line in of_file] == [[], [f"bytes={CHUNK}-"]]


def test_files_that_are_complete_are_not_read_again_after_an_error(opened):
    told, _, asked, url = opened
    assert told["broken"] == f"org/broken: {url} answers with status 500. Try again later."
    assert told["goes on"][0] == f"org/broken@{OLD}"
    of_model = [line for line in asked if line.startswith("GET /org/broken/")]
    assert sum("part-0" in line for line in of_model) == 1
    assert sum("part-1" in line for line in of_model) == 2


def test_half_a_file_in_the_cache_is_found_and_half_a_download_is_begun_again(opened):
    told = opened[0]
    assert "part-1.safetensors" in told["half on disk"]
    assert told["half on disk"].endswith("the Hub's cache: hf cache rm model/org/llama")
    assert told["half of a download on disk"] == [f"org/llama@{OLD}", READ]


def test_a_folder_of_that_name_wins_unless_a_revision_is_named(opened):
    told, said, asked, _ = opened
    assert told["folder"][0] is None
    assert not any("org/folder" in line for line in asked)
    line = "is a folder here, which is read; the Hub is not asked (org/folder@main means the Hub)"
    assert said.count(f"org/folder {line}") == 1
    line = "org/llama@main is read from the Hub: org/llama here is a folder without revisions"
    assert said.count(line) == 1


REFUSED = {
    "gated": "org/gated: access is gated. Accept its conditions on {url}/org/gated, and log in (hf "
    "auth login, or HF_TOKEN=… in the environment) with that account.",
    "forbidden": "org/forbidden: {url} forbids it with this token (403). Give the token the right "
    "to read this repository, or log in (hf auth login, or HF_TOKEN=… in the environment) with "
    "another.",
    "token": "org/token: {url} refuses the token (401). Renew it, and log in (hf auth login, or "
    "HF_TOKEN=… in the environment).",
    "down": "org/down: {url} answers with status 503. Try again later.",
    "mirror": "org/mirror: {url} does not answer as the Hub does (no commit in its headers). Check "
    "HF_ENDPOINT, and proxies in between.",
    "none": "org/none: {url} has no model org/none, or it is private. There is no folder of that "
    "name here either. Check the name; if it is private, log in (hf auth login, or HF_TOKEN=… in "
    "the environment).",
    "revision": "org/gated@v9: it has no revision 'v9'. Give a branch, a tag or a commit of "
    "{url}/org/gated/commits, or leave out @v9.",
    "name": "org/a--b: that is no name of the Hub: Cannot have -- or .. in repo_id: 'org/a--b'.",
    "pickles": "org/pickles@{old} holds its weights as pickles (pytorch_model.bin), which run code "
    "when they are read: they are never downloaded. Look for a revision with model.safetensors "
    "(@refs/pr/N), or write it with transformers: model.save_pretrained(folder).",
    "adapter": "org/adapter@{old} has no config.json, which says what the model is. It has "
    "generation_config.json, model.safetensors, tokenizer.json. Give a model that transformers "
    "loads; an adapter is none: merge it into its model first.",
    "bare": "org/bare@{old} has neither model.safetensors nor model.safetensors.index.json with "
    "its files. It has config.json, generation_config.json, tokenizer.json. Give a model with "
    "weights in safetensors, as transformers writes them.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_does_not_give_says_what_to_do(opened, name):
    assert opened[0][name] == REFUSED[name].format(url=opened[3], old=OLD)


def test_a_damaged_index_names_the_model(opened):
    assert opened[0]["index"].startswith(f"org/index@{OLD}: ")
    assert "cannot be read" in opened[0]["index"]


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    how = r"package huggingface_hub: pip install 'hfjax\[hub\]'"
    with pytest.raises(ValueError, match=f"^org/none: there is no such folder.*{how}"):
        hfjax.pretrained("org/none")
    with pytest.raises(ValueError, match=f"^hub:org/none: reading from .*{how}"):
        hfjax.data.prepare("hub:org/none", "nowhere")


def test_a_revision_is_written_behind_the_name():
    with pytest.raises(ValueError, match=r"revision='v1': write it .*pretrained\(\"org/x@v1\"\)"):
        hfjax.pretrained("org/x", revision="v1")


@pytest.mark.parametrize("name", ["hub:texts", "hub:", "hub:org/texts@", "hub:org/te xts"])
def test_a_data_set_is_named_in_one_form(name):
    with pytest.raises(ValueError, match="a data set of the Hub is named hub:ORG/NAME, "):
        DataConfig(train=(name,))


def test_a_model_with_the_prefix_of_data_sets_is_refused():
    told = r"hub:org/llama: models are named without hub:, as org/llama\."
    with pytest.raises(ValueError, match=told):
        hfjax.pretrained("hub:org/llama")


def test_names_of_the_hub_stay_what_they_are_in_a_configuration(tmp_path):
    data = DataConfig(train=("hub:org/texts", "data"), valid="hub:org/more@v1")
    config = TrainConfig(model=ModelConfig(pretrained="org/llama@v1"), data=data)
    assert config.directory == Path("runs/llama")
    config_io.save(config, tmp_path / "config.yaml")
    again = config_io.load(tmp_path / "config.yaml")
    assert again.model.pretrained == "org/llama@v1"
    assert again.data.train == ("hub:org/texts", str(Path("data").absolute()))
    assert again.data.valid == "hub:org/more@v1"


def test_a_hub_that_cannot_be_reached_says_so():
    with (
        pytest.raises(ValueError, match=r"org/x: .*cannot be reached, or .* \(refused\)\. C"),
        hub._explain_errors(hub.HubName("org/x", "model")),
    ):
        raise ConnectionError("refused")


def test_a_full_disk_is_reported_as_such():
    with (
        pytest.raises(OSError, match="No space left"),
        hub._explain_errors(hub.HubName("org/x", "model")),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_watchdog_waits_for_a_download_however_long(monkeypatch, tmp_path):
    limits = []

    def find_sources(run):
        limits.append(run.watchdog._limit)
        raise ValueError("enough")

    monkeypatch.setattr(Run, "find_sources", find_sources)
    with pytest.raises(ValueError, match="enough"):
        train(TrainConfig(run_dir=tmp_path, watchdog_timeout=1))
    assert limits == [math.inf]


TOGETHER = """
import sys
import jax, hfjax
hfjax.init_distributed()
model = hfjax.pretrained("org/llama")
print(model.folder.hub, flush=True)
try:
    hfjax.pretrained("org/none")
except ValueError as error:
    print(str(error)[:30], flush=True)
"""


def test_all_processes_read_the_commit_that_the_first_one_finds(tmp_path, monkeypatch):
    root = tmp_path / "server"
    model(root, "org/llama")
    model(root, "org/llama", NEW)
    (root / "models/org/llama/main").write_text(f"{OLD} {NEW}")  # it moves once it was asked for
    with serve(root) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        command = [sys.executable, "-W", "ignore", "-c", TOGETHER]
        ((status, out, _),) = finished(launched(["-n", 2], *command), limit=240)
    assert status == 0
    lines = sorted(line.partition("] ")[2] for line in out.splitlines())
    assert lines == 2 * [f"org/llama@{OLD}"] + 2 * [f"org/none: {url}"[:30]]
    asked = requests(root)
    assert sum(line == "GET /api/models/org/llama" for line in asked) == 1
    assert sum(line.startswith(f"GET /org/llama/resolve/{OLD}/model.s") for line in asked) == 1


# -- runs --------------------------------------------------------------------------------------

SOURCES = """
import contextlib, io, json, os, sys
from pathlib import Path
import hfjax, jax.numpy as jnp, optax
from hfjax.__main__ import main
from hfjax.distributed import Watchdog
from hfjax.trainer import RunComponents, TrainConfig, config_io
from hfjax.trainer.config import DataConfig, ModelConfig
from hfjax.trainer.train_loop import CHECKPOINTS, Run

def find(run_dir, model, data):
    options = {"model": ModelConfig(pretrained=model), "data": DataConfig(train=(data,))}
    config = TrainConfig(run_dir=Path(run_dir), **options)
    run = Run(config, RunComponents(config), Watchdog(None))
    run.find_sources()
    for note in run.notes:
        print(note)
    print("sources", run.config.model.pretrained, *run.config.data.train)
    print("folders", run.components.pretrained.folder.path, *run.components.texts.folders.values())
    return run

def begin(run_dir, *names):
    run = find(run_dir, *names)
    run.source_folder = run.components.pretrained.folder
    Path(run_dir).mkdir()
    run._save_files(Path(run_dir))
    parameters = lambda rngs: {"w": jnp.ones(8)}
    layout = hfjax.layout(parameters, optax.sgd(0.1), hfjax.make_mesh(), hfjax.DDP)
    settings = config_io.to_plain(config_io.with_absolute_paths(run.config))
    hfjax.save(Path(run_dir, CHECKPOINTS), layout, hfjax.init(layout), config=settings)

told = {}
for key, (verb, *words) in json.loads(sys.argv[1]).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if verb == "move":
                Path(words[0]).write_text(words[1])
            elif verb in ("begin", "find"):
                globals()[verb](*words)
            elif status := main([verb, *words]):
                print("status", status)
        except (ValueError, SystemExit) as error:
            print(error)
    told[key] = out.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a run finds by its names, before and after they moved; then without a network."""
    place = tmp_path_factory.mktemp("found")
    root, home, run = place / "server", place / "home", str(place / "run")
    served(root)
    names = ["org/llama", "hub:org/texts"]
    refused = {
        name: ["find", str(place / "other"), "org/llama@main", f"hub:org/{name}"]
        for name in ("subsets", "fields", "pictures", "tests")
    }
    at_data = lambda name: ["--data-dir", str(place / name)]
    tokenizer = ["--tokenizer", "org/llama"]
    words = {
        "begin": ["begin", run, *names],
        "model moves": ["move", f"{root}/models/org/llama/main", NEW],
        "data moves": ["move", f"{root}/datasets/org/texts/main", NEW],
        "moved": ["find", run, *names],
        "other": ["find", run, f"org/llama@{NEW}", names[1]],
        "no tokenizer": ["find", str(place / "other"), "org/bare", names[1]],
        **refused,
        "text": ["data", "hub:org/subsets/de", *at_data("text")],
        "parquet": ["data", "hub:org/fields", "--field", "question", *at_data("parquet")],
        "made": ["data", "hub:org/texts@main", *tokenizer, *at_data("made")],
        "inspect": ["inspect", "org/llama"],
    }
    with serve(root) as url:
        online, _ = child(SOURCES, url, home, json.dumps(words))
        asked = requests(root)
    words = {
        "moved": ["find", run, *names],
        "none": ["inspect", "org/none"],
        "revision": ["inspect", "org/llama@v9"],
        "inspect": ["inspect", "org/llama"],
    }
    offline, _ = child(SOURCES, url, home, json.dumps(words), HF_HUB_OFFLINE="1")
    return place, online, offline, asked


def served(root: Path) -> None:
    """Write the repositories of the server."""
    model(root, "org/llama")
    model(root, "org/llama", NEW)
    (root / "models/org/llama/main").write_text(OLD)
    (model(root, "org/bare") / "tokenizer.json").unlink()
    files = {"data/train-0.jsonl": TEXTS, "data/test-0.jsonl": TEXTS, "data/val.jsonl": TEXTS[:4]}
    for commit in (NEW, OLD):
        dataset(root, "org/texts", files, commit)
    subsets = dataset(root, "org/subsets", {"en/a.txt": [], "de/a.txt": []})
    (subsets / "de/a.txt").write_text("Es war einmal")
    table = pyarrow.table({"question": TEXTS, "id": list(range(len(TEXTS)))})
    parquet.write_table(table, dataset(root, "org/fields", {}) / "train-00000.parquet")
    (dataset(root, "org/pictures", {}) / "a.png").write_bytes(b"")
    dataset(root, "org/tests", {"test.jsonl": TEXTS})


PINNED = f"sources org/llama@{OLD} hub:org/texts@{OLD}\n"


def test_a_run_from_names_keeps_name_and_commit(found):
    place, online, _, asked = found
    said = online["begin"]
    assert "org/llama: commit aaaaaaaaaaaa of the Hub\n" in said
    assert "hub:org/texts: commit aaaaaaaaaaaa of the Hub\n" in said
    assert "hub:org/texts: 40 documents to train on, 4 to validate on; tokens in " in said
    assert PINNED in said
    settings = yaml.safe_load((place / "run/config.yaml").read_text())
    names = [f"org/llama@{OLD}", [f"hub:org/texts@{OLD}"]]
    assert [settings["model"]["pretrained"], settings["data"]["train"]] == names
    assert json.loads((place / "run/model/tensors.json").read_text())["from"] == names[0]
    assert not any("test-0" in line for line in asked)


def test_data_of_the_hub_is_prepared_once_by_commit_and_tokenizer(found):
    folders = [line for line in found[1]["begin"].splitlines() if line.startswith("folders ")]
    prepared = Path(folders[0].split()[2])
    assert prepared.name.startswith(f"org--texts-{OLD[:12]}-")
    assert TokenSet(prepared / "train").meta.documents == 40
    assert TokenSet(prepared / "valid").meta.documents == 4
    assert TokenSet(prepared / "train").vocab == 270
    assert f" {prepared}\n" in found[1]["moved"]
    line = f"hub:org/texts: 40 documents to train on, 4 to validate on; tokens in {prepared}\n"
    assert line in found[1]["moved"]
    assert sum("train-0.jsonl" in line for line in found[3] if line.startswith("GET")) == 1


def test_a_run_goes_on_with_its_commits_although_branches_have_moved(found):
    place, online, offline, _ = found
    for name in ("org/llama", "hub:org/texts"):
        assert (
            f"{name} has moved to commit bbbbbbbbbbbb: the run goes on with aaaaaaaaaaaa, which it "
            "began with\n"
        ) in online["moved"]
    for said in (online["moved"], offline["moved"]):
        assert PINNED in said
        assert f"folders {place}/run/model " in said
    assert f"org/llama@{NEW}: llama, 21 tensors" in online["inspect"]


def test_a_run_does_not_go_on_with_another_commit(found):
    assert (
        f"--model.pretrained org/llama@{NEW} is not the model that {found[0]}/run began from: that "
        f"is org/llama@{OLD}. Give that one; or begin anew: --run-dir ANOTHER.\n"
    ) in found[1]["other"]


def test_without_a_network_the_cache_is_read_and_what_it_lacks_is_said(found):
    place, _, offline, _ = found
    assert f"org/llama@{NEW}: llama, 21 tensors" in offline["inspect"]
    for key, name in {"none": "org/none", "revision": "org/llama@v9"}.items():
        assert (
            f"hfjax inspect: {name}: HF_HUB_OFFLINE is set, and the Hub's cache does not have all "
            f"of it ({place}/home/hub). Unset it, or download it once where there is a network: hf "
            f"download {name.partition('@')[0]}\n"
        ) in offline[key]


REFUSED_DATA = {
    "subsets": f"hub:org/subsets@{OLD} has 2 folders of data: de, en. They may hold the same text "
    f"twice: name those to read, as hub:org/subsets/de@{OLD}.\n",
    "pictures": f"hub:org/pictures@{OLD} has no files of Parquet, JSONL or text (.parquet, .jsonl, "
    ".ndjson, .txt). It has README.md, a.png. Look for a revision that has them "
    "(@refs/convert/parquet is one that the Hub makes of many), or convert them and give the files "
    "to hfjax data.\n",
    "tests": f"hub:org/tests@{OLD} has no files to train on, only test.jsonl. Name those to read: "
    f"hfjax data hub:org/tests@{OLD} --pattern '*.jsonl' --data-dir DIR\n",
    "no tokenizer": f"--model.pretrained org/bare@{OLD}: it has no tokenizer.json, and no tokens "
    "are named: text cannot be read.",
    "fields": "train-00000.parquet has no column 'text': it has question, id. Name the one with "
    "the text: --field NAME\nA run reads a data set of the Hub by the column or field 'text'. With "
    f"other settings, make it first: hfjax data hub:org/fields@{OLD} --field NAME --data-dir DIR; "
    "then give --data.train DIR.\n",
}


@pytest.mark.parametrize("name", REFUSED_DATA)
def test_a_data_set_that_cannot_be_read_says_what_it_has(found, name):
    assert REFUSED_DATA[name] in found[1][name]


def test_data_sets_of_the_hub_become_tokens_also_a_folder_another_column_or_tokenizer(found):
    place, online, _, _ = found
    text, table, made = (TokenSet(place / name) for name in ("text", "parquet", "made"))
    assert text.tokenizer.decode(text.read(0, 13)) == "Es war einmal", online["text"]
    assert text.meta.sources == [f"hub:org/subsets/de@{OLD}"]
    assert (table.meta.documents, table.vocab) == (40, 256), online["parquet"]
    assert made.meta.sources == [f"hub:org/texts@{NEW}"]
    assert (made.meta.documents, made.vocab, made.meta.end) == (40, 270, 5), online["made"]


SMALL = [
    *("--model.seq-len", "16", "--global-batch-size", "2", "--cpu-devices", "1", "--lr", "1e-4"),
    *("--log.sample-tokens", "0", "--eval.max-batches", "1", "--checkpoint.interval", "0"),
]


@pytest.mark.slow
def test_from_names_to_a_resumed_run_and_an_export_the_last_steps_without_a_network(tmp_path):
    served(tmp_path / "server")
    run, out = ["--run-dir", str(tmp_path / "run")], str(tmp_path / "out")
    train = ["train", "--model.pretrained", "org/llama", "--data.train", "hub:org/texts", *SMALL]
    again = ["--config", str(tmp_path / "run/config.yaml"), "--run-dir", str(tmp_path / "again")]
    with serve(tmp_path / "server") as url:
        words = {
            "train": [*train, *run, "--steps", "1"],
            "move": ["move", f"{tmp_path}/server/models/org/llama/main", NEW],
            "resume": [*train, *run, "--steps", "2"],
        }
        online, _ = child(SOURCES, url, tmp_path / "home", json.dumps(words))
    words = {
        "resume": [*train, *run, "--steps", "3"],
        "again": ["train", *again, "--steps", "1", "--cpu-devices", "1"],
        "export": ["export", str(tmp_path / "run"), "--export-dir", out],
    }
    offline, _ = child(SOURCES, url, tmp_path / "home", json.dumps(words), HF_HUB_OFFLINE="1")
    assert f"KiB of org/llama@{OLD} in" in online["train"]
    assert "settings that changed: --steps 2 (before: --steps 1)\n" in online["resume"]
    assert "going on after step 2" in offline["resume"]
    assert f"KiB of org/llama@{OLD} in" in offline["again"]
    assert hfjax.pretrained(out).has_tokenizer, offline["export"]


@pytest.mark.slow
def test_two_processes_train_from_names(tmp_path, monkeypatch):
    served(tmp_path / "server")
    command = [sys.executable, "-m", "hfjax", "train", "--model.pretrained", "org/llama", *SMALL]
    command += ["--data.train", "hub:org/texts", "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    with serve(tmp_path / "server") as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        (result,) = finished(launched(["-n", 2], *command), limit=240)
        asked = requests(tmp_path / "server")
    assert result[0] == 0, result
    assert result[1].count("tokens in") == 1
    for name in ("models/org/llama", "datasets/org/texts"):
        assert sum(line == f"GET /api/{name}" for line in asked) == 1
    assert sum("train-0.jsonl" in line for line in asked if line.startswith("GET")) == 1
