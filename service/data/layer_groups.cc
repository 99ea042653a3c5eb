#include "service/data/layer_groups.h"

#include <algorithm>
#include <utility>

namespace tributary::service {
namespace {

LayerGroup GroupOf(std::vector<int32_t> layers, const std::vector<int64_t>& window_left) {
  LayerGroup group{.layers = std::move(layers), .reach = 0};
  for (const int32_t layer : group.layers) {
    if (window_left[layer] < 0) {
      group.reach.reset();
      return group;
    }
    group.reach = std::max(*group.reach, window_left[layer]);
  }
  return group;
}

}  // namespace

LayerGroups::LayerGroups(const std::vector<int64_t>& window_left, bool apart)
    : places_(window_left.size()) {
  std::vector<int32_t> layers[2];
  for (size_t i = 0; i < window_left.size(); ++i) {
    layers[apart && window_left[i] >= 0].push_back(static_cast<int32_t>(i));
  }
  for (std::vector<int32_t>& some : layers) {
    if (some.empty()) continue;
    for (size_t i = 0; i < some.size(); ++i) {
      places_[some[i]] = {.group = size(), .index = static_cast<int32_t>(i)};
    }
    groups_.push_back(GroupOf(std::move(some), window_left));
  }
}

std::vector<int64_t> WindowsOf(const worker::CacheSpec& spec) {
  std::vector<int64_t> windows;
  for (const worker::LayerSpec& layer : spec.layers) {
    windows.push_back(std::max<int64_t>(layer.window.left, -1));
  }
  return windows;
}

worker::CacheSpec SpecOf(const worker::CacheSpec& whole, const LayerGroup& group,
                         int32_t num_pages) {
  worker::CacheSpec spec = whole;
  spec.num_pages = num_pages;
  spec.layers.clear();
  for (const int32_t layer : group.layers) spec.layers.push_back(whole.layers[layer]);
  // One group alone may have what the flags are about.
  spec.fp8_queries = std::any_of(spec.layers.begin(), spec.layers.end(), [&](const auto& layer) {
    return worker::RoundsQueries(whole, worker::KvDType(whole, layer));
  });
  spec.fp8_weights = whole.fp8_weights && spec.fp8_queries;
  return spec;
}

}  // namespace tributary::service
