#include "tests/fault/random_host.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace tributary::test {
namespace {

// A call is repeated for so long at most: several faults may follow on each other.
constexpr std::chrono::minutes kRepeatFor{3};
constexpr std::chrono::milliseconds kPause{50};
constexpr uint64_t kIdsPerHost = 1'000'000;

constexpr size_t kMostSequences = 4;
constexpr int64_t kMostTokens = 300;
constexpr int64_t kFirstTokens = 40;
// A call of more than 64 tokens sees them as they came.
constexpr int64_t kLeastPrompt = 65, kMostPrompt = 90;

bool OutcomeIsUnknown(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::ABORTED ||
         status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
}

}  // namespace

const char* Name(HostOperation operation) {
  constexpr const char* kNames[kHostOperations] = {"open",     "step", "prompt", "look",
                                                   "truncate", "fork", "close"};
  return kNames[static_cast<int>(operation)];
}

RandomHost::RandomHost(std::shared_ptr<v1::AttentionService::Stub> stub, int number, uint64_t seed)
    : stub_(std::move(stub)),
      random_(seed + static_cast<uint64_t>(number)),
      next_id_(static_cast<uint64_t>(number + 1) * kIdsPerHost) {}

std::unique_ptr<SequenceHost> RandomHost::NewSequence() {
  return std::make_unique<SequenceHost>(stub_, next_id_++);
}

void RandomHost::Run(const std::atomic<bool>& stop) {
  while (!stop && !failed_) DoOne();
}

bool RandomHost::Finish(HostOperation operation, const std::function<grpc::Status()>& call) {
  const auto until = std::chrono::steady_clock::now() + kRepeatFor;
  for (;;) {
    const grpc::Status status = call();
    if (status.ok()) {
      ++done_of_[static_cast<size_t>(operation)];
      ++done_;
      return true;
    }
    if (!OutcomeIsUnknown(status) || std::chrono::steady_clock::now() > until) {
      ADD_FAILURE() << Name(operation) << " ended with code " << status.error_code() << ": "
                    << status.error_message();
      failed_ = true;
      return false;
    }
    ++interrupted_;
    std::this_thread::sleep_for(kPause);
  }
}

// A coordinator that restarts forgets sequences without tokens, so none stays so.
void RandomHost::OpenOne() {
  auto sequence = NewSequence();
  const auto tokens = static_cast<int>(Draw(1, kFirstTokens));
  bool open = false;
  const bool opened = Finish(HostOperation::kOpen, [&] {
    if (!open) {
      const grpc::Status status = sequence->Open();
      if (!status.ok()) return status;
      open = true;
    }
    const grpc::Status step = sequence->Step(tokens);
    if (step.error_code() != grpc::StatusCode::NOT_FOUND) return step;
    open = false;  // it was forgotten in between: once more
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, step.error_message());
  });
  if (opened) sequences_.push_back(std::move(sequence));
}

void RandomHost::DoOne() {
  const bool room = sequences_.size() < kMostSequences;
  if (sequences_.empty() || (room && Draw(1, 100) <= 5)) return OpenOne();
  const auto at = static_cast<size_t>(Draw(0, static_cast<int64_t>(sequences_.size()) - 1));
  SequenceHost& sequence = *sequences_[at];
  const int64_t length = sequence.length();
  const int64_t dice = Draw(1, 100);
  if (length > kMostTokens || dice <= 12) {
    const int64_t to = Draw(1, length);
    Finish(HostOperation::kTruncate, [&] { return sequence.Truncate(to); });
  } else if (dice <= 20 && room) {
    auto child = NewSequence();
    const int64_t shared = Draw(1, length);
    if (Finish(HostOperation::kFork, [&] { return sequence.Fork(child.get(), shared); })) {
      sequences_.push_back(std::move(child));
    }
  } else if (dice <= 24) {
    const bool closed = Finish(HostOperation::kClose, [&, before = interrupted_.load()] {
      const grpc::Status status = sequence.Close();
      // An attempt before this one has closed it.
      const bool gone = status.error_code() == grpc::StatusCode::NOT_FOUND;
      return gone && interrupted_ > before ? grpc::Status::OK : status;
    });
    if (closed) sequences_.erase(sequences_.begin() + static_cast<ptrdiff_t>(at));
  } else if (dice <= 50) {
    const auto rows = static_cast<int>(Draw(1, std::min<int64_t>(length, 4)));
    Finish(HostOperation::kLook, [&] { return sequence.Look(rows); });
  } else if (dice <= 53) {
    const auto tokens = static_cast<int>(Draw(kLeastPrompt, kMostPrompt));
    Finish(HostOperation::kPrompt, [&] { return sequence.Step(tokens); });
  } else {
    const auto tokens = static_cast<int>(Draw(1, 5));
    Finish(HostOperation::kStep, [&] { return sequence.Step(tokens); });
  }
}

void RandomHost::CheckAndClose() {
  for (const auto& sequence : sequences_) {
    if (failed_) return;
    const auto all = static_cast<int>(sequence->length());
    Finish(HostOperation::kLook, [&] { return sequence->Look(all); });
    Finish(HostOperation::kClose, [&] { return sequence->Close(); });
  }
  sequences_.clear();
}

}  // namespace tributary::test
