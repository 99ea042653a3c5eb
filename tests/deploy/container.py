"""Runs a command as a container runtime would: with a root of its own that is read-only, the pod's volumes at their
places, a user that may nothing. Usage, as root and in the pod's namespaces: container.py SPEC.json

The specification has `args`, `env` and `mounts` ({path, source, readOnly}), `user` and `group`, `devices` (paths of what
the container gets besides), and the folders `root` (empty, to build in) and `bin` (whose programs lie in /usr/local/bin).
What the machine has in /usr and /etc stands for the image.
"""

import json
import os
import pathlib
import subprocess
import sys

DEVICES = ("null", "zero", "random", "urandom")
# Of /etc, what a program with no settings of its own needs.
ETC = ("group", "host.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "passwd", "ssl")


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


def bind(source, place, read_only=False):
    mount("--bind", source, place)
    if read_only:
        mount("-o", "remount,bind,ro", place)


def mounted_below(folder):
    """What is mounted below a folder, outer mounts first: a GPU's driver lies in one of its own on some machines."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        places = {line.split()[4] for line in file}
    return sorted(place for place in places if place.startswith(f"{folder}/"))


def build(spec):
    """The container's root."""
    root = pathlib.Path(spec["root"])
    mount("-t", "tmpfs", "-o", "size=16m,mode=755", "none", root)
    for name in ("usr", "etc", "proc", "dev"):
        (root / name).mkdir()
    for place in ["/usr", *mounted_below("/usr")]:
        bind(place, root / place.lstrip("/"), read_only=True)
    for name in ("bin", "sbin", "lib", "lib64"):  # links into /usr on Debian 12
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}"))
    bind(spec["bin"], root / "usr/local/bin", read_only=True)
    mount("-t", "proc", "proc", root / "proc")
    devices = [f"/dev/{name}" for name in DEVICES] + spec.get("devices", [])
    fixed = [{"path": device, "source": device} for device in devices]
    fixed += [{"path": f"/etc/{name}", "source": f"/etc/{name}", "readOnly": True} for name in ETC]
    for one in fixed + sorted(spec["mounts"], key=lambda one: one["path"]):
        if not os.path.exists(one["source"]):
            continue
        place = root / one["path"].lstrip("/")
        if os.path.isdir(one["source"]):
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        bind(one["source"], place, one.get("readOnly", False))
    mount("-o", "remount,bind,ro", root)
    return root


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    os.chroot(build(spec))
    os.chdir("/tmp")
    user = ["setpriv", f"--reuid={spec['user']}", f"--regid={spec['group']}", "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all"]
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **spec["env"]}
    os.execvpe(user[0], [*user, *spec["args"]], environment)


if __name__ == "__main__":
    main()
