#include "service/api/companion_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>
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

absl::StatusOr<std::unique_ptr<CompanionSocket>> CompanionSocket::Listen(
    absl::string_view service_path, MailboxHandout* handout, MemoryDeposit* deposit) {
  const std::string path = CompanionSocketOf(service_path);
  TRIBUTARY_RETURN_IF_ERROR(CheckFree(absl::StrCat("unix:", path)));
  unlink(path.c_str());  // of a service that was killed
  TRIBUTARY_ASSIGN_OR_RETURN(const int listener, BindToUnix(path, SOCK_NONBLOCK));
  CopyAccess(std::string(service_path), path);
  const int wake = eventfd(0, EFD_CLOEXEC);
  std::unique_ptr<CompanionSocket> socket(
      new CompanionSocket(path, listener, wake, handout, deposit));
  if (wake < 0 || listen(listener, kMostConnections) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen at ", path, ": ", std::strerror(errno)));
  }
  socket->thread_ = std::thread([s = socket.get()] { s->Run(); });
  return socket;
}

CompanionSocket::~CompanionSocket() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!write(wake_, &one, sizeof(one)));  // an eventfd takes the first
    thread_.join();
  }
  unlink(path_.c_str());
  close(listener_);
  if (wake_ >= 0) close(wake_);
}

void CompanionSocket::Run() {
  std::vector<pollfd> files;
  while (true) {
    files.assign({{wake_, POLLIN, 0}, {listener_, POLLIN, 0}});
    for (const Connection& connection : connections_) {
      files.push_back({connection.file.get(), POLLIN, 0});
    }
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
      return connection.until <= now || (ready && !Serve(&connection));
    });
    if (files[1].revents != 0) Accept();
  }
}

void CompanionSocket::Accept() {
  Descriptor file(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!file.open()) {
    // Out of descriptors: not at once again.
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(kRest);
    return;
  }
  if (connections_.size() == kMostConnections) connections_.pop_front();
  Connection& connection = connections_.emplace_back();
  connection.file = std::move(file);
  connection.until = Clock::now() + kPatience;
}

bool CompanionSocket::Serve(Connection* connection) {
  char bytes[MailboxHandout::kTokenBytes];
  ReceivedBytes received = ReceiveWithDescriptor(
      connection->file.get(),
      std::span(bytes).first(MailboxHandout::kTokenBytes - connection->secret.size()));
  if (received.count < 0) return errno == EAGAIN || errno == EINTR;
  if (received.count == 0) return false;
  if (received.descriptor.open()) connection->memory = std::move(received.descriptor);
  connection->secret.append(bytes, static_cast<size_t>(received.count));
  if (connection->secret.size() < MailboxHandout::kTokenBytes) return true;
  if (connection->memory.open()) {
    Deposit(connection);
  } else if (const auto mailbox = handout_.Take(connection->secret, Clock::now())) {
    SendDescriptor(connection->file.get(), mailbox->descriptor());
  }
  return false;
}

void CompanionSocket::Deposit(Connection* connection) {
  const std::optional<uid_t> user = UserAt(connection->file.get());
  if (!user.has_value()) return;
  if (!deposit_.Put(connection->secret, std::move(connection->memory), *user, Clock::now())) return;
  const char taken = 1;
  static_cast<void>(
      send(connection->file.get(), &taken, sizeof(taken), MSG_NOSIGNAL | MSG_DONTWAIT));
}

}  // namespace tributary::service
