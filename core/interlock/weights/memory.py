"""Memory that loading has used and the allocator keeps."""

from __future__ import annotations

import ctypes


def return_freed() -> None:
    """Give freed memory back to the system where the C library can (glibc).

    Loading works with large temporary tensors; without this a tenth of a gigabyte and more stays
    with the process of a small model, and would be counted against its caches.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return
