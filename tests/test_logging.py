"""The library logs and prints nothing; a tracker that fails stops no run."""

import json
import sys
from dataclasses import replace

import pytest

from hfjax.trainer import load, train
from hfjax.trainer.config import MeshConfig
from tests.small_run import BIGRAMS, QUIET, corpus, open_trackers, small

ONE = MeshConfig(data=1)
TRACKERS = '''
import json

class Lines:
    """Writes what it is called with."""

    def start(self, directory, config, step):
        self.path = directory / "lines.json"
        self.lines = [["start", step, config["steps"]]]

    def log(self, step, metrics):
        self.lines.append([step, sorted(metrics)[:1], metrics.get("valid_loss")])

    def finish(self):
        self.path.write_text(json.dumps(self.lines))

class BadStart(Lines):
    def start(self, *_):
        raise ConnectionError("no network")

class BadMaker(Lines):
    def __init__(self):
        raise RuntimeError("no key")

class BadLog(Lines):
    def log(self, step, metrics):
        super().log(step, metrics)
        if step in (1, 2):
            raise KeyError("perplexity")

class BadFinish(Lines):
    def finish(self):
        super().finish()
        raise OSError("disk is full")

class NoFinish:
    start = log = print

class Arguments(Lines):
    def __init__(self, project):
        pass
'''


@pytest.fixture(scope="module", name="data")
def fixture_data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(name="config")
def fixture_config(data, tmp_path):
    (tmp_path / "mine.py").write_text(TRACKERS)
    log = replace(QUIET, tracker=f"{tmp_path}/mine.py:Lines")
    return small(tmp_path / "run", data, model=BIGRAMS, mesh=ONE, steps=4, log=log)


def _with_tracker(config, name):
    tracker = config.log.tracker.replace("Lines", name)
    return replace(config, log=replace(config.log, tracker=tracker))


def _tracker_lines(config):
    return json.loads((config.directory / "lines.json").read_text())


def test_a_run_logs_its_lines_and_prints_nothing(config, capsys, caplog):
    caplog.set_level("INFO", "hfjax")
    train(config)
    assert capsys.readouterr() == ("", "")
    assert any(line.startswith("step 4/4  loss ") for line in caplog.messages)
    assert caplog.messages[-1].startswith("done: 4 steps; ")
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert all(record.name.startswith("hfjax.") for record in caplog.records)


def test_a_tracker_of_ones_own_gets_every_step_and_validation(config, tmp_path):
    valid = {"eval": replace(config.eval, interval=2)}
    result = train(replace(config, max_runtime=None, steps=2, **valid))
    start, *lines = _tracker_lines(config)
    assert start == ["start", 0, 2]
    assert [step for step, *_ in lines] == [0, 1, 2]
    assert lines[-1][-1] == result.valid_loss
    train(replace(config, **valid))
    assert _tracker_lines(config)[0] == ["start", 2, 4]  # it resumes
    saved = load(config.directory / "config.yaml")
    assert saved.log.tracker == f"{tmp_path}/mine.py:Lines"


FAILURES = {
    "BadMaker": [r"raised in start (RuntimeError: no key). It gets no metrics; the run goes on"],
    "BadStart": [r"raised in start (ConnectionError: no network). It gets no metrics; the run"],
    "BadLog": [
        r"raised in log, of step 1 (KeyError: 'perplexity'). It is called again for later steps;",
        r"BadLog raised in 2 calls of log",
    ],
    "BadFinish": [r"raised in finish (OSError: disk is full). It may have lost metrics; metrics"],
}


def test_a_run_goes_on_without_a_tracker_that_raises(config, caplog):
    assert train(_with_tracker(config, "BadStart")).step == 4
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"warning: --log.tracker {config.log.tracker.replace('Lines', 'BadStart')} raised in start "
        "(ConnectionError: no network). It gets no metrics; the run goes on, and metrics.jsonl "
        "has all metrics."
    ]


@pytest.mark.parametrize("name", FAILURES)
def test_a_tracker_that_raises_is_told_once(config, name, caplog):
    config.directory.mkdir()
    tracker = config.log.tracker.replace("Lines", name)
    with open_trackers(config.directory, config={"steps": 4}, tracker=tracker) as trackers:
        for step in range(4):
            trackers.log(step, loss=1.0)
        trackers.log(4, valid_loss=1.0)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(FAILURES[name])
    for record, text in zip(warned, FAILURES[name], strict=True):
        assert text in record.getMessage()
        assert f"mine.py:{name}" in record.getMessage()
    if name == "BadLog":
        assert [step for step, *_ in _tracker_lines(config)][1:] == [0, 1, 2, 3, 4]


REFUSALS = {
    "NoFinish": r"NoFinish: the class has no finish\. A tracker has start, log, finish",
    "Arguments": r"Arguments: the class is called without arguments, and missing .*'project'",
    "Nobody": r"--log\.tracker .*mine\.py has no class Nobody\. There: \['Lines'",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_class_that_is_no_tracker_is_refused_before_anything_is_written(config, name):
    with pytest.raises(ValueError, match=REFUSALS[name]):
        train(_with_tracker(config, name))
    assert not (config.directory / "checkpoints").exists()


@pytest.mark.parametrize(("flag", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_whose_package_is_missing_says_how_to_install_it(
    flag, module, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    told = rf"--log\.{flag} needs the package {module}: pip install 'hfjax\[logs\]'"
    with pytest.raises(ValueError, match=told):
        open_trackers(tmp_path, 0, **{flag: "books"})


def test_a_warning_of_a_tracker_is_a_line_of_the_command(tmp_path, shown_log, capsys):
    (tmp_path / "mine.py").write_text(TRACKERS)
    with open_trackers(tmp_path, tracker=f"{tmp_path}/mine.py:BadStart"):
        pass
    assert "BadStart raised in start (ConnectionError: no network)" in capsys.readouterr().out
