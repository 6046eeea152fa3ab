"""What `--ray` needs no Ray for; tests/cli/test_ray.py has the rest."""

from pathlib import Path

import pytest

import tiny
from ness import NessError
from ness.cli.main import main
from ness.cli.watch import screen
from ness.lab.runs import ray_driver, status
from ness.lab.runs.on_ray import _fitting, receive
from ness.lab.runs.ray_driver import Cluster, Outbox, Part
from ness.lab.runs.run import Options, folder_of, run
from ness.lab.runs.run_folder import RunFolder, me
from ness.lab.runs.status import Node, StatusMonitor
from ness.lab.training.loop import Event


@pytest.fixture(autouse=True)
def _known(monkeypatch, tmp_path: Path) -> None:
    tiny.make_known(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no line of `ness watch` is folded


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ray", "ray://10.0.0.1:10001"], "start the command on a machine of the cluster, with --ray auto"),
        (["--ray", "somewhere"], "expected local, auto or HOST:PORT"),
        (["--ray", "--jobs", "2"], "--ray goes without --jobs and --lanes"),
        (["--ray", "--device", "cuda:1"], "Ray chooses the GPU; expected cpu or cuda"),
        (["--ray", "--device", "cuda", "--gpus-per-run", "0"], "leave one of them out"),
        (["--ray", "--gpus-per-run", "1.5"], "--gpus-per-run 1.5: expected a part of a GPU"),
        (["--ray", "--gpus-per-run", "nan"], "--gpus-per-run nan"),
        (["--ray", "--cpus-per-run", "0"], "--cpus-per-run 0: expected more than 0"),
        (["--cpus-per-run", "2"], "--cpus-per-run 2 goes with --ray"),
        (["--gpus-per-run", "0.5"], "--gpus-per-run 0.5 goes with --ray"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(flags: list[str], words: str, capsys) -> None:
    assert main(["table", "--benchmark", "tiny", "--methods", "finetune", *flags]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


def test_without_ray_the_error_says_how_to_get_it(capsys, monkeypatch) -> None:
    monkeypatch.setattr(ray_driver, "find_spec", lambda name: None)
    for command in (["table", "--methods", "finetune"], ["run"], ["tune", "--over", "lr=0.1,0.2"]):
        assert main([*command, "--benchmark", "tiny", "--ray"]) == 2
        assert (
            "--ray needs the package ray, which is not installed: pip install 'ness-cl[lab,ray]'"
            in capsys.readouterr().err
        )


def test_how_many_runs_fit_on_a_node() -> None:
    node = {"cpus": 8.0, "gpus": 2.0}
    assert _fitting(node, Cluster(cpus=0.1)) == 80
    assert _fitting(node, Cluster(cpus=3.0)) == 2
    assert _fitting(node, Cluster(gpus=0.25)) == 8
    assert _fitting(node, Cluster(gpus=4.0)) == 0


def test_what_comes_back_in_parts_is_the_run_folder_as_the_node_wrote_it_and_nothing_else(tmp_path: Path) -> None:
    job = tiny.job("finetune", epochs=2)
    there, here = folder_of(job, 1, tmp_path / "there"), tmp_path / "here"
    outbox, names = Outbox(there, "node", {}), set()

    def listen(event: Event) -> None:
        outbox.part.events.append(event)
        part = outbox.take()
        receive(here, part)
        names.update(part.files)
        found = {path.name: path.read_bytes() for path in there.glob("checkpoint-*")}
        assert {path.name: path.read_bytes() for path in here.glob("checkpoint-*")} == found

    run(job, 1, Options(tmp_path / "there", save_every=0.0), listen)
    receive(here, outbox.take())
    expected = {name: (there / name).read_bytes() for name in ("events.jsonl", "model.safetensors", "result.json")}
    assert {path.name: path.read_bytes() for path in here.iterdir()} == expected
    assert len(names) > 5  # the checkpoints came as they were made
    receive(here, Part(files={"../outside": b"", "config.json": b"other"}, gone=["result.json"]))
    assert {path.name for path in here.iterdir()} == set(expected)
    assert not (tmp_path / "outside").exists()


def test_watch_shows_nodes_and_where_a_run_is_and_one_that_is_queued_waits(tmp_path: Path) -> None:
    from ness._sealed import write_json

    job = tiny.job("finetune", epochs=1)
    for seed in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(job, seed, Options(tmp_path), interrupt)
    shown = [{"name": "left (1a2b3c)", "alive": True, "cpus": 8.0, "gpus": 0.0, "runs": 1}]
    shown += [{"name": "right (4d5e6f)", "alive": False, "cpus": 8.0, "gpus": 0.0, "runs": 0}]
    write_json(tmp_path / status.NODES, {**me(), "nodes": shown})
    first, second = (RunFolder(folder_of(job, seed, tmp_path)) for seed in (1, 2))
    with first.held(), second.held(queued=True):
        first.say_holder("left (1a2b3c)")
        found = StatusMonitor(tmp_path).look()
        assert [(one.state, one.node) for one in found] == [("running", "left (1a2b3c)"), ("waiting", "")]
        text = screen(found, nodes=status.nodes(tmp_path))
        assert "running on left (1a2b3c)" in text
        assert "right (4d5e6f)  8     0     gone" in text
    assert status.nodes(tmp_path)[0] == Node("left (1a2b3c)", True, 8.0, 0.0, 1)
    write_json(tmp_path / status.NODES, {**me(), "process": 1 << 22, "nodes": shown})
    assert status.nodes(tmp_path) == []  # of a command that is gone
    write_json(tmp_path / status.NODES, {**me(), "nodes": [{"name": 1}]})
    assert status.nodes(tmp_path) == []


def interrupt(event: Event) -> None:
    if event.kind == "learnt":
        raise KeyboardInterrupt


def test_ranges_are_checked_where_the_cluster_is_made() -> None:
    with pytest.raises(NessError, match="HOST:PORT"):
        Cluster("10.0.0.1:port").check()
