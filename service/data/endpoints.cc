#include "service/data/endpoints.h"

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"

namespace tributary::service {
namespace {

constexpr int32_t kMostEndpoints = 64;

absl::Status Refused(const worker::LayerGeometry& layer, int32_t endpoints) {
  return InvalidField("open.endpoints",
                      absl::StrCat("cannot be ", endpoints, " for ", layer.q_heads,
                                   " query heads and ", layer.kv.kv_heads, " KV heads"));
}

}  // namespace

absl::Status CheckEndpoints(const worker::CacheSpec& spec, const Endpoints& endpoints) {
  const int32_t count = endpoints.count;
  if (count < 1 || count > kMostEndpoints) {
    return InvalidField("open.endpoints",
                        absl::StrCat("must be 1 to ", kMostEndpoints, ", is ", count));
  }
  for (const worker::LayerSpec& layer : spec.layers) {
    const worker::LayerGeometry geometry = worker::GeometryOf(spec, layer);
    const int32_t kv_heads = geometry.kv.kv_heads;
    const bool splits_kv =
        endpoints.kv_replicated || kv_heads % count == 0 || count % kv_heads == 0;
    if (geometry.q_heads % count != 0 || !splits_kv) return Refused(geometry, count);
  }
  return absl::OkStatus();
}

EndpointHeads HeadsOf(const worker::LayerGeometry& layer, const Endpoints& endpoints,
                      int32_t endpoint) {
  const int32_t count = endpoints.count;
  const int32_t kv_heads = layer.kv.kv_heads;
  const int32_t q_each = layer.q_heads / count;
  EndpointHeads heads{.q = {endpoint * q_each, q_each}};
  if (endpoints.kv_replicated) {
    heads.kv = {0, endpoint == 0 ? kv_heads : 0};
  } else if (count <= kv_heads) {
    const int32_t kv_each = kv_heads / count;
    heads.kv = {endpoint * kv_each, kv_each};
  } else {
    // So many endpoints have one KV head.
    const int32_t sharers = count / kv_heads;
    heads.kv = {endpoint / sharers, endpoint % sharers == 0 ? 1 : 0};
  }
  return heads;
}

worker::LayerGeometry OwnGeometry(const worker::LayerGeometry& layer, const Endpoints& endpoints,
                                  int32_t endpoint) {
  const EndpointHeads heads = HeadsOf(layer, endpoints, endpoint);
  worker::LayerGeometry own = layer;
  own.q_heads = heads.q.count;
  own.kv.kv_heads = heads.kv.count;
  return own;
}

}  // namespace tributary::service
