"""How OpenMP threads wait, which decides how torch behaves when it is not alone on the machine."""

from __future__ import annotations

import os

# libgomp lets a waiting thread spin some 300,000 rounds before it sleeps. One busy neighbour then
# makes a decode step ten times slower: the spinning thread occupies the core that the thread it
# waits for would need. A few microseconds of spinning cost nothing measurable when alone.
SPIN_COUNT = "2000"


def limit_spinning() -> None:
    """Make waiting threads sleep soon. Call before torch is imported; a user's choice is kept."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
