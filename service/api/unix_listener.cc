#include "service/api/unix_listener.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/rpc/listening.h"
#include "base/rpc/unix_address.h"
#include "base/status/status_macros.h"

namespace tributary::service {
namespace {

// How long to wait when the system has no descriptor left.
constexpr std::chrono::milliseconds kPause{10};
constexpr int kBacklog = 512;
// The range of the numbers that connections get.
constexpr int kFirstNumber = 256;
constexpr int kLastNumber = 1 << 16;

int EndOfNumbers() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kFirstNumber;
  return static_cast<int>(std::min<rlim_t>(limit.rlim_cur, kLastNumber));
}

absl::Status CannotListen(absl::string_view path, int error) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen at unix:", path, ": ", std::strerror(error)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Bind(absl::string_view path,
                                                                 mode_t mode) {
  TRIBUTARY_RETURN_IF_ERROR(CheckFree(absl::StrCat("unix:", path)));
  const std::string name(path);
  unlink(name.c_str());  // of a service that was killed
  TRIBUTARY_ASSIGN_OR_RETURN(const int bound, BindToUnix(path, SOCK_NONBLOCK));
  Descriptor listener(bound);
  Descriptor wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.open() || chmod(name.c_str(), mode) != 0) return CannotListen(path, errno);
  return std::unique_ptr<UnixListener>(
      new UnixListener(name, std::move(listener), std::move(wake)));
}

absl::Status UnixListener::Serve(grpc::Server* server) {
  server_ = server;
  if (listen(listener_.get(), kBacklog) != 0) return CannotListen(path_, errno);
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

UnixListener::~UnixListener() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!write(wake_.get(), &one, sizeof(one)));  // an eventfd takes the first
    thread_.join();
  }
  unlink(path_.c_str());
}

void UnixListener::Run() {
  while (true) {
    pollfd files[] = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    if (poll(files, 2, -1) < 0) {
      if (errno != EINTR) std::this_thread::sleep_for(kPause);
      continue;
    }
    if (files[0].revents != 0) return;
    if (files[1].revents != 0) Accept();
  }
}

void UnixListener::Accept() {
  Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!connection.open()) {
    // No descriptor is left, so it is not tried again at once.
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(kPause);
    return;
  }
  grpc::AddInsecureChannelFromFd(server_, Renumber(std::move(connection)).Release());
}

Descriptor UnixListener::Renumber(Descriptor connection) {
  const int end = EndOfNumbers();
  if (next_number_ < kFirstNumber || next_number_ >= end) next_number_ = kFirstNumber;
  int number = fcntl(connection.get(), F_DUPFD_CLOEXEC, next_number_);
  if (number < 0) number = fcntl(connection.get(), F_DUPFD_CLOEXEC, kFirstNumber);
  if (number < 0) return connection;
  next_number_ = number + 1;
  return Descriptor(number);
}

}  // namespace tributary::service
