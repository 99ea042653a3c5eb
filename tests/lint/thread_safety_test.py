"""The repository's .clang-tidy fails on state that is touched without its lock. Skipped where there is no clang-tidy."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("TRIBUTARY_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))

COUNTER = """
#include "base/sync/mutex.h"

class Counter {
 public:
  int Add() {
    %s
    return ++count_;
  }

 private:
  tributary::Mutex mutex_;
  int count_ TRIBUTARY_GUARDED_BY(mutex_) = 0;
};

int Use(Counter& counter) { return counter.Add(); }
"""


class ThreadSafety(unittest.TestCase):
    def lint(self, statement):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "counter.cc")
            source.write_text(COUNTER % statement, encoding="utf-8")
            config = f"--config-file={SOURCE / '.clang-tidy'}"
            return subprocess.run(
                ["clang-tidy", "--quiet", config, str(source), "--", "-std=c++20", f"-I{SOURCE}"],
                capture_output=True, text=True, check=False,
            )

    def test_a_lock_that_is_held(self):
        done = self.lint("const tributary::MutexLock lock(mutex_);")
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_lock_that_is_forgotten(self):
        done = self.lint("")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("requires holding mutex 'mutex_'", done.stdout)
        self.assertIn("clang-diagnostic-thread-safety", done.stdout)


if __name__ == "__main__":
    if shutil.which("clang-tidy") is None:
        print("skipped: there is no clang-tidy")
        sys.exit(77)
    unittest.main(verbosity=2)
