#include "worker/backend.h"

namespace tributary::worker {
namespace {

absl::Status NoReplicas() { return absl::UnimplementedError("this backend keeps no replicas"); }

}  // namespace

absl::Status Shard::ReadPages(std::span<const int32_t>, std::byte*) { return NoReplicas(); }

absl::Status Shard::WritePages(std::span<const int32_t>, const std::byte*) { return NoReplicas(); }

absl::Status Shard::ReadRuns(std::span<const int64_t>, int32_t, std::byte*) { return NoReplicas(); }

absl::Status Shard::WriteRuns(std::span<const int64_t>, int32_t, const std::byte*) {
  return NoReplicas();
}

absl::StatusOr<std::unique_ptr<Shard>> Backend::CreateReplica(const CacheSpec&, size_t, PageFill) {
  return NoReplicas();
}

}  // namespace tributary::worker
