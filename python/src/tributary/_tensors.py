"""How tensors of numpy and torch are handed to the extension module."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .errors import refused

#: the service's codes of dtypes
CODES = {"f32": 1, "bf16": 2, "f16": 3, "fp8_e4m3": 4, "fp8_e5m2": 5, "nvfp4": 6}
_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "uint16": "bf16", "uint8": "fp8_e4m3"}
_of_torch: dict[Any, int] = {}  # codes by torch.dtype, as they come
OUTPUTS = ("f32", "bf16", "f16", "fp8_e4m3", "nvfp4")
#: what holds an output's elements: FP8 and NVFP4 as their bytes, and bfloat16 of numpy as its bits
_OF_NUMPY = {"f32": "float32", "bf16": "uint16", "f16": "float16"}
_OF_TORCH = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def dtype_code(dtype: str) -> int:
    """The code of "f32", "bf16" or "f16"."""
    if dtype not in ("f32", "bf16", "f16"):
        raise refused("dtype", f"must be one of f32, bf16, f16, is {dtype!r}")
    return CODES[dtype]


def shape_of(field: str, tensor: Any) -> tuple[int, int, int]:
    """The shape of a tensor of three dimensions."""
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise refused(field, f"must be a tensor [rows, heads, dim], is {_kind(tensor)}")
    if len(shape) != 3:
        raise refused(f"{field}.shape", f"must be [rows, heads, dim], is {list(shape)}")
    return shape[0], shape[1], shape[2]


def bits(tensor: Any) -> Any:
    """The tensor as its memory has it.

    An array of bfloat16 (of ml_dtypes), which no protocol exports, is given as its bits. Of a tensor of torch that
    stands for the negative of what its memory holds, a copy is made.
    """
    if isinstance(tensor, np.ndarray):
        # A dtype's name is made anew whenever it is asked for; numpy's own numbers need not be asked.
        if tensor.dtype.kind == "V" and tensor.dtype.name == "bfloat16":
            return tensor.view(np.uint16)
        return tensor
    return tensor.resolve_neg() if hasattr(tensor, "resolve_neg") else tensor


def address(field: str, tensor: Any) -> Any:
    """A tensor of torch as (address, dtype, on a GPU, shape, strides); anything else as `bits` has it.

    The negative bit must have been resolved.
    """
    if isinstance(tensor, np.ndarray) or not hasattr(tensor, "data_ptr"):
        return bits(tensor)
    code = _of_torch.get(tensor.dtype)
    if code is None:
        name = _NAMES.get(str(tensor.dtype).rpartition(".")[2])
        if name is None:
            raise refused(field, f"must be float32, float16 or bfloat16, is {tensor.dtype}")
        code = _of_torch[tensor.dtype] = CODES[name]
    on_gpu = tensor.is_cuda
    if tensor.layout is not _strided_layout() or not (on_gpu or tensor.is_cpu):
        raise refused(field, why_not(tensor, True))
    if tensor.dim() != 3:
        raise refused(f"{field}.shape", f"must be [rows, heads, dim], is {list(tensor.shape)}")
    return tensor.data_ptr(), code, on_gpu, tuple(tensor.shape), tensor.stride()


def written(field: str, tensor: Any) -> Any:
    """A tensor that results are written to, which must have its numbers in its memory as they are."""
    if hasattr(tensor, "is_neg") and tensor.is_neg():
        raise refused(field, "must not stand for the negative of its memory (torch's negative bit)")
    return tensor


def _strided_layout() -> Any:
    return sys.modules["torch"].strided


def _kind(given: Any) -> str:
    return type(given).__name__


def why_not(tensor: Any, may_copy: bool) -> str:
    """What kept the extension module from taking a tensor; `may_copy`: it would have been copied, if need be."""
    if isinstance(tensor, np.ndarray):
        if not tensor.dtype.isnative:
            return "must be in this machine's byte order"
        if tensor.dtype.name not in _NAMES:
            return f"must be float32, float16 or bfloat16, is {tensor.dtype}"
        if not may_copy and not tensor.flags.writeable:
            return "must be writable"
        if not may_copy and not tensor.flags.c_contiguous:
            return "must be contiguous"
    elif hasattr(tensor, "data_ptr"):
        if tensor.layout is not _strided_layout():
            return f"must be dense, is {tensor.layout}"
        if tensor.device.type not in ("cpu", "cuda"):
            return f"must be in memory of the host or a GPU, is on {tensor.device}"
        if tensor.device.type == "cuda":
            return f"must be in host memory, is on {tensor.device}"
        if tensor.requires_grad:
            return "must not require a gradient: detach() it"
        if not may_copy and not tensor.is_contiguous():
            return "must be contiguous"
    return f"must be a tensor of float32, float16 or bfloat16 (numpy, DLPack or a buffer), is {_kind(tensor)}"


def strided(tensor: Any) -> Any:
    """[rows, heads, dim] such that heads are dense and rows and heads lie apart; a copy where it is not."""
    if tensor is None or (isinstance(tensor, np.ndarray) and tensor.ndim == 3 and tensor.flags.c_contiguous):
        return tensor
    of_torch = hasattr(tensor, "data_ptr")
    if of_torch:
        if tensor.layout is not _strided_layout():
            return tensor  # has no strides, and is refused
        tensor = tensor.resolve_neg()
    strides = tensor.stride() if of_torch else getattr(tensor, "strides", None)
    if strides is None or len(strides) != 3:
        return tensor
    element = 1 if of_torch else tensor.itemsize
    sizes = tensor.shape
    if (strides[2] == element or sizes[2] < 2) and all(strides[i] > 0 or sizes[i] < 2 for i in (0, 1)):
        return tensor
    return tensor.contiguous() if of_torch else np.ascontiguousarray(tensor)


def output_code(dtype: str | None) -> int:
    """The code of an output's type; 0: None, which is q's."""
    if dtype is None:
        return 0
    if dtype not in OUTPUTS:
        raise refused("output_dtype", f"must be one of {', '.join(OUTPUTS)}, is {dtype!r}")
    return CODES[dtype]


def output_bits(out: Any) -> Any:
    """An output as the core takes it: FP8 of torch or ml_dtypes as its bytes, anything else as `bits` has it."""
    if str(getattr(out, "dtype", "")).endswith("float8_e4m3fn"):
        return out.view(sys.modules["torch"].uint8 if hasattr(out, "data_ptr") else np.uint8)
    return bits(out)


def empty_output(q: Any, shape: tuple[int, int, int], dtype: str) -> Any:
    """An uninitialised output of q's kind and device: `shape`, or of NVFP4 the bytes of so many elements."""
    size = shape if dtype != "nvfp4" else (shape[0] * shape[1] * shape[2] * 9 // 16,)
    if hasattr(q, "new_empty"):
        return q.new_empty(size, dtype=getattr(sys.modules["torch"], _OF_TORCH.get(dtype, "uint8")))
    return np.empty(size, _OF_NUMPY.get(dtype, "uint8"))


def empty_beside(q: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised tensor of q's kind, dtype and device."""
    return q.new_empty(shape) if hasattr(q, "new_empty") else np.empty(shape, q.dtype)
