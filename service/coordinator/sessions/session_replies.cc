#include "service/coordinator/sessions/session_replies.h"

#include <algorithm>
#include <chrono>

#include "base/mailbox/layout_message.h"
#include "service/data/endpoints.h"

namespace tributary::service {
namespace {

// What an endpoint hands over: one shape for all layers where they are alike.
void AddShapes(const Session& session, int32_t endpoint, v1::SessionOpened* opened) {
  const worker::CacheSpec& spec = session.cache->spec;
  bool alike = true;
  for (const worker::LayerSpec& layer : spec.layers) {
    const worker::LayerGeometry geometry = worker::GeometryOf(spec, layer);
    const EndpointHeads heads = HeadsOf(geometry, session.terms.endpoints, endpoint);
    v1::LayerShape shape;
    shape.set_q_heads(heads.q.count);
    shape.set_first_q_head(heads.q.begin);
    shape.set_kv_heads(heads.kv.count);
    shape.set_first_kv_head(heads.kv.begin);
    const bool shared = session.terms.shares_mailbox();
    shape.set_slot_q_heads(shared ? geometry.q_heads : heads.q.count);
    shape.set_slot_kv_heads(shared ? geometry.kv.kv_heads : heads.kv.count);
    shape.set_head_dim(geometry.kv.key_dim);
    shape.set_value_head_dim(geometry.kv.value_dim);
    *opened->add_shapes() = shape;
    alike = alike && shape.SerializeAsString() == opened->shapes(0).SerializeAsString();
  }
  if (alike) opened->mutable_shapes()->DeleteSubrange(1, opened->shapes_size() - 1);
}

}  // namespace

v1::SessionReply OpenedReply(const Session& session, int32_t endpoint) {
  v1::SessionReply reply;
  v1::SessionOpened* opened = reply.mutable_opened();
  opened->set_session_id(session.id);
  opened->set_epoch(session.epoch);
  *opened->mutable_terms() = session.terms.public_terms;
  opened->set_endpoint(endpoint);
  AddShapes(session, endpoint, opened);
  return reply;
}

v1::DeviceMailbox PublicMailbox(const worker::DeviceMailbox& mailbox) {
  v1::DeviceMailbox out;
  out.set_raw_handle(mailbox.handle);
  out.set_device_uuid(mailbox.gpu);
  out.set_address(mailbox.address);
  out.set_process_nonce(mailbox.process_nonce);
  out.set_several_gpus(mailbox.several_gpus);
  return out;
}

void AddMailbox(const Session& session, const std::string& token, const std::string& socket,
                v1::SessionOpened* opened) {
  *opened->mutable_layout() = mailbox::MessageOf(session.terms.command.layout);
  opened->mutable_host()->set_socket(socket);
  opened->mutable_host()->set_token(token);
}

void AddDeviceMailbox(const Session& session, int32_t endpoint, v1::SessionOpened* opened) {
  *opened->mutable_layout() = mailbox::MessageOf(session.terms.command.layout.OfEndpoint(endpoint));
  *opened->mutable_device() = session.mailbox;
}

v1::SessionReply AcceptedReply(const SessionStep& step) {
  v1::SessionReply reply;
  v1::StepAccepted* told = reply.mutable_accepted();
  told->set_step_id(step.request.step_id);
  told->set_first_count(step.first_count);
  told->mutable_lengths()->Add(step.accepted.lengths.begin(), step.accepted.lengths.end());
  return reply;
}

v1::SessionInfo InfoOf(const Session& session, CoordinatorLock::Clock::time_point now) {
  v1::SessionInfo info;
  info.set_session_id(session.id);
  info.set_client(session.call.caller);
  info.set_cache_id(session.cache->name);
  const v1::OpenSession& terms = session.terms.public_terms;
  info.set_memory(terms.memory());
  info.set_waiting(session.way_to_wait);
  info.set_round_trip_seconds(session.choice.round_trip_seconds);
  info.set_warning(session.choice.warning);
  const bool has_mailbox = terms.memory() != v1::SESSION_MEMORY_MESSAGES;
  if (has_mailbox) info.set_mailbox_bytes(session.terms.mailbox_bytes());
  info.set_steps_in_flight(static_cast<int32_t>(session.in_flight.size()));
  info.set_steps_done(session.steps_done);
  info.set_layers_done(session.layers_done);
  info.set_endpoints(session.terms.endpoints.count);
  info.set_endpoints_joined(static_cast<int32_t>(
      1 + std::count_if(session.joined.begin(), session.joined.end(),
                        [](const auto& endpoint) { return endpoint != nullptr; })));
  info.set_age_seconds(std::chrono::duration<double>(now - session.since).count());
  return info;
}

}  // namespace tributary::service
