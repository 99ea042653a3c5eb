"""GPUs of this machine, for tests of pods that have some."""

import functools
import glob
import pathlib
import shutil
import unittest

import support


@functools.cache
def count():
    """GPUs that the driver shows, and why there is none (empty where there are)."""
    if shutil.which("nvidia-smi") is None:
        return 0, "this machine has no GPU (nvidia-smi is missing)"
    listed = support.run("nvidia-smi", "--list-gpus")
    if listed.returncode != 0:
        return 0, f"this machine has no GPU: {listed.stdout.strip()}"
    # The program looks for its GPU before it refuses the size of its group.
    asked = support.run(support.BIN / "tributary-worker", "--coordinator=127.0.0.1:1", "--device=cuda", "--world_size=-1")
    if "no CUDA" in asked.stdout:
        return 0, "the programs are built without CUDA"
    return len([line for line in listed.stdout.splitlines() if line.startswith("GPU ")]), ""


def need(least):
    """How many GPUs there are; the test is skipped when they are fewer."""
    number, why = count()
    if number < least:
        raise unittest.SkipTest(why or f"this machine has {number} GPUs, {least} are needed")
    return number


def need_mps():
    """The driver's program of NVIDIA's Multi-Process Service, or the test is skipped."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise unittest.SkipTest("nvidia-cuda-mps-control is missing, which comes with the driver")


def devices():
    """What a container runtime gives to a container that has all GPUs."""
    found = [path for path in glob.glob("/dev/nvidia*") if pathlib.Path(path).is_char_device()]
    return sorted(found + [path for path in ("/dev/nvidia-caps",) if pathlib.Path(path).is_dir()])


def values(device):
    """Values of the chart for workers with all GPUs of their node, as a claim gives them."""
    if device != "gpu":
        return []
    return ["worker.backend=gpu", "worker.resourceClaims=[{name: gpus, resourceClaimTemplateName: all}]"]
