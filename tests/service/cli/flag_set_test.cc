#include "service/cli/flag_set.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace tributary::cli {
namespace {

struct Options {
  std::string target = "here";
  int32_t count = 1;
  uint64_t size = 2;
  double ratio = 0.5;
  bool json = false;
  bool colour = true;
  absl::Duration timeout = absl::Seconds(3);
};

class FlagSetTest : public ::testing::Test {
 protected:
  FlagSetTest() {
    flags_.Add("target", &options_.target, "where");
    flags_.Add("max_count", &options_.count, "how many");
    flags_.Add("size", &options_.size, "how large");
    flags_.Add("ratio", &options_.ratio, "how much");
    flags_.Add("json", &options_.json, "as JSON");
    flags_.Add("colour", &options_.colour, "in colour");
    flags_.Add("timeout", &options_.timeout, "how long");
  }
  std::string Error(const std::vector<std::string>& arguments) {
    const absl::Status status = flags_.Parse(arguments);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  }

  Options options_;
  FlagSet flags_;
};

TEST_F(FlagSetTest, TakesBothSpellings) {
  ASSERT_EQ(flags_.Parse({"--target=there", "--max-count", "-7", "--size=3", "--ratio=0.25",
                          "--json", "--nocolour", "--timeout=250ms"}),
            absl::OkStatus());
  EXPECT_EQ(options_.target, "there");
  EXPECT_EQ(options_.count, -7);
  EXPECT_EQ(options_.size, 3u);
  EXPECT_EQ(options_.ratio, 0.25);
  EXPECT_TRUE(options_.json);
  EXPECT_FALSE(options_.colour);
  EXPECT_EQ(options_.timeout, absl::Milliseconds(250));
  ASSERT_EQ(flags_.Parse({"--json=false", "--target="}), absl::OkStatus());
  EXPECT_FALSE(options_.json);
  EXPECT_EQ(options_.target, "");
}

TEST_F(FlagSetTest, NamesWhatItCannotTake) {
  EXPECT_EQ(Error({"--tarhet=x"}), "--tarhet: no such flag");
  EXPECT_EQ(Error({"stray"}), "unexpected 'stray'");
  EXPECT_EQ(Error({"--"}), "unexpected '--'");
  EXPECT_EQ(Error({"--target"}), "--target: wants a value");
  EXPECT_EQ(Error({"--notarget"}), "--notarget: no such flag");
  EXPECT_EQ(Error({"--max_count=2147483648"}),
            "--max_count: wants a whole number that fits, not '2147483648'");
  EXPECT_EQ(Error({"--size=-1"}), "--size: wants a whole number that fits, not '-1'");
  EXPECT_EQ(Error({"--ratio=nan"}), "--ratio: wants a number, not 'nan'");
  EXPECT_EQ(Error({"--json=maybe"}), "--json: wants true or false, not 'maybe'");
  EXPECT_EQ(Error({"--timeout=5"}), "--timeout: wants a duration such as 500ms, 10s, 2m, not '5'");
}

TEST_F(FlagSetTest, HelpShowsDefaults) {
  const std::string help = flags_.Help();
  for (const char* part :
       {"--target=here\n      where\n", "--max_count=1", "--json=false", "--timeout=3s"}) {
    EXPECT_NE(help.find(part), std::string::npos) << part << " in\n" << help;
  }
}

}  // namespace
}  // namespace tributary::cli
