#include "collective/device/device_exchange.h"

#include <string>

namespace tributary::collective {
namespace {

Status CheckDims(int32_t rows, int32_t heads, int32_t value_dim) {
  if (rows < 0) return InvalidArgument("rows is negative: " + std::to_string(rows));
  if (heads < 0) return InvalidArgument("heads is negative: " + std::to_string(heads));
  if (value_dim < 8 || value_dim % 8 != 0 || value_dim > 1024) {
    return InvalidArgument("value_dim is not a multiple of 8 up to 1024: " +
                           std::to_string(value_dim));
  }
  return Status::Ok();
}

bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

Status CheckArray(const void* p, const char* name) {
  if (p == nullptr) return InvalidArgument(std::string(name) + " is null");
  if (!Aligned(p)) return InvalidArgument(std::string(name) + " is not aligned to 16 bytes");
  return Status::Ok();
}

}  // namespace

bool MayTravelAs(DType o, DType wire) {
  return IsUnscaled(wire) && (o == wire || o == DType::kF32);
}

Status CheckDeviceExchange(const DeviceExchangeParams& p, int32_t rank, int32_t ranks) {
  if (Status s = CheckDims(p.rows, p.heads, p.value_dim); !s.ok()) return s;
  if (!IsUnscaled(p.wire)) return InvalidArgument("wire must be f32, bf16 or f16");
  if (!MayTravelAs(p.o_dtype, p.wire)) {
    return InvalidArgument(std::string("o_dtype must be f32 or the wire's, not ") +
                           Name(p.o_dtype));
  }
  if (!IsUnscaled(p.out_dtype)) return InvalidArgument("out_dtype must be f32, bf16 or f16");
  if (p.partial_arrives && p.o_dtype != DType::kF32) {
    return InvalidArgument("partial_arrives: o_dtype must be f32");
  }
  if (p.rows == 0 || p.heads == 0) return Status::Ok();
  if (Status s = CheckArray(p.o, "o"); !s.ok()) return s;
  if (p.lse == nullptr) return InvalidArgument("lse is null");
  const bool writes =
      p.placement == Placement::kGathered ? rank == 0 : SliceOfRank(p.heads, ranks, rank).count > 0;
  return writes ? CheckArray(p.out, "out") : Status::Ok();
}

Status CheckDeviceGather(const DeviceGatherParams& p, int32_t rank, int32_t ranks) {
  if (Status s = CheckDims(p.rows, p.heads, p.value_dim); !s.ok()) return s;
  if (!IsUnscaled(p.dtype)) return InvalidArgument("dtype must be f32, bf16 or f16");
  if (p.rows == 0 || p.heads == 0) return Status::Ok();
  if (SliceOfRank(p.heads, ranks, rank).count > 0) {
    if (Status s = CheckArray(p.slice, "slice"); !s.ok()) return s;
  }
  if (rank != 0) return Status::Ok();
  if (p.lse_out != nullptr && p.slice_lse == nullptr) {
    return InvalidArgument("lse_out is wanted but slice_lse is null");
  }
  return CheckArray(p.out, "out");
}

}  // namespace tributary::collective
