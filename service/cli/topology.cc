// tributary topology: who holds what.
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "service/cli/commands.h"
#include "service/cli/connect_flags.h"
#include "service/cli/print_json.h"
#include "service/cli/report.h"
#include "service/client/client.h"

namespace tributary::cli {
namespace {

class Topology final : public Command {
 public:
  std::string name() const override { return "topology"; }
  std::string summary() const override { return "workers, caches, pages used, sequences"; }
  std::string description() const override {
    return "Shows the group of workers, the caches with the pages they use, and with --sequences\n"
           "how many tokens of each sequence lie on which rank.\n";
  }
  void AddFlags(FlagSet& flags) override {
    AddConnectFlags(flags, &target_, "host:port or unix:/path of the service", &security_);
    flags.Add("cache", &cache_, "only this cache");
    flags.Add("sequences", &sequences_, "list sequences too");
    flags.Add("max_sequences", &max_sequences_, "list no more of each cache");
    flags.Add("json", &json_, "print the service's reply as JSON");
    flags.Add("timeout", &timeout_, "how long to wait for the service");
  }

  int Run() override {
    const auto client = client::Client::Connect({.target = target_,
                                                 .security = security_,
                                                 .timeout = absl::ToChronoMilliseconds(timeout_)});
    if (!client.ok()) return Fail(name(), std::string(client.status().message()));
    v1::GetTopologyRequest request;
    request.set_cache_id(cache_);
    request.set_with_sequences(sequences_);
    request.set_max_sequences(max_sequences_);
    const auto topology = (*client)->GetTopology(request);
    if (!topology.ok()) return Fail(name(), topology.status().ToString());
    if (json_) return PrintJson(name(), *topology);
    std::fputs(TopologyReport(*topology, Style::For(stdout)).c_str(), stdout);
    return kDone;
  }

 private:
  std::string target_ = kDefaultTarget;
  ChannelSecurity security_;
  std::string cache_;
  bool sequences_ = false;
  int32_t max_sequences_ = 100;
  bool json_ = false;
  absl::Duration timeout_ = absl::Seconds(5);
};

}  // namespace

std::unique_ptr<Command> MakeTopology() { return std::make_unique<Topology>(); }

}  // namespace tributary::cli
