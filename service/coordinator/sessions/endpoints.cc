#include "service/coordinator/sessions/endpoints.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace tributary::service {

void ExpectEndpoints(Session& session, std::string secret, v1::SessionOpened* opened) {
  const auto count = static_cast<size_t>(session.terms.endpoints.count);
  if (count == 1) return;
  opened->set_endpoint_secret(secret);
  session.endpoint_secret = std::move(secret);
  session.joined.resize(count);
}

bool IsSecret(absl::string_view secret, absl::string_view shown) {
  if (secret.empty() || shown.size() != secret.size()) return false;
  int differs = 0;
  for (size_t i = 0; i < secret.size(); ++i) differs |= secret[i] ^ shown[i];
  return differs == 0;
}

void AddToOutboxes(Session& session, v1::SessionReply reply) {
  for (const auto& endpoint : session.joined) {
    if (endpoint != nullptr) endpoint->Reply(reply);
  }
  session.outbox.Reply(std::move(reply));
}

void EndOutboxes(Session& session, const absl::Status& why) {
  session.outbox.End(why);
  for (const auto& endpoint : session.joined) {
    if (endpoint != nullptr) endpoint->End(why);
  }
}

std::function<void()> DrainOf(const SessionPtr& session) {
  return [session, joined = session->joined] {
    session->outbox.Drain();
    for (const auto& endpoint : joined) {
      if (endpoint != nullptr) endpoint->Drain();
    }
  };
}

absl::Status EndpointLeft(int32_t endpoint) {
  return absl::AbortedError(absl::StrCat("endpoint ", endpoint, " of the session left"));
}

}  // namespace tributary::service
