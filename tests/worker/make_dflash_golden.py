#!/usr/bin/env python3
"""Writes dflash_golden.bin: DFlash attention computed by PyTorch with dense masks, for dflash_golden_test.

    python3 make_dflash_golden.py dflash_golden.bin

Nothing of the code under test is used. A mask is a Boolean for every pair of row and key; K and V of the
context are rounded by PyTorch's own conversions; the rest is float64. Tensors are not stored: both sides
make them from a hash (Values below), in steps of 1/32, which bf16 holds exactly.

Little-endian. Cases one after the other until the end of the file, each:

    int32 x 10   kv dtype (2 bf16, 3 f16, 4 e4m3, 5 e5m2), context, rows, window left and right (-1: none),
                 base (0 query, 1 anchor), causal, sinks (0 or 1), soft cap in quarters, seed
    float32      k_scale, v_scale
    float32      o [rows, q_heads, head_dim], lse [rows, q_heads]
"""

import random
import struct
import sys

import torch

Q_HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
SM_SCALE = 0.0625
DTYPES = {2: torch.bfloat16, 3: torch.float16, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}
SINKS = [0.5, -1.25]


def mixed(x):
    """SplitMix64."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def values(seed, tensor, shape):
    count = 1
    for extent in shape:
        count *= extent
    base = mixed(seed * 16 + tensor)
    numbers = [((mixed(base + i) >> 40 & 0xFF) - 128) / 32 for i in range(count)]
    return torch.tensor(numbers, dtype=torch.float32).view(shape)


def through_cache(x, dtype, scale):
    scale = torch.tensor(scale, dtype=torch.float32)
    return (x / scale).to(DTYPES[dtype]).double() * scale.double()


def visible(context, rows, left, right, base, causal):
    positions = torch.arange(context, context + rows)[:, None]
    keys = torch.arange(context + rows)[None]
    centre = torch.full_like(positions, context) if base == 1 else positions
    mask = torch.ones(rows, context + rows, dtype=torch.bool)
    if left >= 0:
        mask &= keys >= centre - left
    if right >= 0:
        mask &= keys <= centre + right
    if causal:
        mask &= keys <= positions
    return mask


def attention(case):
    dtype, context, rows, left, right, base, causal, sinks, soft_cap, seed, k_scale, v_scale = case
    q = values(seed, 0, (rows, Q_HEADS, HEAD_DIM)).double()
    k = torch.cat((through_cache(values(seed, 1, (context, KV_HEADS, HEAD_DIM)), dtype, k_scale),
                   values(seed, 3, (rows, KV_HEADS, HEAD_DIM)).double()))
    v = torch.cat((through_cache(values(seed, 2, (context, KV_HEADS, HEAD_DIM)), dtype, v_scale),
                   values(seed, 4, (rows, KV_HEADS, HEAD_DIM)).double()))
    k, v = (t.repeat_interleave(Q_HEADS // KV_HEADS, dim=1) for t in (k, v))
    logits = torch.einsum("rhd,khd->rhk", q, k) * SM_SCALE
    if soft_cap > 0:
        cap = soft_cap / 4
        logits = cap * torch.tanh(logits / cap)
    mask = visible(context, rows, left, right, base, causal)
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None])
    o = torch.einsum("rhk,khd->rhd", weights, v)
    if sinks:
        o = o * torch.sigmoid(lse - torch.tensor(SINKS, dtype=torch.float64))[..., None]
    return o, lse


def cases():
    choose = random.Random(3)
    contexts = [0, 1, 15, 16, 17, 31, 48, 63, 64, 65, 100, 193]
    for index, rows in enumerate([1, 2, 8, 16, 32] * 5):
        left = choose.choice([-1, 0, 3, 7, 20, 1000])
        right = choose.choice([-1, -1, 0, 2, 9, 1000])
        scale = (1.0, 1.0) if index % 4 < 2 else (0.0234375, 0.03125)
        yield (2 + index % 4, choose.choice(contexts), rows, left, right, choose.randrange(2),
               choose.randrange(2), choose.randrange(2), choose.choice([0, 0, 6]), index + 1, *scale)


def main():
    with open(sys.argv[1], "wb") as file:
        for case in cases():
            o, lse = attention(case)
            file.write(struct.pack("<10i2f", *case))
            for tensor in (o, lse):
                numbers = tensor.float().flatten().tolist()
                file.write(struct.pack(f"<{len(numbers)}f", *numbers))


if __name__ == "__main__":
    main()
