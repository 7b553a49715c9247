"""Interrupts that are not lost.

Python drops a KeyboardInterrupt that is raised where nothing can catch it: in a finalizer, in a callback of C code, as an
import makes many; or a library makes another error of it. So a signal is remembered as well as raised, and whoever works
long asks now and then. What is raised is a class of its own: of KeyboardInterrupt itself the interpreter keeps a note, if it
passed through `exec`, and ends the process by the signal even when it was caught.
"""

import os
import signal
from types import FrameType

_MAIN = os.getpid()
_asked = False
_heard: list[signal.Signals] = []


class Interrupted(KeyboardInterrupt):
    """A signal came."""


def listen(*numbers: signal.Signals) -> None:
    """From here on these signals raise KeyboardInterrupt, and `check` does so if that went unheard."""
    for number in numbers:
        signal.signal(number, _interrupt)
        _heard.append(number)


def ignore() -> None:
    """From here on they do nothing: how the work ended is decided, and has only to be said."""
    for number in _heard:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    global _asked
    if os.getpid() != _MAIN:  # a library's worker process, told to end
        os._exit(0)
    _asked = True
    raise Interrupted


def check() -> None:
    """Raises KeyboardInterrupt when a signal has come."""
    if asked():
        raise Interrupted


def asked() -> bool:
    """Whether a signal has come, heard or not."""
    return _asked
