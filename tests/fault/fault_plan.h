// Which faults a soak makes, and in which order: it follows from a seed, so that a run can be
// repeated.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tributary::test {

enum class FaultKind : uint8_t {
  kKillWorker,        // SIGKILL; another is started in its place
  kPauseWorker,       // SIGSTOP, and later SIGCONT
  kStopWorker,        // SIGTERM; another is started in its place
  kOtherBuild,        // the same, and the other one is of the build before
  kKillCoordinator,   // SIGKILL; another is started
  kPauseCoordinator,  // SIGSTOP, and later SIGCONT
  kStopCoordinator,   // SIGTERM; another is started
  kRollingRestart,    // all workers, and then the coordinator, by SIGTERM
  kTornJournal,       // the coordinator is killed, and the end of its journal is cut off
  kGarbledJournal,    // the coordinator is killed, and the end of its journal is overwritten
  kSlowLink,          // between a worker and the coordinator, everything arrives later
  kCutLink,           // between a worker and the coordinator, nothing arrives
  kFullDisk,          // the journal's disk is full while a worker is killed
  kMemoryPressure,    // caches are asked for that the workers have no memory for
  kResize,            // the number of workers changes, and changes back
  kKilledResize,      // the same, and a worker is killed meanwhile
  kPartedPeer,        // between a worker and the others, nothing arrives
  kClockJump,         // the wall clock of the coordinator jumps
};
inline constexpr int kFaultKinds = 18;
const char* Name(FaultKind kind);  // "kill-worker"
// Whether there is a kind of that name.
bool ParseFaultKind(const std::string& name, FaultKind* kind);

struct Fault {
  FaultKind kind = FaultKind::kKillWorker;
  int rank = 0;  // of the worker that it hits
  // How long it lasts, or how late things arrive.
  std::chrono::milliseconds time{0};
  uint32_t bytes = 0;  // of the journal
  int workers = 0;     // that there are to be
  std::chrono::seconds jump{0};
};

std::string Describe(const Fault& fault);  // "kill-worker 2"

class FaultPlan {
 public:
  // At least one kind.
  FaultPlan(uint64_t seed, int workers, std::vector<FaultKind> kinds)
      : random_(seed), workers_(workers), kinds_(std::move(kinds)) {}

  // Every kind comes once before any comes again.
  Fault Next();

 private:
  int64_t Between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }

  std::mt19937_64 random_;
  const int workers_;
  const std::vector<FaultKind> kinds_;
  std::vector<FaultKind> left_;  // of this round, in reverse order
};

}  // namespace tributary::test
