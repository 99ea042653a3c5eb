"""Tensors as Transformers has them, [batch, heads, columns, dim], and as the service has them, [rows, heads, dim]."""

from __future__ import annotations

import torch

from .geometry import Layer


def to_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, columns, dim] as [batch * columns, heads, dim]."""
    if tensor.shape[2] == 1:  # a token for each row: done for every layer of every token, so by one operation
        return tensor.squeeze(2)
    return tensor.transpose(1, 2).flatten(0, 1)


def to_batch(rows: torch.Tensor, batch: int) -> torch.Tensor:
    """[batch * columns, heads, dim] as attention functions return it: [batch, columns, heads, dim]."""
    return rows.reshape(batch, -1, *rows.shape[1:])


def pad(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Heads of `dim` dimensions, the last of them zeros."""
    missing = dim - rows.shape[-1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def trim(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The first `dim` dimensions of heads: without those that `pad` added."""
    return rows if rows.shape[-1] == dim else rows[..., :dim]


def fit(
    layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows with the heads and dimensions that the service holds for a layer."""
    if layer.copies > 1:
        key, value = key.repeat_interleave(layer.copies, 1), value.repeat_interleave(layer.copies, 1)
    head_dim, value_head_dim = layer.held_dims
    return pad(query, head_dim), pad(key, head_dim), pad(value, value_head_dim)
