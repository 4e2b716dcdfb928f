"""Makes Triton's interpreter round and compute as the device does. Import before any launch.

Up to 3.9 it keeps bf16 as integers and adds those, and truncates float32 to bf16 and fp8 where
the hardware rounds to nearest even. This replaces the conversions and computes bf16 in float32,
rounding after each operation, through the interpreter's private functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_ROUNDED = {
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
    tl.bfloat16: (torch.bfloat16, torch.uint16),
}
_convert = interpreter._convert_float


def convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source == tl.float32 and target in _ROUNDED:
        kind, bits = _ROUNDED[target]
        rounded = torch.from_numpy(np.array(x.view(np.float32))).to(kind)
        return rounded.view(bits).numpy().reshape(x.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return x.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return _convert(x, source, target, rounding)


def _is_bf16(handle: Any) -> bool:
    if not isinstance(handle, interpreter.TensorHandle):
        return False
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16


def _widened(handle: Any) -> Any:
    if not _is_bf16(handle):
        return handle
    wide = (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _narrowed(handle: Any) -> Any:
    if handle.data.dtype != np.float32:
        return handle
    return interpreter.TensorHandle(
        convert(handle.data, tl.float32, tl.bfloat16, None), tl.bfloat16
    )


def _patch(name: str, *, narrow: bool) -> None:
    original = getattr(interpreter.InterpreterBuilder, name, None)
    if original is None:
        return

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_bf16, args)):
            return original(self, *args, **kwargs)
        result = original(self, *map(_widened, args), **kwargs)
        return _narrowed(result) if narrow else result

    setattr(interpreter.InterpreterBuilder, name, patched)


def install() -> None:
    interpreter._convert_float = convert
    for name in ("binary_op", "unary_op", "create_fma", "create_fabs", "create_clampf"):
        _patch(name, narrow=True)
    _patch("create_dot", narrow=False)
