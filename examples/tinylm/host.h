// A service that computes attention, in this process or elsewhere, and the caches it is asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "examples/tinylm/draft.h"
#include "examples/tinylm/model.h"
#include "examples/tinylm/service_attention.h"
#include "service/client/client.h"
#include "service/embedded/embedded_service.h"

namespace tributary::tinylm {

// A service and the connection to it.
struct Host {
  std::unique_ptr<service::EmbeddedService> embedded;  // null when the service is another process
  std::unique_ptr<client::Client> client;
  std::string target;
};

// To the service at `target`; where that is empty, to one that is started in this process.
absl::StatusOr<Host> ConnectTo(const std::string& target,
                               const service::EmbeddedServiceOptions& service);

// For `sequences` texts of the model at a time; scales of an FP8 cache come from
// `calibration_text`.
absl::StatusOr<std::unique_ptr<ServiceCache>> CreateModelCache(const Host& host, const Model& model,
                                                               DType kv_dtype,
                                                               const std::string& calibration_text,
                                                               int sequences = 1);

// The same of the contexts of the model's draft. window_left: -1 for full attention.
absl::StatusOr<std::unique_ptr<ServiceCache>> CreateDraftCache(const Host& host, const Model& model,
                                                               const Draft& draft, DType kv_dtype,
                                                               int64_t window_left,
                                                               const std::string& calibration_text,
                                                               int sequences = 1);

}  // namespace tributary::tinylm
