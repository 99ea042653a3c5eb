// Workers as threads of this process.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collective/exchange/exchange.h"
#include "service/workers/worker_group.h"
#include "worker/backend.h"
#include "worker/backends.h"
#include "worker/exchange_choice.h"

namespace tributary::service {

struct EmbeddedGroupOptions {
  int workers = 4;
  // CPU threads of all workers together. Each worker gets an equal share, at least one. 0: as many
  // as the machine has.
  int threads = 0;
  collective::Strategy strategy = collective::Strategy::kAuto;
  // Bytes the shards of all workers may take together. 0: no limit but the devices'.
  size_t memory_limit = 0;
  // GPUs: rank r has GPU first_gpu + r to itself. Start refuses when they are not there.
  worker::Device device = worker::Device::kCpu;
  int first_gpu = 0;
  bool deterministic = false;  // results do not depend on what shares a step
  // Of GPUs. Start refuses the strategy `direct` where they cannot.
  worker::ExchangePlace exchange_place = worker::ExchangePlace::kHost;
  // Called when the way in which the ranks exchange partials is chosen or changes; may be empty.
  std::function<void(const std::string& how)> on_exchange;
  // Called once, on a thread of the group, when a device has lost the memory of a rank: it is gone
  // until the process is started again. The group forms no more, and no call is served. May be
  // empty.
  std::function<void(const absl::Status& status)> on_lost;
  // Makes the backend of a rank; empty: that of the device. For tests.
  std::function<absl::StatusOr<std::unique_ptr<worker::Backend>>(int rank)> make_backend;
  // The time from when all ranks have left the last group until all are in the next one, and the
  // pause before another attempt.
  std::chrono::milliseconds form_timeout{30'000};
  std::chrono::milliseconds form_pause{1'000};
};

// When a collective fails or a deadline passes, the communicator is aborted and a new one made
// under the next epoch; the shards stay, so no rank is ever fresh again. A device that loses its
// memory ends that (on_lost).
std::unique_ptr<WorkerGroup> CreateEmbeddedGroup(const EmbeddedGroupOptions& options);

}  // namespace tributary::service
