#include "tests/fault/fault_plan.h"

#include <algorithm>

namespace tributary::test {
namespace {

constexpr std::array<const char*, kFaultKinds> kNames = {
    "kill-worker",      "pause-worker",      "stop-worker",      "other-build",
    "kill-coordinator", "pause-coordinator", "stop-coordinator", "rolling-restart",
    "torn-journal",     "garbled-journal",   "slow-link",        "cut-link",
    "full-disk",        "memory-pressure",   "resize",           "killed-resize",
    "parted-peer",      "clock-jump"};

bool HitsAWorker(FaultKind kind) {
  switch (kind) {
    case FaultKind::kKillWorker:
    case FaultKind::kPauseWorker:
    case FaultKind::kStopWorker:
    case FaultKind::kOtherBuild:
    case FaultKind::kSlowLink:
    case FaultKind::kCutLink:
    case FaultKind::kFullDisk:
    case FaultKind::kKilledResize:
    case FaultKind::kPartedPeer:
      return true;
    default:
      return false;
  }
}

bool Lasts(FaultKind kind) {
  return kind == FaultKind::kPauseWorker || kind == FaultKind::kPauseCoordinator ||
         kind == FaultKind::kSlowLink || kind == FaultKind::kCutLink ||
         kind == FaultKind::kPartedPeer || kind == FaultKind::kKilledResize;
}

}  // namespace

const char* Name(FaultKind kind) { return kNames[static_cast<size_t>(kind)]; }

bool ParseFaultKind(const std::string& name, FaultKind* kind) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) return false;
  *kind = static_cast<FaultKind>(found - kNames.begin());
  return true;
}

std::string Describe(const Fault& fault) {
  std::string text = Name(fault.kind);
  if (HitsAWorker(fault.kind)) text += " rank " + std::to_string(fault.rank);
  if (Lasts(fault.kind)) text += " " + std::to_string(fault.time.count()) + " ms";
  if (fault.bytes > 0) text += " " + std::to_string(fault.bytes) + " bytes";
  if (fault.workers > 0) text += " to " + std::to_string(fault.workers) + " workers";
  if (fault.jump.count() != 0) text += " " + std::to_string(fault.jump.count()) + " s";
  return text;
}

Fault FaultPlan::Next() {
  if (left_.empty()) {
    left_ = kinds_;
    std::shuffle(left_.begin(), left_.end(), random_);
  }
  Fault fault{.kind = left_.back(), .rank = static_cast<int>(Between(0, workers_ - 1))};
  left_.pop_back();
  switch (fault.kind) {
    case FaultKind::kPauseWorker:
    case FaultKind::kCutLink:
      // A worker that is silent for 5 s is taken for dead: sometimes it is, and sometimes not.
      fault.time = std::chrono::milliseconds(Between(100, 7'000));
      break;
    case FaultKind::kPartedPeer:
      fault.time = std::chrono::milliseconds(Between(100, 5'000));
      break;
    case FaultKind::kKilledResize:
      fault.time = std::chrono::milliseconds(Between(0, 300));
      [[fallthrough]];
    case FaultKind::kResize: {
      constexpr int kOthers[] = {2, 3, 5, 6};
      fault.workers = kOthers[Between(0, 3)];
      break;
    }
    case FaultKind::kClockJump:
      fault.jump = std::chrono::seconds(Between(1, 100'000) * (Between(0, 1) == 0 ? 1 : -1));
      break;
    case FaultKind::kPauseCoordinator:
      fault.time = std::chrono::milliseconds(Between(100, 7'000));
      break;
    case FaultKind::kSlowLink:
      fault.time = std::chrono::milliseconds(Between(1, 100));
      break;
    case FaultKind::kTornJournal:
    case FaultKind::kGarbledJournal:
      fault.bytes = static_cast<uint32_t>(Between(1, 8'192));
      break;
    default:
      break;
  }
  return fault;
}

}  // namespace tributary::test
