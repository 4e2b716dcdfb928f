"""MXFP4 weights: kept in 4 bits on every device, with expert kernels and deferred finalization.

Imports no torch: the command line loads this module to learn the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interlock.errors import ConfigError
from interlock.hookspec import hookimpl
from interlock_mxfp4.settings import Mxfp4Settings

if TYPE_CHECKING:
    import torch

    from interlock.extension import ExpertLayer, ExpertMethod, LinearMethod
    from interlock.settings import Settings
    from interlock_mxfp4.layers import Layers

__all__ = ["Mxfp4", "Mxfp4Settings"]


class Mxfp4:
    """The plugin: see docs/mxfp4.md."""

    api_version = 1

    def __init__(self) -> None:
        self._settings = Mxfp4Settings()
        self._layers: Layers | None = None

    @hookimpl
    def interlock_settings(self) -> type[Mxfp4Settings]:
        return Mxfp4Settings

    @hookimpl
    def interlock_configure(self, section: Mxfp4Settings | None) -> None:
        from interlock_mxfp4.layers import Layers

        self._settings = section or Mxfp4Settings()
        self._layers = Layers(self._settings)

    @hookimpl
    def interlock_kernels(
        self, device: torch.device, dtype: torch.dtype
    ) -> Mapping[tuple[str, str], Callable[..., Any]]:
        if device.type != "cuda":
            if self._settings.tail == "fused":
                raise ConfigError(
                    f"mxfp4.tail: fused needs GPUs that map each other's memory, and the device is "
                    f"{device.type}; leave it at collective"
                )
            return {}
        from interlock_mxfp4.gpu import ops

        return ops(dtype, self._settings.tail == "fused")

    @hookimpl
    def interlock_linear_method(
        self, name: str, in_features: int, weight_format: str, dtype: torch.dtype, device: Any
    ) -> LinearMethod | None:
        assert self._layers is not None, "configured before any layer is built"
        return self._layers.linear(name, in_features, weight_format, dtype, device)

    @hookimpl
    def interlock_expert_method(self, layer: ExpertLayer) -> ExpertMethod | None:
        assert self._layers is not None, "configured before any layer is built"
        return self._layers.experts(layer)

    @hookimpl
    def interlock_fingerprint(self, settings: Settings) -> str:
        """Quantized weights and activations give other cache entries than those as they are."""
        if self._layers is not None and self._layers.asked and not self._layers.taken:
            raise ConfigError(
                f"mxfp4.scope: nothing in {settings.engine.model!r} is stored in MXFP4, and "
                f"scope={self._settings.scope} quantizes nothing of it; give "
                "--set mxfp4.scope=linear (or experts, or all), or leave the plugin out"
            )
        own = self._settings
        return f"scope={own.scope} ignore={','.join(own.ignore)} activations={own.activations}"

    @hookimpl
    def interlock_counters(self) -> dict[str, float]:
        return {} if self._layers is None else self._layers.counters()
