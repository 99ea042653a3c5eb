// The endpoints of a session: the processes of a host whose model is split over heads. Which heads
// each of them has is a rule of session.proto (JoinSession); these are pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/cache_spec.h"

namespace tributary::service {

struct Endpoints {
  int32_t count = 1;
  bool kv_replicated = false;
};

// Heads [begin, begin + count) of a layer.
struct Heads {
  int32_t begin = 0;
  int32_t count = 0;
  bool operator==(const Heads&) const = default;
};

// What an endpoint hands over of a layer.
struct EndpointHeads {
  Heads q;
  Heads kv;  // none where other endpoints hand them over
  bool operator==(const EndpointHeads&) const = default;
};

// INVALID_ARGUMENT, open.endpoints: the heads of some layer cannot be split so.
absl::Status CheckEndpoints(const worker::CacheSpec& spec, const Endpoints& endpoints);

// `endpoints` has been checked for the layer's cache.
EndpointHeads HeadsOf(const worker::LayerGeometry& layer, const Endpoints& endpoints,
                      int32_t endpoint);

// The layer as that endpoint has it.
worker::LayerGeometry OwnGeometry(const worker::LayerGeometry& layer, const Endpoints& endpoints,
                                  int32_t endpoint);

}  // namespace tributary::service
