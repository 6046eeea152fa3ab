"""The error family is importable from the top."""

import ness


def test_one_family() -> None:
    assert issubclass(ness.NessError, Exception)
    assert issubclass(ness.NessWarning, UserWarning)
