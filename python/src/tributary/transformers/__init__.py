"""Models of Hugging Face Transformers with their KV cache in a service.

>>> attachment = tributary.transformers.attach(model, "unix:/run/tributary.sock")
>>> model.generate(**inputs)

Needs transformers 5.24 or later and torch, neither of which `import tributary` brings.
"""

from .attachment import Attachment, attach, examine
from .cache import ServiceCache, SharedRows
from .drafts import DraftAttachment, attach_drafter
from .geometry import Layer, Refused

__all__ = [
    "Attachment",
    "DraftAttachment",
    "Layer",
    "Refused",
    "ServiceCache",
    "SharedRows",
    "attach",
    "attach_drafter",
    "examine",
]
