// Adds up the time spent in another Attention.
#pragma once

#include <chrono>

#include "examples/tinylm/attention.h"

namespace tributary::tinylm {

class TimedAttention final : public Attention {
 public:
  explicit TimedAttention(Attention& inner) : inner_(inner) {}

  absl::Status Attend(int32_t layer, int64_t first_position, const Matrix& q, const Matrix& k,
                      const Matrix& v, Matrix& out) override {
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = inner_.Attend(layer, first_position, q, k, v, out);
    spent_ += std::chrono::steady_clock::now() - begin;
    return status;
  }
  absl::Status Truncate(int64_t length) override { return inner_.Truncate(length); }

  double seconds() const { return spent_.count(); }

 private:
  Attention& inner_;
  std::chrono::duration<double> spent_{0};
};

}  // namespace tributary::tinylm
