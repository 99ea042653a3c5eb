// Shared memory of this process. The process holds a lock on it for as long as it has the memory,
// by which the service knows when nobody is left who could use it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/rpc/descriptor.h"

namespace tributary::client {

class SharedRegion {
 public:
  // Makes a POSIX object under a random name with `size` (> 0) bytes, all of them backed by memory.
  // RESOURCE_EXHAUSTED when the machine cannot, instead of a SIGBUS at first use.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> Create(uint64_t size);
  // Makes a memfd that nobody can make shorter or longer. It has no name in the system.
  static absl::StatusOr<std::unique_ptr<SharedRegion>> CreateSealed(uint64_t size);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Removes the name of a POSIX object. Processes that have mapped it keep it, and nothing is left
  // behind when they end, however they end. The destructor does it, too.
  void Unlink();

  const std::string& name() const { return name_; }  // of the registration
  std::string key() const { return "/" + name_; }    // a POSIX object's name for shm_open
  bool sealed() const { return lock_.open(); }
  // Of the memory. Whoever is given it does not thereby hold the lock.
  int descriptor() const { return file_.get(); }
  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  // For memory that is not mapped yet.
  SharedRegion(std::string name, uint64_t size) : name_(std::move(name)), size_(size) {}

  // Takes the memory, locks it and maps it. An error says which of these failed.
  absl::Status Take();

  const std::string name_;
  const uint64_t size_;
  Descriptor file_;
  Descriptor lock_;  // a memfd's own open description that holds the lock
  std::byte* data_ = nullptr;
  bool linked_ = false;
};

}  // namespace tributary::client
