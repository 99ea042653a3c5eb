// tributary trace: the spans the service keeps, for a viewer.
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/cli/commands.h"
#include "service/cli/service_command.h"

namespace tributary::cli {
namespace {

class Trace final : public ServiceCommand {
 public:
  Trace() : ServiceCommand({.timeout = absl::Seconds(10)}) {}
  std::string name() const override { return "trace"; }
  std::string summary() const override { return "spans of traced calls, for Perfetto"; }
  std::string description() const override {
    return "Fetches the spans the service keeps of traced calls and their steps. A file whose "
           "name\n"
           "ends with .json, and standard output, get Chrome trace JSON, for chrome://tracing and\n"
           "scripts; any other file, such as trace.pftrace, gets Perfetto's own format, for\n"
           "https://ui.perfetto.dev. Calls are traced that bring a sampled traceparent, and the\n"
           "share --trace_sample of the others.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("out", &out_, "The spans are written to this file; when empty, to standard output.");
  }

  int Run() override {
    v1::GetTraceRequest request;
    const bool json = out_.empty() || absl::EndsWith(out_, ".json");
    if (!json) request.set_format(v1::GetTraceRequest::PERFETTO);
    v1::GetTraceReply reply;
    const absl::Status status = Diagnose([&](v1::DiagnosticsService::Stub& stub, auto* context) {
      return stub.GetTrace(context, request, &reply);
    });
    if (!status.ok()) return FailToAsk(status);
    if (reply.spans_dropped() > 0) {
      std::fprintf(stderr, "%llu older spans are no longer kept; see --trace_spans\n",
                   static_cast<unsigned long long>(reply.spans_dropped()));
    }
    if (out_.empty()) {
      std::fputs(reply.chrome_json().c_str(), stdout);
      return kDone;
    }
    std::ofstream file(out_, std::ios::binary);
    file << (json ? reply.chrome_json() : reply.perfetto());
    file.close();
    if (!file) return FailWith(absl::StrCat("cannot write ", out_));
    return kDone;
  }

 private:
  std::string out_;
};

}  // namespace

std::unique_ptr<Command> MakeTrace() { return std::make_unique<Trace>(); }

}  // namespace tributary::cli
