"""Parses the command line, runs a command, turns failures into exit codes.

| code | meaning |
|---|---|
| 0 | done |
| 1 | a check failed |
| 2 | wrong usage or arguments |
| 3 | a device failed, or none could be used |
| 130 | Ctrl-C |
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, TextIO

from .._version import __version__
from ..errors import CortiqError, DeviceError
from . import adapters, bench, plan, ppl, verify
from .report import DEVICE, INTERRUPTED, OK, USAGE, err_console

_CLOSED_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


class Command(Protocol):
    """A module of this package that is one command."""

    def register(self, subparsers: Any) -> None:
        """Adds the command's parser, with `run=run` among its defaults."""

    def run(self, args: argparse.Namespace) -> int:
        """Does it; returns the exit code."""


COMMANDS: tuple[Command, ...] = (adapters, plan, verify, bench, ppl)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and where to read on, instead of a screenful of usage."""
        self.exit(USAGE, f"{self.prog}: {message}\nSee: {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="cortiq-o1",
        description="Constant-memory attention on this machine's adapters.",
        epilog="Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 a device failed, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"cortiq-o1 {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        command.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A name from a driver may hold what the terminal cannot show.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")
    # Mesa's drivers complain on standard error, once each, where a desktop has not set this.
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    prog = "cortiq-o1"
    try:
        args = make_parser().parse_args(argv)
        prog = f"cortiq-o1 {args.command}"
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse's way to end, after --help too
        return done.code if isinstance(done.code, int) else OK
    except KeyboardInterrupt:
        return _fail(prog, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not raise again while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except DeviceError as error:
        return _fail(prog, str(error), DEVICE)
    except CortiqError as error:
        return _fail(prog, str(error), USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(prog, f"{where}{error.strerror or error}", USAGE)


def _fail(prog: str, message: str, code: int) -> int:
    err_console().print(f"{prog}: {message}", style="red", soft_wrap=True)
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings without the place in the source that raised them."""
    err_console().print(f"note: {message}", style="yellow", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
