// Replicas: the pages of each rank are also kept by another rank, its keeper, in host memory.
//
// A keeper writes the tokens of its ward in the same step as the ward, because every rank gets all
// new tokens of a step. Both quantize alike, so their bytes are equal. Page tables are the same on
// all ranks, and so are the numbers of pages. When the ward is lost, its
// successor takes the pages from the keeper (TransferPagesCommand); when the keeper is lost, its
// successor takes them from the ward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/cache_spec.h"

namespace tributary::worker {

// Who keeps the pages of `rank`, and whose pages `rank` keeps. 0 < stride < size.
constexpr int KeeperOf(int rank, int stride, int size) { return (rank + stride) % size; }
constexpr int WardOf(int rank, int stride, int size) { return (rank + size - stride) % size; }

// The stride for ranks on these hosts ([ranks], names): the least of those that give as many ranks
// as possible a keeper on another host. 0 for a single rank.
int ReplicaStride(const std::vector<std::string>& hosts);

// The order of bytes in the pages of a cache. It is part of what checksums are made of, so that a
// worker of another build refuses pages that it would read otherwise. It rises for the types whose
// order changes; 0 at first.
uint32_t PageOrderOf(const CacheSpec& spec);

// The form in which pages travel: [pages][page_bytes], then one checksum per page.
size_t ParcelBytes(size_t pages, size_t page_bytes);
// Calls body(part) for every part in [0, parts), on any threads.
using Spread = std::function<void(int parts, const std::function<void(int part)>& body)>;
// On the calling thread.
void OnThisThread(int parts, const std::function<void(int part)>& body);
// Writes the checksums behind the pages.
void SealParcel(size_t pages, size_t page_bytes, std::byte* parcel, uint32_t order = 0,
                const Spread& spread = OnThisThread);
// kInternal names the first page whose bytes, or their order, have changed on the way.
absl::Status CheckParcel(std::span<const int32_t> pages, size_t page_bytes, const std::byte* parcel,
                         uint32_t order = 0, const Spread& spread = OnThisThread);

}  // namespace tributary::worker
