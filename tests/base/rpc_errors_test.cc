// How errors travel between processes: details that leave with a status are read at the other end.
#include "base/status/rpc_errors.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "base/status/errors.h"
#include "base/status/grpc_status.h"
#include "google/rpc/error_details.pb.h"
#include "tests/support/rpc_status.h"

namespace tributary {
namespace {

using std::chrono::milliseconds;
using test::Rpc;
using test::UnavailableAfter;

TEST(RpcErrors, DetailsOfTheWireStayReadable) {
  EXPECT_EQ(RetryDelayOf(UnavailableAfter(1, 500'000'000)), milliseconds(1500));
  EXPECT_EQ(RetryDelayOf(UnavailableAfter(0, 1)), milliseconds(1)) << "rounded up, never to none";
  EXPECT_EQ(RetryDelayOf(UnavailableAfter(-5, 0)), milliseconds(0));
  EXPECT_EQ(RetryDelayOf(absl::UnavailableError("bare")), std::nullopt);

  google::rpc::Status status = Rpc(3, "q.shape[1]: must be 8");
  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("q.shape[1]");
  status.add_details()->PackFrom(bad);
  EXPECT_EQ(FieldOf(FromRpcStatus(status)), "q.shape[1]");
  EXPECT_EQ(FieldOf(FromRpcStatus(Rpc(3, "none"))), "");
  EXPECT_EQ(FieldOf(absl::OkStatus()), "");
}

TEST(RpcErrors, WhatTheServiceSaysIsWhatTheClientReads) {
  const absl::Status said = Unavailable("FORMING", "the group is forming", milliseconds(250));
  EXPECT_EQ(RetryDelayOf(FromRpcStatus(ToRpcStatus(said))), milliseconds(250));
  const absl::Status refused = InvalidField("entries[1].new_tokens", "must be 0 or query_rows");
  const absl::Status heard = FromGrpcStatus(ToGrpcStatus(refused));
  EXPECT_TRUE(absl::IsInvalidArgument(heard));
  EXPECT_EQ(heard.message(), refused.message());
  EXPECT_EQ(FieldOf(heard), "entries[1].new_tokens");
}

TEST(RpcErrors, TheLengthHeldTravelsWithAPositionBeyondIt) {
  const absl::Status beyond = BeyondEnd("entries[0].first_position", 9, 4);
  EXPECT_EQ(LengthOf(FromRpcStatus(ToRpcStatus(beyond))), 4);
  EXPECT_EQ(LengthOf(GivenUp("entries[0].first_position", 9, 4)), std::nullopt);
  EXPECT_EQ(LengthOf(absl::OutOfRangeError("bare")), std::nullopt);

  google::rpc::ErrorInfo of_others;
  of_others.set_domain("elsewhere");
  (*of_others.mutable_metadata())["length"] = "4";
  google::rpc::Status status = Rpc(11, "theirs");
  status.add_details()->PackFrom(of_others);
  EXPECT_EQ(LengthOf(FromRpcStatus(status)), std::nullopt);
}

TEST(RpcErrors, UnaryErrorsCarryTheirTrailer) {
  google::rpc::Status full = Rpc(5, "no sequence 7");
  google::rpc::BadRequest bad;
  bad.add_field_violations()->set_field("entries[0].sequence_id");
  full.add_details()->PackFrom(bad);
  const absl::Status status = FromGrpcStatus(
      grpc::Status(grpc::StatusCode::NOT_FOUND, "no sequence 7", full.SerializeAsString()));
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_EQ(status.message(), "no sequence 7");
  EXPECT_EQ(FieldOf(status), "entries[0].sequence_id");
}

TEST(RpcErrors, AnUnreadableTrailerCostsOnlyTheDetails) {
  const absl::Status status =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::DATA_LOSS, "lost", "\xff\xff not a message"));
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_EQ(status.message(), "lost");
  EXPECT_EQ(FieldOf(status), "");
}

// What gRPC's server does to calls of anybody when messages take more memory than it may have.
TEST(RpcErrors, ACallThatWasResetForWantOfMemoryIsUnavailable) {
  const grpc::Status reset(grpc::StatusCode::RESOURCE_EXHAUSTED,
                           "Received RST_STREAM with error code 11");
  EXPECT_TRUE(absl::IsUnavailable(FromGrpcStatus(reset))) << FromGrpcStatus(reset);
  EXPECT_EQ(RetryDelayOf(FromGrpcStatus(reset)), std::nullopt);  // so its outcome is unknown
  const grpc::Status too_large(grpc::StatusCode::RESOURCE_EXHAUSTED,
                               "Received message larger than max");
  EXPECT_TRUE(absl::IsResourceExhausted(FromGrpcStatus(too_large)));
  const grpc::Status ours = ToGrpcStatus(Exhausted("cache:m pages", "RST_STREAM with error code"));
  EXPECT_TRUE(absl::IsResourceExhausted(FromGrpcStatus(ours)));
}

TEST(RpcErrors, AreTextForPeople) {
  EXPECT_EQ(StatusText(absl::NotFoundError("no cache")), "NOT_FOUND: no cache");
  EXPECT_EQ(StatusText(absl::UnknownError("")), "UNKNOWN");
  EXPECT_EQ(StatusText(Unavailable("FORMING", "the group forms", milliseconds(200))),
            "UNAVAILABLE: the group forms (reason FORMING; retry after 200 ms)");
  EXPECT_EQ(
      StatusText(BeyondEnd("entries[0].first_position", 9, 4)),
      "OUT_OF_RANGE: entries[0].first_position: position 9 is beyond the 4 tokens held (reason "
      "BEYOND_END, length 4)");
  absl::Status field = absl::InvalidArgumentError("must be 8");
  field.SetPayload(kFieldPayloadUrl, absl::Cord("q"));
  EXPECT_EQ(StatusText(field), "INVALID_ARGUMENT: must be 8 (field q)");
  // What peers send is theirs to choose: none of its bytes reach a terminal as they are.
  absl::Status unknown = absl::InternalError("broken");
  unknown.SetPayload("type.googleapis.com/of.somebody.else", absl::Cord("\x01\x02\xff"));
  EXPECT_EQ(StatusText(unknown), "INTERNAL: broken");
}

TEST(MissingTokens, TravelWithTheError) {
  const MissingTokens missing{
      .sequence = 7, .layer = 3, .ranges = {{16, 32}, {80, 81}}, .tokens = 17};
  const absl::Status status =
      FromRpcStatus(ToRpcStatus(Lost({7, 9}, "entries[0].sequence_id", missing)));
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_EQ(FieldOf(status), "entries[0].sequence_id");
  const auto told = MissingTokensOf(status);
  ASSERT_TRUE(told.has_value());
  EXPECT_EQ(told->sequence, 7u);
  EXPECT_EQ(told->layer, 3);
  EXPECT_EQ(told->ranges, missing.ranges);
  EXPECT_EQ(told->tokens, 17);
  EXPECT_NE(StatusText(status).find("missing 16-31,80-80"), std::string::npos);
  // Nothing is left, or nothing is lost.
  EXPECT_FALSE(MissingTokensOf(Lost({7}, "sequence_id")).has_value());
  EXPECT_FALSE(MissingTokensOf(BeyondEnd("x", 5, 3)).has_value());
  EXPECT_FALSE(MissingTokensOf(absl::OkStatus()).has_value());
}

}  // namespace
}  // namespace tributary
