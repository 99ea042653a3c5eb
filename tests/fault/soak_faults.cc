// Random calls, random faults, and a model that every answer is checked against (model_soak.h), for
// as long as one likes.
//
//   fault_soak_faults --duration=30m --seed=7
//   fault_soak_faults --seed=7 --faults=12          the first faults of such a run again
//   fault_soak_faults --kinds=kill-worker,cut-link  these alone
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/time.h"
#include "tests/fault/model_soak.h"

ABSL_FLAG(uint64_t, seed, 1, "which faults and calls there are");
ABSL_FLAG(absl::Duration, duration, absl::Minutes(30), "how long it takes, if --faults is 0");
ABSL_FLAG(int, faults, 0, "how many faults there are; 0: as many as come within --duration");
ABSL_FLAG(int, hosts, 3, "hosts, each with a connection and up to four sequences");
ABSL_FLAG(std::vector<std::string>, kinds, {}, "the kinds of faults; all when empty");

namespace tributary::test {
namespace {

class LongSoak : public ModelSoak {};

TEST_F(LongSoak, NoAnswerIsWrongAndNothingIsLost) {
  ModelSoakOptions options{.seed = absl::GetFlag(FLAGS_seed),
                           .hosts = absl::GetFlag(FLAGS_hosts),
                           .faults = absl::GetFlag(FLAGS_faults),
                           .duration = absl::ToChronoSeconds(absl::GetFlag(FLAGS_duration))};
  for (const std::string& name : absl::GetFlag(FLAGS_kinds)) {
    FaultKind kind{};
    ASSERT_TRUE(ParseFaultKind(name, &kind)) << "--kinds: there is no " << name;
    options.kinds.push_back(kind);
  }
  for (int kind = 0; options.kinds.size() < kFaultKinds && absl::GetFlag(FLAGS_kinds).empty();
       ++kind) {
    options.kinds.push_back(static_cast<FaultKind>(kind));
  }
  Soak(options);
  PrintCounts();
}

}  // namespace
}  // namespace tributary::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  return RUN_ALL_TESTS();
}
