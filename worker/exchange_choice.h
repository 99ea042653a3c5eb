// How the ranks of a group exchange partials: what may be asked for, and what ranks with GPUs try.
// Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "collective/exchange/exchange.h"
#include "worker/backends.h"

namespace tributary::worker {

// Where partials of GPU workers meet (--device_exchange).
enum class ExchangePlace : uint8_t {
  kHost,  // in host memory, over the communicator of the group
  kAuto,  // in device memory where all ranks can, else as kHost; the reason is said
};
const char* Name(ExchangePlace place);  // "host", "auto"
bool Parse(std::string_view text, ExchangePlace* out);

// Whether a group that computes on `device` may be asked for this. kInvalidArgument names the
// setting, "exchange" or "device_exchange", and the reason.
absl::Status CheckExchange(Device device, collective::Strategy strategy, ExchangePlace place);

// The ways between GPUs that give a strategy, best first. A group takes the first one that all of
// its ranks have.
enum class DeviceTransport : uint8_t { kDirect, kNccl };
const char* Name(DeviceTransport transport);  // "direct", "NCCL"
std::vector<DeviceTransport> TransportsFor(collective::Strategy strategy);

// Why ranks on these GPUs (by rank: the name of each, the same for the same GPU anywhere) cannot
// exchange on them; empty when they can. Ranks that share a GPU cannot: one that takes or frees
// memory waits for all that runs there, and so for the peer that waits for it.
std::string WhyNotOnGpus(const std::vector<std::string>& gpus);

}  // namespace tributary::worker
