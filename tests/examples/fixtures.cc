#include "tests/examples/fixtures.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

#include "examples/tinylm/find_files.h"

namespace tributary::tinylm {
namespace {

// GoogleTest reports what a test throws as its failure.
template <typename T>
T OrThrow(absl::StatusOr<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().ToString());
  return *std::move(result);
}

}  // namespace

std::string ModelFolder() { return std::string(TINYLM_FOLDER) + "/weights"; }

std::string HeldOutSample() {
  return OrThrow(ReadText(std::string(TINYLM_FOLDER) + "/heldout.txt"));
}

const Model& ShippedModel() {
  static const Model model(OrThrow(LoadWeights(ModelFolder())));
  return model;
}

const Draft& ShippedDraft() {
  static const Draft draft(OrThrow(LoadDraft(ModelFolder(), ShippedModel().config())),
                           ShippedModel());
  return draft;
}

RemoteDraft OpenDraft(const Service& service, ServiceCacheOptions options) {
  options.mode = v1::ATTEND_MODE_DFLASH;
  RemoteDraft remote;
  remote.cache =
      OrThrow(ServiceCache::Create(service.client.get(), ShippedDraft().config().shape, options));
  remote.attention = OrThrow(ServiceDraftAttention::Open(remote.cache.get()));
  return remote;
}

Service StartService(int workers, worker::Device device, worker::ExchangePlace place) {
  Service service;
  service.embedded = OrThrow(service::EmbeddedService::Start(
      {.workers = workers, .device = device, .exchange_place = place}));
  service.client = OrThrow(client::Client::Connect(
      {.target = service.embedded->target(), .shared_memory_bytes = size_t{16} << 20}));
  return service;
}

RemoteAttention OpenAttention(const Service& service, const ServiceCacheOptions& options) {
  RemoteAttention remote;
  remote.cache =
      OrThrow(ServiceCache::Create(service.client.get(), ShippedModel().config(), options));
  remote.attention = OrThrow(ServiceAttention::Open(remote.cache.get()));
  return remote;
}

}  // namespace tributary::tinylm
