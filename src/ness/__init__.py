"""Continual learning without forgetting, for PyTorch."""

from ness._version import __version__
from ness.errors import NessError, NessWarning

__all__ = ["NessError", "NessWarning", "__version__"]
