#include "service/client/attend_message.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "service/client/offset_allocator.h"

namespace tributary::client {
namespace {

// What a message holds besides its tensors' bytes: shapes, names, framing.
constexpr uint64_t kReplyOverhead = 256;
// No call is larger; far below where products of sizes leave 64 bits.
constexpr uint64_t kMostBytes = uint64_t{1} << 46;
// The longest yield that the service accepts.
constexpr std::chrono::milliseconds kMostYield{1000};

int64_t Rows(const AttendCall& call) {
  int64_t rows = 0;
  for (const auto& entry : call.entries) rows += entry.query_rows;
  return rows;
}

int64_t NewTokens(const AttendCall& call) {
  int64_t tokens = 0;
  for (const auto& entry : call.entries) tokens += entry.new_tokens;
  return tokens;
}

int64_t Tokens(const AppendCall& call) {
  int64_t tokens = 0;
  for (const auto& entry : call.entries) tokens += entry.tokens;
  return tokens;
}

// Bytes of one element of the types that CheckDType lets through.
uint64_t ElementBytes(v1::DType dtype) { return dtype == v1::DTYPE_F32 ? 4 : 2; }

uint64_t Bytes(int64_t rows, int32_t heads, int32_t head_dim, v1::DType dtype) {
  return static_cast<uint64_t>(rows) * static_cast<uint64_t>(heads) *
         static_cast<uint64_t>(head_dim) * ElementBytes(dtype);
}

uint64_t Aligned(uint64_t bytes) {
  constexpr uint64_t kAlignment = OffsetAllocator::kAlignment;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Bytes of each tensor of a call, in the order in which they lie in a slot.
struct Sizes {
  uint64_t q, k, v, output, lse;
};

Sizes SizesOf(const AttendCall& call) {
  const int64_t rows = Rows(call);
  const uint64_t q = Bytes(rows, call.q_heads, call.head_dim, call.dtype);
  const uint64_t k = Bytes(NewTokens(call), call.kv_heads, call.head_dim, call.dtype);
  const uint64_t v = Bytes(NewTokens(call), call.kv_heads, ValueDim(call), call.dtype);
  const uint64_t output = OutputBytes(OutputDType(call), static_cast<uint64_t>(rows) *
                                                             static_cast<uint64_t>(call.q_heads) *
                                                             static_cast<uint64_t>(ValueDim(call)));
  const uint64_t lse = call.lse == nullptr ? 0 : Bytes(rows, call.q_heads, 1, v1::DTYPE_F32);
  return {q, k, v, output, lse};
}

struct KvSizes {
  uint64_t k, v;
};

KvSizes SizesOf(const AppendCall& call) {
  return {Bytes(Tokens(call), call.kv_heads, call.head_dim, call.dtype),
          Bytes(Tokens(call), call.kv_heads, ValueDim(call), call.dtype)};
}

void Describe(int64_t rows, int32_t heads, int32_t head_dim, v1::DType dtype, v1::Tensor& tensor) {
  tensor.set_dtype(dtype);
  tensor.add_shape(rows);
  tensor.add_shape(heads);
  if (head_dim > 0) tensor.add_shape(head_dim);
}

// Refers to tensors in memory that the service has, or writes one after the other into a slot.
class Placer {
 public:
  using Buffer = HostBuffers::Buffer;

  Placer(const DeviceRegion* device, const RegionPool::Slot* slot) : device_(device), slot_(slot) {}

  // `buffer`: that it lies in, or null.
  void Input(const void* bytes, uint64_t size, const Buffer* buffer, v1::Tensor& tensor) {
    if (ReferInPlace(bytes, buffer, tensor)) return;
    if (slot_ == nullptr) {
      tensor.set_inline_(bytes, size);
      return;
    }
    std::memcpy(slot_->data() + used_, bytes, size);
    ReferToSlot(size, tensor);
  }
  // Returns false where the result has to travel in the reply.
  bool Output(const void* bytes, uint64_t size, const Buffer* buffer, v1::Tensor& tensor) {
    if (ReferInPlace(bytes, buffer, tensor)) return true;
    if (slot_ == nullptr) return false;
    ReferToSlot(size, tensor);
    return true;
  }

 private:
  bool ReferInPlace(const void* bytes, const Buffer* buffer, v1::Tensor& tensor) {
    if (device_ != nullptr) {
      Refer(device_->name(), bytes, device_->memory().data, tensor);
    } else if (buffer != nullptr) {
      Refer(buffer->name(), bytes, buffer->data(), tensor);
    } else {
      return false;
    }
    return true;
  }
  static void Refer(const std::string& region, const void* bytes, const void* begin,
                    v1::Tensor& tensor) {
    tensor.mutable_shared_memory()->set_region(region);
    tensor.mutable_shared_memory()->set_offset(static_cast<uint64_t>(
        static_cast<const std::byte*>(bytes) - static_cast<const std::byte*>(begin)));
  }
  void ReferToSlot(uint64_t size, v1::Tensor& tensor) {
    tensor.mutable_shared_memory()->set_region(slot_->region());
    tensor.mutable_shared_memory()->set_offset(slot_->offset() + used_);
    used_ += Aligned(size);
  }

  const DeviceRegion* const device_;
  const RegionPool::Slot* const slot_;
  uint64_t used_ = 0;
};

absl::Status CheckDType(v1::DType dtype) {
  if (dtype == v1::DTYPE_F32 || dtype == v1::DTYPE_BF16 || dtype == v1::DTYPE_F16) {
    return absl::OkStatus();
  }
  return InvalidField("dtype", absl::StrCat("must be DTYPE_F32, DTYPE_BF16 or DTYPE_F16, is ",
                                            v1::DType_Name(dtype)));
}

absl::Status CheckPositive(absl::string_view field, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("must be > 0, is ", value));
}

template <typename Call>
absl::Status CheckDims(const Call& call) {
  if (auto s = CheckPositive("head_dim", call.head_dim); !s.ok()) return s;
  if (call.value_head_dim == 0) return absl::OkStatus();
  return CheckPositive("value_head_dim", call.value_head_dim);
}

absl::Status CheckBytes(absl::string_view field, int64_t rows, int32_t heads, int32_t head_dim) {
  uint64_t elements = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(rows),
                             static_cast<uint64_t>(heads) * static_cast<uint64_t>(head_dim),
                             &elements) ||
      elements > kMostBytes / sizeof(float)) {
    return InvalidField(field, "is larger than any message or region");
  }
  return absl::OkStatus();
}

// Alignment and the like are the service's to refuse; what lies before the region has no offset.
absl::Status CheckInside(const std::shared_ptr<const DeviceRegion>& device, absl::string_view field,
                         const void* pointer, uint64_t bytes) {
  if (device == nullptr) return absl::OkStatus();
  const auto begin = reinterpret_cast<uintptr_t>(device->memory().data);
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  const uint64_t size = device->memory().bytes;
  if (at >= begin && bytes <= size && at - begin <= size - bytes) return absl::OkStatus();
  return InvalidField(field,
                      absl::StrCat("does not lie in the device memory shared as ", device->name()));
}

absl::Status TooLarge(absl::string_view what, uint64_t bytes, uint64_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of ", bytes, " bytes is larger than max_message_bytes (", limit,
                   "): split the call, or let its tensors travel in shared memory"));
}

absl::Status TakeTensor(absl::string_view field, const v1::Tensor& tensor, v1::DType dtype,
                        uint64_t bytes, void* to) {
  if (tensor.dtype() != dtype || tensor.inline_().size() != bytes) {
    return absl::InternalError(absl::StrCat("the reply's ", field, " is not what was asked for: ",
                                            tensor.inline_().size(), " bytes instead of ", bytes));
  }
  std::memcpy(to, tensor.inline_().data(), bytes);
  return absl::OkStatus();
}

// A size is needed; whether the service has such outputs is for it to say.
absl::Status CheckOutputDType(const AttendCall& call) {
  if (OutputBytes(OutputDType(call), 16) == 0) {
    return InvalidField("output_dtype",
                        absl::StrCat("no output is ", v1::DType_Name(call.output_dtype)));
  }
  if (call.output_dtype == v1::DTYPE_NVFP4 && ValueDim(call) % 16 != 0) {
    return InvalidField("output_dtype", absl::StrCat("NVFP4 has blocks of 16, a head has ",
                                                     ValueDim(call), " dimensions"));
  }
  return absl::OkStatus();
}

}  // namespace

v1::DType OutputDType(const AttendCall& call) {
  return call.output_dtype == v1::DTYPE_UNSPECIFIED ? call.dtype : call.output_dtype;
}

uint64_t OutputBytes(v1::DType dtype, uint64_t elements) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return 4 * elements;
    case v1::DTYPE_BF16:
    case v1::DTYPE_F16:
      return 2 * elements;
    case v1::DTYPE_FP8_E4M3:
      return elements;
    case v1::DTYPE_NVFP4:
      return elements / 2 + elements / 16;
    default:
      return 0;
  }
}

absl::Status CheckCall(const AttendCall& call) {
  if (call.entries.empty()) return InvalidField("entries", "must not be empty");
  for (size_t i = 0; i < call.entries.size(); ++i) {
    const AttendEntry& entry = call.entries[i];
    const std::string field = absl::StrCat("entries[", i, "]");
    if (auto s = CheckPositive(field + ".query_rows", entry.query_rows); !s.ok()) return s;
    if (entry.new_tokens != 0 && entry.new_tokens != entry.query_rows) {
      return InvalidField(field + ".new_tokens",
                          absl::StrCat("must be 0 or query_rows, is ", entry.new_tokens));
    }
  }
  if (call.yield.count() < 0 || call.yield > kMostYield) {
    return InvalidField(
        "yield_ms", absl::StrCat("must be 0 to ", kMostYield.count(), ", is ", call.yield.count()));
  }
  if (auto s = CheckDType(call.dtype); !s.ok()) return s;
  if (auto s = CheckPositive("q_heads", call.q_heads); !s.ok()) return s;
  if (auto s = CheckDims(call); !s.ok()) return s;
  if (auto s = CheckOutputDType(call); !s.ok()) return s;
  if (auto s = CheckBytes("q", Rows(call), call.q_heads, call.head_dim); !s.ok()) return s;
  if (auto s = CheckBytes("output", Rows(call), call.q_heads, ValueDim(call)); !s.ok()) return s;
  if (call.q == nullptr) return InvalidField("q", "is missing");
  if (call.output == nullptr) return InvalidField("output", "there is no place for it");
  if (const int64_t tokens = NewTokens(call); tokens > 0) {
    if (auto s = CheckPositive("kv_heads", call.kv_heads); !s.ok()) return s;
    if (auto s = CheckBytes("k", tokens, call.kv_heads, call.head_dim); !s.ok()) return s;
    if (auto s = CheckBytes("v", tokens, call.kv_heads, ValueDim(call)); !s.ok()) return s;
    if (call.k == nullptr) return InvalidField("k", "is missing: entries have new tokens");
    if (call.v == nullptr) return InvalidField("v", "is missing: entries have new tokens");
  }
  const Sizes sizes = SizesOf(call);
  if (auto s = CheckInside(call.device, "q", call.q, sizes.q); !s.ok()) return s;
  if (sizes.k > 0) {
    if (auto s = CheckInside(call.device, "k", call.k, sizes.k); !s.ok()) return s;
    if (auto s = CheckInside(call.device, "v", call.v, sizes.v); !s.ok()) return s;
  }
  if (auto s = CheckInside(call.device, "output", call.output, sizes.output); !s.ok()) return s;
  if (call.lse == nullptr) return absl::OkStatus();
  return CheckInside(call.device, "lse", call.lse, sizes.lse);
}

absl::Status CheckCall(const AppendCall& call) {
  if (call.entries.empty()) return InvalidField("entries", "must not be empty");
  for (size_t i = 0; i < call.entries.size(); ++i) {
    const std::string field = absl::StrCat("entries[", i, "].tokens");
    if (auto s = CheckPositive(field, call.entries[i].tokens); !s.ok()) return s;
  }
  if (auto s = CheckDType(call.dtype); !s.ok()) return s;
  if (auto s = CheckPositive("kv_heads", call.kv_heads); !s.ok()) return s;
  if (auto s = CheckDims(call); !s.ok()) return s;
  if (auto s = CheckBytes("k", Tokens(call), call.kv_heads, call.head_dim); !s.ok()) return s;
  if (auto s = CheckBytes("v", Tokens(call), call.kv_heads, ValueDim(call)); !s.ok()) return s;
  if (call.k == nullptr) return InvalidField("k", "is missing");
  if (call.v == nullptr) return InvalidField("v", "is missing");
  const KvSizes sizes = SizesOf(call);
  if (auto s = CheckInside(call.device, "k", call.k, sizes.k); !s.ok()) return s;
  return CheckInside(call.device, "v", call.v, sizes.v);
}

v1::AttendRequest DescribeCall(const AttendCall& call) {
  v1::AttendRequest request;
  request.set_cache_id(call.cache_id);
  request.set_layer(call.layer);
  request.set_mode(call.mode);
  request.set_return_lse(call.lse != nullptr);
  if (call.o_scale.has_value()) request.set_o_scale(*call.o_scale);
  request.set_yield_ms(static_cast<int32_t>(call.yield.count()));
  for (const AttendEntry& entry : call.entries) {
    v1::AttendEntry& added = *request.add_entries();
    added.set_sequence_id(entry.sequence_id);
    added.set_first_position(entry.first_position);
    added.set_query_rows(entry.query_rows);
    added.set_new_tokens(entry.new_tokens);
  }
  Describe(Rows(call), call.q_heads, call.head_dim, call.dtype, *request.mutable_q());
  if (const int64_t tokens = NewTokens(call); tokens > 0) {
    Describe(tokens, call.kv_heads, call.head_dim, call.dtype, *request.mutable_k());
    Describe(tokens, call.kv_heads, ValueDim(call), call.dtype, *request.mutable_v());
  }
  return request;
}

v1::AppendRequest DescribeCall(const AppendCall& call) {
  v1::AppendRequest request;
  request.set_cache_id(call.cache_id);
  request.set_layer(call.layer);
  for (const AppendCall::Entry& entry : call.entries) {
    v1::AppendEntry& added = *request.add_entries();
    added.set_sequence_id(entry.sequence_id);
    added.set_first_position(entry.first_position);
    added.set_tokens(entry.tokens);
  }
  Describe(Tokens(call), call.kv_heads, call.head_dim, call.dtype, *request.mutable_k());
  Describe(Tokens(call), call.kv_heads, ValueDim(call), call.dtype, *request.mutable_v());
  return request;
}

void InPlace::Forget() const {
  for (const HostBuffers::BufferPtr& buffer : {q, k, v, output, lse}) {
    if (buffer != nullptr) buffer->Forget();
  }
}

InPlace FindInPlace(const AttendCall& call, const HostBuffers& buffers) {
  const Sizes sizes = SizesOf(call);
  const auto find = [&](const void* data, uint64_t size) {
    return size == 0 ? nullptr : buffers.Find(data, size);
  };
  return {.q = find(call.q, sizes.q),
          .k = find(call.k, sizes.k),
          .v = find(call.v, sizes.v),
          .output = find(call.output, sizes.output),
          .lse = find(call.lse, sizes.lse)};
}

InPlace FindInPlace(const AppendCall& call, const HostBuffers& buffers) {
  const KvSizes sizes = SizesOf(call);
  return {.k = buffers.Find(call.k, sizes.k), .v = buffers.Find(call.v, sizes.v)};
}

uint64_t SharedBytes(const AttendCall& call, const InPlace& in_place) {
  const Sizes sizes = SizesOf(call);
  const auto bytes = [](const HostBuffers::BufferPtr& buffer, uint64_t size) {
    return buffer == nullptr ? Aligned(size) : 0;
  };
  return bytes(in_place.q, sizes.q) + bytes(in_place.k, sizes.k) + bytes(in_place.v, sizes.v) +
         bytes(in_place.output, sizes.output) + bytes(in_place.lse, sizes.lse);
}

uint64_t SharedBytes(const AppendCall& call, const InPlace& in_place) {
  const KvSizes sizes = SizesOf(call);
  return (in_place.k == nullptr ? Aligned(sizes.k) : 0) +
         (in_place.v == nullptr ? Aligned(sizes.v) : 0);
}

void PlaceTensors(const AttendCall& call, const InPlace& in_place, const RegionPool::Slot* slot,
                  v1::AttendRequest& request) {
  const Sizes sizes = SizesOf(call);
  Placer placer(call.device.get(), slot);
  placer.Input(call.q, sizes.q, in_place.q.get(), *request.mutable_q());
  if (sizes.k > 0) {
    placer.Input(call.k, sizes.k, in_place.k.get(), *request.mutable_k());
    placer.Input(call.v, sizes.v, in_place.v.get(), *request.mutable_v());
  }
  request.clear_output();
  request.clear_lse();
  v1::Tensor output;
  Describe(Rows(call), call.q_heads, ValueDim(call), OutputDType(call), output);
  if (placer.Output(call.output, sizes.output, in_place.output.get(), output)) {
    *request.mutable_output() = std::move(output);
  } else if (OutputDType(call) != call.dtype) {
    // Inline results, the output in q's type, are what the service gives unasked.
    request.mutable_output()->set_dtype(OutputDType(call));
  }
  if (call.lse == nullptr) return;
  v1::Tensor lse;
  Describe(Rows(call), call.q_heads, 0, v1::DTYPE_F32, lse);
  if (placer.Output(call.lse, sizes.lse, in_place.lse.get(), lse)) {
    *request.mutable_lse() = std::move(lse);
  }
}

void PlaceTensors(const AppendCall& call, const InPlace& in_place, const RegionPool::Slot* slot,
                  v1::AppendRequest& request) {
  const KvSizes sizes = SizesOf(call);
  Placer placer(call.device.get(), slot);
  placer.Input(call.k, sizes.k, in_place.k.get(), *request.mutable_k());
  placer.Input(call.v, sizes.v, in_place.v.get(), *request.mutable_v());
}

absl::Status CheckSize(const AttendCall& call, const v1::AttendRequest& request, uint64_t limit) {
  if (const uint64_t bytes = request.ByteSizeLong(); bytes > limit) {
    return TooLarge("a request", bytes, limit);
  }
  if (request.output().has_shared_memory()) return absl::OkStatus();
  const Sizes sizes = SizesOf(call);
  const uint64_t reply = sizes.output + sizes.lse + 10 * call.entries.size() + kReplyOverhead;
  return reply > limit ? TooLarge("a reply", reply, limit) : absl::OkStatus();
}

absl::Status CheckSize(const v1::AppendRequest& request, uint64_t limit) {
  const uint64_t bytes = request.ByteSizeLong();
  return bytes > limit ? TooLarge("a request", bytes, limit) : absl::OkStatus();
}

absl::Status TakeResults(const AttendCall& call, const InPlace& in_place,
                         const RegionPool::Slot* slot, const v1::AttendReply& reply) {
  if (call.device != nullptr) return absl::OkStatus();  // they lie there
  const Sizes sizes = SizesOf(call);
  if (slot != nullptr) {
    // Results that do not lie in place are where PlaceTensors has laid them out.
    const auto used = [](const HostBuffers::BufferPtr& buffer, uint64_t size) {
      return buffer == nullptr ? Aligned(size) : 0;
    };
    const std::byte* from = slot->data() + used(in_place.q, sizes.q) + used(in_place.k, sizes.k) +
                            used(in_place.v, sizes.v);
    if (in_place.output == nullptr) std::memcpy(call.output, from, sizes.output);
    from += used(in_place.output, sizes.output);
    if (call.lse != nullptr && in_place.lse == nullptr) std::memcpy(call.lse, from, sizes.lse);
    return absl::OkStatus();
  }
  if (in_place.output == nullptr) {
    absl::Status status =
        TakeTensor("output", reply.output(), OutputDType(call), sizes.output, call.output);
    if (!status.ok()) return status;
  }
  if (call.lse == nullptr || in_place.lse != nullptr) return absl::OkStatus();
  return TakeTensor("lse", reply.lse(), v1::DTYPE_F32, sizes.lse, call.lse);
}

}  // namespace tributary::client
