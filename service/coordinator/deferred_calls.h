// Calls that are decided while a lock is held and made after it is released.
//
// Not thread safe: the lock's holder adds calls, and whoever took the list away runs them.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace tributary::service {

class DeferredCalls {
 public:
  void Add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  // The call answers `count` calls of the API that were accepted.
  void AddAnswer(std::function<void()> call, int64_t count) {
    answers_ += count;
    Add(std::move(call));
  }

  // Makes the calls in the order in which they were added.
  void Run() const {
    for (const auto& call : calls_) call();
  }
  // How many accepted calls of the API these calls answer.
  int64_t answers() const { return answers_; }

 private:
  absl::InlinedVector<std::function<void()>, 2> calls_;
  int64_t answers_ = 0;
};

}  // namespace tributary::service
