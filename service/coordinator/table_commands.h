// The commands that tell workers all tables of a group of layers.
#pragma once

#include <vector>

#include "service/schedule/sequence_table.h"
#include "worker/command.h"

namespace tributary::service {

// What is told of one sequence goes into one command. The size of a command is bounded, however
// many sequences are open.
std::vector<worker::SetTablesCommand> TableCommands(std::vector<SequenceTable::Told> all);

}  // namespace tributary::service
