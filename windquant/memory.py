"""What the C library keeps of freed memory, which would otherwise grow with every block.

glibc serves tensors below a threshold from a heap full of holes, and raises the threshold to 32 MB as larger ones are freed:
most matrices of a model of 1 B parameters are smaller. Elsewhere than on glibc both functions do nothing.
"""

import ctypes
import sys

_MMAP_THRESHOLD = -3
LARGE = 1 << 20
"""Bytes from which on an allocation is returned to the system as soon as it is freed."""


def return_large() -> None:
    """Fix the threshold at LARGE for the rest of the process: for programs to call, not for libraries."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)(_MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Return the holes of the heap."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
