// A service within its host's process: the coordinator, its workers as threads, and a Unix socket
// that only this user reaches. Clients in this process and in others connect to the socket.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/backends.h"
#include "worker/exchange_choice.h"

namespace tributary::service {

struct EmbeddedServiceOptions {
  // The path of the socket, at most 107 bytes. Empty: it lies in a folder of its own below the
  // folder for temporary files, and the folder ends with the service.
  std::string socket;
  int32_t workers = 1;  // parts that each sequence is spread over: 1 to 1024; with kCuda, GPUs
  int32_t threads = 0;  // on CPUs, of all workers together; 0: as many as the machine has
  int64_t memory_limit_bytes = 0;  // of caches, on all workers together; 0: none but the machine's
  worker::Device device = worker::Device::kCpu;
  int32_t first_gpu = 0;       // worker r takes GPU first_gpu + r
  bool deterministic = false;  // results do not depend on what shares their step
  // Where the partial results of several GPUs meet.
  worker::ExchangePlace exchange_place = worker::ExchangePlace::kAuto;
};

// With CUDA, host and workers share the process's contexts: a GPU changes between the two without
// MPS. What the library logs, warnings and errors, goes to standard error.
class EmbeddedService {
 public:
  // Serves when it returns. INVALID_ARGUMENT names a field of the options; FAILED_PRECONDITION: the
  // device is missing; UNAVAILABLE: the socket cannot be bound.
  static absl::StatusOr<std::unique_ptr<EmbeddedService>> Start(
      const EmbeddedServiceOptions& options);
  // Lets calls in flight finish, for five seconds unless Drain was called before, and cancels the
  // rest.
  virtual ~EmbeddedService() = default;

  // What ConnectOptions::target is to be: "unix:" and the socket.
  virtual const std::string& target() const = 0;
  // Refuses new calls, and waits for accepted ones for at most `patience`. True when all finished.
  virtual bool Drain(std::chrono::milliseconds patience) = 0;
};

}  // namespace tributary::service
