// Layers of a host whose model is split over heads: each endpoint hands its heads over through a
// mailbox of its own. Here they are put together, and the results are dealt out by heads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "service/coordinator/sessions/layer_channel.h"
#include "service/coordinator/sessions/mailbox_channel.h"
#include "service/data/host_mailbox.h"
#include "service/data/session_terms.h"

namespace tributary::service {

// End may be called from any thread, Take and Deliver by one.
class EndpointChannel final : public LayerChannel {
 public:
  // `mailboxes`: by endpoint. `spin` as MailboxChannel has it.
  EndpointChannel(const SessionTerms& terms,
                  const std::vector<std::shared_ptr<HostMailbox>>& mailboxes,
                  std::chrono::nanoseconds spin);

  // A status that says who is to blame names the endpoint.
  absl::StatusOr<LayerTensors> Take(const LayerCall& call,
                                    std::chrono::steady_clock::time_point until) override;
  void Deliver(const LayerCall& call, std::span<const std::byte> result) override;
  void End(const absl::Status& why) override;

 private:
  // Of all endpoints, in dense tensors.
  struct Layer {
    std::vector<std::byte> q, k, v, output, lse;
  };

  EndpointHeads HeadsOf(const LayerCall& call, size_t endpoint) const;
  LayerCall PartOf(const LayerCall& call, size_t endpoint) const;
  void Gather(const LayerCall& call, size_t endpoint, const LayerTensors& part);
  // `output` and `lse` of all heads.
  void Scatter(const LayerCall& call, size_t endpoint, const std::byte* output,
               const std::byte* lse) const;

  const SessionTerms terms_;
  std::vector<std::unique_ptr<MailboxChannel>> channels_;  // by endpoint
  std::vector<LayerTensors> parts_;                        // of the layer taken last
  std::shared_ptr<Layer> layer_;
};

}  // namespace tributary::service
