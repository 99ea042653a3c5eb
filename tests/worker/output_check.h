// Whether rows of a result reach every place in every format: the bytes are those of the numbers.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "worker/cache_spec.h"
#include "worker/command.h"

namespace tributary::worker::testing {

// Pins whole pages (PinHostMemory); empty: nothing is pinned.
using Pinner = std::function<std::shared_ptr<const void>(std::byte*, size_t)>;

// Bytes that begin with a page, pinned if a pinner is given and can.
class PagedBytes {
 public:
  PagedBytes(size_t bytes, const Pinner& pin);

  std::byte* data() const { return data_.get(); }
  bool pinned() const { return pin_ != nullptr; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::shared_ptr<const void> pin_;
};

// An output for each entry with rows, all formats and places in turn, which differ with `turn`.
class OutputCheck {
 public:
  OutputCheck(const std::vector<StepEntry>& entries, const LayerGeometry& geometry, int turn,
              const Pinner& pin);

  const std::vector<StepOutput>& outputs() const { return outputs_; }
  // EXPECTs that what arrived is `o` [rows, q_heads, value_dim] and `lse` [rows, q_heads].
  void Check(const Reply& reply, const std::vector<float>& o, const std::vector<float>& lse) const;

 private:
  const LayerGeometry geometry_;
  std::vector<StepOutput> outputs_;
  std::vector<PagedBytes> memory_;
};

}  // namespace tributary::worker::testing
