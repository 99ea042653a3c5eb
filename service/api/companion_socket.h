// The socket beside the service's Unix socket, over which hosts and the service pass descriptors of
// memory, because gRPC carries none. A host connects and sends a secret of 16 bytes.
//
// - A host that was told the secret by SessionOpened sends it alone. It gets one byte with the
//   descriptor of its session's mailbox.
// - A host that is about to register memory (MemfdSharedMemory) sends a secret of its own choice
//   with the memory's descriptor. It gets one byte when the service has it.
//
// A host that does neither gets nothing, and the connection ends.
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
  // How long a connection may take, and how many there may be at a time. A further connection ends
  // the oldest one.
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
    std::string secret;  // the part of it that has come
    Descriptor memory;   // what came with the secret
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
  // Reads what has come and answers it. Returns false when the connection is over.
  bool Serve(Connection* connection);
  void Deposit(Connection* connection);

  const std::string path_;
  const int listener_;
  const int wake_;  // an eventfd that tells the thread to end
  MailboxHandout& handout_;
  MemoryDeposit& deposit_;
  std::list<Connection> connections_;  // oldest first; used by the thread alone
  std::thread thread_;
};

}  // namespace tributary::service
