#include "service/coordinator/table_commands.h"

#include <algorithm>
#include <utility>

namespace tributary::service {
namespace {

// The most page numbers, and lengths, in one SetTables command. It bounds the size of the command
// however many sequences are open.
constexpr size_t kNumbersPerCommand = 1 << 18;

}  // namespace

std::vector<worker::SetTablesCommand> TableCommands(std::vector<SequenceTable::Told> all) {
  std::vector<worker::SetTablesCommand> commands;
  size_t room = 0;
  for (SequenceTable::Told& told : all) {
    const size_t size =
        1 + told.standing.lengths.size() + (told.table ? told.table->pages.size() : 0);
    if (size > room) {
      commands.emplace_back();
      room = std::max(kNumbersPerCommand, size);
    }
    room -= size;
    if (told.table.has_value()) commands.back().tables.push_back(*std::move(told.table));
    commands.back().standings.push_back(std::move(told.standing));
  }
  return commands;
}

}  // namespace tributary::service
