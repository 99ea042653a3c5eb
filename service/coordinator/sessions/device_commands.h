// What the workers are told of a session's steps where the mailbox lies on a GPU.
//
// A step that fits a slot is one command for all its layers. Of a larger one each piece of each
// layer is a command. Only so many commands are with the workers at a time: a GPU's stream takes
// about a thousand launches, and a rank that enqueues more waits for the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "service/coordinator/session.h"
#include "worker/command.h"

namespace tributary::service {

// The command that begins with piece number `first` of the step, counted over its layers.
worker::SessionStepCommand CommandOf(const Session& session, const SessionStep& step,
                                     uint32_t first) TRIBUTARY_LOCKED;

// A command that is to be sent now.
struct NextCommand {
  SessionStepPtr step;
  uint32_t first = 0;  // as CommandOf has it
  explicit operator bool() const { return step != nullptr; }
};

// Takes what is to be sent next of the session's accepted steps, and counts it as sent. The step is
// null when there is nothing, or when enough commands are with the workers.
NextCommand TakeNextCommand(Session& session) TRIBUTARY_LOCKED;
// Counts the commands as over that the workers have carried out (Session::carried_out).
void DropDoneCommands(Session& session) TRIBUTARY_LOCKED;

// Notes that repeated tokens differ: of entry `entry` of the command whose first layer, or piece of
// one, has this number. A command of no step in flight is left alone.
void AddConflict(Session& session, uint32_t first_count, int32_t entry) TRIBUTARY_LOCKED;

}  // namespace tributary::service
