// The mailbox of a session in shared memory, as its host has it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/mailbox/cpu_doorbell.h"
#include "base/mailbox/layout.h"

namespace tributary::client {

class MailboxMemory {
 public:
  // Shows the secret at the socket and maps what comes back. UNAVAILABLE: nobody is there, or the
  // secret is not good any more. DEADLINE_EXCEEDED. INTERNAL: it is not what the layout says.
  static absl::StatusOr<std::unique_ptr<MailboxMemory>> Fetch(
      const std::string& socket, const std::string& token, const mailbox::Layout& layout,
      std::chrono::steady_clock::time_point deadline);
  ~MailboxMemory();
  MailboxMemory(const MailboxMemory&) = delete;
  MailboxMemory& operator=(const MailboxMemory&) = delete;

  const mailbox::Layout& layout() const { return layout_; }
  mailbox::CpuDoorbell arrived() const {
    return {Word(layout_.arrived), Word(layout_.service_sleeps)};
  }
  mailbox::CpuDoorbell finished() const {
    return {Word(layout_.finished), Word(layout_.host_sleeps)};
  }
  uint32_t* status() const { return Word(layout_.status); }
  std::byte* SlotOf(uint32_t count) const { return data_ + layout_.SlotOf(count); }

 private:
  MailboxMemory(const mailbox::Layout& layout, std::byte* data) : layout_(layout), data_(data) {}
  uint32_t* Word(size_t offset) const { return reinterpret_cast<uint32_t*>(data_ + offset); }

  const mailbox::Layout layout_;
  std::byte* const data_;
};

}  // namespace tributary::client
