#include "service/api/reply_bytes.h"

#include <google/protobuf/io/coded_stream.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "service/api/raw_methods.h"

namespace tributary::service {
namespace {

using google::protobuf::io::CodedOutputStream;

// Copying less than this is quicker than having gRPC send one more piece.
constexpr size_t kLongBytes = 64 * 1024;

// Of a field that has a length.
constexpr uint32_t TagOf(int field) { return static_cast<uint32_t>(field) << 3 | 2; }

uint8_t* WriteLength(int field, uint64_t bytes, uint8_t* at) {
  at = CodedOutputStream::WriteTagToArray(TagOf(field), at);
  return CodedOutputStream::WriteVarint64ToArray(bytes, at);
}

// What comes before the bytes of a tensor in a message that has nothing of the tensor but these.
grpc::Slice HeaderOf(int tensor_field, size_t bytes) {
  std::array<uint8_t, 16> inner;
  const auto inner_bytes = static_cast<size_t>(
      WriteLength(v1::Tensor::kInlineFieldNumber, bytes, inner.data()) - inner.data());
  std::array<uint8_t, 32> header;
  uint8_t* end = WriteLength(tensor_field, inner_bytes + bytes, header.data());
  end = std::copy_n(inner.data(), inner_bytes, end);
  return {header.data(), static_cast<size_t>(end - header.data())};
}

grpc::Slice SliceOf(std::string bytes) {
  auto kept = std::make_unique<std::string>(std::move(bytes));
  std::string& data = *kept;
  return {data.data(), data.size(), [](void* string) { delete static_cast<std::string*>(string); },
          kept.release()};
}

// Takes the bytes of a tensor that has many out of the message.
void TakeLong(int field, v1::Tensor* tensor, std::vector<grpc::Slice>* slices) {
  if (tensor->inline_().size() < kLongBytes) return;
  std::string bytes = std::move(*tensor->mutable_inline_());
  tensor->clear_inline_();
  slices->push_back(HeaderOf(field, bytes.size()));
  slices->push_back(SliceOf(std::move(bytes)));
}

}  // namespace

// A parser merges what a message says of one field in several places: so the long bytes follow the
// message, each as a tensor of which nothing else is said.
// https://protobuf.dev/programming-guides/encoding/#last-one-wins
grpc::ByteBuffer SerializeMessage(v1::AttendReply&& reply) {
  std::vector<grpc::Slice> results;
  if (reply.has_output()) {
    TakeLong(v1::AttendReply::kOutputFieldNumber, reply.mutable_output(), &results);
  }
  if (reply.has_lse()) TakeLong(v1::AttendReply::kLseFieldNumber, reply.mutable_lse(), &results);
  grpc::ByteBuffer rest = SerializeMessage<v1::AttendReply>(reply);
  if (results.empty()) return rest;
  std::vector<grpc::Slice> slices;
  if (!rest.Dump(&slices).ok()) return {};
  slices.insert(slices.end(), results.begin(), results.end());
  return {slices.data(), slices.size()};
}

}  // namespace tributary::service
