// The flags of one subcommand: names bound to variables, whose values are the defaults.
//
//   FlagSet flags;
//   flags.Add("target", &options.target, "where the service listens");
//   if (absl::Status status = flags.Parse(arguments); !status.ok()) ...
//
// Not Abseil's flags: those are global, and subcommands would share names.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tributary::cli {

class FlagSet {
 public:
  using Target =
      std::variant<std::string*, int32_t*, int64_t*, uint64_t*, double*, bool*, absl::Duration*>;

  // `name` with '_' between words; '-' is accepted too. The variable outlives the set.
  void Add(const std::string& name, Target target, const std::string& help);

  // Takes --name=value, --name value, --flag and --noflag. INVALID_ARGUMENT names what it cannot
  // take; values before it are set.
  absl::Status Parse(const std::vector<std::string>& arguments) const;

  // One flag a paragraph, with its default.
  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    Target target;
    std::string help;
    std::string default_value;
  };
  const Flag* Find(const std::string& name) const;

  std::vector<Flag> flags_;
};

}  // namespace tributary::cli
