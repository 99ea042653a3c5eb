#include "tests/service/fake_group.h"

#include <string>
#include <utility>

#include "base/process/boot_id.h"
#include "worker/output_bytes.h"

namespace tributary::service::testing {

absl::Status FakeGroup::Start(GroupObserver* observer) {
  observer_ = observer;
  Form(std::vector<bool>(size_, true));
  return absl::OkStatus();
}

void FakeGroup::Submit(std::shared_ptr<const worker::Command> command, Done done) {
  Outcome outcome;
  {
    std::lock_guard lock(mutex_);
    if (record_) commands_.push_back(command);
    if (broken_ || command->epoch != epoch_) {
      outcome.status = absl::AbortedError("no group");
    } else if (holding_ && std::holds_alternative<worker::StepCommand>(command->body)) {
      held_.push_back({std::move(command), std::move(done)});
      held_changed_.notify_all();
      return;
    } else {
      outcome = Succeed(*command);
    }
  }
  done(std::move(outcome));
}

Outcome FakeGroup::Succeed(const worker::Command& command) {
  Outcome outcome;
  outcome.replies.resize(size_);
  for (int rank = 0; rank < size_; ++rank) {
    outcome.replies[rank].rank = rank;
    outcome.replies[rank].epoch = command.epoch;
    outcome.replies[rank].number = command.number;
  }
  if (const auto* create = std::get_if<worker::CreateCacheCommand>(&command.body)) {
    specs_[command.cache] = create->spec;
    const auto own = create_caches_.find(command.cache);
    outcome.status = own == create_caches_.end() ? create_cache_ : own->second;
    outcome.replies.back().status = outcome.status;
    outcome.replies.back().more_memory = ++taken_[command.cache] < pieces_;
  } else if (std::holds_alternative<worker::OpenSessionCommand>(command.body)) {
    outcome.replies.front().mailbox = {.handle = std::string(64, 'h'),
                                       .gpu = "GPU-0",
                                       .process_nonce = "nonce",
                                       .machine = lies_elsewhere_ ? "another" : BootId()};
  } else if (std::holds_alternative<worker::OpenRegionCommand>(command.body)) {
    outcome.replies.back().status = outcome.status = open_region_;
  } else if (const auto* step = std::get_if<worker::StepCommand>(&command.body)) {
    const worker::CacheSpec& spec = specs_.at(command.cache);
    const worker::LayerGeometry geometry =
        worker::GeometryOf(spec, spec.layers[static_cast<size_t>(step->layer)]);
    const size_t bytes = worker::BytesInReply(step->outputs, geometry);
    outcome.replies[0].result = worker::ResultBytes(std::string(bytes, '\0'));
  }
  return outcome;
}

std::vector<Member> FakeGroup::members() const {
  std::lock_guard lock(mutex_);
  std::vector<Member> members;
  for (int rank = 0; rank < size_; ++rank) {
    members.push_back({.rank = rank,
                       .address = "fake",
                       .backend = Name(device_),
                       .protocol = protocol_,
                       .connected = true});
  }
  return members;
}

void FakeGroup::Stop() { Break("stopped"); }

void FakeGroup::Hold() {
  std::lock_guard lock(mutex_);
  holding_ = true;
}

void FakeGroup::AnswerOpenRegion(absl::Status status) {
  std::lock_guard lock(mutex_);
  open_region_ = std::move(status);
}

void FakeGroup::AnswerCreateCache(absl::Status status) {
  std::lock_guard lock(mutex_);
  create_cache_ = std::move(status);
}

void FakeGroup::AnswerCreateCache(worker::CacheId cache, absl::Status status) {
  std::lock_guard lock(mutex_);
  create_caches_.erase(cache);
  if (!status.ok()) create_caches_.emplace(cache, std::move(status));
}

void FakeGroup::TakeMemoryInPieces(int pieces) {
  std::lock_guard lock(mutex_);
  pieces_ = pieces;
}

void FakeGroup::WaitForHeld(size_t count) {
  std::unique_lock lock(mutex_);
  held_changed_.wait(lock, [&] { return held_.size() >= count; });
}

void FakeGroup::ReleaseOne(const std::function<void(const worker::StepCommand&, Outcome*)>& edit) {
  Held held;
  Outcome outcome;
  {
    std::unique_lock lock(mutex_);
    held_changed_.wait(lock, [&] { return !held_.empty(); });
    held = std::move(held_.front());
    held_.pop_front();
    outcome = Succeed(*held.command);
  }
  if (edit) edit(std::get<worker::StepCommand>(held.command->body), &outcome);
  held.done(std::move(outcome));
}

void FakeGroup::Release() {
  while (true) {
    Held held;
    Outcome outcome;
    {
      std::lock_guard lock(mutex_);
      holding_ = false;
      if (held_.empty()) return;
      held = std::move(held_.front());
      held_.pop_front();
      outcome = Succeed(*held.command);
    }
    held.done(std::move(outcome));
  }
}

void FakeGroup::Break(const std::string& reason) {
  std::deque<Held> held;
  {
    std::lock_guard lock(mutex_);
    if (broken_) return;
    broken_ = true;
    held.swap(held_);
  }
  observer_->OnBroken(reason);
  for (Held& h : held) h.done({absl::AbortedError(reason), {}});
}

void FakeGroup::Form(const std::vector<bool>& fresh) {
  uint64_t epoch = 0;
  {
    std::lock_guard lock(mutex_);
    broken_ = false;
    epoch = ++epoch_;
  }
  observer_->OnFormed(epoch, fresh);
}

void FakeGroup::SpeakProtocol(uint32_t version) {
  std::lock_guard lock(mutex_);
  protocol_ = version;
}

void FakeGroup::LieElsewhere() {
  std::lock_guard lock(mutex_);
  lies_elsewhere_ = true;
}

void FakeGroup::Tell(const worker::SessionNews& news) { observer_->OnSessionNews(news); }

std::vector<std::shared_ptr<const worker::Command>> FakeGroup::commands() const {
  std::lock_guard lock(mutex_);
  return commands_;
}

}  // namespace tributary::service::testing
