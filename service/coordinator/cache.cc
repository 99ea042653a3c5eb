#include "service/coordinator/cache.h"

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

}  // namespace tributary::service
