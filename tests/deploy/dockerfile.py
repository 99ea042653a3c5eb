"""Reads a Dockerfile and judges it by the project's rules: pinned bases, no root, no build tools at run time."""

import dataclasses
import re
import shlex

# What has no place where programs only run.
BUILD_TOOL = re.compile(r"(-dev$|^(build-essential|g\+\+|gcc|clang|make|cmake|ninja-build|git|curl|wget|python3.*)$)")
INSTALLER = re.compile(r"\b(apt-get|apt|pip|pip3|dpkg|curl|wget)\b")
LABELS = ("title", "description", "version", "revision", "created", "base.name")


@dataclasses.dataclass
class Instruction:
    name: str
    value: str  # without options, continuation lines joined
    options: list  # "--from=build"


@dataclasses.dataclass
class Stage:
    name: str
    base: str  # as written; ARGs are filled in
    instructions: list

    def all(self, name):
        return [i for i in self.instructions if i.name == name]


def _instructions(text):
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    for line in joined.splitlines():
        if not line.strip():
            continue
        name, _, rest = line.strip().partition(" ")
        options = []
        while match := re.match(r"\s*(--\S+)\s+", rest):
            options.append(match[1])
            rest = rest[match.end():]
        yield Instruction(name.upper(), rest.strip(), options)


def parse(text):
    """{stage: Stage} in order, every global ARG filled in."""
    arguments, stages, current = {}, {}, None
    for instruction in _instructions(text):
        if instruction.name == "ARG" and current is None:
            name, _, value = instruction.value.partition("=")
            arguments[name] = value
        elif instruction.name == "FROM":
            base, _, name = instruction.value.partition(" AS ")
            base = re.sub(r"\$\{(\w+)\}", lambda m: arguments.get(m[1], m[0]), base)
            current = Stage(name or base, base, [])
            stages[current.name] = current
        elif current is None:
            raise ValueError(f"{instruction.name} before the first FROM")
        else:
            current.instructions.append(instruction)
    return stages


def lineage(stages, name):
    """The stages whose layers the image of `name` has, the base first."""
    chain = []
    while name in stages:
        chain.insert(0, stages[name])
        name = stages[name].base
    return chain


def _last(chain, name):
    found = [i for stage in chain for i in stage.all(name)]
    return found[-1].value if found else None


def _pinned(base):
    return re.search(r"@sha256:[0-9a-f]{64}$", base) is not None


def problems(text, targets, packages):
    """What is wrong with the images `targets`, a sentence each. `packages`: {list name: package names}."""
    stages = parse(text)
    found = []
    for stage in stages.values():
        if stage.base not in stages and not _pinned(stage.base):
            found.append(f"{stage.name}: base {stage.base} is not pinned by digest")
        for instruction in stage.all("COPY"):
            for option in instruction.options:
                if option.startswith("--from=") and option[7:] not in stages:
                    found.append(f"{stage.name}: COPY from unknown stage {option[7:]}")
        if stage.all("ADD"):
            found.append(f"{stage.name}: ADD fetches and unpacks; use COPY")
    for target in targets:
        if target not in stages:
            found.append(f"{target}: no such target")
            continue
        found += [f"{target}: {problem}" for problem in _target_problems(lineage(stages, target), packages)]
    return found


def _target_problems(chain, packages):
    user = _last(chain, "USER") or "root"
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", user):
        yield f"USER {user} must be a number other than 0"
    if _last(chain, "STOPSIGNAL") != "SIGTERM":
        yield "STOPSIGNAL must be SIGTERM"
    if not re.match(r'\["/usr/bin/tini",', _last(chain, "ENTRYPOINT") or ""):
        yield "ENTRYPOINT must begin with tini"
    labels = " ".join(i.value for stage in chain for i in stage.all("LABEL"))
    for label in LABELS:
        if f"org.opencontainers.image.{label}=" not in labels:
            yield f"label org.opencontainers.image.{label} is missing"
    for stage in chain:
        for instruction in stage.all("RUN"):
            yield from _runtime_run_problems(instruction, packages)
        for instruction in stage.all("COPY"):
            source = next((o[7:] for o in instruction.options if o.startswith("--from=")), None)
            if source is None:
                yield f"COPY {instruction.value} brings files of the source tree into the image"


def _runtime_run_problems(instruction, packages):
    if match := INSTALLER.search(re.sub(r"/var/lib/apt\S*", "", instruction.value)):
        yield f"RUN uses {match[1]}: packages come from deploy/install-packages.sh"
    for command in re.split(r"&&|;", instruction.value):
        words = shlex.split(command)
        if not words or not words[0].endswith("install-packages.sh"):
            continue
        for name in words[1:]:
            for package in packages.get(name, [name]):
                if BUILD_TOOL.search(package):
                    yield f"build tool {package} (list {name}) in the runtime image"
