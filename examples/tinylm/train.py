#!/usr/bin/env python3
"""Trains tinylm: a byte-level, Llama-shaped language model of at most 8 MB.

    python3 prepare_data.py --out data
    python3 train.py --data data --out weights

Writes to --out:

    model.safetensors    bf16, the tensor names of Hugging Face's LlamaForCausalLM
    config.json          LlamaForCausalLM's configuration, so that other tools load the folder
    golden.safetensors   token ids and float64-computed logits of a fixed prompt, for loader tests
    train_log.json       losses over time, settings, figures
    samples.txt          what the model writes

Every figure is measured with the weights as shipped, that is, rounded to bf16. The step with the best
held-out loss is the one kept. Needs PyTorch and safetensors.
"""

import argparse
import copy
import dataclasses
import math
import os
import time

import torch
import torch.nn.functional as F
import training
from safetensors.torch import save_file
from torch import nn

SIZE_LIMIT = 8_000_000  # bytes of model.safetensors
GOLDEN_PROMPT = "And it came to pass in those days, that Captain Ahab"
SAMPLE_PROMPTS = [
    "In the beginning God created",
    "And it came to pass in those days, that",
    "The LORD is my shepherd;",
    "It is a truth universally acknowledged, that",
    "Call me Ishmael.",
]


@dataclasses.dataclass
class Config:
    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 416
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True

    def to_huggingface(self):
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dataclasses.asdict(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": True,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rotate(x, cos, sin):
    """RoPE, rotate-half convention: channel i is paired with channel i + head_dim / 2."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def heads(self, x):
        return x.view(*x.shape[:2], -1, self.c.head_dim).transpose(1, 2)

    def queries(self, x, rope):
        return rotate(self.heads(self.q_proj(x)), *rope)

    def keys(self, x, rope):
        """K and V."""
        return rotate(self.heads(self.k_proj(x)), *rope), self.heads(self.v_proj(x))

    def attend(self, q, k, v, **options):
        group = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def forward(self, x, cos, sin):
        rope = (cos, sin)
        return self.attend(self.queries(x, rope), *self.keys(x, rope), is_causal=True)


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c, dropout):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    def __init__(self, c, dropout):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, dropout) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class TinyLm(nn.Module):
    """Parameters carry the names of Hugging Face's LlamaForCausalLM."""

    def __init__(self, c, dropout=0.0):
        super().__init__()
        self.c = c
        self.model = Body(c, dropout)
        self.lm_head = None
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        training.initialise(self, c.num_hidden_layers)
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        angles = torch.outer(
            torch.arange(c.max_position_embeddings, dtype=torch.float64), c.rope_theta**-exponents
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, tokens):
        rows = tokens.shape[1]
        cos, sin = self.cos[:rows], self.sin[:rows]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.model.norm(x), head.weight)


@torch.no_grad()
def held_out_loss(model, tokens, context):
    """Mean loss in nats per byte over consecutive, non-overlapping windows."""
    count = (len(tokens) - 1) // context
    x = tokens[: count * context].view(count, context)
    y = tokens[1 : count * context + 1].view(count, context)
    total = 0.0
    for begin in range(0, count, 64):
        logits = model(x[begin : begin + 64].long())
        targets = y[begin : begin + 64].long()
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    return total / (count * context)


@torch.no_grad()
def generate(model, prompt, count, temperature, seed):
    device = next(model.parameters()).device
    random = torch.Generator(device=device).manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode("ascii"))], device=device)
    for _ in range(count):
        logits = model(tokens[:, -model.c.max_position_embeddings :])[:, -1]
        if temperature > 0:
            chances = F.softmax(logits / temperature, dim=-1)
            token = torch.multinomial(chances, 1, generator=random)
        else:
            token = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, token), dim=1)
    return bytes(tokens[0].tolist()).decode("latin-1")


def optimizer_of(model, args):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)


def train(model, args, device, log):
    """Trains until the time is over. Returns the best model as shipped."""
    corpus = training.load_tokens(os.path.join(args.data, "train.txt"), device)
    held_out = training.load_tokens(os.path.join(args.data, "heldout.txt"), device)
    started = time.monotonic()
    deadline = started + 60 * args.minutes
    optimizer = optimizer_of(model, args)
    span = torch.arange(args.context + 1, device=device)

    def loss_of(windows):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())

    step_loss = torch.compile(loss_of) if args.compile else loss_of
    best, best_loss = None, math.inf
    schedule_start = None  # after the first steps, which compile
    next_evaluation = 0.0
    step = 0
    while True:
        now = time.monotonic()
        if step == 3:
            schedule_start = now
        progress = 0.0 if schedule_start is None else (now - schedule_start) / (deadline - schedule_start)
        over = progress >= 1 or now >= deadline or (args.steps and step >= args.steps)
        if over or (schedule_start is not None and now >= next_evaluation):
            shipped = training.as_shipped(model, TinyLm(model.c))
            loss = held_out_loss(shipped, held_out, args.context)
            if loss < best_loss:
                best, best_loss = shipped, loss
            seconds = now - started
            log["held_out"].append({"step": step, "seconds": round(seconds, 1), "loss": loss})
            print(f"step {step} {seconds:.0f} s  held-out {loss:.4f} nats/byte, best {best_loss:.4f}", flush=True)
            next_evaluation = time.monotonic() + args.eval_seconds
        if over:
            break
        begins = torch.randint(len(corpus) - args.context - 1, (args.batch, 1), device=device)
        loss = step_loss(corpus[begins + span].long())
        training.take_step(optimizer, loss, training.learning_rate(args, step, progress))
        if step % args.log_steps == 0:
            value = training.log_loss(log, step, loss)
            rate = (step + 1) * args.batch * args.context / (time.monotonic() - started)
            print(f"step {step}  loss {value:.4f}  {rate / 1e6:.3f}M tokens/s", flush=True)
        elif step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # so that the clock read above is the step's
        step += 1
    log["steps"] = step
    log["tokens"] = step * args.batch * args.context
    log["best_held_out_loss"] = best_loss
    log["train_loss_as_shipped"] = held_out_loss(best, corpus[: len(held_out)], args.context)
    return best


def write_golden(model, path):
    """Logits computed in float64 from the shipped weights, stored as float32."""
    exact = copy.deepcopy(model).cpu().double()
    tokens = torch.tensor(list(GOLDEN_PROMPT.encode("ascii")))
    with torch.no_grad():
        logits = exact(tokens[None])[0]
    save_file({"tokens": tokens.to(torch.int32), "logits": logits.float()}, path)


def check_huggingface(model, folder):
    """Loads the folder with transformers and compares logits; fails when they differ."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([list(GOLDEN_PROMPT.encode("ascii"))])
    with torch.no_grad():
        difference = (theirs(tokens).logits - copy.deepcopy(model).cpu()(tokens)).abs().max().item()
    print(f"transformers: {type(theirs).__name__}, largest difference of a logit {difference:.2e}", flush=True)
    if not difference < 1e-3:
        raise RuntimeError("transformers reads these weights differently")
    return difference


def write(model, args, log):
    os.makedirs(args.out, exist_ok=True)
    path = lambda name: os.path.join(args.out, name)
    training.write_weights(model, path("model.safetensors"), log)
    training.write_json(model.c.to_huggingface(), path("config.json"), indent=2)
    write_golden(model, path("golden.safetensors"))
    training.write_json(log, path("train_log.json"))
    print(f"{log['parameters']:,} parameters, {log['bytes']:,} bytes", flush=True)
    training.check_size(path("model.safetensors"), SIZE_LIMIT)


def write_samples(model, args):
    with open(os.path.join(args.out, "samples.txt"), "w", encoding="utf-8") as file:
        for prompt in SAMPLE_PROMPTS:
            for temperature in (0.0, 0.7):
                text = generate(model, prompt, args.sample_tokens, temperature, seed=1)
                file.write(f"--- temperature {temperature}\n{text}\n\n")
                print(f"--- temperature {temperature}\n{text}\n", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    training.add_arguments(parser, minutes=1.8, weight_decay=0.5, eval_seconds=10.0, log_steps=100)
    parser.add_argument("--batch", type=int, default=128, help="windows a step")
    parser.add_argument("--context", type=int, default=1024, help="bytes a window")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=Config.num_hidden_layers)
    parser.add_argument("--sample-tokens", type=int, default=300)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--check-hf", action="store_true", help="compare logits with transformers'")
    return parser.parse_args()


def main():
    args = arguments()
    device, log = training.begin(args)
    config = Config(num_hidden_layers=args.layers, max_position_embeddings=args.context)
    model = TinyLm(config, args.dropout).to(device)
    best = train(model, args, device, log)
    write(best, args, log)
    write_samples(best, args)
    if args.check_hf:
        check_huggingface(best, args.out)


if __name__ == "__main__":
    main()
