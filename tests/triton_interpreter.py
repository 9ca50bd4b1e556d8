"""Triton's interpreter, for tests that run kernels on a CPU (TRITON_INTERPRET=1)."""

from __future__ import annotations

from typing import Any


def mend_interpreter() -> None:
    """What Triton 3.6's interpreter gets wrong: products of bfloat16 (it multiplies the bits),
    rounding to it (it truncates), and loop bounds under NumPy 2.4. And a third of its time: it
    patches Triton's modules anew for every call of a function in a kernel."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def widen(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def narrow(values: Any) -> Any:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def mended_cast(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widen(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(narrow(source.data), tl.bfloat16)
        return cast(self, source, target)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(widen(x.data), tl.float32) if x.data.dtype == np.uint16 else x
            for x in (a, b)
        )
        return dot(self, a, b, *rest)

    patch = interpreter._patch_lang_tensor

    def mended_patch(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched: set[int] = set()
    launch_grid = interpreter.GridExecutor.__call__

    def mended_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch_grid(self, *args, **kwargs)

    def mended_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    builder.cast_impl, builder.create_dot = mended_cast, mended_dot
    interpreter._patch_lang_tensor = mended_patch
    interpreter.GridExecutor.__call__ = mended_launch
    interpreter.InterpretedFunction.__call__ = mended_call
