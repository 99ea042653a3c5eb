// A host's session through the client library, whose steps are checked by a ModelHost.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "service/client/host_session.h"
#include "tests/service/model_host.h"
#include "tests/service/test_service.h"
#include "tributary/v1/attention.pb.h"

namespace tributary::service::testing {

// Creates cache "m" and opens its sequences 1 to `sequences`; EXPECTs that it may.
void PrepareCache(TestService& service, const v1::CacheSpec& spec, int sequences);

// Of cache "m", whose results come with LSEs. EXPECTs that it opens.
std::unique_ptr<client::HostSession> OpenSessionAt(const std::string& target,
                                                   client::HostSessionOptions options);

// The step that these requests, of one layer each, are together.
client::SessionStep StepOf(const std::vector<v1::AttendRequest>& requests);
// The tensors of a request, in place.
client::HeadRows RowsOf(const v1::Tensor& tensor);

// Hands the next layer over, and checks its results unless `model` is null.
absl::Status AttendWith(client::HostSession& session, const v1::AttendRequest& request,
                        ModelHost* model);
// Submits a step, drives its layers and awaits it: EXPECTs that all of it is right.
void RunStep(client::HostSession& session, ModelHost& model,
             const std::vector<v1::AttendRequest>& requests);

}  // namespace tributary::service::testing
