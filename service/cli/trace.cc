// tributary trace: the spans the service keeps, for a viewer.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/rpc/channel_security.h"
#include "grpcpp/client_context.h"
#include "service/cli/commands.h"
#include "service/cli/connect_flags.h"
#include "tributary/v1/diagnostics.grpc.pb.h"

namespace tributary::cli {
namespace {

class Trace final : public Command {
 public:
  std::string name() const override { return "trace"; }
  std::string summary() const override { return "spans of traced calls, for Perfetto"; }
  std::string description() const override {
    return "Fetches the spans the service keeps of traced calls and their steps, as Chrome trace\n"
           "JSON: open it at https://ui.perfetto.dev or chrome://tracing. Calls are traced that\n"
           "bring a sampled traceparent, and the share --trace_sample of the others.\n";
  }
  void AddFlags(FlagSet& flags) override {
    AddConnectFlags(flags, &target_, "host:port or unix:/path of the service", &security_);
    flags.Add("out", &out_, "file to write; empty: to standard output");
    flags.Add("timeout", &timeout_, "how long to wait for the service");
  }

  int Run() override {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    const auto channel = DialSecurely(target_, security_, arguments);
    if (!channel.ok()) return Fail(name(), std::string(channel.status().message()));
    const auto stub = v1::DiagnosticsService::NewStub(*channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout_));
    v1::GetTraceReply reply;
    const grpc::Status status = stub->GetTrace(&context, {}, &reply);
    if (!status.ok()) {
      return Fail(name(), absl::StrCat(target_, ": ", status.error_message()));
    }
    if (reply.spans_dropped() > 0) {
      std::fprintf(stderr, "%llu older spans are no longer kept; see --trace_spans\n",
                   static_cast<unsigned long long>(reply.spans_dropped()));
    }
    if (out_.empty()) {
      std::fputs(reply.chrome_json().c_str(), stdout);
      return kDone;
    }
    std::ofstream file(out_, std::ios::binary);
    file << reply.chrome_json();
    file.close();
    if (!file) return Fail(name(), absl::StrCat("cannot write ", out_));
    return kDone;
  }

 private:
  std::string target_ = kDefaultTarget;
  ChannelSecurity security_;
  std::string out_;
  absl::Duration timeout_ = absl::Seconds(10);
};

}  // namespace

std::unique_ptr<Command> MakeTrace() { return std::make_unique<Trace>(); }

}  // namespace tributary::cli
