#include "worker/replica.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/crc32.h"

namespace tributary::worker {
namespace {

using Checksum = uint32_t;

// A page is cut so that several threads read it.
constexpr size_t kPieceBytes = size_t{512} << 10;

// Of each page of a parcel.
std::vector<Checksum> ChecksumsOf(size_t pages, size_t page_bytes, const std::byte* parcel,
                                  uint32_t order, const Spread& spread) {
  const size_t pieces = std::max<size_t>(1, (page_bytes + kPieceBytes - 1) / kPieceBytes);
  std::vector<Checksum> of_piece(pages * pieces);
  spread(static_cast<int>(of_piece.size()), [&](int part) {
    const auto index = static_cast<size_t>(part);
    const size_t at = index % pieces * kPieceBytes;
    of_piece[index] = cpu::Crc32(at == 0 ? order : 0, parcel + index / pieces * page_bytes + at,
                                 std::min(kPieceBytes, page_bytes - std::min(page_bytes, at)));
  });
  std::vector<Checksum> sums(pages);
  for (size_t page = 0; page < pages; ++page) {
    uLong sum = of_piece[page * pieces];
    for (size_t piece = 1; piece < pieces; ++piece) {
      const size_t bytes = std::min(kPieceBytes, page_bytes - piece * kPieceBytes);
      sum = crc32_combine(sum, of_piece[page * pieces + piece], static_cast<z_off_t>(bytes));
    }
    sums[page] = static_cast<Checksum>(sum);
  }
  return sums;
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

void OnThisThread(int parts, const std::function<void(int part)>& body) {
  for (int part = 0; part < parts; ++part) body(part);
}

void SealParcel(size_t pages, size_t page_bytes, std::byte* parcel, uint32_t order,
                const Spread& spread) {
  const std::vector<Checksum> sums = ChecksumsOf(pages, page_bytes, parcel, order, spread);
  if (pages > 0) std::memcpy(parcel + pages * page_bytes, sums.data(), pages * sizeof(Checksum));
}

absl::Status CheckParcel(std::span<const int32_t> pages, size_t page_bytes, const std::byte* parcel,
                         uint32_t order, const Spread& spread) {
  const std::vector<Checksum> sums = ChecksumsOf(pages.size(), page_bytes, parcel, order, spread);
  for (size_t i = 0; i < pages.size(); ++i) {
    Checksum sum = 0;
    std::memcpy(&sum, parcel + pages.size() * page_bytes + i * sizeof sum, sizeof sum);
    if (sum == sums[i]) continue;
    return absl::InternalError(absl::StrCat("page ", pages[i],
                                            " came with other bytes than it was sent with, or from "
                                            "a build that orders them otherwise"));
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
