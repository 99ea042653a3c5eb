// tributary flight: the last steps, those that have not ended included.
#include <cstdio>
#include <memory>
#include <string>

#include "service/cli/commands.h"
#include "service/cli/print_json.h"
#include "service/cli/report.h"
#include "service/cli/service_command.h"

namespace tributary::cli {
namespace {

class Flight final : public ServiceCommand {
 public:
  std::string name() const override { return "flight"; }
  std::string summary() const override { return "the last steps and where their time went"; }
  std::string description() const override {
    return "Asks for the flight record: the steps the service ran last, with the time each phase\n"
           "took on the slowest rank, and those that have not ended. The same goes to the\n"
           "coordinator's log when the group breaks.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("steps", &steps_,
              "At most this many steps, the last ones, are shown; 0 means all that are kept.");
    flags.Add("json", &json_, "The service's reply is printed as JSON.");
  }

  int Run() override {
    if (steps_ < 0) {
      return WrongUsage("steps: must be >= 0");
    }
    v1::GetFlightRecordRequest request;
    request.set_steps(static_cast<uint32_t>(steps_));
    v1::FlightRecord record;
    const absl::Status status = Diagnose([&](v1::DiagnosticsService::Stub& stub, auto* context) {
      return stub.GetFlightRecord(context, request, &record);
    });
    if (!status.ok()) return FailToAsk(status);
    if (json_) return PrintJson(name(), record);
    std::fputs(FlightReport(record, Style::For(stdout)).c_str(), stdout);
    return kDone;
  }

 private:
  int32_t steps_ = 40;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeFlight() { return std::make_unique<Flight>(); }

}  // namespace tributary::cli
