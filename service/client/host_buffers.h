// Host memory that the service reads and writes where it lies (Client::AllocateShared).
//
// A service that restarts has forgotten the memory and cannot be told of it again, because the
// memory has no name any more. (So nothing is left behind when this process dies.) Tensors that lie
// in it are copied from then on, like all others.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync/mutex.h"
#include "service/client/client.h"
#include "service/client/region_registrar.h"
#include "service/client/shared_region.h"

namespace tributary::client {

// Thread safe.
class HostBuffers {
 public:
  class Buffer;
  using BufferPtr = std::shared_ptr<const Buffer>;

  // `service_path` is the path of the service's Unix socket, and empty when the service is called
  // in another way.
  HostBuffers(v1::AttentionService::Stub* stub, std::string service_path);
  // Buffers that still live remain their owners' memory. Nothing in them is used in place any more.
  ~HostBuffers();
  HostBuffers(const HostBuffers&) = delete;
  HostBuffers& operator=(const HostBuffers&) = delete;

  absl::StatusOr<std::shared_ptr<SharedBuffer>> Allocate(
      uint64_t bytes, std::chrono::system_clock::time_point deadline);

  // The buffer in which these bytes lie, if the service knows it; null otherwise.
  BufferPtr Find(const void* data, uint64_t bytes) const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

class HostBuffers::Buffer final : public SharedBuffer {
 public:
  Buffer(std::shared_ptr<State> state, std::unique_ptr<SharedRegion> memory)
      : state_(std::move(state)), memory_(std::move(memory)) {}
  ~Buffer() override;

  std::byte* data() const override { return memory_->data(); }
  uint64_t bytes() const override { return memory_->size(); }
  const std::string& name() const { return memory_->name(); }  // as registered

  // The service said that it does not know it.
  void Forget() const { forgotten_ = true; }

 private:
  friend class HostBuffers;
  const std::shared_ptr<State> state_;
  const std::unique_ptr<SharedRegion> memory_;
  mutable std::atomic<bool> forgotten_{false};
};

}  // namespace tributary::client
