#include "service/coordinator/group_commands.h"

#include <memory>
#include <utility>

#include "base/sync/mutex.h"

namespace tributary::service {
namespace {

// Collects the answers to several commands.
class Answers {
 public:
  Answers(size_t count, std::function<void(const absl::Status&)> done)
      : done_(std::move(done)), missing_(count) {}

  void Add(const absl::Status& status) {
    absl::Status failure;
    {
      const MutexLock lock(mutex_);
      first_failure_.Update(status);
      if (--missing_ > 0) return;
      failure = first_failure_;
    }
    done_(failure);
  }

 private:
  const std::function<void(const absl::Status&)> done_;
  Mutex mutex_;
  size_t missing_ TRIBUTARY_GUARDED_BY(mutex_);
  absl::Status first_failure_ TRIBUTARY_GUARDED_BY(mutex_);
};

}  // namespace

void GroupCommands::Send(worker::CacheId cache, Fill fill, WorkerGroup::Done done) {
  queue_.Enqueue(
      [cache, epoch = serving_.epoch(), timeout = timeout_,
       fill = std::move(fill)](uint64_t number) {
        worker::Command command;
        command.number = number;
        command.cache = cache;
        command.epoch = epoch;
        command.deadline = CoordinatorLock::Clock::now() + timeout;
        fill(&command);
        return command;
      },
      std::move(done));
}

void GroupCommands::SendBody(worker::CacheId cache, Body body, WorkerGroup::Done done) {
  Send(
      cache,
      [body = std::move(body)](worker::Command* command) mutable {
        command->body = std::move(body);  // called once
      },
      std::move(done));
}

void GroupCommands::SendToLayerGroups(const Cache& cache, const std::function<Body(int32_t)>& body,
                                      std::function<void(const absl::Status&)> done) {
  const auto answers = std::make_shared<Answers>(cache.ids.size(), std::move(done));
  for (size_t group = 0; group < cache.ids.size(); ++group) {
    SendBody(cache.ids[group], body(static_cast<int32_t>(group)),
             [answers](const Outcome& outcome) { answers->Add(outcome.status); });
  }
}

}  // namespace tributary::service
