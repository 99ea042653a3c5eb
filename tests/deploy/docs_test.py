"""The documentation: every link leads somewhere, and the commands marked `checked` do what the page says.

A fenced block that opens with ```sh checked is run; the blocks of a page in order, in one shell, in a folder that looks
like a checkout whose build/cpu is this build. Where the machine allows it the shell has a network of its own, so that
the pages' well-known ports are free.
"""

import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

import support

FENCE = re.compile(r"^(```|~~~)(.*)$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()]*\))?)\)")
MARKER = "checked"
BASH = ["/bin/bash", "-euo", "pipefail"]
PAGE_TIMEOUT = 120


def pages():
    listing = support.run("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", cwd=support.SOURCE)
    if listing.returncode == 0:
        names = listing.stdout.split()
    else:  # an unpacked archive
        names = [p.relative_to(support.SOURCE) for top in support.SOURCE.iterdir() if top.name != "build"
                 for p in ([top] if top.suffix == ".md" else top.rglob("*.md"))]
    return {str(name): (support.SOURCE / name).read_text(encoding="utf-8") for name in names}


def split(text):
    """(prose without code, [(info string, code)])."""
    prose, blocks, current = [], [], None
    for line in text.splitlines():
        fence = FENCE.match(line.strip())
        if current is None and fence:
            current = (fence[2].strip(), [])
        elif current is not None and fence and not fence[2].strip():
            blocks.append((current[0], "\n".join(current[1])))
            current = None
        elif current is not None:
            current[1].append(line)
        else:
            prose.append(line)
    if current is not None:
        raise ValueError(f"a code block is not closed: {current[0]}")
    return re.sub(r"`[^`\n]*`", "", "\n".join(prose)), blocks


def anchors(text):
    """The anchors GitHub makes of a page's headings."""
    found, without_code = set(), []
    fenced = False
    for line in text.splitlines():
        if FENCE.match(line.strip()):
            fenced = not fenced
        elif not fenced:
            without_code.append(line)
    for heading in re.findall(r"(?m)^#{1,6} +(.+?)\s*$", "\n".join(without_code)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (unique := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(unique)
    return found


def broken_links(name, text):
    prose, _ = split(text)
    for target in LINK.findall(prose):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        file = (support.SOURCE / name).parent / path
        if path and not file.exists():
            yield f"{name}: {target}: no such file"
        elif anchor and (not path or file.suffix == ".md"):
            if anchor not in anchors(file.read_text(encoding="utf-8") if path else text):
                yield f"{name}: {target}: no such heading"


class Links(unittest.TestCase):
    def test_lead_somewhere(self):
        all_pages = pages()
        self.assertGreater(len(all_pages), 20)
        self.assertEqual([problem for name, text in all_pages.items() for problem in broken_links(name, text)],
                         [])

    def test_broken_ones_are_seen(self):
        text = "# A b\n[x](nowhere.md) [y](#a-b) [z](#c) [r](README.md#no-such) `[code](gone.md)`\n"
        self.assertEqual(list(broken_links("page.md", text)),
                         ["page.md: nowhere.md: no such file", "page.md: #c: no such heading",
                          "page.md: README.md#no-such: no such heading"])

    def test_pictures_are_well_formed(self):
        for picture in (support.SOURCE / "docs").rglob("*.svg"):
            root = xml.etree.ElementTree.parse(picture).getroot()
            self.assertIsNotNone(root.find("{http://www.w3.org/2000/svg}title"), f"{picture}: no title to read out")

    def test_every_guide_is_in_the_index(self):
        index = (support.SOURCE / "docs/README.md").read_text(encoding="utf-8")
        for page in (support.SOURCE / "docs").glob("*.md"):
            if page.name != "README.md":
                self.assertIn(f"({page.name})", index)


def ports_in_use():
    used = []
    for port in (7400, 7401, 7402, 9464):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                used.append(port)
    return used


class Commands(unittest.TestCase):
    def scratch(self):
        """A folder like a checkout, with this build as build/cpu and build/cuda."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        top = pathlib.Path(folder.name)
        for entry in support.SOURCE.iterdir():
            if entry.name not in ("build", ".git"):
                (top / entry.name).symlink_to(entry)
        for preset in ("cpu", "cuda"):
            (top / "build" / preset).mkdir(parents=True)
            (top / "build" / preset / "bin").symlink_to(support.BIN)
        return top

    def run_script(self, script, prefix):
        """(exit code, output); everything it left running is ended."""
        # A page's background programs end with it.
        script = "trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT\n" + script
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen([*prefix, *BASH, "-c", script], stdout=output, stderr=subprocess.STDOUT,
                                     stdin=subprocess.DEVNULL, cwd=self.scratch(), start_new_session=True)
            try:
                code = child.wait(PAGE_TIMEOUT)
            except subprocess.TimeoutExpired:
                code = f"not done within {PAGE_TIMEOUT} s"
            finally:
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                child.wait()
            output.seek(0)
            return code, output.read()

    def test_checked_blocks(self):
        prefix = support.own_network()
        if not prefix and ports_in_use():
            raise unittest.SkipTest(f"ports {ports_in_use()} are in use, and no network of one's own is permitted here")
        count = 0
        for name, text in pages().items():
            blocks = [code for info, code in split(text)[1] if MARKER in info.split()[1:]]
            if not blocks:
                continue
            count += len(blocks)
            with self.subTest(name):
                code, output = self.run_script("\n".join(blocks), prefix)
                self.assertEqual(code, 0, output)
        self.assertGreaterEqual(count, 7)

    def test_a_command_that_fails_is_seen(self):
        code, _ = self.run_script("build/cpu/bin/tributary health --target=unix:/nowhere --timeout=100ms\ntrue", [])
        self.assertEqual(code, 1)

    def test_only_shell_is_marked(self):
        for name, text in pages().items():
            for info, _ in split(text)[1]:
                if MARKER in info.split():
                    self.assertEqual(info, f"sh {MARKER}", name)


if __name__ == "__main__":
    support.main()
