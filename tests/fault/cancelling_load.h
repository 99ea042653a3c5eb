// Clients that lose interest in their calls, beside hosts that do not.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/fault/load.h"

namespace tributary::test {

class FickleClient;

// Over one cache, kCacheId. Every client has a connection and a sequence of its own and alternates
// between calls to their end and injections: it cancels a call, lets it expire, cancels a stream
// with several calls in flight, hangs up in the middle of one, or abandons a shared memory region.
// A call that ends otherwise than that, or a host's answer that is wrong, fails the test.
class CancellingLoad {
 public:
  struct Phase {
    int injections = 0;
    // The injections are spread evenly over it; 0: they come as fast as they can.
    std::chrono::milliseconds duration{0};
    // Of a client between its calls.
    std::chrono::milliseconds pause{0};
    std::chrono::milliseconds sample_every{1'000};
  };

  // Connects the clients and opens their sequences. `stub` is the hosts'.
  CancellingLoad(const std::string& address, std::shared_ptr<v1::AttentionService::Stub> stub,
                 int clients, uint64_t seed);
  ~CancellingLoad();

  // Returns when the phase is over and nothing is in flight; the clients' connections stay, their
  // sequences are open and empty. `sample` is called meanwhile, by the calling thread.
  void Run(
      const Phase& phase, const std::function<void()>& sample = [] {});
  // Closes the clients' sequences.
  void Close();

  int injections() const { return injections_; }
  int64_t calls() const { return calls_; }            // of clients, to their end
  int64_t checked_calls() const { return checked_; }  // of hosts

 private:
  class Schedule;

  void RunClient(FickleClient& client, const Phase& phase, Schedule& schedule);
  void RunHost(uint64_t sequence, const Phase& phase, const std::atomic<bool>& stop);

  const std::shared_ptr<v1::AttentionService::Stub> stub_;
  std::vector<std::unique_ptr<FickleClient>> clients_;
  std::atomic<int> injections_{0};
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> checked_{0};
};

}  // namespace tributary::test
