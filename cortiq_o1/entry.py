"""Where the command line begins: it says what is missing where rich is."""

from __future__ import annotations

import importlib.util
import sys


def main() -> int:
    """Runs the command line; the exit code."""
    if importlib.util.find_spec("rich") is None:
        print("cortiq-o1: the command line needs rich: pip install rich", file=sys.stderr)
        return 2
    from .cli.main import main as run

    return run()
