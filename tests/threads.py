"""Threads that do the same again and again beside each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def raced(bodies: Sequence[Callable[[int], object]], seconds: float) -> list[BaseException]:
    """Run each body, with the number of its turn, in a thread of its own until the time is over; what they raised."""
    stop, failures = threading.Event(), list[BaseException]()

    def run(body: Callable[[int], object]) -> None:
        turn = 0
        try:
            while not stop.is_set():
                body(turn := turn + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(30)
    return failures
