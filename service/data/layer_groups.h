// Which layers of a cache share pages.
//
// A page stands for the same tokens in all layers that share it, so it can be given up only when
// none of them needs it. Layers that look at everything and layers with a window may therefore be
// kept apart. Each group of layers then has page tables and pages of its own, and is a cache of its
// own to the workers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "worker/cache_spec.h"

namespace tributary::service {

struct LayerGroup {
  std::vector<int32_t> layers;  // of the cache, in order
  // How many tokens back any row of the group looks. Absent: some layer looks at everything, so
  // nothing is given up.
  std::optional<int64_t> reach;
};

// Where a layer of a cache is kept.
struct LayerPlace {
  int32_t group = 0;
  int32_t index = 0;  // among the layers of the group
};

class LayerGroups {
 public:
  // `window_left`: [layers], how many tokens back rows look, -1 for everything. `apart`: layers
  // with a window do not share pages with layers without one; otherwise there is one group.
  LayerGroups(const std::vector<int64_t>& window_left, bool apart);

  int32_t size() const { return static_cast<int32_t>(groups_.size()); }
  const LayerGroup& operator[](int32_t group) const { return groups_[group]; }
  const LayerPlace& PlaceOf(int32_t layer) const { return places_[layer]; }

 private:
  std::vector<LayerGroup> groups_;  // that of the layers that see everything first
  std::vector<LayerPlace> places_;  // [layers]
};

// How far back the rows of each layer look, as LayerGroups wants it.
std::vector<int64_t> WindowsOf(const worker::CacheSpec& spec);

// The cache that workers are told of: a group's layers, on `num_pages` pages.
worker::CacheSpec SpecOf(const worker::CacheSpec& whole, const LayerGroup& group,
                         int32_t num_pages);

}  // namespace tributary::service
