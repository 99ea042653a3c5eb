#include "service/coordinator/cache.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tributary::service {
namespace {

std::vector<worker::CacheId> IdsFrom(worker::CacheId first, int32_t count) {
  std::vector<worker::CacheId> ids(count);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

}  // namespace

Cache::Cache(std::string cache_name, std::string cache_owner, worker::CacheId first_id,
             ResolvedSpec resolved, worker::CacheBackends cache_backends,
             const TableGeometry& geometry)
    : name(std::move(cache_name)),
      owner(std::move(cache_owner)),
      spec(std::move(resolved.spec)),
      terms(std::move(resolved.terms)),
      public_spec(std::move(resolved.public_spec)),
      backends(std::move(cache_backends)),
      ranks(geometry.ranks),
      table(geometry),
      ids(IdsFrom(first_id, table.groups().size())),
      layer_groups(table.groups()) {}

worker::CacheSpec Cache::GroupSpec(int32_t group) const {
  return SpecOf(spec, table.groups()[group], table.pages(group).total());
}

int64_t Cache::PageBytes(int32_t group) const {
  const worker::CacheSpec group_spec = GroupSpec(group);
  const auto all = static_cast<int64_t>(worker::ShardBytes(group_spec).value_or(0));
  return std::max<int64_t>(1, all / std::max(1, group_spec.num_pages));
}

}  // namespace tributary::service
