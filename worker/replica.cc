#include "worker/replica.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/params.h"
#include "worker/token_slots.h"

namespace tributary::worker {
namespace {

using Checksum = uint32_t;

Checksum ChecksumOf(const std::byte* page, size_t bytes, uint32_t order) {
  return static_cast<Checksum>(crc32_z(order, reinterpret_cast<const Bytef*>(page), bytes));
}

}  // namespace

int ReplicaStride(const std::vector<std::string>& hosts) {
  const int size = static_cast<int>(hosts.size());
  int best = 0;
  int64_t most = -1;
  for (int stride = 1; stride < size; ++stride) {
    int64_t apart = 0;
    for (int rank = 0; rank < size; ++rank) {
      apart += hosts[static_cast<size_t>(rank)] !=
               hosts[static_cast<size_t>(KeeperOf(rank, stride, size))];
    }
    if (apart > most) {
      most = apart;
      best = stride;
    }
  }
  return best;
}

bool KeptSlots(const DcpLayout& layout, int32_t page_size, StepKind kind,
               std::span<const StepEntry> entries, std::span<const PageTable* const> tables,
               std::vector<int64_t>* slots) {
  slots->clear();
  if (kind == StepKind::kDflash) return false;
  bool any = false;
  for (size_t i = 0; i < entries.size(); ++i) {
    const StepEntry& entry = entries[i];
    for (int32_t token = 0; token < entry.new_tokens; ++token) {
      int64_t slot = kPadSlot;
      if (!entry.replay && entry.first_row == 0 && tables[i] != nullptr) {
        slot = SlotOfToken(layout, page_size, entry.first_position + token, *tables[i]);
      }
      any |= slot != kPadSlot;
      slots->push_back(slot);
    }
  }
  return any;
}

uint32_t PageOrderOf(const CacheSpec& spec) {
  const auto order = [](DType type) {
    return type == DType::kNvfp4 || type == DType::kF32 ? 1 : 0;
  };
  int most = order(spec.kv_dtype);
  for (const LayerSpec& layer : spec.layers) {
    if (layer.kv_dtype.has_value()) most = std::max(most, order(*layer.kv_dtype));
  }
  return static_cast<uint32_t>(most);
}

size_t ParcelBytes(size_t pages, size_t page_bytes) {
  return pages * (page_bytes + sizeof(Checksum));
}

void SealParcel(size_t pages, size_t page_bytes, std::byte* parcel, uint32_t order) {
  for (size_t i = 0; i < pages; ++i) {
    const Checksum sum = ChecksumOf(parcel + i * page_bytes, page_bytes, order);
    std::memcpy(parcel + pages * page_bytes + i * sizeof sum, &sum, sizeof sum);
  }
}

absl::Status CheckParcel(std::span<const int32_t> pages, size_t page_bytes, const std::byte* parcel,
                         uint32_t order) {
  for (size_t i = 0; i < pages.size(); ++i) {
    Checksum sum = 0;
    std::memcpy(&sum, parcel + pages.size() * page_bytes + i * sizeof sum, sizeof sum);
    if (sum == ChecksumOf(parcel + i * page_bytes, page_bytes, order)) continue;
    return absl::InternalError(absl::StrCat("page ", pages[i],
                                            " came with other bytes than it was sent with, or from "
                                            "a build that orders them otherwise"));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
