"""Readers of files, fuzzed a little; `make fuzz` does it ten thousand times, guided by coverage."""

import pytest

import fuzz


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_any_bytes_give_a_value_or_an_error_of_ours(kind: str) -> None:
    ends = list(fuzz.plain(kind, 150))
    assert all(ends[: len(fuzz.seeds(kind))]) or kind in ("idx", "toml")
    assert not all(ends) or kind == "log"  # whose damaged lines are counted, not refused
