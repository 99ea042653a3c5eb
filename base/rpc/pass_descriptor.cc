#include "base/rpc/pass_descriptor.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tributary {
namespace {

// A message of one byte, with room for a descriptor. It points into itself, and stays where it is.
struct DescriptorMessage {
  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 1;
  iovec data{.iov_base = &byte, .iov_len = 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

}  // namespace

void SendDescriptor(int connection, int descriptor) {
  DescriptorMessage of;
  cmsghdr* const header = CMSG_FIRSTHDR(&of.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(descriptor));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof(descriptor));
  static_cast<void>(sendmsg(connection, &of.message, MSG_NOSIGNAL | MSG_DONTWAIT));
}

absl::StatusOr<std::optional<int>> ReceiveDescriptor(int connection) {
  DescriptorMessage of;
  const ssize_t got = recvmsg(connection, &of.message, MSG_CMSG_CLOEXEC);
  if (got < 0) return absl::UnavailableError(absl::StrCat("receiving: ", std::strerror(errno)));
  int descriptor = -1;
  const cmsghdr* const header = CMSG_FIRSTHDR(&of.message);
  if (got == 0 || header == nullptr || header->cmsg_level != SOL_SOCKET ||
      header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(descriptor))) {
    return std::nullopt;
  }
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
  return descriptor;
}

}  // namespace tributary
