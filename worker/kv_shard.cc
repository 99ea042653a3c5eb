#include "worker/kv_shard.h"

#include <cstring>
#include <utility>

#include "base/status/status_macros.h"
#include "kernels/cpu/page_rows.h"

namespace tributary::worker {
namespace {

// Expands one value, or one per head, to one per head.
void Expand(const std::vector<float>& scale, int32_t kv_heads, float* out) {
  for (int32_t h = 0; h < kv_heads; ++h) out[h] = scale[scale.size() == 1 ? 0 : h];
}

// Bytes of one token of one layer, without padding.
size_t TokenBytes(const KvGeometry& g) {
  return static_cast<size_t>(g.kv_heads) * static_cast<size_t>(BytesPerTokenOfHead(g));
}

// Calls visit(place, bytes) for the rows of all heads of one token of one layer.
template <typename Visit>
void ForEachRow(const PagedKv& kv, int64_t slot, const Visit& visit) {
  cpu::RowPlace place{.page = static_cast<int32_t>(slot / kv.page_size),
                      .token = static_cast<int32_t>(slot % kv.page_size)};
  for (place.head = 0; place.head < kv.geometry.kv_heads; ++place.head) {
    place.kind = cpu::RowKind::kKey;
    visit(place, StoredKeyBytes(kv.geometry));
    if (kv.geometry.value_in_key) continue;
    place.kind = cpu::RowKind::kValue;
    visit(place, StoredValueBytes(kv.geometry));
  }
}

// The pages of runs that are as long as a page.
std::vector<int32_t> PagesOf(std::span<const int64_t> first, int32_t page_size) {
  std::vector<int32_t> pages;
  pages.reserve(first.size());
  for (const int64_t slot : first) pages.push_back(static_cast<int32_t>(slot / page_size));
  return pages;
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

size_t KvShard::run_bytes(int32_t slots) const {
  if (slots == page_size()) return page_bytes_;
  size_t bytes = 0;
  for (const PagedKv& kv : layers_) bytes += TokenBytes(kv.geometry);
  return bytes * static_cast<size_t>(slots);
}

void KvShard::ReadRuns(std::span<const int64_t> first, int32_t slots, std::byte* out,
                       cpu::ThreadPool& pool) const {
  if (slots == page_size()) return ReadPages(PagesOf(first, slots), out, pool);
  const size_t bytes = run_bytes(slots);
  pool.Run(static_cast<int>(first.size()), [&](int i) {
    std::byte* to = out + static_cast<size_t>(i) * bytes;
    for (const PagedKv& kv : layers_) {
      for (int32_t slot = 0; slot < slots; ++slot) {
        ForEachRow(kv, first[static_cast<size_t>(i)] + slot, [&](cpu::RowPlace place, size_t row) {
          cpu::LoadRow(kv, place, to);
          to += row;
        });
      }
    }
  });
}

void KvShard::WriteRuns(std::span<const int64_t> first, int32_t slots, const std::byte* in,
                        cpu::ThreadPool& pool) {
  if (slots == page_size()) return WritePages(PagesOf(first, slots), in, pool);
  // Tokens that lie beside each other share words, so a layer's runs are written by one thread.
  const size_t bytes = run_bytes(slots);
  std::vector<size_t> offsets;
  size_t offset = 0;
  for (const PagedKv& kv : layers_) {
    offsets.push_back(offset);
    offset += TokenBytes(kv.geometry) * static_cast<size_t>(slots);
  }
  pool.Run(num_layers(), [&](int layer) {
    const PagedKv& kv = layers_[static_cast<size_t>(layer)];
    for (size_t i = 0; i < first.size(); ++i) {
      const std::byte* from = in + i * bytes + offsets[static_cast<size_t>(layer)];
      for (int32_t slot = 0; slot < slots; ++slot) {
        ForEachRow(kv, first[i] + slot, [&](cpu::RowPlace place, size_t row) {
          cpu::StoreRow(kv, place, from);
          from += row;
        });
      }
    }
  });
}

}  // namespace tributary::worker
