"""`python -m ness` is the command `ness`."""

import sys

from ness.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
