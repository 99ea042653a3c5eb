"""Parts of a model as torch.compile makes them: norms, MLPs, and whatever else of it knows nothing of attention.

A norm of Transformers is eight launches, and an MLP's activation two, on tensors of a few kilobytes. In a CUDA graph each
takes the GPU some two microseconds, and a model of 32 layers has a thousand of them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch

_ROTARY = "apply_rotary_pos_emb"


def parts(model: Any) -> list[Any]:
    """The largest modules of a model that hold no layer of attention, and of whose kind there are several."""
    kinds = collections.Counter(type(module) for module in model.modules())
    found: list[Any] = []

    def visit(module: Any) -> None:
        for child in module.children():
            of_torch = type(child).__module__.startswith("torch.")
            attends = any(hasattr(part, "layer_idx") for part in child.modules())
            if kinds[type(child)] > 1 and not of_torch and not attends and any(True for _ in child.parameters()):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def rotary(model: Any) -> list[Any]:
    """Modules of Python with a function that layers of attention of this model turn queries and keys by."""
    named = {type(part).__module__ for part in model.modules() if hasattr(part, "layer_idx")}
    return [sys.modules[name] for name in sorted(named) if hasattr(sys.modules[name], _ROTARY)]


@contextlib.contextmanager
def fused(model: Any) -> Iterator[None]:
    """While it lasts, these are called as torch.compile makes them: once for each kind and shape."""
    chosen = [part for part in parts(model) if "forward" not in part.__dict__]
    compiled = {kind: torch.compile(kind.forward, dynamic=False) for kind in {type(part) for part in chosen}}
    turning = [(module, getattr(module, _ROTARY)) for module in rotary(model)]
    for part in chosen:
        part.forward = functools.partial(compiled[type(part)], part)
    for module, function in turning:  # which other models of the kind may call meanwhile: it computes the same
        setattr(module, _ROTARY, torch.compile(function, dynamic=False))
    try:
        yield
    finally:
        for part in chosen:
            del part.forward
        for module, function in turning:
            setattr(module, _ROTARY, function)
