#include "worker/kv_shard.h"

#include <cstring>
#include <utility>

#include "base/status/status_macros.h"

namespace tributary::worker {
namespace {

// Expands one value, or one per head, to one per head.
void Expand(const std::vector<float>& scale, int32_t kv_heads, float* out) {
  for (int32_t h = 0; h < kv_heads; ++h) out[h] = scale[scale.size() == 1 ? 0 : h];
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvShard>> KvShard::Create(const CacheSpec& spec, size_t available,
                                                         PageFill fill) {
  TRIBUTARY_ASSIGN_OR_RETURN(const size_t bytes, ShardBytes(spec));
  TRIBUTARY_ASSIGN_OR_RETURN(std::shared_ptr<ShardMemory> memory,
                             ShardMemory::Create(bytes, available, fill));
  return std::unique_ptr<KvShard>(new KvShard(spec, std::move(memory)));
}

KvShard::KvShard(const CacheSpec& spec, std::shared_ptr<ShardMemory> memory)
    : memory_(std::move(memory)) {
  size_t heads = 0;  // of all layers
  for (const LayerSpec& layer : spec.layers) {
    heads += static_cast<size_t>(GeometryOf(spec, layer).kv.kv_heads);
  }
  scales_.resize(2 * heads);
  float* scales = scales_.data();
  layers_.resize(spec.layers.size());
  std::byte* base = memory_->data();
  for (size_t i = 0; i < layers_.size(); ++i) {
    const KvGeometry geometry = GeometryOf(spec, spec.layers[i]).kv;
    float* k_scale = scales;
    float* v_scale = k_scale + geometry.kv_heads;
    scales = v_scale + geometry.kv_heads;
    Expand(spec.layers[i].k_scale, geometry.kv_heads, k_scale);
    Expand(spec.layers[i].v_scale, geometry.kv_heads, v_scale);
    layers_[i] = PagedKv{.num_pages = spec.num_pages,
                         .page_size = spec.page_size,
                         .geometry = geometry,
                         .k_scale = k_scale,
                         .v_scale = v_scale};
    layers_[i].base = base;
    page_bytes_ += PageBytes(layers_[i]);
    base += static_cast<size_t>(spec.num_pages) * PageBytes(layers_[i]);
  }
}

void KvShard::CopyPages(const std::vector<PageCopy>& copies, cpu::ThreadPool& pool) {
  if (copies.empty()) return;
  // Layers are independent; copies of one layer keep their order, for one may read what another
  // wrote.
  pool.Run(num_layers(), [&](int layer) {
    const PagedKv& kv = layers_[static_cast<size_t>(layer)];
    for (const PageCopy& copy : copies) {
      if (copy.source == copy.destination) continue;
      std::memcpy(KeyPlane(kv, copy.destination, 0), KeyPlane(kv, copy.source, 0), PageBytes(kv));
    }
  });
}

void KvShard::ReadPages(std::span<const int32_t> pages, std::byte* out,
                        cpu::ThreadPool& pool) const {
  pool.Run(static_cast<int>(pages.size()), [&](int i) {
    std::byte* to = out + static_cast<size_t>(i) * page_bytes_;
    for (const PagedKv& kv : layers_) {
      std::memcpy(to, KeyPlane(kv, pages[static_cast<size_t>(i)], 0), PageBytes(kv));
      to += PageBytes(kv);
    }
  });
}

void KvShard::WritePages(std::span<const int32_t> pages, const std::byte* in,
                         cpu::ThreadPool& pool) {
  pool.Run(static_cast<int>(pages.size()), [&](int i) {
    const std::byte* from = in + static_cast<size_t>(i) * page_bytes_;
    for (const PagedKv& kv : layers_) {
      std::memcpy(KeyPlane(kv, pages[static_cast<size_t>(i)], 0), from, PageBytes(kv));
      from += PageBytes(kv);
    }
  });
}

}  // namespace tributary::worker
