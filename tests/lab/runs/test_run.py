"""Runs that survive: cut anywhere, taken up, finished once; locks, full disks, damage."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ness
import tiny
from ness import NessError
from ness._sealed import read_json, unseal_json, unseal_lines, write_json
from ness.lab.benchmarks.base import Stream
from ness.lab.gpu.coroutines import Coroutine
from ness.lab.runs import checkpoint, environment
from ness.lab.runs.run import Options, folder_of, run
from ness.lab.runs.run_folder import RunFolder, lines


@pytest.fixture(autouse=True)
def _known(monkeypatch) -> None:
    tiny.make_known(monkeypatch)


def options(path: Path, **changes) -> Options:
    return Options(out=path, save_every=0.0, **changes)


def same_end(one: Path, other: Path) -> bool:
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    weights = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    return weights and results[0]["accuracy"] == results[1]["accuracy"]


def test_one_run_is_one_folder(tmp_path: Path) -> None:
    heard = []
    outcome = run(tiny.job("ness"), 1, options(tmp_path), lambda event: heard.append(event.kind))
    assert outcome.how == "run"
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {"config.json", "events.jsonl", "result.json", "model.safetensors", "lock"}
    result = outcome.result
    assert result == json.loads((outcome.folder / "result.json").read_text())
    weights = (outcome.folder / "model.safetensors").read_bytes()
    assert result["weights"]["sha256"] == hashlib.sha256(weights).hexdigest()
    assert len(result["accuracy"]) == len(result["accuracy"][0]) == 3
    assert result["bwt"] == pytest.approx(
        sum(result["accuracy"][2][i] - result["accuracy"][i][i] for i in range(2)) / 2
    )
    assert result["environment"]["torch"] == torch.__version__
    assert result["version"] == ness.__version__
    assert len(result["seconds"]) == len(result["epochs"]) == 3
    assert result["peak_memory"] > 1e6
    events = [json.loads(line) for line in (outcome.folder / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] != "epoch"] == ["task", "learnt"] * 3 + ["finished"]
    assert heard[0] == "begun"
    assert set(load_file(outcome.folder / "model.safetensors")) == set(tiny.trainer("ness").context.model.state_dict())


def test_a_finished_run_is_not_run_again_unless_asked(tmp_path: Path, monkeypatch) -> None:
    first = run(tiny.job(), 1, options(tmp_path))
    second = run(tiny.job(), 1, options(tmp_path))
    assert (second.how, second.result) == ("there", first.result)
    third = run(tiny.job(), 1, options(tmp_path, again=True))
    assert third.how == "run"
    assert third.result["accuracy"] == first.result["accuracy"]
    assert (third.folder / "result.old.json").exists()
    heard = []
    monkeypatch.setattr(ness, "__version__", "99.0")
    run(tiny.job(), 1, options(tmp_path), lambda event: heard.append(event.facts["text"]))
    assert "finished by version" in heard[0]
    assert "--again" in heard[0]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("method", ["finetune", "joint", "alone", "ness"])
def test_interrupted_at_every_event_it_ends_bit_equal(method: str, tmp_path: Path) -> None:
    job = tiny.job(method, epochs=2)
    count = 0

    def counting(event) -> None:
        nonlocal count
        count += 1

    whole = run(job, 1, options(tmp_path / "whole"), counting).folder
    for stop in range(count):
        heard = 0

        def stopping(event, stop: int = stop) -> None:
            nonlocal heard
            heard += 1
            if heard > stop:
                raise Interrupted

        base = tmp_path / str(stop)
        with pytest.raises(Interrupted):
            run(job, 1, options(base), stopping)
        outcome = run(job, 1, options(base))
        assert outcome.how == ("resumed" if stop > 1 else "run")
        assert same_end(outcome.folder, whole), f"stopped at event {stop}"


def test_a_run_cut_again_and_again_gets_there(tmp_path: Path) -> None:
    job = tiny.job("ness")
    whole = run(job, 3, options(tmp_path / "whole")).folder
    cuts = 0
    while True:
        heard = []

        def two_epochs(event, heard: list = heard) -> None:
            heard.append(event.kind)
            if heard.count("epoch") == 2:
                raise Interrupted

        try:
            outcome = run(job, 3, options(tmp_path / "cut"), two_epochs)
            break
        except Interrupted:
            cuts += 1
    assert cuts >= 4
    assert same_end(outcome.folder, whole)
    events = (outcome.folder / "events.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["event"] == "resumed" for line in events) == cuts


def test_a_full_disk_at_any_write_keeps_the_last_good_state(tmp_path: Path, monkeypatch) -> None:
    job = tiny.job("finetune", epochs=1)
    whole = run(job, 1, options(tmp_path / "whole")).folder
    rename = os.replace

    def filling(at: int):
        count = 0

        def replace(temporary: Path, target: Path) -> None:
            nonlocal count
            count += 1
            if count == at:
                raise OSError(errno.ENOSPC, "No space left on device")
            rename(temporary, target)

        return replace

    for at in range(1, 40):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", filling(at))
            message = _message_of(job, tmp_path / str(at))
        if message is None:
            break
        assert "No space left on device" in message
        assert "\n" not in message
        assert same_end(run(job, 1, options(tmp_path / str(at))).folder, whole), f"write {at}"
    assert at > 8


def _message_of(job, path: Path) -> str | None:
    try:
        run(job, 1, options(path))
    except NessError as error:
        return str(error)
    return None


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    job = tiny.job("ness")
    whole = run(job, 1, options(tmp_path / "whole")).folder

    def stop(event) -> None:
        if event.kind == "learnt" and event.facts["task"] == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(job, 1, options(tmp_path), stop)
    folder = folder_of(job, 1, tmp_path)
    newest = checkpoint.paths(folder)[-1]
    raw = bytearray(newest.read_bytes())
    raw[raw.index(b'"manifest"') + 40] ^= 1  # in the header
    newest.write_bytes(raw)
    said = []
    outcome = run(job, 1, options(tmp_path), lambda event: said.append(event.facts.get("text", "")))
    assert any("damaged" in text and "the checkpoint before it" in text for text in said)
    assert same_end(outcome.folder, whole)


def test_two_damaged_checkpoints_are_one_clear_line(tmp_path: Path) -> None:
    job = tiny.job()
    with pytest.raises(Interrupted):
        run(job, 1, options(tmp_path), _stop_after_learning)
    for path in checkpoint.paths(folder_of(job, 1, tmp_path)):
        path.write_bytes(b"")
    with pytest.raises(NessError, match="damaged, and there is no older one; start over with --again"):
        run(job, 1, options(tmp_path))
    assert run(job, 1, options(tmp_path, again=True)).how == "run"


def _stop_after_learning(event) -> None:
    if event.kind == "learnt":
        raise Interrupted


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(NessError, match=r"cannot write in .*choose another --out"):
        run(tiny.job(), 1, options(tmp_path / "deeper"))
    tmp_path.chmod(0o700)


def test_a_folder_without_rights_is_one_line(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("ness.lab.runs.run_folder.FileLock.acquire", refuse)
    with pytest.raises(NessError, match=r"cannot write in .*Read-only file system.*choose another --out"):
        run(tiny.job(), 1, options(tmp_path))


def test_out_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NessError, match=r"cannot write in .*choose another --out"):
        run(tiny.job(), 1, options(tmp_path / "file"))


HOLDING = """
import sys
from pathlib import Path
from ness.lab.runs.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).held():
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_the_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    path = folder_of(tiny.job(), 1, tmp_path)
    argv = [sys.executable, "-c", HOLDING, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(NessError, match=rf"is held by process {holder.pid} on .* since .*; wait for it"):
            run(tiny.job(), 1, options(tmp_path))
        holder.communicate("")
    assert run(tiny.job(), 1, options(tmp_path)).how == "run"


def test_a_run_taken_up_in_the_middle_of_a_task_says_so_before_its_first_epoch(tmp_path: Path) -> None:
    """Lanes do what is between tasks on another stream, where no step may be captured."""
    job, options, heard = tiny.job("finetune", epochs=3), Options(tmp_path, save_every=0), []
    work = Coroutine(lambda: run(job, 1, options, lambda event: heard.append(event.kind)))
    while "epoch" not in heard:
        next(work)
    work.close()
    again = Coroutine(lambda: run(job, 1, options, lambda event: heard.append(event.kind)))
    assert next(again) == "steps"
    assert heard[-1] == "resumed"
    assert next(again) == "epoch"
    again.close()


def test_other_data_or_another_device_is_not_taken_up(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(Interrupted):
        run(tiny.job(), 1, options(tmp_path), _stop_after_learning)
    monkeypatch.setattr(Stream, "fingerprint", "00000000")
    with pytest.raises(NessError, match=r"begun with data .*, now data is 00000000"):
        run(tiny.job(), 1, options(tmp_path))


def test_a_config_that_is_not_this_runs_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tiny.job(), 1, tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"method": "other"}))
    with pytest.raises(NessError, match=r"config.json: method is 'other', expected 'finetune'"):
        run(tiny.job(), 1, options(tmp_path))


def test_a_torn_last_line_of_the_log_is_closed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log("one", {})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "tor')
    folder.log("two", {})
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in (lines[0], lines[2])] == ["one", "two"]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-000009.safetensors.1.tmp").write_bytes(b"half")
    with RunFolder(tmp_path).held():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_checkpoints_come_at_most_so_often(tmp_path: Path, monkeypatch) -> None:
    written = []
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (written.append(1), write(*args))[1])
    run(tiny.job(), 1, Options(out=tmp_path / "rarely", save_every=1e9))
    assert not written
    run(tiny.job(), 1, Options(out=tmp_path / "always", save_every=0))
    assert len(written) == 3 * (3 + 1)  # every epoch and every task


def test_a_damaged_newest_checkpoint_is_replaced_and_two_good_ones_are_kept(tmp_path: Path) -> None:
    job = tiny.job("finetune", epochs=2)
    whole = run(job, 1, options(tmp_path / "whole")).folder
    folder = folder_of(job, 1, tmp_path)
    for round_ in range(4):
        heard = 0

        def two_epochs(event) -> None:
            nonlocal heard
            heard += event.kind == "epoch"
            if heard == 2 and event.kind != "epoch":
                raise Interrupted

        with pytest.raises(Interrupted):
            run(job, 1, options(tmp_path), two_epochs)
        newest = checkpoint.paths(folder)[-1]
        newest.write_bytes(newest.read_bytes()[:-1])
        good = [path for path in checkpoint.paths(folder)[:-1] if checkpoint.read(path)]
        assert good, f"round {round_}: nothing to fall back to"
        if round_ == 2:
            break
    assert same_end(run(job, 1, options(tmp_path)).folder, whole)


def test_every_flipped_bit_of_config_holder_and_result_is_noticed_or_harmless(tmp_path: Path) -> None:
    """JSON files are sealed; the copy that says nothing else is the only one that may pass."""
    value = {"schema": 1, "name": "x", "numbers": [1, 2.5, None, True]}
    written = write_json(tmp_path / "file.json", value)
    assert read_json(tmp_path / "file.json") == written == {"sha256": written["sha256"], **value}
    raw = (tmp_path / "file.json").read_bytes()
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(NessError):
            unseal_json(bytes(flipped), "file")


def test_every_flipped_bit_of_the_log_costs_its_own_lines_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for number in range(4):
        folder.log("epoch", {"task": 0, "epoch": number, "valid_accuracy": 50.0 + number})
    raw = (tmp_path / "events.jsonl").read_bytes()
    whole, damaged = lines(tmp_path / "events.jsonl")
    assert (len(whole), damaged) == (4, 0)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        found, damaged = unseal_lines(bytes(flipped), "log")
        assert all(one in whole for one in found), f"bit {bit} changed an event"
        assert len(found) >= 2
        assert damaged >= 1


def test_a_log_of_an_earlier_version_is_read_and_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "old"}\n{"event": "older"}\n')
    RunFolder(tmp_path).log("new", {})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "not ours"}\n')
    found, damaged = lines(tmp_path / "events.jsonl")
    assert ([one["event"] for one in found], damaged) == (["old", "older", "new"], 1)


def test_a_damaged_config_is_written_anew_and_said(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tiny.job(), 1, options(tmp_path), _stop_after_learning)
    config = folder_of(tiny.job(), 1, tmp_path) / "config.json"
    raw = config.read_bytes()
    config.write_bytes(raw.replace(b"finetune", b"finetunf", 1))
    said = []
    run(tiny.job(), 1, options(tmp_path), lambda event: said.append(event.facts.get("text", "")))
    assert any("config.json" in text and "written anew from the command" in text for text in said)
    assert config.read_bytes() == raw


def test_a_damaged_result_with_a_checkpoint_left_is_made_again_from_there(tmp_path: Path) -> None:
    job, dropped = tiny.job(), []
    whole = run(job, 1, options(tmp_path / "whole")).folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "drop_checkpoints", lambda self: dropped.append(1))  # as if killed just before
        folder = run(job, 1, options(tmp_path)).folder
    result = folder / "result.json"
    result.write_bytes(result.read_bytes().replace(b'"acc"', b'"bcc"', 1))
    said = []
    outcome = run(job, 1, options(tmp_path), lambda event: said.append(event.facts.get("text", "")))
    assert outcome.how == "resumed"
    assert any("checksum differs" in text and "going on from the last checkpoint" in text for text in said)
    assert same_end(folder, whole)
    result.write_bytes(result.read_bytes().replace(b'"acc"', b'"bcc"', 1))
    with pytest.raises(NessError, match=r"checksum differs.*repeat the run with --again"):
        run(job, 1, options(tmp_path))


def test_what_a_kill_after_the_result_left_is_removed_by_the_next_look(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "drop_checkpoints", lambda self: None)
        folder = run(tiny.job(), 1, options(tmp_path)).folder
    (folder / "holder.json").write_text("{}")
    assert checkpoint.paths(folder)
    assert run(tiny.job(), 1, options(tmp_path)).how == "there"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "events.jsonl", "result.json", "model.safetensors", "lock",
    }  # fmt: skip


def test_damaged_weights_beside_a_result_are_said(tmp_path: Path) -> None:
    folder = run(tiny.job(), 1, options(tmp_path)).folder
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    said = []
    assert run(tiny.job(), 1, options(tmp_path), lambda event: said.append(event.facts["text"])).how == "there"
    assert "model.safetensors: damaged" in said[0]


@pytest.mark.parametrize("changed", ["threads", "torch", "CPU"])
def test_other_conditions_are_said_before_it_goes_on(changed: str, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(Interrupted):
        run(tiny.job(), 1, options(tmp_path), _stop_after_learning)
    now = environment.conditions(torch.device("cpu"))
    monkeypatch.setattr(environment, "conditions", lambda device: {**now, changed: "another"})
    heard = []
    run(tiny.job(), 1, options(tmp_path), lambda event: heard.append((event.kind, event.facts.get("text", ""))))
    kinds = [kind for kind, _ in heard]
    said = heard[kinds.index("remark")][1]
    assert f"begun with {changed} {now[changed]}, now another" in said
    assert "not end bit-equal" in said
    assert "\n" not in said
    assert kinds.index("remark") < kinds.index("resumed") < kinds.index("epoch")


def test_under_the_same_conditions_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tiny.job(), 1, options(tmp_path), _stop_after_learning)
    heard = []
    run(tiny.job(), 1, options(tmp_path), lambda event: heard.append(event.kind))
    assert "remark" not in heard


@pytest.mark.parametrize("name", ["result.json", "events.jsonl", "checkpoint-000001.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    folder = folder_of(tiny.job(), 1, tmp_path)
    folder.mkdir(parents=True)
    os.mkfifo(folder / name)
    with pytest.raises(NessError) as caught:
        run(tiny.job(), 1, options(tmp_path))
    assert "\n" not in str(caught.value)
