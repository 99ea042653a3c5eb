// Embedded workers whose tensors and results travel as those of workers in other processes do.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "service/workers/embedded_group.h"
#include "service/workers/worker_group.h"
#include "worker/command.h"

namespace tributary::service::testing {

class RemoteLikeGroup final : public WorkerGroup {
 public:
  explicit RemoteLikeGroup(int size)
      : workers_(CreateEmbeddedGroup({.workers = size, .threads = size})) {}

  uint64_t id() const override { return workers_->id(); }
  int size() const override { return workers_->size(); }
  worker::Device device() const override { return workers_->device(); }
  absl::Status CheckRegions() const override { return workers_->CheckRegions(); }
  absl::Status CheckDeviceSessions() const override { return workers_->CheckDeviceSessions(); }
  bool sends_tensors() const override { return true; }
  absl::Status Start(GroupObserver* observer) override { return workers_->Start(observer); }
  void Submit(std::shared_ptr<const worker::Command> command, Done done) override {
    if (const auto* step = std::get_if<worker::StepCommand>(&command->body)) {
      for (const worker::StepOutput& output : step->outputs) {
        EXPECT_EQ(output.o.data, nullptr) << "another process cannot write there";
        EXPECT_EQ(output.lse.data, nullptr);
      }
    }
    workers_->Submit(std::move(command), std::move(done));
  }
  std::vector<Member> members() const override { return workers_->members(); }
  void Stop() override { workers_->Stop(); }

 private:
  const std::unique_ptr<WorkerGroup> workers_;
};

}  // namespace tributary::service::testing
