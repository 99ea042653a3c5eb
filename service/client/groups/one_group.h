// A client of one group of workers.
#pragma once

#include <grpcpp/channel.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "service/client/client.h"

namespace tributary::client {

// Does not wait for the service. `new_id` draws the ids of sequences that are opened and forked; it
// is called from any thread. Tensors travel in shared memory once the service has taken a region.
std::unique_ptr<Client> MakeClient(const ConnectOptions& options,
                                   std::shared_ptr<grpc::Channel> channel,
                                   std::function<uint64_t()> new_id);

}  // namespace tributary::client
