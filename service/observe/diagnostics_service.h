// The flight record and the trace over gRPC (proto/tributary/v1/diagnostics.proto), for admins.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "service/access/access_control.h"
#include "service/observe/telemetry.h"
#include "tributary/v1/diagnostics.grpc.pb.h"

namespace tributary::service {

class DiagnosticsService final : public v1::DiagnosticsService::CallbackService {
 public:
  DiagnosticsService(std::shared_ptr<const Telemetry> telemetry,
                     std::shared_ptr<AccessControl> access)
      : telemetry_(std::move(telemetry)), access_(std::move(access)) {}

  grpc::ServerUnaryReactor* GetFlightRecord(grpc::CallbackServerContext* context,
                                            const v1::GetFlightRecordRequest* request,
                                            v1::FlightRecord* reply) override;
  grpc::ServerUnaryReactor* GetTrace(grpc::CallbackServerContext* context,
                                     const v1::GetTraceRequest* request,
                                     v1::GetTraceReply* reply) override;

 private:
  const std::shared_ptr<const Telemetry> telemetry_;
  const std::shared_ptr<AccessControl> access_;
};

}  // namespace tributary::service
