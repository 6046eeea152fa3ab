"""What a user, or whoever wrote a file, can get wrong: an exit code, one line, no traceback, nothing written."""

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ness
import tiny
from ness.cli.main import main
from ness.lab.training.loop import Trainer
from report.making import result, write

CORES = os.cpu_count() or 1
RUN = ["run", "--benchmark", "tiny", "--epochs", "1", "--method", "finetune"]


@pytest.fixture(autouse=True)
def _known(monkeypatch, tmp_path: Path) -> None:
    tiny.make_known(monkeypatch)
    monkeypatch.chdir(tmp_path)


def one_line(capsys) -> str:
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.count("\n") == 1, caught.err
    assert "Traceback" not in caught.err
    assert caught.err.startswith("ness: ")
    return caught.err


FLAGS = [
    ("--save-every", "nan"), ("--save-every", "-1"), ("--save-every", "inf"), ("--stop-after", "-1"),
    ("--stop-after", "nan"), ("--threads", "-5"), ("--threads", str(CORES + 1)), ("--threads", "100000"),
    ("--lanes", "-3"), ("--lanes", "0"), ("--lanes", "1000000"), ("--device", "mps"), ("--device", "gpu"),
    ("--device", ""), ("--device", "cuda:x"), ("--device", "cpu:99999999999999999999"), ("--epochs", "0"),
    ("--epochs", "1000000000000000000000"), ("--batch", "1000000000000000000000"), ("--batch", "1"), ("--lr", "nan"),
    ("--lr", "-1"), ("--lr", "0"), ("--weight-decay", "-1"), ("--weight-decay", "inf"), ("--mixup", "-0.5"),
    ("--momentum", "1"), ("--lr-factor", "1"), ("--patience", "0"), ("--lr-min", "-1"), ("--seeds", "-1"),
]  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS, ids=" ".join)
@pytest.mark.parametrize("command", ["run", "table"])
def test_every_number_has_its_range(command: str, flag: tuple[str, str], capsys, tmp_path: Path) -> None:
    start = RUN[:3] if command == "run" else ["table", "--benchmark", "tiny", "--methods", "finetune"]
    assert main([*start, *flag]) == 2
    assert flag[0].lstrip("-").replace("-", "_") in one_line(capsys).replace("-", "_")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["1e21", "x", "0x10", "1.5"])
def test_what_is_no_whole_number(value: str, capsys) -> None:
    assert main([*RUN, "--batch", value]) == 2
    assert "--batch" in one_line(capsys)


@pytest.mark.parametrize(
    "argv",
    [
        [*RUN, "--lr", "\x1b[31m"], [*RUN, "--epoch", "3"], [*RUN, "--lr"], [*RUN, "--seeds", "x"], ["list", "x"],
        ["table", "--format", "pdf"], ["table", "--from", "a", "--format", "pdf"], ["watch", "--every", "x"],
        ["report", "--nope"], ["study"], ["study", "x.toml", "--threads", "x"], ["study", "x.toml", "--seeds", "1e9"],
        ["repair"], ["repair", "a", "b", "--passes", "x"], ["tune", "--first-tasks", "x"],
    ],
    ids=lambda argv: ascii(" ".join(argv))[-40:],
)  # fmt: skip
def test_what_is_not_understood_is_one_line(argv: list[str], capsys, tmp_path: Path) -> None:
    assert main(argv) == 2
    said = one_line(capsys)
    assert "--help" in said
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == []


STUDY = 'title = "t"\nmodel = "m"\ndomain = "d"\ngeneral = "self"\nheld_out = ["self"]\nseeds = [1]\n'
ROW = '[[row]]\nname = "r"\nmethod = "lora"\nrate = 0.1\n'
STUDIES = [
    STUDY, STUDY + "row = 3", STUDY + "row = [3]", STUDY + ROW.replace('"r"', "1"), STUDY + ROW.replace('"lora"', "[]"),
    STUDY + ROW.replace("0.1", '"x"'), STUDY + ROW.replace("0.1", "nan"), STUDY + ROW + "wise = [2]",
    STUDY + ROW + "both = [[1]]", STUDY + ROW + 'statistics = "x"', STUDY + ROW + "rank = 'x'",
    STUDY + ROW + "nope = 1",
    STUDY + ROW + "rank = -1", STUDY + ROW + ROW, STUDY.replace("[1]", "[-1]") + ROW, STUDY.replace("[1]", "3") + ROW,
    STUDY.replace('["self"]', "1") + ROW, "steps = 0\n" + STUDY + ROW, "length = 1e999\n" + STUDY + ROW,
    "batch = " + "9" * 5000, "steps = " + "[" * 5000, "\ud800", STUDY.replace('"t"', "5") + ROW,
]  # fmt: skip


@pytest.mark.parametrize("text", STUDIES, ids=range(len(STUDIES)))
def test_values_of_a_study(text: str, capsys, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(text.encode(errors="surrogatepass"))
    assert main(["study", "s.toml"]) == 2
    assert "s.toml" in one_line(capsys)


@pytest.mark.parametrize(
    "flags", [("--threads", "0"), ("--threads", str(CORES + 1)), ("--seeds", "-1"), ("--seeds", "1", "1"),
              ("--rows", "x"), ("--device", "cuda:77"), ("--device", "meta")], ids=" ".join
)  # fmt: skip
def test_options_of_a_study(flags: tuple[str, ...], capsys, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY + ROW)
    assert main(["study", "s.toml", *flags]) == 2
    one_line(capsys)


def test_tune_looks_at_where_it_writes_before_it_trains(capsys, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    argv = ["tune", "--benchmark", "tiny", "--method", "ness", "--first-tasks", "2", "--over", "eps=0.01"]
    assert main([*argv, "--write", "folder"]) == 2
    assert "folder" in one_line(capsys)
    assert not (tmp_path / "tuning").exists()


@pytest.mark.parametrize("flags", [["--image-size", "1"], ["--image-size", "100000"], ["--test-share", "nan"]])
def test_options_of_a_benchmark(flags: list[str], capsys, tmp_path: Path) -> None:
    assert main(["run", "--benchmark", "folder", "--data", str(tmp_path), *flags]) == 2
    one_line(capsys)


@pytest.mark.parametrize(
    "flags", [["--least-bwt", "nan"], ["--first-tasks", "1"], ["--first-tasks", "-3"], ["--threads", "-1"]]
)
def test_tune(flags: list[str], capsys) -> None:
    assert main(["tune", "--benchmark", "tiny", "--method", "ness", "--over", "eps=0.01", *flags]) == 2
    one_line(capsys)


@pytest.mark.parametrize("every", ["nan", "-1", "inf", "1e400"])
def test_watch(every: str, capsys) -> None:
    assert main(["watch", "--every", every]) == 2
    one_line(capsys)


CONFIG = [
    "method = inf", "method = 5", "benchmark = true", "benchmark = []", "out = 1e999", "out = 2020-01-01", "data = 5",
    "device = 5", "device = 'tpu'", "lanes = 1.5", "lanes = -1", "threads = nan", "threads = '1'", "seeds = 5",
    "seeds = [true]", "seeds = [1.5]", "seeds = []", "save_every = nan", "save_every = 'often'", "log = 'tensorboard'",
    "preset = 1", "optimizer = 3", "optimizer = ['sgd']", "lr = true", "lr = '1'", "epochs = 1.5", "epochs = inf",
    "again = 1", "config = 'other.toml'", "out = \"a\\u0000b\"", "quiet = 'yes'", "momentum = {a = 1}",
    "lr = 1" + "0" * 400, "epochs = 1" + "0" * 400, "epochs = " + "9" * 5000, "lr = " + "[" * 5000,
    "lr = " + "[" * 40 + "]" * 40, "x = " + "{a=" * 3000, "lr = ", "\x00", "\x1b[31m = 1", "lr = 1\nlr = 2", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("text", CONFIG, ids=lambda text: ascii(text)[:24])
@pytest.mark.parametrize("command", ["run", "table"])
def test_values_of_a_config(command: str, text: str, capsys, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode(errors="surrogatepass"))
    assert main([command, "--config", "c.toml", "--benchmark", "tiny"]) == 2
    said = one_line(capsys)
    assert any(word in said for word in ("c.toml", "--", "seeds", "device"))
    assert "\x1b" not in said
    assert len(said) < 1000
    assert not (tmp_path / "runs").exists()


PLAN = 'benchmark = "tiny"\nseeds = [1]\n[[row]]\nmethod = "finetune"\n'
PLANS = [
    "title = 5\n" + PLAN, "seeds = 1\n", PLAN + "lr = true\n", PLAN + "lr = [1]\n", PLAN + "epochs = inf\n",
    PLAN + "name = 5\n", PLAN + "lr = {a = 1}\n", PLAN + "epochs = 1" + "0" * 400, PLAN + "epochs = " + "9" * 5000,
    "row = 5\n", "row = [5]\n", "[row]\nx = 1\n", PLAN + "lr = " + "[" * 5000, "benchmark = inf\n" + PLAN[19:],
    "\ud800", PLAN + "preset = 1979-05-27\n", PLAN.replace("[1]", "[1e999]"),
]  # fmt: skip


@pytest.mark.parametrize("text", PLANS, ids=lambda text: ascii(text)[:40])
def test_values_of_a_plan(text: str, capsys, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_bytes(text.encode(errors="surrogatepass"))
    assert main(["table", "--plan", "p.toml"]) == 2
    assert "p.toml" in one_line(capsys)


def odd(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "nothing": "missing", "itself": path}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "nothing", "itself"])
def test_what_is_no_file_is_refused_at_once(kind: str, capsys, tmp_path: Path) -> None:
    odd(kind, tmp_path / "odd.toml")
    began = time.monotonic()
    assert main([*RUN, "--config", "odd.toml"]) == 2
    one_line(capsys)
    assert main(["table", "--plan", "odd.toml"]) == 2
    one_line(capsys)
    write(tmp_path / "runs" / "good", result())
    (tmp_path / "runs" / "bad").mkdir()
    odd(kind, tmp_path / "runs" / "bad" / "result.json")
    for argv in (["table", "--from", "runs"], ["report", "runs"]):
        assert main(argv) == 0
        caught = capsys.readouterr()
        assert "finetune" in (tmp_path / "runs/report/table.md").read_text() if argv[0] == "report" else caught.out
        assert sum("left out: runs/bad" in line for line in caught.err.splitlines()) == 1
    assert main(["watch", "runs", "--once"]) == 0
    assert time.monotonic() - began < 60


LONG = "x" * 5000


@pytest.mark.parametrize(
    "argv",
    [
        [*RUN, "--out", LONG], ["report", LONG], ["report", "runs", "--out", LONG], ["watch", LONG],
        ["table", "--from", LONG], ["table", "--plan", LONG], ["run", "--config", LONG],
        [*RUN, "--out", "file"], [*RUN, "--out", "file/below"], [*RUN, "--out", "dangling"], ["report", "file"],
        ["report", "runs", "--out", "file"], ["watch", "dangling"], ["table", "--from", "file"],
        ["run", "--benchmark", "folder", "--data", "file"], ["run", "--benchmark", "folder", "--data", LONG],
        ["data", "list", "mnist", "--data", LONG], ["data", "get", "mnist", "--data", "file"],
    ],
    ids=lambda argv: " ".join(word[:12] for word in argv),
)  # fmt: skip
def test_places_that_are_none(argv: list[str], capsys, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("missing/deep")
    write(tmp_path / "runs" / "good", result())
    code = main(argv)
    caught = capsys.readouterr()
    assert code in (1, 2)
    assert "Traceback" not in caught.err
    assert "Errno" not in caught.err
    assert caught.err.count("\n") <= 1


HOSTILE = "\x1b[31mred\x07\r\nline\u202e\u2028"


def test_control_characters_never_reach_the_terminal_and_formulas_never_a_csv(capsys, tmp_path: Path) -> None:
    formulas = {"method": "=HYPERLINK(1)", "setting": "@SUM(A1)", "tasks": ["+1+cmd|", "-2+3"]}
    write(tmp_path / "runs" / "formula", result(**formulas))
    write(tmp_path / "runs" / "escape", result(HOSTILE, setting=HOSTILE, tasks=[HOSTILE, "b"]))
    (tmp_path / "runs" / "bad\x1b[2J\n").mkdir()
    (tmp_path / "runs" / "bad\x1b[2J\n" / "result.json").write_text('{"x": "\x1b"}')
    for argv in (
        ["table", "--from", "runs"],
        *(["table", "--from", "runs", "--format", kind] for kind in ("markdown", "csv", "latex")),
        ["report", "runs"],
        ["watch", "runs"],
    ):
        assert main(argv) == 0, argv
        caught = capsys.readouterr()
        for text in (caught.out, caught.err):
            assert not {letter for letter in text if ord(letter) < 32 and letter != "\n"}, argv
            assert "\u202e" not in text
            assert "\u2028" not in text
        assert caught.err.count("left out") == (argv[0] != "watch"), caught.err
    for path in (tmp_path / "runs" / "report").rglob("*.csv"):
        for line in csv.reader(io.StringIO(path.read_text())):
            for cell in line:
                assert not cell.startswith(("=", "@", "+")), (path, cell)
                assert not cell.startswith("-") or float(cell) < 0


BAD = {
    "a number of 400 digits": lambda one: {**one, "total_seconds": 10**400},
    "a number beyond any": lambda one: {**one, "total_seconds": 1e308},
    "half a surrogate": lambda one: {**one, "method": "\ud800"},
    "no tasks": lambda one: {**one, "tasks": [], "accuracy": []},
    "no rows": lambda one: {**one, "accuracy": []},
    "empty rows": lambda one: {**one, "accuracy": [[], []]},
    "text for tasks": lambda one: {**one, "tasks": "ab"},
    "huge notes": lambda one: {**one, "notes": [{"certificate": [{"name": "x", "fan_in": 3, "rank": 1e308}]}]},
    "a kept that is text": lambda one: {**one, "notes": [{"kept": "much"}]},
    "a name of a million": lambda one: {**one, "method": "x" * 10**6},
}


@pytest.mark.parametrize("name", [*BAD, "deep", "infinity", "twice", "binary", "empty"])
def test_a_hostile_record_costs_its_own_row_alone(name: str, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # all columns
    write(tmp_path / "runs" / "good", result())
    bad = write(tmp_path / "runs" / "tiny-ness-0-seed1", result("ness"))
    (bad / "config.json").write_text(json.dumps({**result("ness"), "digest": "0", "settings": {"epochs": 2}}))
    raw = {
        "deep": b"[" * 100_000, "infinity": b'{"total_seconds": Infinity}', "twice": b'{"a": 1, "a": 2}',
        "binary": bytes(range(256)), "empty": b"",
    }  # fmt: skip
    text = raw[name] if name in raw else json.dumps(BAD[name](result("ness"))).encode()
    (bad / "result.json").write_bytes(text)
    assert main(["table", "--from", "runs"]) == 0
    caught = capsys.readouterr()
    assert len(caught.out.splitlines()) == 3
    assert len(caught.err.splitlines()) == 1
    assert "left out: runs/tiny-ness-0-seed1: damaged" in caught.err
    assert main(["report", "runs"]) == 0
    assert capsys.readouterr().err.count("left out") == 1
    assert main(["watch", "runs"]) == 0
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("holder.json", '{"process": Infinity, "host": "x", "since": ""}'), ("holder.json", "[" * 10**5),
        ("holder.json", json.dumps({"process": 10**30, "host": "x"})), ("holder.json", "\x00"),
        ("events.jsonl", "[" * 10**5 + "\n"), ("events.jsonl", '{"event": "learnt", "task": 0, "accuracy": []}\n'),
        ("events.jsonl", '{"event": "epoch", "task": 1e400, "epoch": 1, "valid_accuracy": NaN}\n'),
        ("events.jsonl", json.dumps({"event": "task", "task": 10**30, "time": 1e308}) + "\n"),
        ("config.json", "[" * 10**5), ("config.json", '{"settings": {"epochs": Infinity}}'),
        ("../asked.jsonl", '{"folder": "../..", "benchmark": 1}\n'), ("../asked.jsonl", "\x00\n" + "{" * 10**5),
    ],
    ids=lambda value: ascii(value)[:30],
)  # fmt: skip
def test_nothing_in_a_folder_of_runs_stops_watch(name: str, text: str, capsys, tmp_path: Path) -> None:
    write(tmp_path / "runs" / "good", result())
    bad = tmp_path / "runs" / "bad"
    bad.mkdir()
    (bad / "config.json").write_text(json.dumps({**result("ness"), "settings": {"epochs": 2}}))
    (bad / name).write_text(text)
    assert main(["watch", "runs"]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_says_from_where_it_goes_on(monkeypatch, capsys, tmp_path: Path) -> None:
    plain, count = Trainer.epoch, 0

    def interrupted(self: Trainer):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return plain(self)

    argv = ["table", "--benchmark", "tiny", "--methods", "finetune", "frozen", "--epochs", "2", "--save-every", "0"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "epoch", interrupted)
        assert main([*argv, "--quiet"]) == 130
    said = one_line(capsys)
    assert "the same command goes on with finetune on tiny, seed 1, after 1 tasks and 0 epochs (checkpoint-0000" in said
    assert "1 that are not begun" in said
    assert main([*argv, "--quiet"]) == 0


def test_quiet_is_quiet(capsys, tmp_path: Path) -> None:
    for argv in ([*RUN, "--quiet"], [*RUN, "--quiet"], ["table", "--plan", "p.toml", "--quiet"]):
        (tmp_path / "p.toml").write_text('title = "t"\n' + PLAN)
        assert main(argv) == 0
        caught = capsys.readouterr()
        assert caught.err == ""
        assert caught.out.startswith("benchmark")
    assert main([*RUN, "--quiet", "--lr", "1e25"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(ness.__file__).parents[1])}
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "ness", "list", "benchmarks"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=here)
    assert (done.returncode, done.stderr) == (1, "ness: No space left on device\n")
