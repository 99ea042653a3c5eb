// Settings that will not do are told by their names.
#include "base/config/check_flags.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "base/status/errors.h"
#include "tests/support/process.h"

namespace tributary {
namespace {

TEST(CheckFlags, Addresses) {
  for (const char* good : {"127.0.0.1:7400", "host:0", "[::1]:7400", "unix:/tmp/s"}) {
    EXPECT_TRUE(CheckAddress("listen", good).ok()) << good;
  }
  for (const char* bad : {"", "abc", "127.0.0.1", "127.0.0.1:", ":7400", "unix:"}) {
    EXPECT_EQ(FieldOf(CheckAddress("listen", bad)), "listen") << bad;
  }
}

TEST(CheckFlags, Files) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.File("token");
  EXPECT_TRUE(CheckReadable("token_file", "").ok());
  EXPECT_EQ(FieldOf(CheckReadable("token_file", path)), "token_file");
  std::ofstream(path) << "secret\n";
  EXPECT_TRUE(CheckReadable("token_file", path).ok());
  EXPECT_EQ(FieldOf(CheckReadable("token_file", directory.File("."))), "token_file");
}

}  // namespace
}  // namespace tributary
