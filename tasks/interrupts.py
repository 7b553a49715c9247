"""Interrupts that are not lost.

Python drops a KeyboardInterrupt that is raised where nothing can catch it: in a finalizer, in a callback of C code, as an
import makes many. So a signal is remembered as well as raised, and whoever works long asks now and then.
"""

import os
import signal
from types import FrameType

_MAIN = os.getpid()
_asked = False


def listen(*numbers: signal.Signals) -> None:
    """From here on these signals raise KeyboardInterrupt, and `check` does so if that went unheard."""
    for number in numbers:
        signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _asked
    if os.getpid() != _MAIN:  # a library's worker process, told to end
        os._exit(0)
    _asked = True
    raise KeyboardInterrupt


def check() -> None:
    """Raises KeyboardInterrupt when a signal has come."""
    if _asked:
        raise KeyboardInterrupt
