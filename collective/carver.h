// Cuts a workspace into arrays. Without a base it only counts, so that the size of a workspace
// comes from the code that lays it out.
#pragma once

#include <cstddef>

namespace tributary::collective {

class Carver {
 public:
  explicit Carver(std::byte* base = nullptr) : base_(base) {}

  // The next array of `count` elements, aligned to kAlignment as far as the base is; null where
  // there is no base.
  template <typename T = std::byte>
  T* Take(size_t count) {
    const size_t at = bytes_;
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
  }
  // Of everything taken so far.
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 256;
  std::byte* const base_;
  size_t bytes_ = 0;
};

}  // namespace tributary::collective
