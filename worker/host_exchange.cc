#include "worker/host_exchange.h"

#include <cstddef>

#include "worker/status_conversion.h"

namespace tributary::worker {

absl::Status HostExchange::MergeToRoot(const RowPass& pass, Partial partial) {
  const float* sinks = step_.layer().sinks.empty() ? nullptr : step_.layer().sinks.data();
  return Merge(pass, partial, sinks, collective::Placement::kGathered, ResultOf(pass));
}

absl::Status HostExchange::MergeToSlices(const RowPass& pass, Partial partial, Partial out) {
  return Merge(pass, partial, nullptr, collective::Placement::kScattered, out);
}

absl::Status HostExchange::Merge(const RowPass& pass, Partial partial, const float* sinks,
                                 collective::Placement placement, Partial out) {
  const TimedSection timed(results_.times.exchange);
  const collective::ExchangeParams exchange{.o = partial.o,
                                            .lse = partial.lse,
                                            .rows = pass.row_count,
                                            .heads = step_.geometry().q_heads,
                                            .value_dim = step_.geometry().kv.value_dim,
                                            .sinks = sinks,
                                            .placement = placement,
                                            .strategy = strategy_,
                                            .out = out.o,
                                            .lse_out = out.lse};
  return CollectiveStatus(
      collective::ExchangeAndMerge(exchange, step_.comm, workspace_, step_.deadline));
}

absl::Status HostExchange::GatherToRoot(const RowPass& pass, Partial rows) {
  const TimedSection timed(results_.times.exchange);
  const Partial result = ResultOf(pass);
  const collective::ExchangeShape shape{.rows = pass.row_count,
                                        .heads = step_.geometry().q_heads,
                                        .value_dim = step_.geometry().kv.value_dim,
                                        .ranks = step_.comm.size(),
                                        .placement = collective::Placement::kGathered};
  return CollectiveStatus(collective::GatherSlices(rows.o, rows.lse, shape, step_.comm, workspace_,
                                                   result.o, result.lse, step_.deadline));
}

HostExchange::Partial HostExchange::ResultOf(const RowPass& pass) const {
  if (step_.comm.rank() != 0 || results_.o == nullptr) return {};
  const size_t before =
      static_cast<size_t>(pass.row_begin) * static_cast<size_t>(step_.geometry().q_heads);
  return {results_.o + before * static_cast<size_t>(step_.geometry().kv.value_dim),
          results_.lse + before};
}

}  // namespace tributary::worker
