// One rank as a process: forms a group through a directory, and all-gathers until it has
// done what was asked or an operation fails. Says "ready" on stdout when the group is at work.
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "collective/rendezvous/file_rendezvous.h"
#include "collective/transport/transport.h"
#include "tests/collective/peer_exit.h"

namespace tributary::collective {
namespace {

Deadline After(std::chrono::milliseconds d) { return std::chrono::steady_clock::now() + d; }

int Fail(int rank, const Status& s) {
  std::fprintf(stderr, "rank %d: %s\n", rank, s.message().c_str());
  return ExitCodeOf(s.code());
}

int Main(int argc, char** argv) {
  if (argc != 9) {
    std::fprintf(stderr,
                 "usage: %s <gloo or tls> <directory> <epoch> <rank> <size> <words> <deadline ms> "
                 "<operations, 0: no end>\n",
                 argv[0]);
    return kExitUsage;
  }
  const Transport transport = std::string(argv[1]) == "tls" ? Transport::kTls : Transport::kGloo;
  FileRendezvous rendezvous(argv[2]);
  const uint64_t epoch = std::strtoull(argv[3], nullptr, 10);
  const int rank = std::atoi(argv[4]);
  const int size = std::atoi(argv[5]);
  const size_t words = std::strtoull(argv[6], nullptr, 10);
  const std::chrono::milliseconds deadline(std::atoll(argv[7]));
  const uint32_t operations = static_cast<uint32_t>(std::strtoul(argv[8], nullptr, 10));

  std::unique_ptr<Communicator> comm;
  if (Status s = CreatePeerCommunicator(transport, {.rank = rank, .size = size, .epoch = epoch},
                                        rendezvous, After(std::chrono::minutes(1)), &comm);
      !s.ok()) {
    return Fail(rank, s);
  }
  std::vector<uint32_t> send(words), recv(words * size);
  for (uint32_t op = 0; operations == 0 || op < operations; ++op) {
    for (size_t i = 0; i < words; ++i) send[i] = op * 1000003 + rank * 101 + i;
    const Status s =
        comm->AllGather(send.data(), recv.data(), words * sizeof(uint32_t), After(deadline));
    if (!s.ok()) return Fail(rank, s);
    for (int from = 0; from < size; ++from) {
      for (size_t i = 0; i < words; ++i) {
        if (recv[from * words + i] != op * 1000003 + from * 101 + i) return kExitWrongData;
      }
    }
    if (op == 2 && write(STDOUT_FILENO, "ready\n", 6) != 6) return kExitUsage;
  }
  return kExitDone;
}

}  // namespace
}  // namespace tributary::collective

int main(int argc, char** argv) { return tributary::collective::Main(argc, argv); }
