// The socket beside the service's Unix socket, over which memory goes from process to process:
// gRPC carries no descriptors. A host connects and sends a secret of 16 bytes.
//
// - With it comes no descriptor: SessionOpened told the host the secret, and it gets one byte with
//   the descriptor of its session's mailbox; or nothing, and the connection ends.
// - With it comes the descriptor of memory that the host is about to register under this secret
//   (MemfdSharedMemory): it gets one byte without a descriptor; or nothing.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/rpc/descriptor.h"
#include "service/data/mailbox_handout.h"
#include "service/data/memory_deposit.h"

namespace tributary::service {

class CompanionSocket {
 public:
  // How long a connection may take, and how many there may be at a time: one more ends the oldest.
  static constexpr std::chrono::seconds kPatience{2};
  static constexpr size_t kMostConnections = 64;

  // Listens beside the service's socket at `service_path`, as its owner and in its mode, on a
  // thread of its own. Handout and deposit outlive it.
  static absl::StatusOr<std::unique_ptr<CompanionSocket>> Listen(absl::string_view service_path,
                                                                 MailboxHandout* handout,
                                                                 MemoryDeposit* deposit);
  ~CompanionSocket();
  CompanionSocket(const CompanionSocket&) = delete;
  CompanionSocket& operator=(const CompanionSocket&) = delete;

  const std::string& path() const { return path_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    Descriptor file;
    Clock::time_point until;
    std::string secret;  // as far as it has come
    Descriptor memory;   // that came with it
  };

  CompanionSocket(std::string path, int listener, int wake, MailboxHandout* handout,
                  MemoryDeposit* deposit)
      : path_(std::move(path)),
        listener_(listener),
        wake_(wake),
        handout_(*handout),
        deposit_(*deposit) {}

  void Run();
  void Accept();
  // What there is to read; false: the connection is over.
  bool Serve(Connection* connection);
  void Deposit(Connection* connection);

  const std::string path_;
  const int listener_;
  const int wake_;  // an eventfd: the thread is to end
  MailboxHandout& handout_;
  MemoryDeposit& deposit_;
  std::list<Connection> connections_;  // of the thread, oldest first
  std::thread thread_;
};

}  // namespace tributary::service
