#include "worker/opened_regions.h"

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status/errors.h"
#include "base/status/status_macros.h"

namespace tributary::worker {
namespace {

constexpr size_t kHandleBytes = 64;  // of a cudaIpcMemHandle_t

// "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi writes it.
bool IsGpuUuid(absl::string_view text) {
  constexpr absl::string_view kForm = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  if (text.size() != kForm.size()) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (kForm[i] == 'x' ? !absl::ascii_isxdigit(text[i]) : text[i] != kForm[i]) return false;
  }
  return true;
}

}  // namespace

absl::Status CheckSharedDeviceMemory(const SharedDeviceMemory& memory) {
  if (memory.handle.size() != kHandleBytes) {
    return InvalidField("cuda_ipc.raw_handle",
                        absl::StrCat("must be the ", kHandleBytes,
                                     " bytes of a cudaIpcMemHandle_t, has ", memory.handle.size()));
  }
  if (!IsGpuUuid(memory.gpu)) {
    return InvalidField("cuda_ipc.device_uuid",
                        "must be the UUID of a GPU as nvidia-smi -L prints it, GPU-...");
  }
  if (memory.bytes == 0) return InvalidField("byte_size", "must be > 0");
  if (memory.offset % kRegionAlignment != 0) {
    return InvalidField("cuda_ipc.offset",
                        absl::StrCat("must be a multiple of ", kRegionAlignment, " bytes"));
  }
  if (memory.offset + memory.bytes < memory.offset) {
    return InvalidField("cuda_ipc.offset", "offset + byte_size leaves 64 bits");
  }
  return absl::OkStatus();
}

OpenedRegions::~OpenedRegions() {
  for (const auto& [id, region] : open_) opener_.Close(region.mapping);
}

absl::Status OpenedRegions::Open(RegionId region, const SharedDeviceMemory& memory) {
  if (const auto it = open_.find(region); it != open_.end()) {
    if (it->second.memory == memory) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat("region ", region, " is other memory"));
  }
  TRIBUTARY_RETURN_IF_ERROR(CheckSharedDeviceMemory(memory));
  TRIBUTARY_ASSIGN_OR_RETURN(const RegionOpener::Mapping mapping, opener_.Open(memory));
  if (mapping.bytes < memory.offset + memory.bytes) {
    opener_.Close(mapping);
    return InvalidField(
        "byte_size", absl::StrCat("the allocation has ", mapping.bytes, " bytes and ends before ",
                                  memory.offset, " + ", memory.bytes));
  }
  open_.emplace(region, Region{memory, mapping});
  return absl::OkStatus();
}

void OpenedRegions::Close(RegionId region) {
  const auto it = open_.find(region);
  if (it == open_.end()) return;
  opener_.Close(it->second.mapping);
  open_.erase(it);
}

OpenedRegions::Place OpenedRegions::Find(const RegionPart& part) const {
  const auto it = open_.find(part.region);
  if (it == open_.end()) return {};
  const auto& [memory, mapping] = it->second;
  const bool aligned = part.offset % kRegionAlignment == 0;
  if (!aligned || part.offset > memory.bytes || part.bytes > memory.bytes - part.offset) return {};
  return {mapping.base + memory.offset + part.offset, mapping.same_gpu};
}

}  // namespace tributary::worker
