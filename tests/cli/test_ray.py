"""`--ray`: a table on a real Ray cluster of several nodes on this machine, whatever happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fatal
from ness.cli.main import main
from running import facts

pytestmark = pytest.mark.ray
LONG = 500.0  # seconds, on a machine that does much else

PLAN = """
benchmark = "tiny"
seeds = [1, 2]
[[row]]
method = "fatal"
name = "long"
naps = 0.4
[[row]]
method = "fatal"
name = "dies once"
kills = 1
marks = "{once}"
[[row]]
method = "finetune"
"""
FAILING = """
benchmark = "tiny"
seeds = [1]
[[row]]
method = "fatal"
name = "dies always"
kills = 9
marks = "{always}"
[[row]]
method = "fatal"
name = "raises"
raises = true
[[row]]
method = "finetune"
name = "diverges"
lr = 1e25
[[row]]
method = "frozen"
"""
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory) -> Iterator[Path]:
    """What the nodes find: ness, the tests' modules, and the methods of `fatal`."""
    pytest.importorskip("ray")
    before = dict(os.environ)
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch, fatal.known(patch, folder):
        source = Path(fatal.__file__).parents[1] / "src"
        paths = [str(folder), str(Path(fatal.__file__).parent), str(source), *filter(None, sys.path)]
        os.environ.update(RAY_memory_monitor_refresh_ms="0")  # it kills runs where others have filled the memory
        os.environ.update(PYTHONPATH=os.pathsep.join(paths), RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
        yield folder
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def cluster() -> Iterator[object]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no line of `ness watch` is folded


def started(*flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ness", "table", "--save-every", "0", "--out", "there", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def until(happened: Callable[[], bool], command: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + LONG
    while not happened():
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def on_node(node: str, runs: str = "*") -> bool:
    """Whether a run with a checkpoint is on a node whose name has this."""
    found = Path("there").glob(f"{runs}/holder.json")
    with_checkpoint = [path for path in found if list(path.parent.glob("checkpoint-*"))]
    return any(node in json.loads(path.read_text()).get("node", "") for path in with_checkpoint)


def scratch() -> set[Path]:
    import tempfile

    return set(Path(tempfile.gettempdir()).glob("ness-ray-*"))


def test_a_node_is_killed_and_every_run_ends_as_without_ray(cluster, capsys, tmp_path: Path) -> None:
    lost = cluster.add_node(**NODE)
    marks = tmp_path / "once"
    marks.mkdir()
    Path("plan.toml").write_text(PLAN.format(once=marks))
    command = started("--plan", "plan.toml", "--ray", cluster.address)
    busy = f"({lost.node_id[:6]})  1     0     1"  # name, CPUs, GPUs, runs now
    running = f"running on {os.uname().nodename} ({lost.node_id[:6]})"

    def seen() -> bool:
        if not on_node(lost.node_id[:6], "*fatal*-seed2"):  # a long one
            return False
        assert main(["watch", "there", "--once"]) == 0
        shown = capsys.readouterr().out
        return busy in shown and running in shown

    until(seen, command)
    cluster.remove_node(lost, allow_graceful=False)
    out, said = command.communicate(timeout=LONG)
    assert command.returncode == 0, said
    assert "its node is gone (" in said
    assert "its worker died (WorkerCrashedError); it goes on from its last checkpoint" in said
    assert "goes on after " in said
    assert "Traceback" not in said
    assert main(["table", "--plan", "plan.toml", "--out", "here"]) == 0
    assert facts(Path("there")) == facts(Path("here"))
    assert len(facts(Path("there"))) == 6
    assert capsys.readouterr().out.count("\n") == out.count("\n")
    assert not scratch()
    assert not (tmp_path / "there/nodes.json").exists()


def test_what_fails_is_a_row_and_data_are_read_once(cluster, tmp_path: Path) -> None:
    cluster.add_node(**NODE)
    (tmp_path / "always").mkdir()
    Path("plan.toml").write_text(FAILING.format(always=tmp_path / "always"))
    command = started("--plan", "plan.toml", "--ray", cluster.address)
    _, said = command.communicate(timeout=LONG)
    assert command.returncode == 1
    assert len(list((tmp_path / "always").iterdir())) == 3
    assert "ness: dies always on tiny, seed 1: its worker died (WorkerCrashedError), for the third time" in said
    assert (
        "ness: raises on tiny, seed 1: RuntimeError: as it was asked to (where it came from: there/tiny-fatal-" in said
    )
    assert len(list(Path("there").glob("*/traceback.txt"))) == 1
    assert "ness: diverges on tiny, seed 1: task 1, epoch" in said
    assert len(facts(Path("there"))) == 1

    (tmp_path / "data").mkdir()
    flags = ["--benchmark", "counted", "--methods", "finetune", "frozen", "--seeds", "1", "2", "--data", "data"]
    command = started(*flags, "--ray", cluster.address)
    _, said = command.communicate(timeout=LONG)
    assert command.returncode == 0, said
    assert len((tmp_path / "data/reads").read_text().splitlines()) == 1
    assert not scratch()


def test_ctrl_c_leaves_the_cluster_as_it_was_found_and_the_runs_go_on_without_it(cluster, tmp_path: Path) -> None:
    import ray

    flags = ["--benchmark", "tiny", "--methods", "fatal", "--naps", "0.4", "--seeds", "1", "2"]
    command = started(*flags, "--ray", cluster.address)
    until(lambda: on_node("("), command)
    os.killpg(command.pid, signal.SIGINT)
    _, said = command.communicate(timeout=LONG)
    assert command.returncode == 130, said
    assert "ness: interrupted; the same command goes on with fatal on tiny, seed 1, after " in said
    assert not scratch()
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        end = time.monotonic() + 60
        while ray.available_resources().get("CPU") != 1.0 and time.monotonic() < end:
            time.sleep(0.2)
        assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"] == 1.0
        assert len(ray.nodes()) == 1
    finally:
        ray.shutdown()
    assert main(["table", *flags, "--out", "there"]) == 0
    assert main(["table", *flags, "--out", "here"]) == 0
    assert facts(Path("there")) == facts(Path("here"))


def test_a_head_that_goes_away_ends_the_command_which_says_from_where_it_goes_on(cluster) -> None:
    flags = ["--benchmark", "tiny", "--methods", "fatal", "--naps", "0.4"]
    command = started(*flags, "--ray", cluster.address)
    until(lambda: on_node("("), command)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    _, said = command.communicate(timeout=LONG)
    assert command.returncode == 1
    assert "ness: the Ray cluster is gone, or this machine's part of it" in said
    assert "the same command goes on with fatal on tiny, seed 1, after " in said
    assert "Traceback" not in said
    assert main(["table", *flags, "--out", "there"]) == 0
    assert main(["table", *flags, "--out", "here"]) == 0
    assert facts(Path("there")) == facts(Path("here"))


def test_a_cluster_of_its_own_and_one_that_is_not_there() -> None:
    tune = [
        "--benchmark",
        "tiny",
        "--method",
        "finetune",
        "--over",
        "lr=0.01,0.05",
        "--epochs",
        "1",
        "--first-tasks",
        "2",
    ]
    assert main(["tune", *tune, "--out", "there", "--ray"]) == 0
    assert main(["tune", *tune, "--out", "here"]) == 0
    assert facts(Path("there")) == facts(Path("here"))
    again = ["run", "--benchmark", "tiny", "--method", "finetune", "--out"]
    assert main([*again, "there", "--ray", "--cpus-per-run", "999"]) == 1
    assert main([*again, "there", "--ray", "127.0.0.1:1"]) == 1
