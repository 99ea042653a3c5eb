// Memory that another process shares, mapped so that this process outlives whatever becomes of it.
//
// The owner of a shared memory object may cut it short at any time, and a machine may run out of
// memory for its pages. Who then touches a page that is not there is sent SIGBUS, which ends the
// process. Here a handler of that signal puts empty memory of this process in the place of the
// whole mapping, notes that it has been cut short, and lets the access go on. So every thread may
// read and write a mapping without looking, at the speed of memory, and whoever used it asks
// afterwards whether what was read counts.
//
// That holds for accesses of code. A system call that is handed the bytes (a write to a socket)
// fails with EFAULT instead: bytes that are to be sent are copied first.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>

namespace tributary::service {

// Pins memory of this process for as long as the result lives, so that the GPUs of its workers copy
// from and to the memory by themselves. Null where memory cannot be pinned.
using MemoryPinner = std::function<std::shared_ptr<const void>(std::byte* data, size_t bytes)>;

// Thread safe.
class GuardedMapping {
 public:
  // Maps the first `bytes` bytes of an open file, for reading and writing. Null when the system
  // refuses, for the reason in errno. The file may be closed afterwards.
  static std::unique_ptr<GuardedMapping> Create(int file, size_t bytes);
  // By then nobody may use the memory any more.
  ~GuardedMapping();
  GuardedMapping(const GuardedMapping&) = delete;
  GuardedMapping& operator=(const GuardedMapping&) = delete;

  // Pins the bytes from `first` on. Called before anybody else uses the mapping.
  void Pin(const MemoryPinner& pinner, size_t first = 0);
  bool pinned() const { return pin_ != nullptr; }

  std::byte* data() const { return data_; }
  // Whether some access found a page missing. From then on the memory is no longer the object's:
  // what is read means nothing and what is written reaches nobody. Accesses that ended before the
  // question was asked are covered by the answer.
  bool cut_short() const { return cut_short_.load(); }

 private:
  friend class GuardedMappings;
  GuardedMapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}

  std::byte* const data_;
  const size_t bytes_;
  std::shared_ptr<const void> pin_;
  std::atomic<bool> cut_short_{false};
  // The list of all mappings of the process, for the handler.
  GuardedMapping* next_ = nullptr;
  GuardedMapping* previous_ = nullptr;
};

}  // namespace tributary::service
