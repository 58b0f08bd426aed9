"""`hfjax schedule`: the grid, its cost, files of it; faulty input is an error, not a traceback."""

import json
import subprocess
import sys
from itertools import combinations
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from hfjax.__main__ import main
from hfjax.cli import draw_timeline, schedule as timetable
from hfjax.cli.schedule import schedule_timeline
from hfjax.parallel.schedules.named import SCHEDULES, Schedule, build_table
from hfjax.parallel.schedules.text import parse_table

COMMAND = (sys.executable, "-m", "hfjax", "schedule")


@pytest.fixture(name="run")
def fixture_run(monkeypatch, capsys):
    """Return a function that runs the command: its exit status, output and errors."""

    def run(*words: object, columns: int = 300) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["hfjax", "schedule", *map(str, words)])
        return main(), *capsys.readouterr()

    return run


def test_alone_it_lists_every_schedule_in_a_line(run):
    status, out, _ = run()
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1 : 1 + len(SCHEDULES)]] == list(SCHEDULES)
    assert lines[0].split() == ["schedule", "chunks", "bubble", "stash", "B-W", "sent"]
    told = {name: rest[:5] for name, *rest in map(str.split, lines[1 : 1 + len(SCHEDULES)])}
    assert told["1f1b"] == ["1", "15.8%", "7", "0", "38"]
    assert told["zb-h1"] == ["1", "5.9%", "4", "4", "102"]
    assert "with 4 stages, 16 microbatches, forward 1, backward 2" in out
    assert "4.5%" in run("--stages", 2, "--microbatches", 21)[1]


def test_it_prints_the_grid_and_what_it_costs(run):
    status, out, _ = run("1f1b", "--stages", 3, "--microbatches", 4)
    assert status == 0
    assert out.splitlines() == [
        "1f1b: 3 stages, 4 microbatches, 8 ticks without branches",
        "",
        "          0   1   2       3       4       5       6   7",
        "stage 0   0F0 0F1 0F2     0F3     0B0     0B1     0B2 0B3",
        "stage 1   .   1F0 1F1     1F2+1B0 1F3+1B1 1B2     1B3 .",
        "stage 2   .   .   2F0+2B0 2F1+2B1 2F2+2B2 2F3+2B3 .   .",
        "",
        "time      18, with forward 1, backward 2 (weights 1 of it)",
        "bubble    33.3%; waiting for neighbours only: 33.3%, for inputs only: 33.3%",
        "stash     4 3 1: microbatches whose activations each stage keeps",
        "permutes  12 in each stage's program; no stage has more than 8 to send",
        "messages  0->1 6 for 4, 1->0 6 for 4, 1->2 6 for 4, 2->1 6 for 4: sent, for those needed",
        "empty     8 of 24 messages, 33% of the bytes sent",
    ]


def test_it_tells_what_is_sent_and_what_crosses_from_b_to_w(run):
    for name, sent, needed in (("zb-v", 774, 256), ("zb-h1", 390, 128), ("v", 536, 256)):
        _, out, _ = run(name, "--microbatches", 64)
        assert (
            f"permutes  {sent} in each stage's program; no stage has more than {needed} to" in out
        )
    _, out, _ = run("zb-h1", "--microbatches", 64)
    assert "B to W    1 2 3 4: microbatches" in out
    assert "1->2 195 for 64" in out
    _, out, _ = run("1f1b", "--stages", 1)
    assert "messages  none" in out
    assert "B to W" not in out


def test_times_are_those_given(run):
    _, out, _ = run("zb", "--forward", 1, "--backward", 3, "--weights", 1)
    assert "bubble    12.3%" in out  # (4 - 1) * (1 + 3 - 1) of 73


def test_a_wide_grid_is_cut_into_blocks_of_ticks(run):
    _, out, _ = run("interleaved", columns=80)
    heads = [line for line in out.splitlines() if line.startswith("          ")]
    assert " ".join(heads).split() == [str(tick) for tick in range(42)]
    assert max(len(line) for line in out.splitlines() if not line.startswith("messages")) <= 80


def test_a_terminal_gets_colours_and_only_the_ends_of_a_long_grid(capsys):
    table = build_table("1f1b-published", 4, 64, 1)
    given = timetable.argparse.Namespace(forward=1, backward=2, weights=1)
    terminal = Console(force_terminal=True, width=80, color_system="standard", soft_wrap=True)
    timetable._show(table, given, terminal)
    out = capsys.readouterr().out
    assert "\x1b[34m0F0" in out
    assert "--csv or --picture has them all" in out
    assert out.count("stage 0") == timetable.MOST
    assert "0B63" in out


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_table_written_as_csv_reads_back_and_shows_the_same(run, tmp_path, name):
    path = tmp_path / f"{name}.csv"
    _, shown, _ = run(name, "--stages", 3, "--microbatches", 7, "--csv", path)
    status, again, _ = run("--from", path)
    assert (status, again) == (0, shown)


def test_a_table_of_ones_own_is_checked_and_shown(run, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0F1 0B0 0B1\n1F0+1B0 1F1+1B1\n")
    status, out, _ = run("--from", path)
    assert (status, out.splitlines()[0]) == (
        0,
        "mine: 2 stages, 2 microbatches, 4 ticks without branches",
    )
    path.write_text("0F0 0F1 0B0 0B1\n1F0+1B0 1F1\n")
    status, _, wrong = run("--from", path)
    assert status == 2
    assert "hfjax schedule: mine: 1B1 is missing" in wrong
    assert ">1F1<" in wrong
    path.write_text("0F0 0F1 0B0 0B1\n1F0+1B0 1F1+1B1 1F2\n")
    wrong = run("--from", path)[2]
    assert "mine: 1F2 is of microbatch 2, which lacks 0F2, 0B2, 1B2. Remove it" in wrong
    assert "stage 1  1F0+1B0  1F1+1B1  >1F2<" in wrong


SVG = "{http://www.w3.org/2000/svg}"


def test_an_svg_has_a_box_for_every_task_to_scale(run, tmp_path):
    path = tmp_path / "x.svg"
    run("1f1b-published", "--stages", 3, "--microbatches", 4, "--picture", path)
    boxes = [
        g for g in ElementTree.parse(path).iter(f"{SVG}g") if g.find(f"{SVG}title") is not None
    ]
    tips = [str(box.findtext(f"{SVG}title")) for box in boxes]
    table = build_table("1f1b-published", 3, 4, 1)
    assert sorted(tips) == sorted(f"{task}, tick {t}" for task, t, _ in table.tasks())
    wide = {}
    for tip, box in zip(tips, boxes, strict=True):
        (path_of,) = box.findall(f"{SVG}path")
        corners = path_of.attrib["d"].split("\n")
        across = [float(corner.split()[1]) for corner in corners if corner[0] in "ML"]
        wide[tip[1]] = max(across) - min(across)
    assert wide["B"] == pytest.approx(2 * wide["F"], rel=0.05)


def test_the_halves_of_a_backward_are_drawn_by_their_names(run, tmp_path):
    svg, trace = tmp_path / "x.svg", tmp_path / "x.json"
    for path in (svg, trace):
        run("zb-h1", "--stages", 2, "--microbatches", 2, "--picture", path)
    tips = [tip.split(",")[0] for tip in svg.read_text().split("<title>")[1:]]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    names = {e["name"].split(",")[0] for e in events}
    assert set(tips) == names == {f"{g}{kind}{m}" for g in "01" for kind in "FIW" for m in "01"}


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "chunks"),
    [
        ("1f1b", 2, 4, None),
        ("interleaved", 8, 32, 2),
        ("dualpipe-v", 4, 8, None),
        ("v", 2, 2, None),
    ],
    ids=str,
)
@pytest.mark.short("1f1b-2-4-None", "v-2-2-None")
def test_nothing_that_is_written_in_a_picture_is_cut_off_or_overlaps(
    name, stages, microbatches, chunks
):
    table = Schedule(name, microbatches, chunks).table(stages)
    figure = draw_timeline.figure(schedule_timeline(table, 1, 2, 1))
    figure.draw(renderer := FigureCanvasAgg(figure).get_renderer())
    texts = [*figure.legends[0].texts]
    for axes in figure.axes:
        texts += [axes._left_title, axes.xaxis.label, *axes.texts, *axes.get_yticklabels()]
    texts = [text for text in texts if text.get_text()]
    told = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    for text, place in told:
        assert 0 <= place.x0 < place.x1 <= figure.bbox.x1, text
        assert 0 <= place.y0 < place.y1 <= figure.bbox.y1, text
    for (text, one), (other, two) in combinations(told, 2):
        assert not one.overlaps(two), (text, other)


def test_a_picture_says_what_it_shows(run, tmp_path):
    path = tmp_path / "x.svg"
    run("interleaved", "--stages", 4, "--microbatches", 8, "--picture", path)
    texts = {text.text for text in ElementTree.parse(path).iter(f"{SVG}text")}
    assert "interleaved: 4 stages, 8 microbatches, 2 chunks, bubble 15.8%" in texts
    assert {"stage 0", "stage 3", "time", "0", "10", "20"} <= texts
    assert {"forward", "backward", "masked: computed, thrown away"} <= texts
    assert "bar: the later the chunk, the longer" in texts
    assert "bubble    15.8%" in run("interleaved", "--stages", 4, "--microbatches", 8)[1]


def test_the_chunks_of_a_stage_are_told_apart_without_colour():
    table = Schedule("interleaved", 8, 4).table(2)
    for span in schedule_timeline(table, 1, 2, 1).spans:
        if span.label:
            chunk = int(span.name.split("FB"[span.kind == "B"])[0]) // 2
            assert span.bar == chunk / 3, span


def test_a_long_picture_is_cut_between_ticks_into_rows_below_each_other():
    short, long = (
        schedule_timeline(Schedule("zb-v", count).table(4), 1, 2, 1) for count in (2, 64)
    )
    assert len(short.row_ranges) == 1
    assert len(long.row_ranges) == long.rows > 2
    ends = {end for _, end in long.row_ranges}
    assert not [s for s in long.spans for end in ends if s.start < end - 1e-9 < s.end - 2e-9]
    assert schedule_timeline(Schedule("1f1b", 1024).table(2), 1, 2, 1).rows == timetable.MOST_ROWS


def test_pictures_load_no_pyplot_and_a_trace_no_matplotlib(tmp_path):
    program = f"""
import sys
from pathlib import Path
from hfjax.cli.draw_timeline import trace, write
from hfjax.cli.schedule import schedule_timeline
from hfjax.parallel.schedules.named import Schedule

picture = schedule_timeline(Schedule("1f1b", 2).table(2), 1, 2, 1)
assert trace(picture)
assert "matplotlib" not in sys.modules
write(Path({str(tmp_path)!r}, "x.svg"), picture)
write(Path({str(tmp_path)!r}, "x.png"), picture)
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_trace_has_the_tasks_of_each_stage_and_an_arrow_per_message(run, tmp_path):
    path = tmp_path / "x.json"
    run("zb-h1", "--stages", 2, "--microbatches", 3, "--picture", path)
    events = json.loads(path.read_text())["traceEvents"]
    by_kind = lambda kind: [event for event in events if event["ph"] == kind]
    assert [event["args"]["name"] for event in by_kind("M")] == ["stage 0", "stage 1"]
    assert len(by_kind("X")) == 2 * 3 * 3
    assert len(by_kind("s")) == len(by_kind("f")) == 2 * 3
    for sent, used in zip(by_kind("s"), by_kind("f"), strict=True):
        assert (sent["id"], sent["tid"] + used["tid"]) == (used["id"], 1)
        assert sent["ts"] <= used["ts"]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.short("gpipe", "forward")
def test_every_table_can_be_drawn(tmp_path, name):
    table = build_table(name, 2, 3, SCHEDULES[name].chunks)
    picture = schedule_timeline(table, 1, 2, 1)
    tasks = [span.name.split(",")[0].replace("I", "B") for span in picture.spans if span.label]
    assert sorted(tasks) == sorted(map(str, table.times()))
    for ending in ("svg", "png"):
        draw_timeline.write(tmp_path / f"{name}.{ending}", picture)


def test_a_table_of_one_stage_can_be_drawn():
    assert draw_timeline.svg(schedule_timeline(parse_table("0F0 0B0"), 1, 2, 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1b1f",), "no schedule '1b1f'. Schedules: gpipe, 1f1b"),
        (("zb-v", "--chunks", 3), "chunks=3: zb-v has 2 on each stage"),
        (("1f1b", "--stages", 0), "stages=0: a positive number"),
        (("1f1b", "--microbatches", -1), "microbatches=-1: a positive number"),
        (("1f1b", "--backward", -2), "times are finite numbers, none negative"),
        (("zb", "--weights", 3), "weights=3.0 is part of backward=2.0"),
        (("1f1b", "--picture", "x.jpg"), "x.jpg: a picture is an .svg or a .png file"),
        (("1f1b", "--picture", "/no/such/x.svg"), "No such file or directory: '/no/such/x.svg'"),
        (("--from", "/no/such.csv"), "/no/such.csv cannot be read: No such file or directory"),
        (("--from", "/"), "Is a directory"),
        (("1f1b", "--from", "x.csv"), "1f1b and --from x.csv: give a name or a file, not both"),
        (("--csv", "x.csv"), "--csv is for one schedule: name one of gpipe"),
    ],
)
def test_what_cannot_be_is_an_error_with_status_2(run, words, message):
    status, out, wrong = run(*words)
    assert (status, out) == (1 if "x.svg'" in message else 2, "")
    assert message in wrong


def test_a_file_that_is_no_text_and_one_for_other_sizes_are_refused(run, tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    assert "is no text: a line of cells per stage is expected" in run("--from", path)[2]
    path.write_text("0F0 0B0\n1F0 1B0\n")
    for name, count in (("stages", 2), ("microbatches", 1), ("chunks", 1)):
        status, _, wrong = run("--from", path, f"--{name}", 0)
        assert (status, wrong) == (2, f"hfjax schedule: --{name} 0: {path} has {count}.\n")


def test_a_number_that_is_none_is_a_usage_error(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("1f1b", "--stages", "x")
    assert "invalid int value: 'x'" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error():
    for words in ("zb-v --stages 8 --microbatches 64", "1f1b"):
        with subprocess.Popen(
            [*COMMAND, *words.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert b"Traceback" not in (wrong := process.stderr.read())
            assert wrong == b""
            assert process.wait() == 1
