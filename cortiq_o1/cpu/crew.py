"""Threads that share a call with the one that makes it.

`concurrent.futures` does the same, but hands over five times as slowly, which is a twentieth of a token.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

Job = Callable[[], None]
_Order = tuple[Job, "SimpleQueue[BaseException | None]"]


class Crew:
    """Helpers that start when they are first called, and end with the crew.

    Args:
        helpers: threads besides the calling one.
    """

    def __init__(self, helpers: int) -> None:
        self._helpers = helpers
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._process = 0

    def run(self, own: Job, others: list[Job]) -> None:
        """Runs `own` on the calling thread and the others, no more than there are helpers, beside it.

        Raises what a job raises, but not before all of them have ended.
        """
        if others and self._process != os.getpid():
            self._start()
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for job in others:
            self._orders.put((job, done))
        error: BaseException | None = None
        try:
            own()
        except BaseException as raised:
            error = raised
        missing = len(others)
        while missing:
            try:
                error = done.get() or error
                missing -= 1
            except KeyboardInterrupt as raised:  # while it waits: the others still write
                error = raised
        if error is not None:
            raise error

    def _start(self) -> None:
        # Anew in a forked process, which has none of its parent's threads.
        self._orders = SimpleQueue()
        for at in range(self._helpers):
            Thread(target=_help, args=(self._orders,), name=f"cortiq-o1-{at}", daemon=True).start()
        self._process = os.getpid()
        weakref.finalize(self, _dismiss, self._orders, self._helpers)


def _help(orders: SimpleQueue[_Order | None]) -> None:
    while (order := orders.get()) is not None:
        job, done = order
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:
            error = raised
        # Nothing of a call outlives it here.
        del order, job
        done.put(error)
        del done, error


def _dismiss(orders: SimpleQueue[_Order | None], helpers: int) -> None:
    for _ in range(helpers):
        orders.put(None)
