// Subcommands of the command line.
#pragma once

#include <string>
#include <vector>

#include "service/cli/flag_set.h"

namespace tributary::cli {

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kWrongUsage = 2;

using Arguments = std::vector<std::string>;

// A subcommand. Made anew for each use, so that its options are its members and flags refer to
// them.
class Command {
 public:
  virtual ~Command() = default;
  virtual std::string name() const = 0;
  virtual std::string summary() const = 0;      // one line
  virtual std::string description() const = 0;  // paragraphs for `help`; lines end with '\n'
  virtual void AddFlags(FlagSet& flags) = 0;
  // Its exit code.
  virtual int Run() = 0;
  // Whether arguments are passed on as they are: then there are no flags, and TakeArguments is
  // called.
  virtual bool passes_arguments_on() const { return false; }
  virtual void TakeArguments(Arguments) {}
};

// "tributary NAME: MESSAGE" on stderr; returns kFailed.
int Fail(const std::string& command, const std::string& message);

// Where hosts connect, and where health is asked, unless a flag says otherwise: the coordinator's
// own defaults.
inline constexpr char kDefaultTarget[] = "127.0.0.1:7400";
inline constexpr char kDefaultAdmin[] = "127.0.0.1:7401";

}  // namespace tributary::cli
