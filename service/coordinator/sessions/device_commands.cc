#include "service/coordinator/sessions/device_commands.h"

#include "base/mailbox/layout.h"
#include "service/schedule/step_pieces.h"

namespace tributary::service {
namespace {

uint32_t CountOf(const SessionStep& step) { return step.end() - step.first_count; }

// How many numbers a command of the step takes.
uint32_t CountOfCommand(const SessionStep& step) { return step.pieces() == 1 ? CountOf(step) : 1; }

}  // namespace

worker::SessionStepCommand CommandOf(const Session& session, const SessionStep& step,
                                     uint32_t first) {
  const LayerGroups& groups = session.cache->layer_groups;
  const SessionStepRequest& request = step.request;
  worker::SessionStepCommand command{.session = session.id,
                                     .kind = request.kind,
                                     .first_count = step.first_count + first,
                                     .entries = step.accepted.entries,
                                     .waiting = session.choice.waiting};
  if (step.pieces() > 1) {
    const mailbox::Piece& piece = request.pieces[first % step.pieces()];
    command.kind = KindOf(request.kind, request.pieces, piece);
    command.entries = EntriesOf(step.accepted.entries, piece);
  }
  const auto layer = request.range.first + static_cast<int32_t>(first / step.pieces());
  for (uint32_t i = 0; i < CountOfCommand(step); ++i) {
    const LayerPlace place = groups.PlaceOf(layer + static_cast<int32_t>(i));
    command.layers.push_back({session.cache->ids[place.group], place.index});
  }
  if (first > 0) return command;
  for (const GroupPages& pages : step.accepted.pages) {
    command.changes.push_back(
        {session.cache->ids[pages.group], pages.page_copies, pages.page_updates});
  }
  return command;
}

NextCommand TakeNextCommand(Session& session) {
  const auto most = static_cast<size_t>(session.terms.command.max_steps);
  if (session.to_send.empty() || session.sent.size() >= most) return {};
  SessionStepPtr step = session.to_send.front();
  const uint32_t first = session.sent_of_first;
  session.sent_of_first += CountOfCommand(*step);
  session.sent.push_back(step->first_count + session.sent_of_first);
  if (session.sent_of_first == CountOf(*step)) {
    session.to_send.pop_front();
    session.sent_of_first = 0;
  }
  return {std::move(step), first};
}

void DropDoneCommands(Session& session) {
  while (!session.sent.empty() && mailbox::Reached(session.carried_out, session.sent.front())) {
    session.sent.pop_front();
  }
}

void AddConflict(Session& session, uint32_t first_count, int32_t entry) {
  for (const SessionStepPtr& step : session.in_flight) {
    const uint32_t first = first_count - step->first_count;
    if (first >= CountOf(*step)) continue;
    if (step->pieces() > 1) {
      const auto& parts = step->request.pieces[first % step->pieces()].parts;
      if (entry < 0 || static_cast<size_t>(entry) >= parts.size()) return;
      entry = parts[static_cast<size_t>(entry)].entry;
    }
    step->conflicts.push_back(entry);
    return;
  }
}

}  // namespace tributary::service
