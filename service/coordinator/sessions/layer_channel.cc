#include "service/coordinator/sessions/layer_channel.h"

#include "absl/strings/str_cat.h"

namespace tributary::service {

absl::Status NotHandedOver(const LayerCall& call, const SessionTerms& terms) {
  return absl::DeadlineExceededError(absl::StrCat("the host did not hand over layer ", call.layer,
                                                  " of step ", call.step_id, " within ",
                                                  terms.public_terms.wait_timeout_ms(), " ms"));
}

}  // namespace tributary::service
