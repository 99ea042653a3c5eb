#include "tests/worker/output_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "kernels/cpu/backend.h"
#include "worker/output_bytes.h"

namespace tributary::worker::testing {
namespace {

constexpr size_t kPage = 4096;
constexpr DType kFormats[] = {DType::kBf16, DType::kF32, DType::kNvfp4, DType::kF16,
                              DType::kFp8E4M3};
constexpr float kScale = 0.37f;

}  // namespace

PagedBytes::PagedBytes(size_t bytes, const Pinner& pin) {
  const size_t pages = std::max<size_t>(1, (bytes + kPage - 1) / kPage) * kPage;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, pages)));
  std::memset(data_.get(), 0xa5, pages);
  if (pin) pin_ = pin(data_.get(), pages);
}

OutputCheck::OutputCheck(const std::vector<StepEntry>& entries, const LayerGeometry& geometry,
                         int turn, const Pinner& pin)
    : geometry_(geometry) {
  for (const StepEntry& entry : entries) {
    if (entry.query_rows == 0) continue;
    StepOutput output{.rows = entry.query_rows,
                      .format = {kFormats[turn % std::size(kFormats)], kScale}};
    const auto place = [&](OutputPlace* to, int where, size_t bytes) {
      if (where == 0) to->in_reply = true;
      if (where == 0 || bytes == 0) return;
      memory_.emplace_back(bytes, where == 1 ? pin : Pinner());
      to->data = memory_.back().data();
      to->pinned = memory_.back().pinned();
    };
    place(&output.o, turn % 3, OutputBytesOf(output, geometry));
    // 3: it is not wanted.
    if (turn % 4 != 3) place(&output.lse, turn % 4, LseBytesOf(output, geometry));
    outputs_.push_back(output);
    ++turn;
  }
}

void OutputCheck::Check(const Reply& reply, const std::vector<float>& o,
                        const std::vector<float>& lse) const {
  ASSERT_EQ(reply.result.size(), BytesInReply(outputs_, geometry_));
  EXPECT_TRUE(reply.o.empty());
  const std::byte* in_reply = reply.result.data();
  const auto bytes_of = [&in_reply](const OutputPlace& place, size_t bytes) {
    const std::byte* at = place.in_reply ? in_reply : place.data;
    if (place.in_reply) in_reply += bytes;
    return at;
  };
  const float* numbers = o.data();
  const float* lses = lse.data();
  for (const StepOutput& output : outputs_) {
    const size_t lse_bytes = LseBytesOf(output, geometry_);
    const size_t count = lse_bytes / sizeof(float) * static_cast<size_t>(geometry_.kv.value_dim);
    std::vector<std::byte> expected(OutputBytesOf(output, geometry_));
    cpu::StoreOutput(output.format, numbers, count, expected.data());
    const std::byte* got = bytes_of(output.o, expected.size());
    EXPECT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
        << Name(output.format.dtype) << ", " << output.rows << " rows, "
        << (output.o.in_reply ? "in the reply"
            : output.o.pinned ? "pinned"
                              : "in memory");
    if (output.lse.on_host()) {
      EXPECT_EQ(std::memcmp(bytes_of(output.lse, lse_bytes), lses, lse_bytes), 0) << "LSE";
    }
    numbers += count;
    lses += lse_bytes / sizeof(float);
  }
}

}  // namespace tributary::worker::testing
