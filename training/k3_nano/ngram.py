"""The baseline: an interpolated Kneser-Ney 5-gram model over the same tokens.

Kneser and Ney 1995, in the interpolated form of Chen and Goodman 1998 with one discount per order,
``n1 / (n1 + 2 n2)``. An n-gram is one 64-bit number, so that counting is sorting.
"""

from __future__ import annotations

import numpy as np
from tokenizer import VOCAB_SIZE

ORDER = 5
PAD = VOCAB_SIZE - 1


def padded(documents: list[np.ndarray]) -> np.ndarray:
    """All documents in one row, with paddings so that no n-gram spans two of them."""
    gap = np.full(ORDER - 1, PAD, dtype=np.uint64)
    return np.concatenate([part for d in documents for part in (gap, d.astype(np.uint64))])


def grams(stream: np.ndarray, order: int) -> np.ndarray:
    """The n-gram that ends at each position from ``ORDER - 1`` on, as a number."""
    count = len(stream) - ORDER + 1
    result = np.zeros(count, dtype=np.uint64)
    for offset in range(order):
        begin = ORDER - order + offset
        result = result * np.uint64(VOCAB_SIZE) + stream[begin : begin + count]
    return result


class KneserNey:
    def __init__(self, documents: list[np.ndarray]) -> None:
        stream = padded(documents)
        ends = stream[ORDER - 1 :] != PAD
        self.tables: list[tuple[np.ndarray, ...]] = []
        self.discounts: list[float] = []
        seen, counts = np.unique(grams(stream, ORDER)[ends], return_counts=True)
        for order in range(ORDER, 0, -1):
            ones, twos = (counts == 1).sum(), (counts == 2).sum()
            self.discounts.insert(0, float(ones / (ones + 2 * twos)) if ones else 0.5)
            contexts, index = np.unique(seen // np.uint64(VOCAB_SIZE), return_inverse=True)
            totals = np.bincount(index, counts)
            self.tables.insert(0, (seen, counts, contexts, totals, np.bincount(index)))
            # The next lower order counts in how many contexts an n-gram continues one.
            shorter = seen % np.uint64(VOCAB_SIZE ** (order - 1))
            seen, counts = np.unique(shorter, return_counts=True)

    def log_probs(self, document: np.ndarray) -> np.ndarray:
        """Natural log-probability of each token of a document but the first."""
        stream = padded([document])
        probs = np.full(len(document), 1.0 / VOCAB_SIZE)
        for order in range(1, ORDER + 1):
            seen, counts, contexts, totals, kinds = self.tables[order - 1]
            wanted = grams(stream, order)
            at, known = _find(seen, wanted)
            here, met = _find(contexts, wanted // np.uint64(VOCAB_SIZE))
            total = np.where(met, totals[here], 1)
            discount = self.discounts[order - 1]
            own = np.maximum(np.where(known, counts[at], 0) - discount, 0) / total
            mixed = own + discount * kinds[here] / total * probs
            probs = np.where(met, mixed, probs)
        return np.log(probs[1:])


def _find(table: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.searchsorted(table, wanted).clip(0, len(table) - 1)
    return at, table[at] == wanted
