#include "service/coordinator/group_commands.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/sync/mutex.h"

namespace tributary::service {
namespace {

// Between two times that workers are asked to take memory: a rank that is asked takes no step for
// half a millisecond at most (worker::kMemorySlice).
constexpr std::chrono::milliseconds kBetweenTurns{5};

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

void GroupCommands::Send(worker::CacheId cache, Fill fill, WorkerGroup::Done done,
                         std::chrono::milliseconds more_time) {
  if (more_time.count() > 0) {
    more_time_ += more_time.count();
    done = [this, more_time, done = std::move(done)](Outcome outcome) {
      more_time_ -= more_time.count();
      done(std::move(outcome));
    };
  }
  queue_.Enqueue(
      [this, cache, epoch = serving_.epoch(), fill = std::move(fill)](uint64_t number) {
        worker::Command command;
        command.number = number;
        command.cache = cache;
        command.epoch = epoch;
        command.deadline =
            CoordinatorLock::Clock::now() + timeout_ + std::chrono::milliseconds(more_time_.load());
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

void GroupCommands::TellAgain(worker::CacheId cache, std::vector<worker::Standing> standings) {
  SendBody(cache, worker::SetTablesCommand{{}, std::move(standings)}, [](const Outcome&) {});
}

void GroupCommands::SendToLayerGroups(const Cache& cache, const std::function<Body(int32_t)>& body,
                                      std::function<void(const absl::Status&)> done) {
  const auto answers = std::make_shared<Answers>(cache.ids.size(), std::move(done));
  for (size_t group = 0; group < cache.ids.size(); ++group) {
    SendBody(cache.ids[group], body(static_cast<int32_t>(group)),
             [answers](const Outcome& outcome) { answers->Add(outcome.status); });
  }
}

void GroupCommands::CreateCache(worker::CacheId cache, worker::CreateCacheCommand command,
                                std::function<void(const absl::Status&)> done) {
  creations_.push_back(
      std::make_shared<Creation>(Creation{cache, std::move(command), std::move(done)}));
  CreateMore();
}

CoordinatorLock::Clock::time_point GroupCommands::NextDue() const {
  if (creating_ || creations_.empty()) return CoordinatorLock::Clock::time_point::max();
  return next_creation_;
}

void GroupCommands::CreateMore() {
  if (CoordinatorLock::Clock::now() < NextDue()) return;
  creating_ = true;
  const CreationPtr creation = std::move(creations_.front());
  creations_.pop_front();
  SendBody(creation->cache, creation->command,
           [this, creation](const Outcome& outcome) { OnCreateAnswer(creation, outcome); });
}

void GroupCommands::OnCreateAnswer(const CreationPtr& creation, const Outcome& outcome) {
  const bool more = outcome.status.ok() &&
                    std::any_of(outcome.replies.begin(), outcome.replies.end(),
                                [](const worker::Reply& reply) { return reply.more_memory; });
  {
    const CriticalSection section(lock_);
    creating_ = false;
    if (more) {
      creations_.push_back(creation);
      next_creation_ = CoordinatorLock::Clock::now() + kBetweenTurns;
    }
    CreateMore();
  }
  if (!more) creation->done(outcome.status);
}

}  // namespace tributary::service
