#include "service/client/mailbox_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/rpc/pass_descriptor.h"
#include "base/rpc/unix_address.h"
#include "base/status/status_macros.h"

namespace tributary::client {
namespace {

using Clock = std::chrono::steady_clock;

absl::Status MailboxFailure(absl::string_view what, int error) {
  return absl::UnavailableError(
      absl::StrCat("the session's mailbox: ", what, ": ", std::strerror(error)));
}

// A mailbox that could be made shorter would end this process when it is.
bool IsWhole(int file, size_t bytes) {
  struct stat info {};
  const int seals = fcntl(file, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(file, &info) == 0 &&
         info.st_size >= 0 && static_cast<uint64_t>(info.st_size) >= bytes;
}

// Whether all that the layout names lies in the mailbox, and its words where words may lie.
bool IsSound(const mailbox::Layout& layout) {
  const auto is_word = [&layout](size_t offset) {
    return offset % sizeof(uint32_t) == 0 && offset < layout.bytes &&
           layout.bytes - offset >= sizeof(uint32_t);
  };
  if (layout.slots < 1 || !is_word(layout.arrived) || !is_word(layout.finished) ||
      !is_word(layout.status) || !is_word(layout.service_sleeps) || !is_word(layout.host_sleeps)) {
    return false;
  }
  const bool ordered = layout.q <= layout.k && layout.k <= layout.v && layout.v <= layout.output &&
                       layout.output <= layout.lse && layout.lse <= layout.slot_bytes;
  const auto slots = static_cast<size_t>(layout.slots);
  return ordered && layout.first_slot <= layout.bytes &&
         layout.slot_bytes <= (layout.bytes - layout.first_slot) / slots;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MailboxMemory>> MailboxMemory::Fetch(const std::string& socket,
                                                                    const std::string& token,
                                                                    const mailbox::Layout& layout,
                                                                    Clock::time_point deadline) {
  if (!IsSound(layout)) return absl::InternalError("the service sent no layout of a mailbox");
  TRIBUTARY_ASSIGN_OR_RETURN(const int connection, ConnectToUnixBy(socket, deadline));
  const absl::Cleanup close_connection = [connection] { close(connection); };
  const ssize_t sent = send(connection, token.data(), token.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(token.size())) return MailboxFailure("sending", errno);
  TRIBUTARY_RETURN_IF_ERROR(AwaitReadable(connection, deadline));
  const absl::StatusOr<std::optional<int>> received = ReceiveDescriptor(connection);
  if (!received.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the session's mailbox: ", received.status().message()));
  }
  if (!received->has_value()) {
    return absl::UnavailableError("the service has no mailbox for this session any more");
  }
  const int file = **received;
  const absl::Cleanup close_file = [file] { close(file); };
  if (!IsWhole(file, layout.bytes)) {
    return absl::InternalError("the service sent no sealed mailbox of the size that it states");
  }
  void* const data = mmap(nullptr, layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) return MailboxFailure("mapping", errno);
  return std::unique_ptr<MailboxMemory>(new MailboxMemory(layout, static_cast<std::byte*>(data)));
}

MailboxMemory::~MailboxMemory() { munmap(data_, layout_.bytes); }

}  // namespace tributary::client
