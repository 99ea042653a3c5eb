#include "service/api/mailbox_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rpc/listening.h"
#include "base/rpc/pass_descriptor.h"
#include "base/rpc/unix_address.h"
#include "base/status/status_macros.h"

namespace tributary::service {
namespace {

// When the system has nothing to give.
constexpr std::chrono::milliseconds kRest{10};

// Who may connect to the one may connect to the other. Where the service may not give the socket to
// the other's group, that group cannot connect: the secret alone does not help it.
void CopyAccess(const std::string& from, const std::string& to) {
  struct stat info {};
  if (stat(from.c_str(), &info) != 0) return;
  if (chown(to.c_str(), info.st_uid, info.st_gid) != 0) return;
  chmod(to.c_str(), info.st_mode & 07777);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MailboxSocket>> MailboxSocket::Listen(absl::string_view service_path,
                                                                     MailboxHandout* handout) {
  const std::string path = MailboxSocketOf(service_path);
  TRIBUTARY_RETURN_IF_ERROR(CheckFree(absl::StrCat("unix:", path)));
  unlink(path.c_str());  // of a service that was killed
  TRIBUTARY_ASSIGN_OR_RETURN(const int listener, BindToUnix(path, SOCK_NONBLOCK));
  CopyAccess(std::string(service_path), path);
  const int wake = eventfd(0, EFD_CLOEXEC);
  std::unique_ptr<MailboxSocket> socket(new MailboxSocket(path, listener, wake, handout));
  if (wake < 0 || listen(listener, kMostConnections) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen at ", path, ": ", std::strerror(errno)));
  }
  socket->thread_ = std::thread([s = socket.get()] { s->Run(); });
  return socket;
}

MailboxSocket::~MailboxSocket() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!write(wake_, &one, sizeof(one)));  // an eventfd takes the first
    thread_.join();
  }
  for (const Connection& connection : connections_) close(connection.file);
  unlink(path_.c_str());
  close(listener_);
  if (wake_ >= 0) close(wake_);
}

void MailboxSocket::Run() {
  std::vector<pollfd> files;
  while (true) {
    files.assign({{wake_, POLLIN, 0}, {listener_, POLLIN, 0}});
    for (const Connection& connection : connections_) files.push_back({connection.file, POLLIN, 0});
    int timeout_ms = -1;
    if (!connections_.empty()) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(connections_.front().until - Clock::now());
      timeout_ms = static_cast<int>(std::max<int64_t>(left.count(), 0));
    }
    if (poll(files.data(), files.size(), timeout_ms) < 0) {
      if (errno != EINTR) std::this_thread::sleep_for(kRest);
      continue;
    }
    if (files[0].revents != 0) return;
    const Clock::time_point now = Clock::now();
    size_t index = 2;
    connections_.remove_if([&](Connection& connection) {
      const bool ready = files[index++].revents != 0;
      if (connection.until > now && (!ready || Serve(&connection))) return false;
      close(connection.file);
      return true;
    });
    if (files[1].revents != 0) Accept();
  }
}

void MailboxSocket::Accept() {
  const int file = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (file < 0) {
    // Out of descriptors: not at once again.
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(kRest);
    return;
  }
  if (connections_.size() == kMostConnections) {
    close(connections_.front().file);
    connections_.pop_front();
  }
  connections_.push_back({.file = file, .until = Clock::now() + kPatience});
}

bool MailboxSocket::Serve(Connection* connection) {
  char bytes[MailboxHandout::kTokenBytes];
  const ssize_t got =
      recv(connection->file, bytes, sizeof(bytes) - connection->token.size(), MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  connection->token.append(bytes, static_cast<size_t>(got));
  if (connection->token.size() < MailboxHandout::kTokenBytes) return true;
  if (const auto mailbox = handout_.Take(connection->token, Clock::now())) {
    SendDescriptor(connection->file, mailbox->descriptor());
  }
  return false;
}

}  // namespace tributary::service
