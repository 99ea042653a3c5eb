#include "tests/worker/ranks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>

#include "collective/in_process.h"
#include "collective/rendezvous/memory_rendezvous.h"
#include "kernels/cpu/thread_pool.h"
#include "worker/cpu_backend.h"

namespace tributary::worker::testing {

ThreadRanks::ThreadRanks(int size, const ExecutorOptions& options, int threads_each)
    : ThreadRanks(size, options, [threads_each, strategy = options.strategy](int) {
        return CreateCpuBackend(std::make_shared<cpu::ThreadPool>(threads_each), strategy);
      }) {}

ThreadRanks::ThreadRanks(int size, const ExecutorOptions& options, MakeBackend make)
    : make_(std::move(make)) {
  for (int rank = 0; rank < size; ++rank) {
    executors_.push_back(std::make_unique<Executor>(options, make_(rank)));
  }
  Reform();
}

ThreadRanks::ThreadRanks(std::vector<std::unique_ptr<Backend>> backends,
                         const ExecutorOptions& options) {
  for (std::unique_ptr<Backend>& backend : backends) {
    executors_.push_back(std::make_unique<Executor>(options, std::move(backend)));
  }
  Reform();
}

ThreadRanks::~ThreadRanks() {
  std::vector<std::thread> threads;
  for (std::unique_ptr<Executor>& executor : executors_) {
    threads.emplace_back([&executor] { executor.reset(); });
  }
  for (std::thread& thread : threads) thread.join();
}

void ThreadRanks::Reform(int shard_ranks) {
  ++epoch_;
  auto comms = collective::CreateInProcessGroup(size(), epoch_);
  collective::MemoryRendezvous rendezvous;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < executors_.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const absl::Status joined =
          executors_[rank]->Join(std::move(comms[rank]), rendezvous, deadline, shard_ranks);
      EXPECT_TRUE(joined.ok()) << "rank " << rank << ": " << joined;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void ThreadRanks::Resize(int size, const ExecutorOptions& options, int shard_ranks) {
  while (static_cast<int>(executors_.size()) < size) {
    executors_.push_back(
        std::make_unique<Executor>(options, make_(static_cast<int>(executors_.size()))));
  }
  executors_.resize(static_cast<size_t>(size));
  Reform(shard_ranks);
}

void ThreadRanks::Replace(int rank, const ExecutorOptions& options) {
  std::unique_ptr<Executor>& executor = executors_[static_cast<size_t>(rank)];
  executor.reset();  // first, so that what it held is not there twice
  executor = std::make_unique<Executor>(options, make_(rank));
  Reform();
}

std::map<int, Reply> ThreadRanks::Execute(const Command& command) {
  std::vector<Reply> replies(executors_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < executors_.size(); ++rank) {
    threads.emplace_back([&, rank] { replies[rank] = executors_[rank]->Execute(command); });
  }
  for (std::thread& thread : threads) thread.join();
  std::map<int, Reply> by_rank;
  for (size_t rank = 0; rank < replies.size(); ++rank) {
    by_rank.emplace(static_cast<int>(rank), std::move(replies[rank]));
  }
  return by_rank;
}

}  // namespace tributary::worker::testing
