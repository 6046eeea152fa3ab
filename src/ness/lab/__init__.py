"""The laboratory: every method and benchmark of the paper on one loop (needs the extra `ness-cl[lab]`)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ness.lab.results import Results, run

__all__ = ["Results", "run"]


def __getattr__(name: str) -> Any:
    """Read when it is asked for, since all modules of the laboratory pass here first."""
    if name in __all__:
        from ness.lab import results

        return getattr(results, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
