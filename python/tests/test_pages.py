"""Pages of the documentation that are Python from top to bottom: their blocks run, and print what stands below them.

  test_pages.py DOCS [test ...]
"""

import contextlib
import io
import pathlib
import re
import sys
import unittest

DOCS = pathlib.Path(sys.argv.pop(1))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Pages(unittest.TestCase):
    def run_page(self, name):
        """Runs a page's blocks in one namespace; returns how many there were."""
        blocks = BLOCK.findall((DOCS / name).read_text(encoding="utf-8"))
        names = {}
        for number, (language, code) in enumerate(blocks):
            if language != "python":
                continue
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(code, f"{name}, block {number}", "exec"), names)  # pylint: disable=exec-used
            below = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
            self.assertEqual(said.getvalue(), below[1] if below[0] == "text" else "", f"{name}: {code}")
        return len(blocks)

    def test_python(self):
        self.assertGreater(self.run_page("python.md"), 15)

    def test_vllm(self):
        self.assertGreater(self.run_page("vllm.md"), 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
