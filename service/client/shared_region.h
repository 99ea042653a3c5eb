// A POSIX shared memory object of this process, locked for as long as the process has it: by that
// the service knows when nobody is left who could use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace tributary::client {

class SharedRegion {
 public:
  // Creates an object under a random name, `size` (> 0) bytes, all of them backed by memory:
  // RESOURCE_EXHAUSTED when the machine cannot, instead of a SIGBUS at first use.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Create(uint64_t size);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Removes the name. Who has mapped the object keeps it; nothing is left behind when the processes
  // end, however they end. The destructor does it too.
  void Unlink();

  const std::string& name() const { return name_; }  // of the registration
  std::string key() const { return "/" + name_; }    // for shm_open
  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  SharedRegion(std::string name, int file, std::byte* data, uint64_t size)
      : name_(std::move(name)), file_(file), data_(data), size_(size) {}

  const std::string name_;
  const int file_;
  std::byte* const data_;
  const uint64_t size_;
  bool linked_ = true;
};

}  // namespace tributary::client
