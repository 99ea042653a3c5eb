// Replies as bytes: what a parser makes of them is the reply.
#include "service/api/reply_bytes.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "service/api/raw_methods.h"

namespace tributary::service {
namespace {

std::string Results(size_t bytes, char first) {
  std::string results(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) results[i] = static_cast<char>(first + i * 7);
  return results;
}

v1::AttendReply ReplyOf(size_t output_bytes, size_t lse_bytes) {
  v1::AttendReply reply;
  reply.set_request_id(77);
  reply.add_lengths(12);
  reply.add_lengths(1234567);
  v1::Tensor& output = *reply.mutable_output();
  output.set_dtype(v1::DTYPE_BF16);
  output.add_shape(3);
  output.add_shape(static_cast<int64_t>(output_bytes));
  output.set_inline_(Results(output_bytes, 'a'));
  if (lse_bytes == 0) return reply;
  v1::Tensor& lse = *reply.mutable_lse();
  lse.set_dtype(v1::DTYPE_F32);
  lse.add_shape(static_cast<int64_t>(lse_bytes));
  lse.set_inline_(Results(lse_bytes, 'z'));
  return reply;
}

TEST(SerializeReplyTest, IsReadAsTheReply) {
  for (const size_t output :
       {size_t{0}, size_t{100}, size_t{65535}, size_t{65536}, size_t{3'000'001}}) {
    for (const size_t lse : {size_t{0}, size_t{64}, size_t{70'000}}) {
      const v1::AttendReply reply = ReplyOf(output, lse);
      v1::AttendReply sent = reply;
      grpc::ByteBuffer bytes = SerializeMessage(std::move(sent));
      EXPECT_LE(bytes.Length(), reply.ByteSizeLong() + 32) << "a few bytes for each long tensor";
      const auto parsed = ParseMessage<v1::AttendReply>(&bytes);
      ASSERT_TRUE(parsed.ok()) << output << " " << lse;
      EXPECT_EQ((*parsed)->SerializeAsString(), reply.SerializeAsString()) << output << " " << lse;
    }
  }
}

TEST(SerializeReplyTest, ResultsInSharedMemoryAndRefusalsStayAsTheyAre) {
  v1::AttendReply reply;
  reply.mutable_output()->mutable_shared_memory()->set_region("r");
  reply.mutable_status()->set_code(5);
  reply.mutable_status()->set_message(std::string(100'000, 'x'));
  const std::string wanted = reply.SerializeAsString();
  grpc::ByteBuffer bytes = SerializeMessage(std::move(reply));
  const auto parsed = ParseMessage<v1::AttendReply>(&bytes);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ((*parsed)->SerializeAsString(), wanted);
}

TEST(SerializeReplyTest, LongResultsAreNotCopied) {
  v1::AttendReply reply = ReplyOf(1'000'000, 0);
  const char* const results = reply.output().inline_().data();
  const grpc::ByteBuffer bytes = SerializeMessage(std::move(reply));
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(bytes.Dump(&slices).ok());
  EXPECT_EQ(reinterpret_cast<const char*>(slices.back().begin()), results);
}

}  // namespace
}  // namespace tributary::service
