#include "service/observe/diagnostics_service.h"

#include "absl/status/statusor.h"
#include "base/status/grpc_status.h"

namespace tributary::service {
namespace {

absl::StatusOr<v1::GetTraceReply> TraceOf(const telemetry::TraceBuffer* spans,
                                          v1::GetTraceRequest::Format format) {
  if (spans == nullptr) {
    return absl::FailedPreconditionError(
        "this service keeps no spans: it was started with --trace_spans=0");
  }
  v1::GetTraceReply reply;
  if (format == v1::GetTraceRequest::PERFETTO) {
    reply.set_perfetto(spans->Perfetto());
  } else {
    reply.set_chrome_json(spans->Json());
  }
  reply.set_spans_dropped(spans->dropped());
  return reply;
}

}  // namespace

grpc::ServerUnaryReactor* DiagnosticsService::GetFlightRecord(
    grpc::CallbackServerContext* context, const v1::GetFlightRecordRequest* request,
    v1::FlightRecord* reply) {
  const absl::Status allowed = access_->Authorize(*context, {Role::kAdmin}).status();
  if (allowed.ok()) *reply = telemetry_->flight().Read(request->steps());
  auto* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(allowed));
  return reactor;
}

grpc::ServerUnaryReactor* DiagnosticsService::GetTrace(grpc::CallbackServerContext* context,
                                                       const v1::GetTraceRequest* request,
                                                       v1::GetTraceReply* reply) {
  absl::Status status = access_->Authorize(*context, {Role::kAdmin}).status();
  if (status.ok()) {
    absl::StatusOr<v1::GetTraceReply> trace = TraceOf(telemetry_->spans(), request->format());
    status = trace.status();
    if (status.ok()) *reply = *std::move(trace);
  }
  auto* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace tributary::service
