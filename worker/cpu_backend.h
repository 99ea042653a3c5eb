// The CPU backend on one rank: shards in host memory, Highway kernels, and the exchange over the
// group's communicator.
#pragma once

#include <memory>

#include "collective/exchange/exchange.h"
#include "kernels/cpu/thread_pool.h"
#include "worker/backend.h"
#include "worker/host_memory_ledger.h"

namespace tributary::worker {

// `memory`: shared by the ranks of a process; null: this rank is the only one.
std::unique_ptr<Backend> CreateCpuBackend(std::shared_ptr<cpu::ThreadPool> pool,
                                          collective::Strategy strategy,
                                          std::shared_ptr<HostMemoryLedger> memory = nullptr);

}  // namespace tributary::worker
