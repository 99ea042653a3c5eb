// The mailbox of a session in shared memory: an object without a name that the service owns, and
// that nobody can make shorter or longer. The host gets its descriptor (mailbox_handout.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "base/mailbox/cpu_doorbell.h"
#include "base/mailbox/layout.h"
#include "service/data/guarded_mapping.h"
#include "worker/host_memory.h"

namespace tributary::service {

// The host may change its contents at any time, so no reader takes a size or a place from them.
class HostMailbox {
 public:
  // Makes a mailbox that is backed by memory as a whole, and zero. `pinner`, which may be empty,
  // pins it. `available` returns the bytes that the machine would still give. RESOURCE_EXHAUSTED
  // when they are too few.
  static absl::StatusOr<std::shared_ptr<HostMailbox>> Create(
      const mailbox::Layout& layout, const MemoryPinner& pinner = {},
      const std::function<size_t()>& available = [] { return worker::AvailableHostMemory(); });
  ~HostMailbox();
  HostMailbox(const HostMailbox&) = delete;
  HostMailbox& operator=(const HostMailbox&) = delete;

  const mailbox::Layout& layout() const { return layout_; }
  int descriptor() const { return file_; }

  mailbox::CpuDoorbell arrived() const {
    return {Word(layout_.arrived), Word(layout_.service_sleeps)};
  }
  mailbox::CpuDoorbell finished() const {
    return {Word(layout_.finished), Word(layout_.host_sleeps)};
  }
  uint32_t* status() const { return Word(layout_.status); }
  // The slot of the session's layer number `count`.
  std::byte* SlotOf(uint32_t count) const { return memory_->data() + layout_.SlotOf(count); }
  bool pinned() const { return memory_->pinned(); }
  // Whether the machine had no memory left for some page when it was touched.
  bool lost() const { return memory_->cut_short(); }

 private:
  HostMailbox(const mailbox::Layout& layout, int file, std::unique_ptr<GuardedMapping> memory);
  uint32_t* Word(size_t offset) const {
    return reinterpret_cast<uint32_t*>(memory_->data() + offset);
  }

  const mailbox::Layout layout_;
  const int file_;
  const std::unique_ptr<GuardedMapping> memory_;
};

}  // namespace tributary::service
