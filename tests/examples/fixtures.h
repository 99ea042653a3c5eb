// The shipped model, and services to run it through; made once for the whole binary.
#pragma once

#include <memory>
#include <string>

#include "examples/tinylm/draft.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/service_attention.h"
#include "service/client/client.h"
#include "service/embedded/embedded_service.h"
#include "worker/backends.h"
#include "worker/exchange_choice.h"

namespace tributary::tinylm {

std::string ModelFolder();    // of weights and golden values
std::string HeldOutSample();  // text the model was not trained on

const Model& ShippedModel();
const Draft& ShippedDraft();

// A service of `workers` ranks with a connection to it. Members go in reverse order.
struct Service {
  std::unique_ptr<service::EmbeddedService> embedded;
  std::unique_ptr<client::Client> client;
};

// Never null members; a failure to start ends the test with the reason.
Service StartService(int workers, worker::Device device = worker::Device::kCpu,
                     worker::ExchangePlace place = worker::ExchangePlace::kHost);

// One sequence in a cache of its own.
struct RemoteAttention {
  std::unique_ptr<ServiceCache> cache;
  std::unique_ptr<ServiceAttention> attention;
};

// The same of a draft's context.
struct RemoteDraft {
  std::unique_ptr<ServiceCache> cache;
  std::unique_ptr<ServiceDraftAttention> attention;
};

RemoteDraft OpenDraft(const Service& service, ServiceCacheOptions options);

RemoteAttention OpenAttention(const Service& service, const ServiceCacheOptions& options);

}  // namespace tributary::tinylm
