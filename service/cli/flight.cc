// tributary flight: the last steps, those that have not ended included.
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/rpc/channel_security.h"
#include "grpcpp/client_context.h"
#include "service/cli/commands.h"
#include "service/cli/connect_flags.h"
#include "service/cli/print_json.h"
#include "service/cli/report.h"
#include "tributary/v1/diagnostics.grpc.pb.h"

namespace tributary::cli {
namespace {

class Flight final : public Command {
 public:
  std::string name() const override { return "flight"; }
  std::string summary() const override { return "the last steps and where their time went"; }
  std::string description() const override {
    return "Asks for the flight record: the steps the service ran last, with the time each phase\n"
           "took on the slowest rank, and those that have not ended. The same goes to the\n"
           "coordinator's log when the group breaks.\n";
  }
  void AddFlags(FlagSet& flags) override {
    AddConnectFlags(flags, &target_, "host:port or unix:/path of the service", &security_);
    flags.Add("steps", &steps_, "no more than these last ones; 0: all that are kept");
    flags.Add("json", &json_, "print the service's reply as JSON");
    flags.Add("timeout", &timeout_, "how long to wait for the service");
  }

  int Run() override {
    if (steps_ < 0) {
      Fail(name(), "steps: must be >= 0");
      return kWrongUsage;
    }
    const auto channel = DialSecurely(target_, security_, {});
    if (!channel.ok()) return Fail(name(), std::string(channel.status().message()));
    const auto stub = v1::DiagnosticsService::NewStub(*channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout_));
    v1::GetFlightRecordRequest request;
    request.set_steps(static_cast<uint32_t>(steps_));
    v1::FlightRecord record;
    const grpc::Status status = stub->GetFlightRecord(&context, request, &record);
    if (!status.ok()) {
      return Fail(name(), absl::StrCat(target_, ": ", status.error_message()));
    }
    if (json_) return PrintJson(name(), record);
    std::fputs(FlightReport(record, Style::For(stdout)).c_str(), stdout);
    return kDone;
  }

 private:
  std::string target_ = kDefaultTarget;
  ChannelSecurity security_;
  int32_t steps_ = 40;
  bool json_ = false;
  absl::Duration timeout_ = absl::Seconds(5);
};

}  // namespace

std::unique_ptr<Command> MakeFlight() { return std::make_unique<Flight>(); }

}  // namespace tributary::cli
