"""Which layers are taken, by what they are run, and what there is to say about it."""

from __future__ import annotations

import math
import sys
from collections import Counter

import attrs
import torch
from torch import Tensor

from interlock.errors import ConfigError, WeightsError
from interlock.extension import ExpertLayer, ExpertMethod, LinearMethod
from interlock.weights.packed_fp4 import FORMAT, decode, pack
from interlock.weights.quantization import GROUP
from interlock.weights.source import WeightTensor
from interlock_mxfp4.settings import Mxfp4Settings


@attrs.define(slots=True)
class Counts:
    """What the running layers did; all of them share one object."""

    calls: int = 0
    deferred: int = 0
    eager: int = 0
    packed_bytes: int = 0


class Layers:
    """Chooses a method for every layer of one engine, and counts."""

    def __init__(self, settings: Mxfp4Settings) -> None:
        self.settings = settings
        self.counts = Counts()
        self.paths: Counter[str] = Counter()
        self.asked = self.taken = 0
        self._said: set[str] = set()

    def linear(
        self,
        name: str,
        in_features: int,
        weight_format: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LinearMethod | None:
        self.asked += 1
        if weight_format != FORMAT and not self.settings.quantizes("linear", name):
            return None
        if in_features % GROUP:
            self._say(f"{name}: {in_features} inputs are no multiple of {GROUP}; not quantized")
            return None
        from interlock_mxfp4.linear import PackedLinear

        path, why = path_of(dtype, device)
        self._take(path, why)
        return PackedLinear(name, dtype, device, path, self.counts)

    def experts(self, layer: ExpertLayer) -> ExpertMethod | None:
        self.asked += 1
        if layer.weight_format != FORMAT and not self.settings.quantizes("experts", layer.name):
            return None
        if layer.size % GROUP:
            self._say(
                f"{layer.name}: tokens of {layer.size} numbers are no multiple of {GROUP}; "
                "not quantized"
            )
            return None
        if self.settings.tail == "fused" and not layer.inner:
            raise ConfigError(
                "mxfp4.tail: fused needs a part of every expert on every rank, and there are more "
                "ranks than groups of 32; leave it at collective"
            )
        from interlock_mxfp4.experts import PackedExperts

        path, why = path_of(layer.dtype, layer.device)
        self._take(path, why)
        self._say(f"finalization is {self._finalization(layer)}")
        return PackedExperts(layer, self.settings, path, self.counts)

    def _finalization(self, layer: ExpertLayer) -> str:
        if self.settings.finalize == "eager":
            return "eager, as asked for"
        if not layer.unfinalized_capacity:
            return "eager: the layer's consumer takes finished results only"
        if layer.unfinalized_capacity == sys.maxsize:
            return "deferred to the consumer's tail, for batches of any size"
        return f"deferred to the consumer's tail up to {layer.unfinalized_capacity} tokens"

    def _take(self, path: str, why: str) -> None:
        self.taken += 1
        self.paths[path] += 1
        self._say(f"runs on {path}: {why}")

    def _say(self, text: str) -> None:
        """One line on stderr, once."""
        if text not in self._said:
            self._said.add(text)
            print(f"mxfp4: {text}", file=sys.stderr, flush=True)

    def counters(self) -> dict[str, float]:
        counts = self.counts
        return {
            "calls_total": counts.calls,
            "finalize_deferred_total": counts.deferred,
            "finalize_eager_total": counts.eager,
            "packed_bytes_now": counts.packed_bytes,
            "layers_now": self.taken,
            **{f"layers_{path}_now": count for path, count in self.paths.items()},
        }


def path_of(dtype: torch.dtype, device: torch.device) -> tuple[str, str]:
    """What runs a layer (``cpu``, ``triton`` or ``torch``), and why."""
    if device.type == "cuda":
        if dtype in (torch.bfloat16, torch.float16):
            return "triton", "the device is a GPU"
        return "torch", f"no Triton kernels for {dtype}: weights are unpacked for every product"
    if device.type != "cpu":
        return "torch", f"the device is {device.type}: weights are unpacked for every product"
    from interlock.ops import kernel_problem

    problem = kernel_problem(dtype)
    if problem is None:
        from interlock_mxfp4.cpu import unsupported

        problem = unsupported(dtype)
    if problem is not None:
        return "torch", f"{problem}: weights are unpacked for every product"
    return "cpu", "this CPU's vector instructions multiply packed weights"


@attrs.define(slots=True)
class Loss:
    """What quantizing the weights of one layer cost."""

    name: str
    formats: set[str] = attrs.field(factory=set)
    count: int = 0
    error: float = 0.0
    size: float = 0.0
    largest: float = 0.0

    def add(self, weight_format: str, weight: Tensor, values: Tensor) -> None:
        difference = weight - values
        self.formats.add(weight_format)
        self.count += 1
        self.error += float(difference.square().sum(dtype=torch.float64))
        self.size += float(weight.square().sum(dtype=torch.float64))
        self.largest = max(self.largest, float(difference.abs().max()))

    @property
    def relative(self) -> float:
        """The error's norm over the weights'."""
        return math.sqrt(self.error / max(self.size, 1e-300))

    def say(self) -> None:
        """One line on stderr: the error relative to the weights, and the largest one."""
        if not self.count:
            return
        what = "1 matrix" if self.count == 1 else f"{self.count} matrices"
        print(
            f"mxfp4: {self.name}: {what} quantized from "
            f"{'+'.join(sorted(self.formats))}, relative error "
            f"{100 * self.relative:.2f} %, largest {self.largest:.4g}",
            file=sys.stderr,
        )


def packed_of(tensor: WeightTensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``tensor`` [N, K], as stored or quantized now; K is padded to groups."""
    stored = tensor.packed()
    if stored is not None:
        return stored
    if tensor.info.format == FORMAT:
        raise WeightsError(
            f"{tensor.info.name}: this rank's part cuts a group of {GROUP} inputs, which share a "
            "scale; use fewer ranks"
        )
    weight = tensor.dense(torch.float32)
    missing = -weight.shape[1] % GROUP
    packed = pack(torch.nn.functional.pad(weight, (0, missing)), tensor.info.name)
    values = decode(*packed, torch.float32)[:, : weight.shape[1]]
    loss.add(tensor.info.format, weight, values)
    return packed
