#include "service/client/session_messages.h"

namespace tributary::client {

v1::SubmitStep MessageOf(const SessionStep& step, uint64_t step_id) {
  v1::SubmitStep message;
  message.set_step_id(step_id);
  message.set_mode(step.mode);
  message.set_first_layer(step.first_layer);
  message.set_layers(step.layers);
  message.set_append_only(step.append_only);
  for (const SessionEntry& entry : step.entries) {
    v1::SessionStepEntry* out = message.add_entries();
    out->set_sequence_id(entry.sequence_id);
    out->set_first_position(entry.first_position);
    out->set_query_rows(entry.query_rows);
    out->set_new_tokens(entry.new_tokens);
    if (entry.truncate_to.has_value()) out->set_truncate_to(*entry.truncate_to);
    if (entry.fork_from.has_value()) out->set_fork_from(*entry.fork_from);
    if (entry.fork_length.has_value()) out->set_fork_length(*entry.fork_length);
  }
  return message;
}

}  // namespace tributary::client
