#include "base/mailbox/layout_message.h"

namespace tributary::mailbox {

v1::MailboxLayout MessageOf(const Layout& layout) {
  v1::MailboxLayout out;
  out.set_arrived(layout.arrived);
  out.set_finished(layout.finished);
  out.set_status(layout.status);
  out.set_service_sleeps(layout.service_sleeps);
  out.set_host_sleeps(layout.host_sleeps);
  out.set_handed_over(layout.handed_over);
  out.set_handed_back(layout.handed_back);
  out.set_begun(layout.begun);
  out.set_first_slot(layout.first_slot);
  out.set_slot_bytes(layout.slot_bytes);
  out.set_slots(layout.slots);
  out.set_q(layout.q);
  out.set_k(layout.k);
  out.set_v(layout.v);
  out.set_output(layout.output);
  out.set_lse(layout.lse);
  out.set_stamps(layout.stamps);
  out.set_byte_size(layout.bytes);
  return out;
}

Layout ReadLayout(const v1::MailboxLayout& message) {
  return {.arrived = message.arrived(),
          .finished = message.finished(),
          .status = message.status(),
          .service_sleeps = message.service_sleeps(),
          .host_sleeps = message.host_sleeps(),
          .handed_over = message.handed_over(),
          .handed_back = message.handed_back(),
          .begun = message.begun(),
          .first_slot = message.first_slot(),
          .slot_bytes = message.slot_bytes(),
          .slots = message.slots(),
          .q = message.q(),
          .k = message.k(),
          .v = message.v(),
          .output = message.output(),
          .lse = message.lse(),
          .stamps = message.stamps(),
          .bytes = message.byte_size()};
}

}  // namespace tributary::mailbox
