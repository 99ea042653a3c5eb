#include "service/cli/flag_set.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "base/config/flag_help.h"

namespace tributary::cli {
namespace {

bool ParseValue(const std::string& text, std::string* value) {
  *value = text;
  return true;
}
bool ParseValue(const std::string& text, bool* value) { return absl::SimpleAtob(text, value); }
bool ParseValue(const std::string& text, double* value) {
  return absl::SimpleAtod(text, value) && std::isfinite(*value);
}
bool ParseValue(const std::string& text, absl::Duration* value) {
  return absl::ParseDuration(text, value);
}
template <typename Integer>
bool ParseValue(const std::string& text, Integer* value) {
  return absl::SimpleAtoi(text, value);
}

std::string ValueText(const std::string& value) { return value; }
std::string ValueText(bool value) { return value ? "true" : "false"; }
std::string ValueText(absl::Duration value) { return absl::FormatDuration(value); }
template <typename Number>
std::string ValueText(Number value) {
  return absl::StrCat(value);
}

const char* Kind(const FlagSet::Target& target) {
  if (std::holds_alternative<bool*>(target)) return "true or false";
  if (std::holds_alternative<absl::Duration*>(target)) return "a duration such as 500ms, 10s, 2m";
  if (std::holds_alternative<double*>(target)) return "a number";
  return "a whole number that fits";
}

}  // namespace

void FlagSet::Add(const std::string& name, Target target, const std::string& help) {
  std::string value = std::visit([](const auto* t) { return ValueText(*t); }, target);
  flags_.push_back({name, target, help, std::move(value)});
}

const FlagSet::Flag* FlagSet::Find(const std::string& name) const {
  const std::string spelled = absl::StrReplaceAll(name, {{"-", "_"}});
  const auto it = std::find_if(flags_.begin(), flags_.end(),
                               [&](const Flag& flag) { return flag.name == spelled; });
  return it == flags_.end() ? nullptr : &*it;
}

absl::Status FlagSet::Parse(const std::vector<std::string>& arguments) const {
  for (size_t i = 0; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    if (!absl::ConsumePrefix(&argument, "--") || argument.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("unexpected '", arguments[i], "'"));
    }
    const size_t equals = argument.find('=');
    const std::string name(argument.substr(0, equals));
    std::optional<std::string> value;
    if (equals != absl::string_view::npos) value = std::string(argument.substr(equals + 1));

    const Flag* flag = Find(name);
    absl::string_view positive = name;
    if (flag == nullptr && !value.has_value() && absl::ConsumePrefix(&positive, "no")) {
      flag = Find(std::string(positive));
      if (flag != nullptr && !std::holds_alternative<bool*>(flag->target)) flag = nullptr;
      value = "false";
    }
    if (flag == nullptr)
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": no such flag"));
    if (!value.has_value()) {
      if (std::holds_alternative<bool*>(flag->target)) {
        value = "true";
      } else if (i + 1 < arguments.size()) {
        value = arguments[++i];
      } else {
        return absl::InvalidArgumentError(absl::StrCat("--", name, ": wants a value"));
      }
    }
    if (!std::visit([&](auto* t) { return ParseValue(*value, t); }, flag->target)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag->name, ": wants ", Kind(flag->target), ", not '", *value, "'"));
    }
  }
  return absl::OkStatus();
}

std::string FlagSet::Help() const {
  std::string out;
  for (const Flag& flag : flags_) {
    absl::StrAppend(&out, FlagHelp(flag.name, flag.default_value, flag.help));
  }
  return out;
}

}  // namespace tributary::cli
