// Cancelled calls and lost connections for as long as one likes, and a verdict: after a warm-up the
// processes' memory does not grow, their descriptors are as many as before, no page is lost.
//
//   fault_soak --clients=64 --duration=10m --injections=1000
//
// The warm-up makes injections as fast as it can, so that what grows up to a bound (pools, threads,
// heap that is kept, rings) has reached it, and then as often as the rest of the run, so that it
// has settled. What is measured afterwards spreads its injections evenly. Memory is judged by the
// slope of a line through the samples, times the time measured.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/time.h"
#include "tests/fault/cancellation_rig.h"
#include "tests/support/trend.h"

ABSL_FLAG(int, clients, 64, "connections, each with a sequence of its own");
ABSL_FLAG(int, ranks, 2, "worker processes");
ABSL_FLAG(int, injections, 1000, "cancelled or expired calls and lost connections, while measured");
ABSL_FLAG(absl::Duration, duration, absl::Minutes(10), "how long it is measured");
ABSL_FLAG(int, warm_up_injections, 20'000, "before that, as fast as they come");
ABSL_FLAG(absl::Duration, warm_up, absl::Minutes(2), "then, at the rate that is measured");
ABSL_FLAG(absl::Duration, pause, absl::Milliseconds(20), "of a client between its calls");
ABSL_FLAG(absl::Duration, sample, absl::Seconds(5), "between two samples");
ABSL_FLAG(absl::Duration, print, absl::Minutes(1), "between two lines of the table");
ABSL_FLAG(double, tolerance_kib, 512,
          "growth of a process that passes for none, over the duration");
ABSL_FLAG(uint64_t, seed, 20240607, "of what is injected");

namespace tributary::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{60};

milliseconds FlagOf(const absl::Flag<absl::Duration>& flag) {
  return absl::ToChronoMilliseconds(absl::GetFlag(flag));
}

// Prints and keeps what the processes take.
class Watch {
 public:
  explicit Watch(CancellationRig* rig)
      : rig_(*rig), memory_(1 + static_cast<size_t>(absl::GetFlag(FLAGS_ranks))) {
    std::printf("%8s %10s %10s %16s %16s %8s %6s %20s\n", "time s", "injections", "calls",
                "coordinator KiB", "of which heap", "threads", "files", "workers KiB");
  }

  void Take() {
    const double now = std::chrono::duration<double>(Clock::now() - begin_).count();
    std::vector<Usage> usage = {rig_.UsageOfCoordinator()};
    for (int rank = 0; rank + 1 < static_cast<int>(memory_.size()); ++rank) {
      usage.push_back(rig_.UsageOfWorker(rank));
    }
    for (size_t i = 0; i < usage.size(); ++i) {
      memory_[i].push_back({now, static_cast<double>(usage[i].resident) / 1024});
    }
    if (now < next_line_) return;
    next_line_ += std::chrono::duration<double>(FlagOf(FLAGS_print)).count();
    std::string workers;
    for (size_t i = 1; i < usage.size(); ++i) {
      workers += " " + std::to_string(usage[i].resident >> 10);
    }
    std::printf("%8.0f %10d %10lld %16zu %16zu %8zu %6zu %20s\n", now, rig_.load().injections(),
                static_cast<long long>(rig_.load().calls()), usage[0].resident >> 10,
                usage[0].anonymous >> 10, usage[0].threads, usage[0].files, workers.c_str());
    std::fflush(stdout);
  }

  // Whether each process kept its size, over all samples taken.
  void ExpectFlat(int injections) const {
    const double tolerance = absl::GetFlag(FLAGS_tolerance_kib);
    for (size_t i = 0; i < memory_.size(); ++i) {
      const std::string name = i == 0 ? "coordinator" : "worker " + std::to_string(i - 1);
      const double growth =
          TheilSenSlope(memory_[i]) * (memory_[i].back().x - memory_[i].front().x);
      std::printf("%s: %+.0f KiB by its slope, %+.2f bytes an injection, of %zu samples\n",
                  name.c_str(), growth, growth * 1024 / injections, memory_[i].size());
      EXPECT_LT(growth, tolerance) << name << " grows";
    }
  }

 private:
  CancellationRig& rig_;
  const Clock::time_point begin_ = Clock::now();
  double next_line_ = 0;
  std::vector<std::vector<Sample>> memory_;  // coordinator, then workers
};

TEST(Soak, MemoryDescriptorsAndPagesStayAsTheyAre) {
  const int injections = absl::GetFlag(FLAGS_injections);
  CancellationRig rig(absl::GetFlag(FLAGS_ranks), absl::GetFlag(FLAGS_clients),
                      absl::GetFlag(FLAGS_seed));
  std::printf("warm-up\n");
  CancellingLoad::Phase phase = {.injections = absl::GetFlag(FLAGS_warm_up_injections),
                                 .sample_every = FlagOf(FLAGS_sample)};
  {
    Watch watch(&rig);
    rig.load().Run(phase, [&] { watch.Take(); });
    phase.duration = FlagOf(FLAGS_warm_up);
    phase.injections =
        static_cast<int>(injections * absl::FDivDuration(absl::GetFlag(FLAGS_warm_up),
                                                         absl::GetFlag(FLAGS_duration)));
    phase.pause = FlagOf(FLAGS_pause);
    rig.load().Run(phase, [&] { watch.Take(); });
  }
  rig.ExpectRest();
  const Usage before = rig.UsageOfCoordinator();
  const int64_t calls_before = rig.load().calls(), checked_before = rig.load().checked_calls();

  std::printf("measured\n");
  Watch watch(&rig);
  phase.injections = injections;
  phase.duration = FlagOf(FLAGS_duration);
  rig.load().Run(phase, [&] { watch.Take(); });
  rig.ExpectRest();
  EXPECT_TRUE(
      Eventually(kPatience, [&] { return rig.UsageOfCoordinator().files == before.files; }));
  const Usage after = rig.UsageOfCoordinator();
  watch.ExpectFlat(injections);
  std::printf(
      "at rest: coordinator %zu -> %zu KiB, descriptors %zu -> %zu, threads %zu -> %zu; "
      "%lld calls to their end, %lld answers checked\n",
      before.resident >> 10, after.resident >> 10, before.files, after.files, before.threads,
      after.threads, static_cast<long long>(rig.load().calls() - calls_before),
      static_cast<long long>(rig.load().checked_calls() - checked_before));
  rig.ExpectEnd();
}

}  // namespace
}  // namespace tributary::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  absl::ParseCommandLine(argc, argv);
  return RUN_ALL_TESTS();
}
