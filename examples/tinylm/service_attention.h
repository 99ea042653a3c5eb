// Attention by the service: every call is one Attend, the cache lies with the workers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/tinylm/attention.h"
#include "examples/tinylm/draft.h"
#include "kernels/dtype.h"
#include "service/client/client.h"

namespace tributary::tinylm {

// What a stored element is multiplied by, one value per KV head. Empty: 1.
struct LayerScales {
  std::vector<float> k;
  std::vector<float> v;
};

struct ServiceCacheOptions {
  DType kv_dtype = DType::kFp8E4M3;
  int64_t capacity_tokens = 4096;
  std::vector<LayerScales> scales;  // one per layer, or empty
  int64_t window_left = -1;         // of every layer; -1: unbounded
  v1::AttendMode mode = v1::ATTEND_MODE_CAUSAL;
};

// A cache of a service, under a random name, for as long as this lives.
class ServiceCache {
 public:
  // `client` outlives the result.
  static absl::StatusOr<std::unique_ptr<ServiceCache>> Create(client::Client* client,
                                                              const ModelConfig& config,
                                                              const ServiceCacheOptions& options);
  ~ServiceCache();
  ServiceCache(const ServiceCache&) = delete;
  ServiceCache& operator=(const ServiceCache&) = delete;

  client::Client* client() const { return client_; }
  const std::string& id() const { return id_; }
  const ModelConfig& config() const { return config_; }
  int32_t ranks() const { return ranks_; }
  // What the workers compute on, as the service names it.
  const std::string& backend() const { return backend_; }

 private:
  ServiceCache(client::Client* client, const ModelConfig& config, std::string id, int32_t ranks,
               std::string backend);

  client::Client* const client_;
  const ModelConfig config_;
  const std::string id_;
  const int32_t ranks_;
  const std::string backend_;
};

// One sequence of a cache. Tensors travel as f32.
class ServiceAttention final : public Attention {
 public:
  // `cache` outlives the result.
  static absl::StatusOr<std::unique_ptr<ServiceAttention>> Open(const ServiceCache* cache);
  ~ServiceAttention() override;

  absl::Status Attend(int32_t layer, int64_t first_position, const Matrix& q, const Matrix& k,
                      const Matrix& v, Matrix& out) override;
  absl::Status Truncate(int64_t length) override;

 private:
  ServiceAttention(const ServiceCache* cache, uint64_t sequence);

  const ServiceCache* const cache_;
  const uint64_t sequence_;
};

// A draft's context in one sequence of a cache of its own, made with mode DFLASH.
class ServiceDraftAttention final : public DraftAttention {
 public:
  // `cache` outlives the result.
  static absl::StatusOr<std::unique_ptr<ServiceDraftAttention>> Open(const ServiceCache* cache);
  ~ServiceDraftAttention() override;

  absl::Status Append(int32_t layer, int64_t first_position, const Matrix& k,
                      const Matrix& v) override;
  absl::Status AttendBlock(int32_t layer, int64_t position, const Matrix& q, const Matrix& k,
                           const Matrix& v, Matrix& out) override;
  absl::Status Reset() override;

 private:
  ServiceDraftAttention(const ServiceCache* cache, uint64_t sequence);

  const ServiceCache* const cache_;
  const uint64_t sequence_;
};

}  // namespace tributary::tinylm
