"""What a wheel of this package asks of the machine that it is installed on.

  check_wheel.py WHEEL [--self-contained]

Prints its size, its tags, the versions of the C and C++ libraries that it needs, and the libraries that it does not
bring. With --self-contained it ends with 1 when there are others than a C and C++ program has anyway.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

# What every Linux with a C++ program has (PEP 600 lists them).
EVERYWHERE = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|z)\.so\.\d+|ld-linux-x86-64\.so\.2|ld-linux-aarch64\.so\.1")
VERSION = re.compile(r"\b(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)+)\b")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def examine(wheel):
    """(libraries that it does not bring, {name of a versioned library: highest version}, names of its libraries)."""
    needed, versions, brought = set(), {}, set()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        libraries = [path for path in pathlib.Path(folder).rglob("*.so*") if path.is_file()]
        for library in libraries:
            brought.add(library.name)
            dynamic = output("readelf", "-dW", library)
            needed.update(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
            for name, version in VERSION.findall(output("readelf", "-VW", library)):
                number = tuple(map(int, version.split(".")))
                versions[name] = max(versions.get(name, (0,)), number)
    others = sorted(name for name in needed - brought if not EVERYWHERE.fullmatch(name))
    return others, versions, brought


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("--self-contained", action="store_true")
    options = parser.parse_args()
    others, versions, brought = examine(options.wheel)
    print(f"{options.wheel.name}: {options.wheel.stat().st_size / 1e6:.1f} MB, {len(brought)} libraries")
    print("needs " + ", ".join(f"{name} {'.'.join(map(str, number))}" for name, number in sorted(versions.items())))
    print("does not bring " + (", ".join(others) or "anything that is not everywhere"))
    tags = options.wheel.stem.split("-")[-3:]
    extension = next(name for name in brought if name.startswith("_core"))
    if (tags[1] == "abi3") != (extension == "_core.abi3.so"):
        sys.exit(f"the tag is {tags[1]}, and the extension module {extension}")
    if options.self_contained and others:
        sys.exit("it is not self-contained")


if __name__ == "__main__":
    main()
