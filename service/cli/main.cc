// tributary: the command line. `tributary help` lists what it can do.
#include <grpc/support/log.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/process/version.h"
#include "service/cli/command.h"
#include "service/cli/commands.h"
#include "service/cli/terminal.h"

namespace tributary::cli {
namespace {

std::vector<std::unique_ptr<Command>> AllCommands() {
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(MakeDemo());
  commands.push_back(MakeBench());
  commands.push_back(MakeHealth());
  commands.push_back(MakeCheck());
  commands.push_back(MakeLimits());
  commands.push_back(MakeTopology());
  commands.push_back(MakeStat());
  commands.push_back(MakeTop());
  commands.push_back(MakeFlight());
  commands.push_back(MakeTrace());
  commands.push_back(MakeResize());
  return commands;
}

std::unique_ptr<Command> Find(const std::string& name) {
  for (std::unique_ptr<Command>& command : AllCommands()) {
    if (command->name() == name) return std::move(command);
  }
  return nullptr;
}

void PrintOverview(std::FILE* to) {
  const Style style = Style::For(to);
  std::fprintf(to, "%s\n\n%s\n", "Talks to a Tributary service: attention where the KV cache lies.",
               style.Bold("usage: tributary COMMAND [flags]").c_str());
  for (const auto& command : AllCommands()) {
    std::fprintf(to, "  %s %s\n", style.Bold(absl::StrFormat("%-9s", command->name())).c_str(),
                 command->summary().c_str());
  }
  std::fprintf(to, "  %s %s\n", style.Bold(absl::StrFormat("%-9s", "help")).c_str(),
               "what a command does and its flags: tributary help bench");
  std::fprintf(to, "  %s %s\n", style.Bold(absl::StrFormat("%-9s", "version")).c_str(),
               "the version and the commit it was built from");
}

void PrintHelp(Command& command) {
  FlagSet flags;
  command.AddFlags(flags);
  std::string usage = absl::StrCat("usage: tributary ", command.name());
  const std::string flag_help = flags.Help();
  absl::StrAppend(&usage, flag_help.empty() ? " [arguments]" : " [flags]");
  std::printf("%s\n\n%s", Style::For(stdout).Bold(usage).c_str(), command.description().c_str());
  if (!flag_help.empty()) std::printf("\n%s", flag_help.c_str());
}

int Help(const Arguments& arguments) {
  if (arguments.empty()) {
    PrintOverview(stdout);
    return kDone;
  }
  const std::unique_ptr<Command> command = Find(arguments[0]);
  if (command == nullptr) {
    Fail("help", absl::StrCat("no command '", arguments[0], "'"));
    return kWrongUsage;
  }
  PrintHelp(*command);
  return kDone;
}

bool AsksForHelp(const std::string& argument) { return argument == "--help" || argument == "-h"; }

int Main(Arguments arguments) {
  if (arguments.empty()) {
    PrintOverview(stderr);
    return kWrongUsage;
  }
  const std::string name = arguments.front();
  arguments.erase(arguments.begin());
  if (name == "help" || AsksForHelp(name)) return Help(arguments);
  if (name == "version" || name == "--version") {
    std::fputs(VersionLine("tributary").c_str(), stdout);
    return kDone;
  }
  const std::unique_ptr<Command> command = Find(name);
  if (command == nullptr) {
    Fail(name, "no such command; see tributary help");
    return kWrongUsage;
  }
  if (command->passes_arguments_on()) {
    command->TakeArguments(std::move(arguments));
    return command->Run();
  }
  for (const std::string& argument : arguments) {
    if (AsksForHelp(argument)) return Help({name});
  }
  FlagSet flags;
  command->AddFlags(flags);
  if (const absl::Status status = flags.Parse(arguments); !status.ok()) {
    Fail(name, absl::StrCat(status.message(), "; see tributary help ", name));
    return kWrongUsage;
  }
  return command->Run();
}

}  // namespace

int Fail(const std::string& command, const std::string& message) {
  std::fprintf(stderr, "%s\n",
               Style::For(stderr).Red(absl::StrCat("tributary ", command, ": ", message)).c_str());
  return kFailed;
}

}  // namespace tributary::cli

int main(int argc, char** argv) {
  // What gRPC logs of a connection that fails, the command says in words. GRPC_VERBOSITY brings it
  // back.
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  return tributary::cli::Main(tributary::cli::Arguments(argv + 1, argv + argc));
}
