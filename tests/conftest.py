"""The ordinary suite tries the same examples every time; HYPOTHESIS_PROFILE=default looks for new ones."""

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
