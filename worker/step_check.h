// Whether a step can be executed at all.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/page_tables.h"

namespace tributary::worker {

// Checks a step against the geometry and the tables, before anything is changed. The answer depends
// only on the commands so far, which all ranks got alike, so they agree without communicating.
//
//   bad layer, count, dtype, size, repeated sequence, unknown page   kInvalidArgument
//   a sequence without a table                                       kNotFound
//   tokens or rows beyond the pages of the table                     kOutOfRange
//
// each naming the field of worker/command.h's StepCommand. `ranks` is N.
absl::Status CheckStep(const CacheSpec& spec, int32_t ranks, const PageTables& tables,
                       const StepCommand& step);

// The same of what lies in regions, for a step that passed CheckStep. `reaches`: Backend::Reaches.
// kInvalidArgument: sizes that do not add up; kNotFound: a part outside of every open region.
absl::Status CheckStepRegions(const CacheSpec& spec, const StepCommand& step,
                              const std::function<bool(const RegionPart&)>& reaches);

}  // namespace tributary::worker
