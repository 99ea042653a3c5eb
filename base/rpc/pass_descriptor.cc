#include "base/rpc/pass_descriptor.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tributary {
namespace {

// A message of some bytes, with room for one descriptor and not for two: what has no room, the
// system closes. It points into itself, and stays where it is.
struct DescriptorMessage {
  DescriptorMessage(char* bytes, size_t count) : data{.iov_base = bytes, .iov_len = count} {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_LEN(sizeof(int));
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  // The descriptor that came.
  Descriptor Take() const {
    const cmsghdr* const header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS ||
        header->cmsg_len != CMSG_LEN(sizeof(int))) {
      return Descriptor();
    }
    int file = -1;
    std::memcpy(&file, CMSG_DATA(header), sizeof(file));
    return Descriptor(file);
  }

  iovec data;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

}  // namespace

void SendDescriptor(int connection, int descriptor) {
  static_cast<void>(SendWithDescriptor(connection, absl::string_view("\x01", 1), descriptor));
}

bool SendWithDescriptor(int connection, absl::string_view bytes, int descriptor) {
  DescriptorMessage of(const_cast<char*>(bytes.data()), bytes.size());  // it is only read
  cmsghdr* const header = CMSG_FIRSTHDR(&of.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(descriptor));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
  return sendmsg(connection, &of.message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

absl::Status AwaitReadable(int connection, std::chrono::steady_clock::time_point deadline) {
  using Clock = std::chrono::steady_clock;
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd file{connection, POLLIN, 0};
    const int ready =
        poll(&file, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) {
      return absl::UnavailableError(absl::StrCat("waiting: ", std::strerror(errno)));
    }
    if (Clock::now() >= deadline) {
      return absl::DeadlineExceededError("the service did not answer at its companion socket");
    }
  }
}

absl::StatusOr<std::optional<int>> ReceiveDescriptor(int connection) {
  char byte = 0;
  DescriptorMessage of(&byte, 1);
  const ssize_t got = recvmsg(connection, &of.message, MSG_CMSG_CLOEXEC);
  if (got < 0) return absl::UnavailableError(absl::StrCat("receiving: ", std::strerror(errno)));
  Descriptor descriptor = got == 0 ? Descriptor() : of.Take();
  if (!descriptor.open()) return std::nullopt;
  return descriptor.Release();
}

ReceivedBytes ReceiveWithDescriptor(int connection, std::span<char> bytes) {
  DescriptorMessage of(bytes.data(), bytes.size());
  ReceivedBytes received;
  received.count = recvmsg(connection, &of.message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received.count > 0) received.descriptor = of.Take();
  return received;
}

}  // namespace tributary
