#include "base/config/config_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status/status_macros.h"

namespace tributary {
namespace {

// The value of --config, the last one given; "--config=x" and "--config x" both count.
std::optional<std::string> ConfigPath(const std::vector<std::string>& arguments) {
  std::optional<std::string> path;
  for (size_t i = 1; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    if (argument == "--") break;
    if (!absl::ConsumePrefix(&argument, "--") && !absl::ConsumePrefix(&argument, "-")) continue;
    if (absl::ConsumePrefix(&argument, "config=")) {
      path = std::string(argument);
    } else if (argument == "config" && i + 1 < arguments.size()) {
      path = arguments[i + 1];
    }
  }
  return path;
}

// "--metrics-port=1" is "--metrics_port=1".
void UnderscoresInName(std::string* argument) {
  if (!absl::StartsWith(*argument, "--")) return;
  const auto end = std::find(argument->begin(), argument->end(), '=');
  std::replace(argument->begin() + 2, end, '-', '_');
}

absl::StatusOr<std::string> ScalarOrList(const YAML::Node& node) {
  if (node.IsScalar()) return node.Scalar();
  if (node.IsSequence()) {
    std::vector<std::string> values;
    for (const YAML::Node& value : node) {
      if (!value.IsScalar()) return absl::InvalidArgumentError("must be a list of scalars");
      values.push_back(value.Scalar());
    }
    return absl::StrJoin(values, ",");
  }
  return absl::InvalidArgumentError("must be a scalar or a list of scalars");
}

std::vector<std::string> WithUnderscores(int argc, char** argv) {
  std::vector<std::string> arguments(argv, argv + argc);
  for (size_t i = 1; i < arguments.size() && arguments[i] != "--"; ++i) {
    UnderscoresInName(&arguments[i]);
  }
  return arguments;
}

}  // namespace

absl::StatusOr<Settings> SettingsOfFile(const std::string& path) {
  YAML::Node root;
  try {
    root = YAML::LoadFile(path);
  } catch (const YAML::BadFile&) {
    return absl::NotFoundError(absl::StrCat("config: cannot read ", path));
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("config: ", path, ": ", error.what()));
  } catch (const std::exception& error) {
    // Of reading: the path is a directory, for example.
    return absl::InvalidArgumentError(
        absl::StrCat("config: cannot read ", path, ": ", error.what()));
  }
  Settings settings;
  if (root.IsNull()) return settings;
  if (!root.IsMap()) {
    return absl::InvalidArgumentError(absl::StrCat("config: ", path, ": must be a mapping"));
  }
  for (const auto& setting : root) {
    std::string name = setting.first.IsScalar() ? setting.first.Scalar() : "";
    std::replace(name.begin(), name.end(), '-', '_');
    if (name == "config" || absl::FindCommandLineFlag(name) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("config: ", path, ": ", name, " is not a setting (see --help for all)"));
    }
    // One of the two would be left out without a word, and nobody can tell which was meant.
    if (settings.count(name) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("config: ", path, ": ", name, " is given twice"));
    }
    absl::StatusOr<std::string> value = ScalarOrList(setting.second);
    if (!value.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("config: ", path, ": ", name, ": ", value.status().message()));
    }
    settings[name] = *std::move(value);
  }
  return settings;
}

std::string ConfigFileOf(int argc, char** argv) {
  return ConfigPath(WithUnderscores(argc, argv)).value_or("");
}

std::set<std::string> FlagsGiven(int argc, char** argv) {
  std::set<std::string> names;
  for (const std::string& argument : WithUnderscores(argc, argv)) {
    absl::string_view name = argument;
    if (argument == "--") break;
    if (!absl::ConsumePrefix(&name, "--")) continue;
    name = name.substr(0, name.find('='));
    absl::string_view positive = name;
    if (absl::FindCommandLineFlag(name) == nullptr && absl::ConsumePrefix(&positive, "no")) {
      name = positive;
    }
    names.emplace(name);
  }
  return names;
}

absl::StatusOr<std::vector<std::string>> ArgumentsWithConfigFile(int argc, char** argv) {
  std::vector<std::string> arguments = WithUnderscores(argc, argv);
  const std::optional<std::string> path = ConfigPath(arguments);
  if (!path.has_value() || path->empty()) return arguments;
  TRIBUTARY_ASSIGN_OR_RETURN(const Settings settings, SettingsOfFile(*path));
  std::vector<std::string> flags;
  for (const auto& [name, value] : settings) flags.push_back(absl::StrCat("--", name, "=", value));
  arguments.insert(arguments.begin() + 1, flags.begin(), flags.end());
  return arguments;
}

}  // namespace tributary
