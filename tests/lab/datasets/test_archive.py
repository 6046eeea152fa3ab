"""Archives are read in place, and nothing in them may lead out of their folder."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

import ness
from lab.datasets import making
from ness.lab.datasets.archive import entries

HOSTILE = ("../evil", "/etc/evil", "a/../../evil", "..\\evil", "C:evil", "C:\\evil", "a/..")


def names(path: Path, limit: int = 1 << 20) -> list[str]:
    return [entry.name for entry in entries(path, limit)]


def tar_with(path: Path, info: tarfile.TarInfo, data: bytes = b"") -> Path:
    with tarfile.open(path, "w") as tar:
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return path


def test_a_good_archive_gives_its_files(tmp_path: Path) -> None:
    files = {"a/one": b"1", "a/two": b"22"}
    making.put(tmp_path, {"x.tar.gz": making.tar_gz(files), "x.zip": making.zipped(files)})
    making.put(tmp_path / "x", files)
    for name in ("x.tar.gz", "x.zip", "x"):
        assert {e.name: e.open().read() for e in entries(tmp_path / name, 100)} == files


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_leave_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    tar = tar_with(tmp_path / "x.tar", tarfile.TarInfo(name), b"evil")
    (tmp_path / "x.zip").write_bytes(making.zipped({name: b"evil"}))
    for path in (tar, tmp_path / "x.zip"):
        with pytest.raises(ness.NessError, match="leads out"):
            names(path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    info = tarfile.TarInfo("train")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(ness.NessError, match="link or a device"):
        names(tar_with(tmp_path / "x.tar", info))


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("train")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ness.NessError, match="link or encrypted"):
        names(tmp_path / "x.zip")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train", bytes(1 << 22))
    (tmp_path / "x.tar.gz").write_bytes(making.tar_gz({"train": bytes(1 << 22)}))
    for name in ("x.zip", "x.tar.gz"):
        with pytest.raises(ness.NessError, match="holds more than"):
            names(tmp_path / name)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(ness.NessError, match="neither a folder nor a tar or zip"):
        names(tmp_path / "x.tar.gz")
