"""Experts on a GPU: the Triton kernels put together, and the ops that they fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from interlock.extension import ExpertLayer
from interlock.ops.experts import latent_tail
from interlock.parallel.group import TensorParallel
from interlock_mxfp4.experts import Backend
from interlock_mxfp4.kernels import activation, experts, experts_mx, reduce_tail, routing, tail
from interlock_mxfp4.kernels.reference import Packed, Routing
from interlock_mxfp4.tiles import Shape, bucket, choose, pair


def ops(dtype: torch.dtype, fused: bool = False) -> dict[tuple[str, str], Callable[..., Any]]:
    """Kernels for the core's op table; a dtype that the matrix units do not take keeps torch's."""
    if dtype not in (torch.bfloat16, torch.float16):
        return {}
    return {
        ("finalize_experts", "cuda"): tail.finalize_experts,
        ("latent_tail", "cuda"): LatentTail(fused),
        ("linear_add", "cuda"): tail.linear_add,
    }


class LatentTail:
    """The op `latent_tail`: one kernel for one rank, or with ``fused`` for several.

    Otherwise, and for batches over the fused kernel's capacity, ranks' parts go through the
    group's all-reduce. Shared memory is set up at the first batch that needs it, by all ranks.
    """

    def __init__(self, fused: bool) -> None:
        self._fused = fused
        self._shared: SharedMemory | None = None

    def __call__(
        self,
        rows: Tensor,
        weights: Tensor,
        row_map: Tensor,
        norm: Tensor,
        eps: float,
        tp: TensorParallel,
    ) -> Tensor:
        if tp.size == 1:
            return tail.finalize_norm(rows, weights, row_map, norm, eps)
        if not self._fused or len(row_map) > reduce_tail.CAPACITY:
            given = (rows, weights, row_map, norm, eps, tp)
            return latent_tail(*given, finalize=tail.finalize_experts)
        if self._shared is None:
            self._shared = SharedMemory(tp, rows.shape[1], rows.device)
        buffers, signals, call = self._shared.next_call()
        return reduce_tail.reduce_tail(
            rows, weights, row_map, norm, eps, buffers, signals, tp.rank, call
        )


class SharedMemory:
    """Buffers and signals that every rank of the group maps (torch's symmetric memory)."""

    def __init__(self, tp: TensorParallel, size: int, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed import barrier, group

        assert group.WORLD is not None, "several ranks have a group"

        slots = reduce_tail.CAPACITY
        self._kept = []
        addresses = []
        for count, dtype in ((2 * slots * size, torch.float32), (2 * tp.size * slots, torch.int32)):
            memory = symmetric.empty(count, dtype=dtype, device=device).zero_()
            handle = symmetric.rendezvous(memory, group.WORLD)
            self._kept.append((memory, handle))
            addresses.append(torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device))
        self._buffers, self._signals = addresses
        self._call = 0
        # Nobody signals before everybody's signals are zero.
        barrier()

    def next_call(self) -> tuple[Tensor, Tensor, int]:
        # Within int32 for ever; an even period keeps the two slots in turn.
        self._call = self._call % 2**30 + 1
        return self._buffers, self._signals, self._call


class TritonExperts(Backend):
    """Sorts tokens by expert and runs both products from the packed weights."""

    def __init__(self, layer: ExpertLayer, activations: str) -> None:
        super().__init__(layer, activations)
        count, size, inner = layer.num_experts, layer.size, self.inner
        self._gate_up = _empty(count, 2 * inner, size, layer.device)
        self._down = _empty(count, size, inner, layer.device)
        self._mapped = count, layer.top, size, inner

    def put(self, expert: int, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> None:
        for target, given in ((self._gate_up, gate_up), (self._down, down)):
            target.codes[expert], target.scales[expert] = given

    def run(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        count, top, size, inner = self._mapped
        if not len(x):
            return x.new_empty(0, size), torch.empty(ids.shape, dtype=torch.int32, device=x.device)
        first, second = pair(top, len(x), count, size, inner, self.mxfp8)
        route = routing.sort_tokens(ids, count, first.tokens)
        beta, linear_beta = (*self.layer.activation[1:], None, None)[:2]
        if self.mxfp8:
            quantized = activation.quantize_mxfp8(x)
            hidden = experts_mx.expert_gate_up_mx(
                quantized, self._gate_up, route, first, beta, linear_beta
            )
            rows = experts_mx.expert_down_mx(hidden, self._down, route, second, x.dtype)
        else:
            values = experts.expert_gate_up(x, self._gate_up, route, first, beta, linear_beta)
            rows = experts.expert_down(values, self._down, route, second)
        return rows, route.row_map

    def finalize(self, rows: Tensor, weights: Tensor, row_map: Tensor) -> Tensor:
        return tail.finalize_experts(rows, weights, row_map)


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """``x @ W^T + bias`` [T, N] of one packed matrix: the experts' second product with one expert.

    Tokens are padded to whole tiles, which that kernel takes an expert's rows to be.
    """
    _, outputs, _ = weight.codes.shape
    count, size = x.shape
    if not count:
        return x.new_empty(0, outputs)
    tiles = choose(Shape("down", bucket(count), 1, 1, outputs, size))
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % tiles.tokens))
    starts = torch.tensor([0, len(padded)], dtype=torch.int32, device=x.device)
    nobody = starts[:0]
    rows = experts.expert_down(padded, weight, Routing(nobody, nobody, starts), tiles)[:count]
    return rows if bias is None else rows + bias


def _empty(count: int, rows: int, columns: int, device: torch.device) -> Packed:
    return Packed(
        torch.empty(count, rows, columns // 2, dtype=torch.uint8, device=device),
        torch.empty(count, rows, columns // 32, dtype=torch.uint8, device=device),
    )
