"""Control groups that limit memory, of either version."""

import pathlib
import time

ROOT = pathlib.Path("/sys/fs/cgroup")
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def in_bytes(quantity):
    """A quantity of memory as Kubernetes writes it ("16Gi")."""
    return int(float(quantity[:-2]) * UNITS[quantity[-2:]]) if quantity[-2:] in UNITS else int(quantity)


class ControlGroup:
    def __init__(self, folder, limit):
        self.folder, self._limit = folder, limit

    def within(self, command):
        """The command, for a process that is in the group from its beginning."""
        return ["sh", "-c", f'echo 0 > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]

    def bytes(self):
        return int((self.folder / self._limit).read_text())

    def processes(self):
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]

    def remove(self):
        for _ in range(50):  # a process that has ended leaves its group a moment later
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.1)


def make(name, memory):
    """A group whose processes may take `memory` (a quantity) together; None where that cannot be had."""
    for above, limit in ((ROOT / "memory", "memory.limit_in_bytes"), (ROOT, "memory.max")):
        folder = above / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / limit).exists():
                (folder / limit).write_text(str(in_bytes(memory)))
                return ControlGroup(folder, limit)
        except OSError:
            pass
        folder.rmdir()
    return None
