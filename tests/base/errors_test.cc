#include "base/status/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tributary {
namespace {

TEST(Errors, CarryTheField) {
  const absl::Status status = InvalidField("spec.q_heads", "is 3");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "spec.q_heads: is 3");
  EXPECT_EQ(FieldOf(status), "spec.q_heads");
}

TEST(Errors, OthersNameNone) {
  EXPECT_EQ(FieldOf(absl::OkStatus()), "");
  EXPECT_EQ(FieldOf(absl::NotFoundError("cache")), "");
}

TEST(Errors, APrefixGoesBeforeTheField) {
  const absl::Status status =
      PrefixField("spec", FieldError(absl::StatusCode::kOutOfRange, "layers", "is 0"));
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(), "spec.layers: is 0");
  EXPECT_EQ(FieldOf(status), "spec.layers");
  const absl::Status plain = absl::NotFoundError("cache");
  EXPECT_EQ(PrefixField("spec", plain), plain);
  EXPECT_TRUE(PrefixField("spec", absl::OkStatus()).ok());
}

TEST(Errors, ARenamedFieldIsToldOnce) {
  absl::Status status = InvalidField("length", "is 0");
  status.SetPayload("example.org/more", absl::Cord("more"));
  status = RenameField("entries[0].truncate_to", status);
  EXPECT_EQ(status.message(), "entries[0].truncate_to: is 0");
  EXPECT_EQ(FieldOf(status), "entries[0].truncate_to");
  EXPECT_TRUE(status.GetPayload("example.org/more").has_value());
  const absl::Status plain = absl::NotFoundError("cache");
  EXPECT_EQ(RenameField("length", plain), plain);
}

TEST(Errors, APrefixLeavesTheOtherDetails) {
  absl::Status status = InvalidField("layers", "is 0");
  status.SetPayload("example.org/more", absl::Cord("more"));
  status = PrefixField("spec", status);
  EXPECT_EQ(FieldOf(status), "spec.layers");
  EXPECT_EQ(status.GetPayload("example.org/more"), absl::Cord("more"));
}

}  // namespace
}  // namespace tributary
