// The CPU backend on one rank: shards in host memory, Highway kernels, and the exchange over the
// group's communicator.
#pragma once

#include <memory>

#include "collective/exchange/exchange.h"
#include "kernels/cpu/thread_pool.h"
#include "worker/backend.h"

namespace tributary::worker {

std::unique_ptr<Backend> CreateCpuBackend(std::shared_ptr<cpu::ThreadPool> pool,
                                          collective::Strategy strategy);

}  // namespace tributary::worker
