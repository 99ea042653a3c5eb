"""What the training scripts share: initial values, steps, and weights as they are shipped."""

import json
import math
import os

import torch
from safetensors.torch import save_file
from torch import nn


def add_arguments(parser, minutes, weight_decay, eval_seconds, log_steps):
    """What every training asks for, with its own defaults."""
    parser.add_argument("--data", required=True, help="folder written by prepare_data.py")
    parser.add_argument("--out", required=True, help="folder the weights are written to")
    parser.add_argument("--minutes", type=float, default=minutes, help="of training alone")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps; 0: by time alone")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--weight-decay", type=float, default=weight_decay)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-seconds", type=float, default=eval_seconds)
    parser.add_argument("--log-steps", type=int, default=log_steps)


def begin(args):
    """The device to train on, and an empty log with the settings."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    settings = {key: value for key, value in vars(args).items() if key not in ("data", "weights", "out")}
    return device, {"settings": settings, "torch": torch.__version__, "train": [], "held_out": []}


def load_tokens(path, device):
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).to(device)


def initialise(module, layers):
    """Normal values for matrices; smaller ones where a branch of a residual layer ends."""
    for name, p in module.named_parameters():
        if p.dim() == 2:
            out_of_branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if out_of_branch else 0.02)


def learning_rate(args, step, progress):
    """Linear warm-up by steps, then a cosine over the time that is left, down to 2% of the peak."""
    warm = min(1.0, (step + 1) / args.warmup)
    return args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def take_step(optimizer, loss, lr):
    parameters = []
    for group in optimizer.param_groups:
        group["lr"] = lr
        parameters += group["params"]
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def log_loss(log, step, loss):
    """Waits for the step. A loss that is no number ends the training."""
    value = loss.item()
    if not math.isfinite(value):
        raise RuntimeError(f"the loss is {value} at step {step}")
    log["train"].append({"step": step, "loss": value})
    return value


def as_shipped(module, fresh):
    """`fresh`, a module of the same shape, with the weights of `module` rounded to bf16."""
    fresh = fresh.to(next(module.parameters()).device).eval()
    fresh.load_state_dict({name: p.bfloat16().float() for name, p in module.state_dict().items()})
    return fresh


def write_json(value, path, indent=1):
    with open(path, "w", encoding="ascii") as file:
        json.dump(value, file, indent=indent)
        file.write("\n")


def write_weights(module, path, log):
    """As bf16; notes how large they are."""
    tensors = {name: p.bfloat16().cpu().contiguous() for name, p in module.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})
    log["bytes"] = os.path.getsize(path)
    log["parameters"] = sum(t.numel() for t in tensors.values())


def check_size(path, limit):
    size = os.path.getsize(path)
    if size > limit:
        raise RuntimeError(f"{path} has {size:,} bytes, more than {limit:,}")
