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

from . import errors
from ._core import version as _version
from .client import Attention, Cache, CacheSpec, Call, Client, Entry, LayerSpec
from .errors import TributaryError
from .service import Service, serve
from .session import Invitation, LayerShape, Session, StepEntry

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
