// A question to a service whose answer is known: is every token of every rank attended over, once?
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "service/client/client.h"

namespace tributary::cli {

// One number the service computed, and what it must be.
struct Finding {
  std::string what;
  double expected = 0;
  double found = 0;
  bool good = false;
};

// Good when `found` is within `tolerance` of what is expected; NaN never is.
Finding Judge(std::string what, double expected, double found, double tolerance);

struct SelfCheck {
  int ranks = 0;
  std::string backend;
  std::vector<Finding> findings;

  bool good() const;
};

// Creates a small cache of its own, attends in it, and deletes it. First over one token: its value
// must come back. Then over a page of every rank, with keys of zero, so that all tokens weigh the
// same: LSE must be the logarithm of their number, which no missing or doubled shard leaves as it
// is, and the output the mean of values that differ by rank. Fails when the service refuses a call.
absl::StatusOr<SelfCheck> RunSelfCheck(client::Client& client);

}  // namespace tributary::cli
