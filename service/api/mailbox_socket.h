// The socket where hosts fetch the mailboxes of their sessions. A host connects, sends the secret
// that SessionOpened told it, and gets one byte with the descriptor; or nothing, and the connection
// ends.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "service/data/mailbox_handout.h"

namespace tributary::service {

class MailboxSocket {
 public:
  // How long a connection may take, and how many there may be at a time: one more ends the oldest.
  static constexpr std::chrono::seconds kPatience{2};
  static constexpr size_t kMostConnections = 64;

  // Listens beside the service's socket at `service_path`, as its owner and in its mode, on a
  // thread of its own. The handout outlives it.
  static absl::StatusOr<std::unique_ptr<MailboxSocket>> Listen(absl::string_view service_path,
                                                               MailboxHandout* handout);
  ~MailboxSocket();
  MailboxSocket(const MailboxSocket&) = delete;
  MailboxSocket& operator=(const MailboxSocket&) = delete;

  const std::string& path() const { return path_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int file = -1;
    Clock::time_point until;
    std::string token;  // as far as it has come
  };

  MailboxSocket(std::string path, int listener, int wake, MailboxHandout* handout)
      : path_(std::move(path)), listener_(listener), wake_(wake), handout_(*handout) {}

  void Run();
  void Accept();
  // What there is to read; false: the connection is over.
  bool Serve(Connection* connection);

  const std::string path_;
  const int listener_;
  const int wake_;  // an eventfd: the thread is to end
  MailboxHandout& handout_;
  std::list<Connection> connections_;  // of the thread, oldest first
  std::thread thread_;
};

}  // namespace tributary::service
