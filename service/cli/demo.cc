// tributary demo: a small language model writes text whose attention the service computes.
//
// The model host is an example, and this floor may not include examples; so the demo is a program
// of its own, tinylm-demo, which lies beside this one, and this process becomes it.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "service/cli/commands.h"

namespace tributary::cli {
namespace {

constexpr char kProgram[] = "tinylm-demo";

class Demo final : public Command {
 public:
  std::string name() const override { return "demo"; }
  std::string summary() const override {
    return "a small language model writes text; attention by four workers";
  }
  std::string description() const override {
    return "Runs the program tinylm-demo that lies beside this one, with all arguments.\n"
           "Its flags: tributary demo --help\n";
  }
  void AddFlags(FlagSet&) override {}
  bool passes_arguments_on() const override { return true; }
  void TakeArguments(Arguments arguments) override { arguments_ = std::move(arguments); }

  int Run() override {
    std::error_code error;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
    if (error) return Fail(name(), absl::StrCat("cannot find myself: ", error.message()));
    std::string program = (self.parent_path() / kProgram).string();
    std::vector<char*> argv = {program.data()};
    for (std::string& argument : arguments_) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(program.c_str(), argv.data());
    return Fail(name(), absl::StrCat("cannot run ", program, ": ", std::strerror(errno)));
  }

 private:
  Arguments arguments_;
};

}  // namespace

std::unique_ptr<Command> MakeDemo() { return std::make_unique<Demo>(); }

}  // namespace tributary::cli
