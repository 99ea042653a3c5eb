#include "worker/kv_shard.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/status/status_macros.h"

namespace tributary::worker {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

constexpr size_t AlignUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Expands one value, or one per head, to one per head.
void Expand(const std::vector<float>& scale, int32_t kv_heads, float* out) {
  for (int32_t h = 0; h < kv_heads; ++h) out[h] = scale[scale.size() == 1 ? 0 : h];
}

// An address inside the mapping that huge pages can start at.
std::byte* AlignedBase(void* mapping) {
  return reinterpret_cast<std::byte*>(AlignUp(reinterpret_cast<uintptr_t>(mapping), kHugePage));
}

// Gives the pages memory. An errno, or 0.
int Populate(std::byte* begin, size_t bytes, PageFill fill) {
  if (fill == PageFill::kPoison) {
    std::memset(begin, 0xff, bytes);
    return 0;
  }
#ifdef MADV_POPULATE_WRITE
  // It wants the begin of a page. A piece begins at one.
  if (madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno == ENOMEM || errno == EFAULT) return errno;
#endif
  std::memset(begin, 0, bytes);  // a kernel too old to know the call
  return 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvShard>> KvShard::Create(const CacheSpec& spec, size_t available,
                                                         PageFill fill) {
  TRIBUTARY_ASSIGN_OR_RETURN(const size_t bytes, ShardBytes(spec));
  if (bytes > available) {
    return ShardOutOfMemory(bytes, absl::StrCat(available, " are available"));
  }
  // A small shard would waste most of a huge page, and tests make many small ones.
  const bool huge = bytes >= kHugePage;
  const size_t mapped = huge ? AlignUp(bytes, kHugePage) + kHugePage : bytes;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) return ShardOutOfMemory(bytes, std::strerror(errno));
  absl::Cleanup unmap = [mapping, mapped] { munmap(mapping, mapped); };
  // Advice: may be refused.
  if (huge) madvise(AlignedBase(mapping), AlignUp(bytes, kHugePage), MADV_HUGEPAGE);
  auto shard = std::unique_ptr<KvShard>(new KvShard(spec, mapping, mapped, bytes, fill));
  std::move(unmap).Cancel();
  return shard;
}

KvShard::KvShard(const CacheSpec& spec, void* mapping, size_t mapped, size_t bytes, PageFill fill)
    : mapping_(mapping),
      mapped_(mapped),
      bytes_(bytes),
      fill_(fill),
      base_(bytes >= kHugePage ? AlignedBase(mapping) : static_cast<std::byte*>(mapping)) {
  size_t heads = 0;  // of all layers
  for (const LayerSpec& layer : spec.layers) {
    heads += static_cast<size_t>(GeometryOf(spec, layer).kv.kv_heads);
  }
  scales_.resize(2 * heads);
  float* scales = scales_.data();
  layers_.resize(spec.layers.size());
  std::byte* base = base_;
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

absl::StatusOr<size_t> KvShard::TakePiece(size_t piece) {
  const size_t begin = piece * kPieceBytes;
  const size_t bytes = std::min(kPieceBytes, bytes_ - begin);
  const int error = Populate(base_ + begin, bytes, fill_);
  if (error != 0) return ShardOutOfMemory(bytes_, std::strerror(error));
  return bytes;
}

KvShard::~KvShard() { munmap(mapping_, mapped_); }

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
