// Whether a step can be executed at all.
#pragma once

#include "absl/status/status.h"
#include "worker/cache_spec.h"
#include "worker/command.h"
#include "worker/page_tables.h"

namespace tributary::worker {

// Checks a step against the geometry and the tables, before anything is changed. The answer depends
// on nothing but the commands so far, which every rank got alike: ranks agree on it without a word.
//
//   bad layer, count, dtype, size, repeated sequence, unknown page   kInvalidArgument
//   a sequence without a table                                       kNotFound
//   tokens or rows beyond the pages of the table                     kOutOfRange
//
// each naming the field of worker/command.h's StepCommand. `ranks` is N.
absl::Status CheckStep(const CacheSpec& spec, int32_t ranks, const PageTables& tables,
                       const StepCommand& step);

}  // namespace tributary::worker
