// tributary resize: another number of workers, with all sequences.
#include <cstdio>
#include <memory>
#include <string>

#include "absl/strings/str_format.h"
#include "service/cli/commands.h"
#include "service/cli/service_command.h"
#include "service/cli/units.h"
#include "tributary/v1/operations.grpc.pb.h"

namespace tributary::cli {
namespace {

class Resize final : public ServiceCommand {
 public:
  Resize() : ServiceCommand(Defaults{.timeout = absl::Minutes(10)}) {}

  std::string name() const override { return "resize"; }
  std::string summary() const override { return "another number of workers, with all sequences"; }
  std::string description() const override {
    return "Changes the number of workers of a service whose workers are processes. Start\n"
           "those that it will have more first; those that it will not need stand by afterwards.\n"
           "The workers deal the tokens out anew among themselves, and nobody sends any again. "
           "Calls\n"
           "are UNAVAILABLE meanwhile. Each worker needs memory for its old and its new share. "
           "When\n"
           "something goes wrong, the service goes on as it was, and the command says why.\n";
  }
  void AddOwnFlags(FlagSet& flags) override {
    flags.Add("workers", &workers_, "The service is to have this many workers.");
  }

  int Run() override {
    if (workers_ < 1) return WrongUsage("--workers: must be >= 1");
    v1::ChangeWorkersRequest request;
    request.set_workers(workers_);
    v1::ChangeWorkersReply reply;
    const absl::Status status =
        Ask<v1::OperationsService>([&](v1::OperationsService::Stub& stub, auto* context) {
          return stub.ChangeWorkers(context, request, &reply);
        });
    if (!status.ok()) return FailToAsk(status);
    if (reply.workers_before() == reply.workers()) {
      std::printf("the service has %d workers already\n", reply.workers());
      return kDone;
    }
    std::printf("%d -> %d workers: %lld caches, %s moved, calls waited for %.1f s\n",
                reply.workers_before(), reply.workers(), static_cast<long long>(reply.caches()),
                Bytes(static_cast<double>(reply.bytes_moved())).c_str(), reply.seconds());
    return kDone;
  }

 private:
  int32_t workers_ = 0;
};

}  // namespace

std::unique_ptr<Command> MakeResize() { return std::make_unique<Resize>(); }

}  // namespace tributary::cli
