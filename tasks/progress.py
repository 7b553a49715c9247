"""Progress with an ETA: a live bar on a terminal, a line every few seconds elsewhere (logs, the Prefect UI)."""

import logging
import sys
import time
from collections.abc import Callable

from tasks import interrupts

log = logging.getLogger("windquant")
EVERY_S = 5.0


def bar(label: str) -> Callable[[int, int], None]:
    """A function to call with (done, total); work that was done before the first call counts as no time."""
    if sys.stderr.isatty():
        return _live(label)
    began = last = time.monotonic()
    first: int | None = None

    def report(done: int, total: int) -> None:
        nonlocal last, first
        interrupts.check()
        now = time.monotonic()
        first = max(done - 1, 0) if first is None else first
        if now - last < EVERY_S or (done == total and first == 0 and last == began):
            return
        last = now
        left = (now - began) / max(done - first, 1) * (total - done)
        filled = 20 * done // total
        log.info("%s [%s%s] %d/%d, %s left", label, "#" * filled, "." * (20 - filled), done, total, clock(left))

    return report


def _live(label: str) -> Callable[[int, int], None]:
    from tqdm import tqdm  # reads its settings from the environment when imported

    line: tqdm | None = None

    def report(done: int, total: int) -> None:
        nonlocal line
        interrupts.check()
        if line is None:
            line = tqdm(total=total, initial=max(done - 1, 0), desc=label, leave=False, dynamic_ncols=True)
        line.update(done - line.n)
        if done >= total:
            line.close()

    return report


def clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
