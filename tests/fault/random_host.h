// A host of several sequences whose calls are drawn at random. Every reply is checked against
// float64 attention, and a call whose outcome is unknown is repeated until it is known.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/fault/load.h"

namespace tributary::test {

enum class HostOperation : uint8_t { kOpen, kStep, kPrompt, kLook, kTruncate, kFork, kClose };
inline constexpr int kHostOperations = 7;
const char* Name(HostOperation operation);

// Used from one thread; what it has counted may be read from any.
class RandomHost {
 public:
  // Its sequences have ids that no host of another number has.
  RandomHost(std::shared_ptr<v1::AttentionService::Stub> stub, int number, uint64_t seed);

  // Calls until `stop`, or until a call ends as none should: then the test has failed.
  void Run(const std::atomic<bool>& stop);
  // Attends over all that is held, and closes it.
  void CheckAndClose();

  int64_t operations() const { return done_; }
  int64_t operations(HostOperation operation) const {
    return done_of_[static_cast<size_t>(operation)];
  }
  int64_t interrupted() const { return interrupted_; }  // calls that had to be repeated

 private:
  void DoOne();
  // Repeats a call until it is done. False when it failed for good.
  bool Finish(HostOperation operation, const std::function<grpc::Status()>& call);
  void OpenOne();
  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  std::unique_ptr<SequenceHost> NewSequence();

  const std::shared_ptr<v1::AttentionService::Stub> stub_;
  std::mt19937_64 random_;
  uint64_t next_id_;
  std::vector<std::unique_ptr<SequenceHost>> sequences_;
  bool failed_ = false;
  std::atomic<int64_t> done_ = 0;
  std::array<std::atomic<int64_t>, kHostOperations> done_of_{};
  std::atomic<int64_t> interrupted_ = 0;
};

}  // namespace tributary::test
