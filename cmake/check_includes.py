#!/usr/bin/env python3
"""Fails when a source includes what its floor may not know. Usage: cmake/check_includes.py [TREE]

The floors of docs/architecture.md, as rules that a machine can check. `make lint` runs this, and so does
tests/lint, which also shows that each rule finds a source that breaks it.
"""

import os
import re
import sys
from dataclasses import dataclass

FLOORS = ("proto", "kernels", "collective", "base", "worker", "service")
OTHERS = ("tests", "bench", "examples")
RPC = ("grpc", "grpcpp", "google", "tributary")  # gRPC, Protobuf, and what is generated from proto/


@dataclass(frozen=True)
class Rule:
    """Sources under `path` (except those under `but`) include nothing under any of `never`, apart from `allowed`."""

    path: str
    never: tuple
    why: str
    but: tuple = ()
    allowed: tuple = ()


def above(*floors):
    """Everything of this project that a floor that may know `floors` must not include."""
    return tuple(folder for folder in FLOORS + OTHERS if folder not in floors)


RULES = (
    Rule(
        "kernels",
        above("kernels"),
        "kernels/ is the lowest floor",
        # Headers that stand alone: the mutex, how launches begin early, and what makes a kernel the gate of a
        # session's layer.
        allowed=("base/cuda/early_launch.cuh", "base/mailbox", "base/sync/mutex.h"),
    ),
    Rule("kernels", ("absl",) + RPC, "kernels/ builds where there is no gRPC, Protobuf or Abseil"),
    Rule(
        "collective",
        above("collective", "kernels"),
        "collective/ knows kernels/ only",
        allowed=("base/rpc/descriptor.h", "base/sync/mutex.h"),
    ),
    Rule("collective", ("absl",) + RPC, "collective/ builds where there is no gRPC, Protobuf or Abseil"),
    Rule("base", above("base"), "base/ knows nothing of attention"),
    Rule("worker", above("worker", "base", "collective", "kernels"), "worker/ lies below service/"),
    Rule(
        "worker",
        RPC + ("base", "worker/rpc"),
        "a build that ends at worker/ has no gRPC or Protobuf; only worker/rpc/ speaks it",
        but=("worker/rpc",),
        allowed=(
            "base/status/errors.h",
            "base/status/status_macros.h",
            "base/telemetry/trace.h",
            "base/cuda",
            "base/mailbox",
            "base/process/boot_id.h",
            "base/rpc/descriptor.h",
            "base/sync/mutex.h",
        ),
    ),
    Rule("service", OTHERS, "the service does not depend on its tests, benchmarks or examples"),
    Rule(
        "service/client",
        above("service", "base") + ("service",),
        "a host that links the client library carries no code of the service",
        allowed=("service/client",),
    ),
)

# What a model host includes. These and all that they include must stand alone.
PUBLIC_HEADERS = (
    "service/client/client.h",
    "service/client/cuda/device_session.h",
    "service/client/cuda_memory.h",
)
NOT_FOR_HOSTS = ("grpc", "grpcpp", "openssl", "kernels", "collective", "worker")

# One mutex for all floors. Clang's thread-safety analysis does not see the locks of the standard library,
# which carry no annotations.
UNSEEN_LOCKS = re.compile(
    r"\bstd::(?:recursive_|shared_|timed_)?(?:mutex|lock_guard|unique_lock|scoped_lock|shared_lock)\b"
    r"|\bstd::condition_variable"
    r"|\babsl::(?:Mutex|MutexLock|CondVar)\b"
)
THE_MUTEX = "base/sync/mutex.h"

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
SOURCES = (".h", ".cc", ".cu", ".cuh")


def lies_in(path, folder):
    return path == folder or path.startswith(folder + "/")


def lies_in_any(path, folders):
    return any(lies_in(path, folder) for folder in folders)


def read(tree, path):
    with open(os.path.join(tree, path), encoding="utf-8") as file:
        return file.read()


def sources(tree):
    for floor in FLOORS:
        for folder, _, names in os.walk(os.path.join(tree, floor)):
            for name in sorted(names):
                if name.endswith(SOURCES):
                    yield os.path.relpath(os.path.join(folder, name), tree)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def check_rules(path, text):
    for include in INCLUDE.finditer(text):
        for rule in RULES:
            if not lies_in(path, rule.path) or lies_in_any(path, rule.but):
                continue
            if lies_in_any(include[1], rule.never) and not lies_in_any(include[1], rule.allowed):
                yield f'{path}:{line_of(text, include.start())}: must not include "{include[1]}": {rule.why}'
                break


def check_locks(path, text):
    if path == THE_MUTEX:
        return
    for lock in UNSEEN_LOCKS.finditer(text):
        line = text[text.rfind("\n", 0, lock.start()) + 1 : lock.start()]
        if "//" not in line:
            yield (
                f"{path}:{line_of(text, lock.start())}: {lock[0]} is a lock that the thread-safety analysis "
                "does not see: use base/sync/mutex.h, and TRIBUTARY_GUARDED_BY for what it guards"
            )


def check_public_header(tree, header):
    """Follows the includes of a header that hosts read through this tree."""
    came_from = {header: None}
    queue = [header] if os.path.exists(os.path.join(tree, header)) else []
    while queue:
        path = queue.pop()
        for include in INCLUDE.findall(read(tree, path)):
            if lies_in_any(include, NOT_FOR_HOSTS):
                chain = [include, path]
                while came_from[chain[-1]] is not None:
                    chain.append(came_from[chain[-1]])
                yield f"{header}: does not stand alone: {' <- '.join(chain)}"
            elif include not in came_from and os.path.exists(os.path.join(tree, include)):
                came_from[include] = path
                queue.append(include)


def check(tree):
    problems = []
    for path in sources(tree):
        text = read(tree, path)
        problems += check_rules(path, text)
        problems += check_locks(path, text)
    for header in PUBLIC_HEADERS:
        problems += check_public_header(tree, header)
    return problems


def main():
    tree = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    problems = check(os.path.normpath(tree))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
