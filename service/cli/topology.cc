// tributary topology: who holds what.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "base/status/rpc_errors.h"
#include "service/cli/commands.h"
#include "service/cli/print_json.h"
#include "service/cli/report.h"
#include "service/cli/service_command.h"

namespace tributary::cli {
namespace {

class Topology final : public ServiceCommand {
 public:
  std::string name() const override { return "topology"; }
  std::string summary() const override { return "workers, caches, pages used, sequences"; }
  std::string description() const override {
    return "Shows the group of workers, the caches with the pages they use, and with --sequences\n"
           "how many tokens of each sequence lie on which rank.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("cache", &cache_, "Only this cache is shown.");
    flags.Add("sequences", &sequences_, "Sequences are listed too.");
    flags.Add("max_sequences", &max_sequences_,
              "At most this many sequences of each cache are listed.");
    flags.Add("json", &json_, "The service's reply is printed as JSON.");
  }

  int Run() override {
    const auto groups = GroupTargets();
    if (!groups.ok()) return FailToAsk(groups.status());
    if (json_ || groups->size() == 1) return Show(target());
    int result = kDone;
    for (const std::string& group : *groups) {
      std::printf("%sgroup at %s\n", group == groups->front() ? "" : "\n", group.c_str());
      result = std::max(result, Show(group));
    }
    return result;
  }

 private:
  // Several groups in one reply are for JSON.
  int Show(const std::string& group) const {
    const auto client = ConnectTo(group);
    if (!client.ok()) return FailToAsk(client.status());
    v1::GetTopologyRequest request;
    request.set_cache_id(cache_);
    request.set_with_sequences(sequences_);
    request.set_max_sequences(max_sequences_);
    const auto topology = (*client)->GetTopology(request);
    if (!topology.ok()) return FailWith(StatusText(topology.status()));
    if (json_) return PrintJson(name(), *topology);
    std::fputs(TopologyReport(*topology, Style::For(stdout)).c_str(), stdout);
    return kDone;
  }

  std::string cache_;
  bool sequences_ = false;
  int32_t max_sequences_ = 100;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeTopology() { return std::make_unique<Topology>(); }

}  // namespace tributary::cli
