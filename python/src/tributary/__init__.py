"""Tributary: a language model's KV cache as a service, and attention where the cache lies.

>>> import numpy as np, tributary
>>> with tributary.serve(workers=2) as service, tributary.Client(service.target) as client:
...     spec = tributary.CacheSpec(layers=1, q_heads=4, kv_heads=2, head_dim=64, capacity_tokens=4096)
...     cache = client.create_cache("my-model", spec)
...     sequence = cache.open()
...     q, k, v = (np.ones((3, heads, 64), np.float32) for heads in (4, 2, 2))
...     cache.attend(0, [tributary.Entry(sequence, 0, 3, 3)], q, k, v).output.shape
(3, 4, 64)
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING

# What a host generates of proto/tributary/v1 is imported as tributary.v1, from wherever it lies on the path.
__path__ = pkgutil.extend_path(__path__, __name__)

from . import errors
from ._core import version as _version
from .client import Attention, Cache, CacheSpec, Call, Client, Entry, LayerSpec
from .errors import TributaryError
from .service import Service, serve
from .session import Invitation, LayerShape, Session, StepEntry

if TYPE_CHECKING:
    from . import aio, ops, transformers, vllm

__version__ = _version()
__all__ = [
    "Attention",
    "Cache",
    "CacheSpec",
    "Call",
    "Client",
    "Entry",
    "Invitation",
    "LayerShape",
    "LayerSpec",
    "Service",
    "Session",
    "StepEntry",
    "TributaryError",
    "errors",
    "serve",
]

_LATE = ("aio", "ops", "transformers", "vllm")  # imported when they are first named, with what they need


def __getattr__(name: str) -> ModuleType:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise AttributeError(f"{__name__}.{name} cannot be imported: {error}") from error
