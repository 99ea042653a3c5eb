#include "tests/fault/group_harness.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <stdexcept>
#include <utility>

#include "tests/fault/programs.h"

namespace tributary::test {
namespace {

using std::chrono::milliseconds;

// A copy that owns its tensors.
std::shared_ptr<const worker::Command> Owned(const worker::Command& command) {
  auto copy = std::make_shared<worker::Command>(command);
  auto* step = std::get_if<worker::StepCommand>(&copy->body);
  if (step == nullptr) return copy;
  auto bytes = std::make_shared<std::vector<std::vector<std::byte>>>();
  for (worker::TensorView* view : {&step->q, &step->k, &step->v}) {
    bytes->emplace_back(view->data, view->data + view->bytes);
    view->data = bytes->back().data();
  }
  copy->owner = bytes;
  return copy;
}

}  // namespace

service::RemoteGroupOptions GroupHarness::Options(int size) {
  return {.size = size,
          .heartbeat_interval = milliseconds(250),
          .heartbeat_timeout = milliseconds(2'000),
          .form_timeout = milliseconds(5'000)};
}

GroupHarness::GroupHarness(const service::RemoteGroupOptions& options)
    : group_(service::CreateRemoteGroup(options)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address(), grpc::InsecureServerCredentials());
  group_->AddTo(builder);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) throw std::runtime_error("cannot listen on " + address());
  if (!group_->Start(this).ok()) throw std::runtime_error("cannot start the group");
}

GroupHarness::~GroupHarness() {
  group_->Stop();
  server_->Shutdown(std::chrono::system_clock::now());
}

GroupHarness::Formed GroupHarness::WaitFormed(size_t count, milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool formed = changed_.wait_for(lock, timeout, [&] { return formed_.size() > count; });
  return formed ? formed_[count] : Formed{};
}

bool GroupHarness::WaitBroken(size_t count, milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return broken_.size() >= count; });
}

std::vector<std::string> GroupHarness::broken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

service::Outcome GroupHarness::Execute(const worker::Command& command) {
  auto promise = std::make_shared<std::promise<service::Outcome>>();
  group_->Submit(Owned(command),
                 [promise](service::Outcome outcome) { promise->set_value(std::move(outcome)); });
  return promise->get_future().get();
}

void GroupHarness::OnFormed(uint64_t epoch, const std::vector<bool>& fresh) {
  std::lock_guard<std::mutex> lock(mutex_);
  formed_.push_back({epoch, fresh});
  changed_.notify_all();
}

void GroupHarness::OnBroken(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  broken_.push_back(reason);
  changed_.notify_all();
}

std::string GroupHarness::address() const { return WorkerAddress(directory_); }

RemoteRanks::~RemoteRanks() {
  worker::Command drop{.epoch = epoch_};
  drop.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  drop.body = worker::DropCacheCommand{};
  for (const worker::CacheId cache : caches_) {
    drop.cache = cache;
    const absl::Status dropped = harness_.Execute(drop).status;
    EXPECT_TRUE(dropped.ok()) << dropped;
  }
}

std::map<int, worker::Reply> RemoteRanks::Execute(const worker::Command& command) {
  if (std::holds_alternative<worker::CreateCacheCommand>(command.body)) {
    caches_.insert(command.cache);
  }
  service::Outcome outcome = harness_.Execute(command);
  const auto more = [](const worker::Reply& reply) { return reply.more_memory; };
  while (outcome.status.ok() && std::any_of(outcome.replies.begin(), outcome.replies.end(), more)) {
    outcome = harness_.Execute(command);
  }
  std::map<int, worker::Reply> replies;
  for (int rank = 0; rank < size(); ++rank) {
    if (outcome.replies.empty()) {  // the group broke
      replies[rank] = {.epoch = command.epoch, .number = command.number, .rank = rank};
      replies[rank].status = outcome.status;
    } else {
      replies[rank] = std::move(outcome.replies[static_cast<size_t>(rank)]);
    }
  }
  return replies;
}

}  // namespace tributary::test
