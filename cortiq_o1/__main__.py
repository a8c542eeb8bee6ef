"""`python -m cortiq_o1`, the same as `cortiq-o1`."""

import sys

from .entry import main

if __name__ == "__main__":
    sys.exit(main())
