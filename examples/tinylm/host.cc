#include "examples/tinylm/host.h"

#include <utility>
#include <vector>

#include "examples/tinylm/evaluate.h"

namespace tributary::tinylm {
namespace {

constexpr size_t kSharedMemoryBytes = size_t{16} << 20;
// Of each sequence: twice the positions that the model has, and pages are rounded up.
constexpr int64_t kCapacityTokens = 2048;

}  // namespace

absl::StatusOr<Host> ConnectTo(const std::string& target,
                               const service::EmbeddedServiceOptions& service) {
  Host host;
  client::ConnectOptions options{.target = target};
  if (target.empty()) {
    auto embedded = service::EmbeddedService::Start(service);
    if (!embedded.ok()) return embedded.status();
    host.embedded = *std::move(embedded);
    options.target = host.embedded->target();
    options.shared_memory_bytes = kSharedMemoryBytes;
  }
  absl::StatusOr<std::unique_ptr<client::Client>> client = client::Client::Connect(options);
  if (!client.ok()) return client.status();
  host.client = *std::move(client);
  host.target = options.target;
  return host;
}

absl::StatusOr<std::unique_ptr<ServiceCache>> CreateModelCache(const Host& host, const Model& model,
                                                               DType kv_dtype,
                                                               const std::string& calibration_text,
                                                               int sequences) {
  absl::StatusOr<std::vector<LayerScales>> scales =
      CalibrateScales(model, calibration_text, kv_dtype);
  if (!scales.ok()) return scales.status();
  return ServiceCache::Create(host.client.get(), model.config(),
                              {.kv_dtype = kv_dtype,
                               .capacity_tokens = sequences * kCapacityTokens,
                               .scales = *std::move(scales)});
}

absl::StatusOr<std::unique_ptr<ServiceCache>> CreateDraftCache(const Host& host, const Model& model,
                                                               const Draft& draft, DType kv_dtype,
                                                               int64_t window_left,
                                                               const std::string& calibration_text,
                                                               int sequences) {
  absl::StatusOr<std::vector<LayerScales>> scales =
      CalibrateDraftScales(model, draft, calibration_text, kv_dtype);
  if (!scales.ok()) return scales.status();
  return ServiceCache::Create(host.client.get(), draft.config().shape,
                              {.kv_dtype = kv_dtype,
                               .capacity_tokens = sequences * kCapacityTokens,
                               .scales = *std::move(scales),
                               .window_left = window_left,
                               .mode = v1::ATTEND_MODE_DFLASH});
}

}  // namespace tributary::tinylm
