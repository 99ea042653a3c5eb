// The copying thread of wgmma_prefill: it keeps the rings of queries, keys and values full by the
// copy engine.
#pragma once

#include "kernels/cuda/prefill/sm90/tensor_map.h"
#include "kernels/cuda/prefill/sm90/wgmma_prefill_shared.cuh"

namespace tributary::cuda {

// [rows, heads, row bytes] of queries, keys and values; of values of eight bits
// [KV tiles * kv_heads * value_dim, 1, slots of a KV tile].
struct PrefillTensorMaps {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
};

// Begins to copy one box: panel rows from `row` on, of one head, from byte `byte` of the row on.
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap& map, int byte, int head,
                                        int row, CopyBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(byte), "r"(head), "r"(row), "r"(SharedAddress(&barrier.state))
      : "memory");
}

// Begins to copy all panels of a tile; `full` counts their bytes, those filled with zeros too.
template <int kRowBytes, int kPanels, int kPanelBytes>
__device__ __forceinline__ void CopyPanels(std::byte (&panels)[kPanels][kPanelBytes],
                                           const CUtensorMap& map, int head, int row,
                                           CopyBarrier& full) {
  full.ArriveAndExpect(kPanels * kPanelBytes);
#pragma unroll
  for (int i = 0; i < kPanels; ++i) CopyBox(panels[i], map, i * kRowBytes, head, row, full);
}

// Tiles, and items with keys, that a thread block has had before.
struct PrefillCounts {
  int items = 0;
  int tiles = 0;
};

// Brings the queries and KV tiles of items of the thread block, in the order of their use, each as
// soon as its stage is empty: those of the first pass or, with kAgain, of the second. Returns the
// item that the pass leaves, or -1.
template <typename Traits, bool kAgain>
__device__ __forceinline__ int CopyPass(const PrefillKernelArgs& args,
                                        const PrefillTensorMaps& maps,
                                        WgmmaPrefillShared<Traits>& shared, PrefillCounts& before) {
  using TilePlace = PrefillRingPlace<Traits::kStages>;
  int index = args.item_begin + blockIdx.x;
  int n = 0;
  while (index >= 0 && (kAgain || before.items < kMarkedItems)) {
    const PrefillItem item = args.items[index];
    index = item.next;
    PrefetchItem(args, index);
    const int tiles = TilesOf<Traits>(item);
    if (tiles == 0) continue;
    if (kAgain && !shared.Wanted(n++)) continue;
    const int kv_head = args.KvHead(item.head);
    const int first_row = item.key_row + item.key_begin;
    const auto copy_keys = [&](int tile) {
      const TilePlace place(before.tiles + tile);
      shared.k_empty[place.stage].Wait(place.parity ^ 1);
      CopyPanels<Traits::kScoreRowBytes>(shared.k[place.stage].panels, maps.k, kv_head,
                                         first_row + tile * Traits::kKeys,
                                         shared.k_full[place.stage]);
    };
    const auto copy_values = [&](int tile) {
      const TilePlace place(before.tiles + tile);
      shared.v_empty[place.stage].Wait(place.parity ^ 1);
      int head = kv_head;
      int row = first_row + tile * Traits::kKeys;
      if constexpr (Traits::kFp8Values) {
        row = (row / Traits::kKeys * args.kv_heads + kv_head) * Traits::kValueDim;
        head = 0;
      }
      CopyPanels<Traits::kValueRowBytes>(shared.v[place.stage].panels, maps.v, head, row,
                                         shared.v_full[place.stage]);
    };
    const PrefillRingPlace<Traits::kQueryStages> queries(before.items);
    shared.q_empty[queries.stage].Wait(queries.parity ^ 1);
    CopyPanels<Traits::kScoreRowBytes>(shared.q[queries.stage].panels, maps.q, item.head,
                                       item.row_begin, shared.q_full[queries.stage]);
    copy_keys(0);
    for (int tile = 1; tile < tiles; ++tile) {
      copy_keys(tile);
      copy_values(tile - 1);
    }
    copy_values(tiles - 1);
    ++before.items;
    before.tiles += tiles;
  }
  return index;
}

// The work of the copying thread.
template <typename Traits>
__device__ __forceinline__ void CopyItems(const PrefillKernelArgs& args,
                                          const PrefillTensorMaps& maps,
                                          WgmmaPrefillShared<Traits>& shared) {
  PrefillCounts before;
  const int left = CopyPass<Traits, /*kAgain=*/false>(args, maps, shared, before);
  shared.first_pass.Wait(0);
  if (left < 0 && shared.second_pass == 0) return;
  CopyPass<Traits, /*kAgain=*/true>(args, maps, shared, before);
}

}  // namespace tributary::cuda
