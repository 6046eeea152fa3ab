"""Downloads from a local server: whole, broken off, resumed, refused."""

import hashlib
import http.server
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import ness
from lab.datasets import making
from lab.datasets.making import CIFAR100, NOTMNIST
from ness.lab.datasets import get, load
from ness.lab.datasets.catalogue import Remote
from ness.lab.datasets.download import fetch

DATA = bytes(range(256)) * 4000


@dataclass
class Behaviour:
    """What the server does: where it breaks off (bytes a request), whether it knows ranges, what it is asked."""

    files: dict[str, bytes]
    break_after: int | None = None
    breaks: int = 10**6
    ranges: bool = True
    requests: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Behaviour]:
    behaviour = Behaviour({"/data.bin": DATA})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            behaviour.requests.append(wanted)
            data = behaviour.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and behaviour.ranges else 0
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            body = data[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if behaviour.break_after is not None and behaviour.breaks > 0:
                behaviour.breaks -= 1
                body = body[: behaviour.break_after]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        behaviour.url = f"http://127.0.0.1:{running.server_address[1]}"
        yield behaviour
        running.shutdown()


def remote(server: Behaviour, md5: str | None = hashlib.md5(DATA).hexdigest(), size: int = len(DATA)) -> Remote:
    return Remote("data.bin", (f"{server.url}/data.bin",), size, md5)


def test_downloads_and_shows_progress(server: Behaviour, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch(remote(server), tmp_path / "new", "x", lambda *step: seen.append(step))
    assert path.read_bytes() == DATA
    assert seen[-1] == ("data.bin", len(DATA), len(DATA))
    assert not list(path.parent.glob("*.part"))


def test_progress_goes_to_the_log(server: Behaviour, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ness"):
        fetch(remote(server), tmp_path, "x")
    assert "downloading data.bin" in caplog.text


def test_a_file_that_is_there_is_not_downloaded_again(server: Behaviour, tmp_path: Path) -> None:
    fetch(remote(server), tmp_path, "x")
    fetch(remote(server), tmp_path, "x")
    assert len(server.requests) == 1


def test_goes_on_where_the_server_broke_off(server: Behaviour, tmp_path: Path) -> None:
    server.break_after = len(DATA) // 3
    assert fetch(remote(server), tmp_path, "x").read_bytes() == DATA
    assert server.requests == [None, *[f"bytes={n * (len(DATA) // 3)}-" for n in range(1, len(server.requests))]]
    assert len(server.requests) > 2


def test_a_later_call_goes_on_where_this_one_gave_up(server: Behaviour, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(DATA[:1000])
    server.break_after = 0
    with pytest.raises(ness.NessError, match=r"broke off at 1000 of 1024000 bytes.*Run the same command again"):
        fetch(remote(server), tmp_path, "x")
    assert (tmp_path / "data.bin.part").read_bytes() == DATA[:1000]
    assert not (tmp_path / "data.bin").exists()
    server.break_after = None
    server.requests.clear()
    assert fetch(remote(server), tmp_path, "x").read_bytes() == DATA
    assert server.requests == ["bytes=1000-"]


def test_a_server_without_ranges_sends_it_all_again(server: Behaviour, tmp_path: Path) -> None:
    server.ranges, server.break_after, server.breaks = False, 5000, 1
    assert fetch(remote(server), tmp_path, "x").read_bytes() == DATA


def test_a_partial_file_of_something_else_is_noticed_and_dropped(server: Behaviour, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(b"x" * 1000)
    with pytest.raises(ness.NessError, match="could not be downloaded"):
        fetch(remote(server), tmp_path, "x")
    assert not (tmp_path / "data.bin").exists()
    assert fetch(remote(server), tmp_path, "x").read_bytes() == DATA


def test_a_partial_file_that_is_too_long_is_dropped(server: Behaviour, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(DATA + b"x")
    assert fetch(remote(server), tmp_path, "x").read_bytes() == DATA


def test_wrong_contents_are_never_given_the_name(server: Behaviour, tmp_path: Path) -> None:
    with pytest.raises(ness.NessError, match="could not be downloaded"):
        fetch(remote(server, md5="0" * 32), tmp_path, "x")
    with pytest.raises(ness.NessError, match="more than the 1000 bytes"):
        fetch(remote(server, size=1000), tmp_path, "x")
    assert not (tmp_path / "data.bin").exists()


@pytest.mark.parametrize("md5", [hashlib.md5(DATA).hexdigest(), None])
def test_a_file_of_the_users_is_kept(md5: str | None, server: Behaviour, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"mine")
    with pytest.raises(ness.NessError, match="Nothing was changed"):
        fetch(remote(server, md5), tmp_path, "x")
    assert (tmp_path / "data.bin").read_bytes() == b"mine"
    assert not server.requests


def test_the_next_address_is_tried(server: Behaviour, tmp_path: Path) -> None:
    file = replace(remote(server), urls=(f"{server.url}/gone", "http://127.0.0.1:1/refused", f"{server.url}/data.bin"))
    assert fetch(file, tmp_path, "x").read_bytes() == DATA
    gone = replace(file, urls=file.urls[:2])
    with pytest.raises(ness.NessError, match=r"404.*refused"):
        fetch(gone, tmp_path / "other", "x")


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(server: Behaviour, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ness.NessError, match="cannot be made"):
        fetch(remote(server), tmp_path / "file" / "below", "x")


@pytest.mark.parametrize("break_after", [None, 700])
def test_a_whole_set_is_downloaded_and_read(
    break_after: int | None, server: Behaviour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NESS_DATA", str(tmp_path / "env"))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    server.break_after = break_after
    for data_set, name, raw, expected in (
        (CIFAR100, "cifar-100-python.tar.gz", making.cifar_archive(making.arrays(CIFAR100), CIFAR100), None),
        (NOTMNIST, "notMNIST_small.tar.gz", making.tar_gz(making.letter_files(making.arrays(NOTMNIST))), None),
    ):
        server.files[f"/{name}"] = raw
        md5 = hashlib.md5(raw).hexdigest() if data_set is CIFAR100 else None
        served = replace(data_set, files=(Remote(name, (f"{server.url}/{name}",), len(raw), md5),))
        data = making.arrays(data_set)
        expected = making.pooled(data) if data_set.pooled else data
        assert making.same(load(served).arrays, expected)
        assert (tmp_path / "env" / data_set.name / name).read_bytes() == raw


def test_missing_and_unreachable_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NESS_DATA", str(tmp_path / "env"))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache")
    lost = replace(CIFAR100, files=(Remote("a.tar.gz", ("http://127.0.0.1:1/a.tar.gz",), 5, None),))
    with pytest.raises(ness.NessError, match=r"was not found in .*one, .*env, .*cache.*could not be downloaded"):
        get(lost, tmp_path / "one")


def test_an_attempt_that_brought_nothing_leaves_nothing(server: Behaviour, tmp_path: Path) -> None:
    gone = Remote("gone.bin", (f"{server.url}/gone.bin",), 10, None)
    with pytest.raises(ness.NessError, match="could not be downloaded"):
        fetch(gone, tmp_path / "set", "set")
    assert list(tmp_path.iterdir()) == []
