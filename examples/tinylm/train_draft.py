#!/usr/bin/env python3
"""Trains a block-diffusion draft (DFlash) for tinylm: at most 4 MB.

    python3 prepare_data.py --out data
    python3 train_draft.py --data data --weights weights --out weights

The draft guesses the next tokens of a block in one pass. Its context is not its own history but the
target's: hidden states of a few target layers, projected to one vector a token, from which every draft
layer makes its K and V. Its block is the anchor (the token known last) followed by masks; every row of
the block sees the whole context and the whole block. See docs/api.md for how a host drives it.

It learns what the target itself writes: prompts from the corpus, continued greedily by the target, and
from each block the tokens that the target chose. One set of weights serves two masks, which take turns
in training: full attention, and a sliding window around each row.

Writes to --out:

    draft.safetensors         bf16
    draft.json                its configuration
    draft_golden.safetensors  float64-computed logits of a fixed block under both masks, for tests
    draft_log.json            settings, losses, acceptance on text it has not seen
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import time

import torch
import torch.nn.functional as F
import train as target_code
import training
from safetensors.torch import load_file, save_file
from torch import nn

SIZE_LIMIT = 4_000_000  # bytes of draft.safetensors
GOLDEN_TEXT = "And it came to pass in those days, that Captain Ahab said unto the king of Israel, "
GOLDEN_BLOCK = 8


@dataclasses.dataclass
class DraftConfig:
    hidden_size: int = 256
    intermediate_size: int = 416
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    # Hidden states after these layers of the target (the first is 0) make the context.
    target_layers: tuple = (1, 3, 5)
    sliding_window_left: int = 127  # keys before a row's own that the sliding variant sees
    block_size: int = 8  # what hosts ask for unless they know better


class DraftAttention(target_code.Attention):
    def forward(self, x, context, rope, context_rope, mask):
        """x: [batch, rows, hidden]; context: [batch, tokens, hidden]; mask: [rows, tokens + rows]."""
        k, v = (torch.cat(t, dim=2) for t in zip(self.keys(context, context_rope), self.keys(x, rope)))
        return self.attend(self.queries(x, rope), k, v, attn_mask=mask)


class DraftLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = target_code.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = target_code.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = target_code.Mlp(c)

    def forward(self, x, context, rope, context_rope, mask):
        x = x + self.self_attn(self.input_layernorm(x), context, rope, context_rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):
    """Embeddings and output head are the target's."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.fc = nn.Linear(len(c.target_layers) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = target_code.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(c.hidden_size))
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = target_code.RMSNorm(c.hidden_size, c.rms_norm_eps)
        training.initialise(self, c.num_hidden_layers)
        nn.init.normal_(self.mask_embedding, std=0.02)

    def forward(self, anchors, features, starts, block, window_left, target):
        """Logits of the masks of several blocks per sequence: [batch, blocks, block - 1, vocabulary].

        anchors: [batch, blocks], tokens at positions `starts` [blocks]; features: [batch, tokens, ...],
        the target's hidden states; block b sees those before starts[b] only.
        """
        context = self.hidden_norm(self.fc(features))
        offsets = torch.arange(block, device=starts.device)
        positions = (starts[:, None] + offsets).flatten()
        embedded = target.model.embed_tokens(anchors)[:, :, None]
        masks = self.mask_embedding.expand(*embedded.shape[:2], block - 1, -1)
        x = torch.cat((embedded.to(masks.dtype), masks), dim=2).flatten(1, 2)
        tokens = features.shape[1]
        mask = visible(starts, block, tokens, window_left)
        rope = (target.cos[positions], target.sin[positions])
        context_rope = (target.cos[:tokens], target.sin[:tokens])
        for layer in self.layers:
            x = layer(x, context, rope, context_rope, mask)
        x = self.norm(x).unflatten(1, (len(starts), block))[:, :, 1:]
        return F.linear(x, target.model.embed_tokens.weight)


def visible(starts, block, tokens, window_left):
    """What rows of all blocks see: [blocks * block, tokens + blocks * block]."""
    offsets = torch.arange(block, device=starts.device)
    positions = (starts[:, None] + offsets).flatten()
    of_block = torch.arange(len(starts), device=starts.device).repeat_interleave(block)
    context = torch.arange(tokens, device=starts.device)
    sees_context = context[None] < starts[of_block][:, None]
    sees_block = of_block[:, None] == of_block[None]
    if window_left is not None:
        sees_context &= context[None] >= positions[:, None] - window_left
        sees_block &= positions[None] >= positions[:, None] - window_left
    return torch.cat((sees_context, sees_block), dim=1)


def target_states(target, tokens, layers):
    """Hidden states after `layers`, side by side, and the target's logits."""
    cos, sin = target.cos[: tokens.shape[1]], target.sin[: tokens.shape[1]]
    x = target.model.embed_tokens(tokens)
    states = []
    for index, layer in enumerate(target.model.layers):
        x = layer(x, cos, sin)
        if index in layers:
            states.append(x)
    return torch.cat(states, dim=-1), F.linear(target.model.norm(x), target.model.embed_tokens.weight)


@torch.no_grad()
def write_greedily(target, prompts, total):
    """Continues [batch, length] prompts to `total` tokens, each the most likely one."""
    c = target.c
    batch, length = prompts.shape
    device = prompts.device
    dtype = target.model.embed_tokens.weight.dtype
    cache = torch.zeros(len(target.model.layers), 2, batch, c.num_key_value_heads, total, c.head_dim,
                        device=device, dtype=dtype)
    text = torch.zeros(batch, total, dtype=torch.long, device=device)
    text[:, :length] = prompts
    begin, end = 0, length
    while end < total:
        x = target.model.embed_tokens(text[:, begin:end])
        rope = (target.cos[begin:end], target.sin[begin:end])
        for index, layer in enumerate(target.model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            for held, new in zip(cache[index], attention.keys(normed, rope)):
                held[:, :, begin:end] = new
            k, v = (held[:, :, :end] for held in cache[index])
            x = x + attention.attend(attention.queries(normed, rope), k, v, is_causal=begin == 0)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = F.linear(target.model.norm(x[:, -1]), target.model.embed_tokens.weight)
        text[:, end] = logits.argmax(-1)
        begin, end = end, end + 1
    return text


def write_corpus(target, args, corpus, count):
    """Prompts cut from the corpus, continued by the target: [count, tokens]."""
    parts = []
    for begin in range(0, count, args.write_batch):
        batch = min(args.write_batch, count - begin)
        at = torch.randint(len(corpus) - args.prompt, (batch, 1), device=corpus.device)
        prompts = corpus[at + torch.arange(args.prompt, device=corpus.device)].long()
        parts.append(write_greedily(target, prompts, args.tokens).to(torch.uint8))
    return torch.cat(parts)


def pick_starts(args, device, blocks, block):
    """Anchors stand behind the prompt: what follows is the target's own."""
    return torch.randint(args.prompt, args.tokens - block, (blocks,), device=device)


def loss_of(draft, target, text, starts, block, window_left, decay):
    with torch.no_grad():
        features, _ = target_states(target, text, draft.c.target_layers)
    span = starts[:, None] + torch.arange(block, device=text.device)
    wanted = text[:, span]  # [batch, blocks, block]
    logits = draft(wanted[:, :, 0], features, starts, block, window_left, target)
    losses = F.cross_entropy(logits.flatten(0, 2).float(), wanted[:, :, 1:].flatten(), reduction="none")
    # A row counts only if all rows before it were right, so early rows matter most.
    weights = torch.exp(-torch.arange(block - 1, device=text.device) / decay)
    return (losses.view(-1, block - 1) * weights).sum(1).mean() / weights.sum()


@torch.no_grad()
def acceptance(draft, target, text, args, block, window_left):
    """Mean number of tokens that one step of verification yields: the accepted ones and the target's own."""
    lengths = []
    generator = torch.Generator(device=text.device).manual_seed(5)
    starts = torch.randint(args.prompt, args.tokens - block, (24,), device=text.device, generator=generator)
    for rows in text.split(64):
        rows = rows.long()
        features, _ = target_states(target, rows, draft.c.target_layers)
        span = starts[:, None] + torch.arange(block, device=text.device)
        wanted = rows[:, span]
        guessed = draft(wanted[:, :, 0], features, starts, block, window_left, target).argmax(-1)
        lengths.append((guessed == wanted[:, :, 1:]).long().cumprod(-1).sum(-1).float().flatten() + 1)
    return torch.cat(lengths).mean().item()


def train(draft, target, args, text, held_out, log):
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    begin = time.monotonic()
    best, best_length, next_evaluation, step = None, 0.0, 0.0, 0
    windows = (None, draft.c.sliding_window_left)
    while True:
        progress = min(1.0, (time.monotonic() - begin) / (60 * args.minutes))
        over = progress >= 1 or (args.steps and step >= args.steps)
        if over or time.monotonic() >= next_evaluation:
            shipped = training.as_shipped(draft, Draft(draft.c))
            lengths = [acceptance(shipped, target, held_out, args, draft.c.block_size, w) for w in windows]
            if min(lengths) > best_length:
                best, best_length = shipped, min(lengths)
            log["held_out"].append({"step": step, "full": lengths[0], "sliding": lengths[1]})
            print(f"step {step} {time.monotonic() - begin:.0f} s  acceptance length {lengths[0]:.3f} full, "
                  f"{lengths[1]:.3f} sliding", flush=True)
            next_evaluation = time.monotonic() + args.eval_seconds
        if over:
            break
        rows = text[torch.randint(len(text), (args.batch,), device=text.device)].long()
        block = args.blocks[step // 2 % len(args.blocks)]
        starts = pick_starts(args, text.device, args.anchors, block)
        with torch.autocast(text.device.type, dtype=torch.bfloat16):
            loss = loss_of(draft, target, rows, starts, block, windows[step % 2], args.decay)
        training.take_step(optimizer, loss, training.learning_rate(args, step, progress))
        if step % args.log_steps == 0:
            print(f"step {step}  loss {training.log_loss(log, step, loss):.4f}", flush=True)
        step += 1
    log["steps"] = step
    return best


@torch.no_grad()
def write_golden(draft, target, path):
    """Logits of one block behind a fixed text, computed in float64 from the weights as shipped."""
    draft, target = copy.deepcopy(draft).cpu().double(), copy.deepcopy(target).cpu().double()
    target.cos, target.sin = target.cos.double(), target.sin.double()
    tokens = torch.tensor([list(GOLDEN_TEXT.encode("ascii"))])
    features, logits = target_states(target, tokens, draft.c.target_layers)
    anchor = logits[:, -1:].argmax(-1)
    starts = torch.tensor([tokens.shape[1]])
    golden = {"tokens": torch.cat((tokens, anchor), dim=1)[0].to(torch.int32)}
    for name, left in (("full", None), ("sliding", 20)):
        golden[name] = draft(anchor, features, starts, GOLDEN_BLOCK, left, target)[0, 0].float()
    save_file(golden, path)


def write(draft, target, args, log, held_out):
    path = lambda name: os.path.join(args.out, name)
    os.makedirs(args.out, exist_ok=True)
    training.write_weights(draft, path("draft.safetensors"), log)
    log["acceptance"] = {
        f"block {block}, {name}": acceptance(draft, target, held_out, args, block, left)
        for block in (4, 8, 12, 16)
        for name, left in (("full", None), ("sliding", draft.c.sliding_window_left))
    }
    training.write_json(dataclasses.asdict(draft.c), path("draft.json"), indent=2)
    write_golden(draft, target, path("draft_golden.safetensors"))
    training.write_json(log, path("draft_log.json"))
    print(f"{log['parameters']:,} parameters, {log['bytes']:,} bytes; {log['acceptance']}", flush=True)
    training.check_size(path("draft.safetensors"), SIZE_LIMIT)


def load_target(folder, device):
    with open(os.path.join(folder, "config.json"), encoding="ascii") as file:
        loaded = json.load(file)
    loaded.setdefault("rope_theta", loaded.get("rope_parameters", {}).get("rope_theta", 10000.0))
    fields = {f.name: loaded[f.name] for f in dataclasses.fields(target_code.Config)}
    target = target_code.TinyLm(target_code.Config(**fields))
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    target.load_state_dict({name: t.float() for name, t in tensors.items()})
    return target.to(device).eval().requires_grad_(False)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    training.add_arguments(parser, minutes=3.0, weight_decay=0.05, eval_seconds=20.0, log_steps=200)
    parser.add_argument("--weights", required=True, help="folder of the target")
    parser.add_argument("--sequences", type=int, default=16384, help="texts the target writes to learn from")
    parser.add_argument("--held-out", type=int, default=256, help="texts that acceptance is measured on")
    parser.add_argument("--write-batch", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=64, help="bytes of a prompt")
    parser.add_argument("--tokens", type=int, default=448, help="tokens of a text, prompt included")
    parser.add_argument("--batch", type=int, default=64, help="texts a step")
    parser.add_argument("--anchors", type=int, default=32, help="blocks a text and step")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16], help="block sizes that take turns")
    parser.add_argument("--decay", type=float, default=4.0, help="rows after which a row's weight is 1/e")
    return parser.parse_args()


def main():
    args = arguments()
    device, log = training.begin(args)
    target = load_target(args.weights, device)
    draft = Draft(DraftConfig()).to(device)
    corpus = training.load_tokens(os.path.join(args.data, "train.txt"), device)
    unseen = training.load_tokens(os.path.join(args.data, "heldout.txt"), device)
    begin = time.monotonic()
    text = write_corpus(target, args, corpus, args.sequences)
    held_out = write_corpus(target, args, unseen, args.held_out)
    print(f"{text.numel():,} tokens written in {time.monotonic() - begin:.0f} s", flush=True)
    best = train(draft, target, args, text, held_out, log)
    write(best, target, args, log, held_out)


if __name__ == "__main__":
    main()
