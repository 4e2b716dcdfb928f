"""The ranks that share a model's weights, as layers see them.

Megatron's scheme (Shoeybi et al. 2019): a linear layer either holds a share of its outputs, or a
share of its inputs and sums its result over the ranks.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from interlock.parallel.sharing import share


@attrs.frozen
class TensorParallel:
    """Rank ``rank`` of ``size``. With one rank every method gives back what it is given."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks; may be ``x`` itself, overwritten."""
        if self.size == 1:
            return x
        x = x.contiguous()
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """The ranks' parts of the last dimension side by side; rank i has ``sizes[i]`` columns."""
        if self.size == 1:
            return x
        width = max(sizes)
        padded = torch.nn.functional.pad(x, (0, width - x.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        torch.distributed.all_gather(parts, padded)
        return torch.cat([p[..., :size] for p, size in zip(parts, sizes, strict=True)], dim=-1)

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers, on every rank."""
        if self.size == 1:
            return number
        value = torch.tensor(number)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN)
        return int(value)

    def share(self, total: int, unit: int = 1) -> tuple[int, int]:
        """This rank's range of ``total`` elements, in whole units."""
        return share(total, unit, self.rank, self.size)

    def sizes(self, total: int, unit: int = 1) -> list[int]:
        """How many elements each rank has."""
        ranges = [share(total, unit, rank, self.size) for rank in range(self.size)]
        return [stop - start for start, stop in ranges]


SINGLE = TensorParallel()
