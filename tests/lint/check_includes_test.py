"""cmake/check_includes.py: this tree keeps its rules, and a source that breaks one is found."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("TRIBUTARY_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
CHECK = SOURCE / "cmake/check_includes.py"


def check(tree):
    done = subprocess.run([sys.executable, str(CHECK), str(tree)], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


class CheckIncludes(unittest.TestCase):
    def check_files(self, files):
        with tempfile.TemporaryDirectory() as tree:
            for path, text in files.items():
                file = pathlib.Path(tree, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            return check(tree)

    def assert_refused(self, path, include):
        code, errors = self.check_files({path: f'// A source.\n#include "{include}"\n'})
        self.assertEqual(code, 1, f"{path} may include {include}")
        self.assertIn(f'{path}:2: must not include "{include}"', errors)

    def assert_fine(self, path, include):
        self.assertEqual(self.check_files({path: f'#include "{include}"\n'}), (0, ""))

    def test_this_tree(self):
        self.assertEqual(check(SOURCE), (0, ""))

    def test_upward_includes(self):
        for path, include in (
            ("kernels/lse.h", "collective/merge.h"),
            ("kernels/cuda/plan/plan.cu", "worker/plan.h"),
            ("kernels/cuda/plan/plan.cuh", "base/status/errors.h"),
            ("collective/exchange.cc", "worker/plan.h"),
            ("collective/exchange.cc", "base/status/errors.h"),
            ("base/rpc/tls.h", "kernels/dtype.h"),
            ("base/rpc/tls.h", "service/config.h"),
            ("worker/rpc/main.cc", "service/config.h"),
            ("worker/executor.cc", "worker/rpc/conversion.h"),
            ("service/main.cc", "tests/support/process.h"),
        ):
            self.assert_refused(path, include)

    def test_floors_without_grpc(self):
        for path in ("kernels/lse.h", "collective/direct/copy.cu"):
            for include in ("absl/status/status.h", "grpcpp/server.h", "google/rpc/status.pb.h", "tributary/v1/types.pb.h"):
                self.assert_refused(path, include)
        self.assert_refused("worker/executor.cc", "tributary/v1/types.pb.h")
        self.assert_refused("worker/executor.cc", "base/rpc/tls.h")

    def test_the_client_stands_alone(self):
        for include in ("kernels/dtype.h", "collective/exchange.h", "worker/rpc/conversion.h", "service/config.h"):
            self.assert_refused("service/client/client.h", include)
            self.assert_refused("service/client/retry.cc", include)

    def test_downward_includes_are_fine(self):
        for path, include in (
            ("collective/exchange.cc", "kernels/lse.h"),
            ("worker/executor.cc", "base/status/errors.h"),
            ("worker/rpc/main.cc", "base/rpc/tls.h"),
            ("worker/rpc/main.cc", "grpcpp/channel.h"),
            ("service/client/retry.cc", "service/client/client.h"),
            ("service/client/client.h", "tributary/v1/attention.pb.h"),
            ("service/main.cc", "worker/backends.h"),
            ("kernels/basement.h", "kernels/base.h"),
        ):
            self.assert_fine(path, include)

    def test_a_public_header_is_followed(self):
        code, errors = self.check_files(
            {
                "service/client/client.h": '#include "base/rpc/options.h"\n',
                "base/rpc/options.h": '#include "base/rpc/tls.h"\n',
                "base/rpc/tls.h": "#include <grpcpp/channel.h>\n",
            }
        )
        self.assertEqual(code, 1)
        self.assertIn("grpcpp/channel.h <- base/rpc/tls.h <- base/rpc/options.h <- service/client/client.h", errors)

    def test_locks_that_the_analysis_does_not_see(self):
        code, errors = self.check_files({"worker/executor.h": "// std::mutex is not for us.\nstd::mutex mutex_;\n"})
        self.assertEqual(code, 1)
        self.assertIn("worker/executor.h:2: std::mutex is a lock", errors)
        self.assertNotIn("executor.h:1", errors)


if __name__ == "__main__":
    unittest.main(verbosity=2)
