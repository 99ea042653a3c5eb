#include "worker/token_mover.h"

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"
#include "worker/redeal.h"
#include "worker/replica.h"

namespace tributary::worker {
namespace {

// The runs that go from one rank to another, as slots on either side.
struct Route {
  std::vector<int64_t> from;
  std::vector<int64_t> to;
};

absl::Status CheckSlots(const std::vector<int64_t>& slots, const CacheSpec& spec) {
  const int64_t all = int64_t{spec.num_pages} * spec.page_size;
  for (const int64_t slot : slots) {
    if (slot >= 0 && slot < all) continue;
    return InvalidField("move.pages", absl::StrCat("there is no slot ", slot));
  }
  return absl::OkStatus();
}

absl::Status CheckMove(const MoveTokensCommand& move, const MoveEnds& ends, int size) {
  const auto in_group = [size](int32_t ranks) { return ranks >= 1 && ranks <= size; };
  if (!in_group(move.ranks.from) || !in_group(move.ranks.to)) {
    return InvalidField("move.ranks", absl::StrCat("must be 1 to ", size));
  }
  if (move.keeper_stride < 0 || (move.keeper_stride > 0 && move.keeper_stride >= move.ranks.to)) {
    return InvalidField("move.keeper_stride", "must be below the number of ranks");
  }
  for (const MovedPage& page : move.pages) {
    if (page.index >= 0 && page.index <= std::numeric_limits<int32_t>::max()) continue;
    return InvalidField("move.pages", absl::StrCat("no sequence has a page ", page.index));
  }
  if (ends.from_spec == nullptr && ends.to_spec == nullptr) {
    return absl::NotFoundError("this rank has neither of the caches");
  }
  if (ends.from_spec == nullptr || ends.to_spec == nullptr) return absl::OkStatus();
  if (ends.from_spec->page_size == ends.to_spec->page_size &&
      ends.from_spec->interleave == ends.to_spec->interleave) {
    return absl::OkStatus();
  }
  return InvalidField("move.from_cache", "has other pages");
}

}  // namespace

absl::Status MoveTokens(const MoveTokensCommand& move, const MoveEnds& ends, ParcelCarrier& parcels,
                        collective::Communicator& comm, collective::Deadline deadline) {
  TRIBUTARY_RETURN_IF_ERROR(CheckMove(move, ends, comm.size()));
  const CacheSpec& spec = ends.from_spec != nullptr ? *ends.from_spec : *ends.to_spec;
  const int size = comm.size();
  const int rank = comm.rank();
  Shard* const any = ends.from != nullptr ? ends.from : ends.to;
  if (any == nullptr) return absl::InternalError("this rank has neither of the caches' pages");
  const size_t run_bytes = any->run_bytes(spec.interleave);
  const auto ranks = static_cast<size_t>(size);
  std::vector<Route> routes(ranks * ranks);
  const auto route_of = [&routes, ranks](int from, int to) -> Route& {
    return routes[static_cast<size_t>(from) * ranks + static_cast<size_t>(to)];
  };
  for (const MovedPage& page : move.pages) {
    for (const RunMove& run : RunsOf(move.ranks, spec.page_size, spec.interleave, page)) {
      const int to = KeeperOf(run.to_rank, move.keeper_stride, move.ranks.to);
      Route& route = route_of(run.from_rank, to);
      route.from.push_back(run.from_slot);
      route.to.push_back(run.to_slot);
    }
  }
  const Spread spread = [&parcels](int parts, const std::function<void(int part)>& body) {
    parcels.Spread(parts, body);
  };
  // Neighbours first, so that in each turn every rank sends to one and hears from one.
  for (int turn = 0; turn < size; ++turn) {
    for (int from = 0; from < size; ++from) {
      const int to = (from + turn) % size;
      const Route& route = route_of(from, to);
      if (route.from.empty()) continue;
      Shard* const source = rank == from ? ends.from : nullptr;
      Shard* const place = rank == to ? ends.to : nullptr;
      if ((rank == from && source == nullptr) || (rank == to && place == nullptr)) {
        return absl::InternalError(absl::StrCat("rank ", rank, " lacks a cache that is moved"));
      }
      const size_t runs = route.from.size();
      const auto pack = [&](std::byte* parcel) {
        TRIBUTARY_RETURN_IF_ERROR(CheckSlots(route.from, *ends.from_spec));
        TRIBUTARY_RETURN_IF_ERROR(source->ReadRuns(route.from, spec.interleave, parcel));
        SealParcel(runs, run_bytes, parcel, /*order=*/0, spread);
        return absl::OkStatus();
      };
      const auto unpack = [&](const std::byte* parcel) {
        TRIBUTARY_RETURN_IF_ERROR(CheckSlots(route.to, *ends.to_spec));
        const std::vector<int32_t> numbers(route.to.begin(), route.to.end());
        TRIBUTARY_RETURN_IF_ERROR(CheckParcel(numbers, run_bytes, parcel, /*order=*/0, spread));
        return place->WriteRuns(route.to, spec.interleave, parcel);
      };
      TRIBUTARY_RETURN_IF_ERROR(
          parcels.Carry({.from = from, .to = to, .bytes = ParcelBytes(runs, run_bytes)}, comm,
                        deadline, pack, unpack));
    }
  }
  return absl::OkStatus();
}

}  // namespace tributary::worker
