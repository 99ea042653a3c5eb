// A file descriptor that is closed with its owner.
#pragma once

#include <unistd.h>

#include <utility>

namespace tributary {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int file) : file_(file) {}
  Descriptor(Descriptor&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Descriptor() {
    if (file_ >= 0) close(file_);
  }

  bool open() const { return file_ >= 0; }
  int get() const { return file_; }
  // Gives the descriptor to the caller, who closes it.
  int Release() { return std::exchange(file_, -1); }

 private:
  int file_ = -1;
};

}  // namespace tributary
