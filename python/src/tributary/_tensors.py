"""How tensors of numpy and torch are handed to the extension module."""

from __future__ import annotations

from typing import Any

import numpy as np

#: the service's codes of dtypes
CODES = {"f32": 1, "bf16": 2, "f16": 3, "fp8_e4m3": 4, "fp8_e5m2": 5, "nvfp4": 6}
_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "uint16": "bf16"}
_of_torch: dict[Any, int] = {}  # codes by torch.dtype, as they come


def dtype_code(dtype: str) -> int:
    """The code of "f32", "bf16" or "f16"."""
    if dtype not in ("f32", "bf16", "f16"):
        raise ValueError(f"dtype: must be one of f32, bf16, f16, is {dtype!r}")
    return CODES[dtype]


def bits(tensor: Any) -> Any:
    """The tensor; an array of bfloat16 (of ml_dtypes), which no protocol exports, as its bits."""
    # A dtype's name is made anew whenever it is asked for; numpy's own numbers need not be asked.
    if isinstance(tensor, np.ndarray) and tensor.dtype.kind == "V" and tensor.dtype.name == "bfloat16":
        return tensor.view(np.uint16)
    return tensor


def address(tensor: Any) -> Any:
    """A tensor of torch as (address, dtype, on a GPU, shape, strides); anything else as `bits` has it."""
    if isinstance(tensor, np.ndarray) or not hasattr(tensor, "data_ptr"):
        return bits(tensor)
    code = _of_torch.get(tensor.dtype)
    if code is None:
        name = _NAMES.get(str(tensor.dtype).rpartition(".")[2])
        if name is None:
            raise ValueError(f"dtype: must be float32, float16 or bfloat16, is {tensor.dtype}")
        code = _of_torch[tensor.dtype] = CODES[name]
    return tensor.data_ptr(), code, tensor.is_cuda, tuple(tensor.shape), tensor.stride()


def strided(tensor: Any) -> Any:
    """[rows, heads, dim] such that heads are dense and rows and heads lie apart; a copy where it is not."""
    if tensor is None or (isinstance(tensor, np.ndarray) and tensor.ndim == 3 and tensor.flags.c_contiguous):
        return tensor
    of_torch = hasattr(tensor, "data_ptr")
    strides = tensor.stride() if of_torch else getattr(tensor, "strides", None)
    if strides is None or len(strides) != 3:
        return tensor
    element = 1 if of_torch else tensor.itemsize
    sizes = tensor.shape
    if (strides[2] == element or sizes[2] < 2) and all(strides[i] > 0 or sizes[i] < 2 for i in (0, 1)):
        return tensor
    return tensor.contiguous() if of_torch else np.ascontiguousarray(tensor)


def empty_beside(q: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised tensor of q's kind, dtype and device."""
    return q.new_empty(shape) if hasattr(q, "new_empty") else np.empty(shape, q.dtype)
