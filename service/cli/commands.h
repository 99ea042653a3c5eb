// One factory a subcommand.
#pragma once

#include <memory>

#include "service/cli/command.h"

namespace tributary::cli {

std::unique_ptr<Command> MakeBench();
std::unique_ptr<Command> MakeCheck();
std::unique_ptr<Command> MakeDemo();
std::unique_ptr<Command> MakeFlight();
std::unique_ptr<Command> MakeHealth();
std::unique_ptr<Command> MakeLimits();
std::unique_ptr<Command> MakeResize();
std::unique_ptr<Command> MakeStat();
std::unique_ptr<Command> MakeTop();
std::unique_ptr<Command> MakeTopology();
std::unique_ptr<Command> MakeTrace();

}  // namespace tributary::cli
