"""Lets PyPI's torch, which is made for GPUs, be used on a CPU without the 2 GB of CUDA libraries that it is linked to.

  cuda_stand_ins.py PACKAGES    the folder that torch was installed to

Each library that is missing beside torch gets an empty one of its name and versions. Nothing on a CPU calls them; what
torch itself computes there is in libtorch_cpu.so, which stays as it is. Only the CUDA runtime (0.7 MB), which says that
there is no GPU, has to be real.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

CUDA = re.compile("cu|nccl|nvshmem")  # how the names of what is missing begin, after "lib"


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing(folder, present):
    """Names of libraries that torch's need and that are not there: {name: versions that are asked of it}."""
    wanted = {}
    for library in sorted(folder.glob("*.so*")):
        for name in re.findall(r"\(NEEDED\).*\[lib(.+)\]", output("readelf", "-Wd", library)):
            if (CUDA.match(name) or name.startswith("nv")) and f"lib{name}" not in present:
                wanted.setdefault(f"lib{name}", set())
    for library in sorted(folder.glob("*.so*")):
        name = None
        for line in output("readelf", "-WV", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                name = found[1]
            found = re.search(r"Name: (\S+)\s+Flags", line)
            if found and name in wanted:
                wanted[name].add(found[1])
    return wanted


def undefined(folder):
    """Functions that torch's libraries ask for: {version, "" for none: names}."""
    names = {}
    for library in sorted(folder.glob("*.so*")):
        symbols = output("nm", "-D", "--undefined-only", library)
        for name, version in re.findall(r" U (\w+)(?:@(\S+))?$", symbols, re.M):
            if version or CUDA.match(name):
                names.setdefault(version, set()).add(name)
    return names


def build(library, versions, names):
    functions = sorted({name for version in versions or [""] for name in names.get(version, ())})
    with tempfile.TemporaryDirectory() as place:
        source, script = pathlib.Path(place, "empty.c"), pathlib.Path(place, "versions")
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions), encoding="utf-8")
        script.write_text(
            "".join(f"{v} {{ {' '.join(f'{n};' for n in sorted(names.get(v, ())))} }};\n" for v in sorted(versions)),
            encoding="utf-8")
        flags = [f"-Wl,--version-script={script}"] if versions else []
        subprocess.run(["cc", "-shared", "-nostdlib", "-w", source, "-o", library, f"-Wl,-soname,{library.name}", *flags],
                       check=True)


def main():
    packages = pathlib.Path(sys.argv[1])
    folder = packages / "torch" / "lib"
    present = {path.name for path in [*folder.iterdir(), *packages.glob("nvidia/**/lib/*.so*")]}
    names = undefined(folder)
    for name, versions in missing(folder, present).items():
        build(folder / name, versions, names)


if __name__ == "__main__":
    main()
