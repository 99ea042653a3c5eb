// The errors of the public API: what each situation of the error table looks like, and how a status
// travels.
//
// Inside the service an error is an absl::Status. Its details are payloads: the field at fault as
// base/status/errors.h keeps it, everything else as a serialised google.rpc message under its Any
// type URL. ToRpcStatus turns all of them into google.rpc.Status, the form in which they leave the
// process.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/rpc/status.pb.h"

namespace tributary {

// ErrorInfo.domain of all our errors.
inline constexpr char kErrorDomain[] = "tributary.v1";

// How errors name a field of an entry of a request: "entries[2].first_position".
std::string EntryField(int index, absl::string_view field);

// Spells the field that an error would name. Checks that calls pass take it instead of the name, so
// that names are spelled for calls that are refused alone.
using FieldName = absl::FunctionRef<std::string()>;

// NOT_FOUND of a named thing ("cache", "sequence", "shared memory region"); `field` is where the
// request named it.
absl::Status NotFound(absl::string_view what, absl::string_view name, absl::string_view field);

// OUT_OF_RANGE: `field` is beyond the tokens held; ErrorInfo.metadata["length"] says how many are.
absl::Status BeyondEnd(absl::string_view field, int64_t position, int64_t length);

// OUT_OF_RANGE: rows at `field` would look for tokens that a windowed cache has given up;
// ErrorInfo.metadata["first_position"] is the first one possible.
absl::Status GivenUp(absl::string_view field, int64_t position, int64_t first_possible);

// ALREADY_EXISTS with the field.
absl::Status Conflict(absl::string_view field, absl::string_view message);

// RESOURCE_EXHAUSTED with QuotaFailure; `subject` is what ran out ("cache:model pages").
absl::Status Exhausted(absl::string_view subject, absl::string_view message);

// FAILED_PRECONDITION: a valid combination that nothing here can do; one violation per reason.
absl::Status Unsupported(absl::string_view subject, const std::vector<std::string>& reasons);

// Positions [begin, end) of tokens.
struct PositionRange {
  int64_t begin = 0;
  int64_t end = 0;
  friend bool operator==(const PositionRange&, const PositionRange&) = default;
};

// What a sequence has lost of one layer.
struct MissingTokens {
  uint64_t sequence = 0;
  int32_t layer = 0;
  std::vector<PositionRange> ranges;  // in order: the first ones, where there are too many to tell
  int64_t tokens = 0;                 // in all
};

// DATA_LOSS of sequences that had tokens on a lost shard; `field` is where the first was named.
// ErrorInfo.metadata has the first as "sequence", the first hundred as "sequences" ("3,7"), and how
// many there are as "count". With what the first one lacks, if something of it is left: "missing"
// ("16-31,80-95"), "missing_tokens" and "layer".
absl::Status Lost(const std::vector<uint64_t>& sequences, absl::string_view field);
absl::Status Lost(const std::vector<uint64_t>& sequences, absl::string_view field,
                  const MissingTokens& missing);

// UNAVAILABLE with RetryInfo.
absl::Status Unavailable(absl::string_view reason, absl::string_view message,
                         std::chrono::milliseconds retry_delay);

// ABORTED with RetryInfo: the step's collective did not complete; the call may be repeated as it
// was.
absl::Status StepAborted(absl::string_view why, std::chrono::milliseconds retry_delay);

// INTERNAL: a worker's reply is not what its command asked for. Nothing of it was used.
absl::Status WrongResult(absl::string_view message);

// What a command's failure means to the caller: collective failures become StepAborted, errors
// about the command itself, and WrongResult, stay. RESOURCE_EXHAUSTED of workers, who know no
// details, gets a QuotaFailure whose subject is kWorkerMemory.
inline constexpr char kWorkerMemory[] = "memory of the workers";
absl::Status FromOutcome(const absl::Status& outcome, std::chrono::milliseconds retry_delay);

// The form in which an error leaves the process, all details included.
google::rpc::Status ToRpcStatus(const absl::Status& status);
// The inverse, for what receives errors: FieldOf and RetryDelayOf read what they carry.
absl::Status FromRpcStatus(const google::rpc::Status& status);

// An error for people: "CODE: message", and in brackets what the details say besides (the reason
// and its metadata, the delay before the call is repeated). Never the bytes of a message.
std::string StatusText(const absl::Status& status);

// The delay the service asks for before the call is repeated, rounded up to milliseconds; nothing
// when it asks for none.
std::optional<std::chrono::milliseconds> RetryDelayOf(const absl::Status& status);

// What is missing of a sequence, where an error says so: Lost does. Nothing: nothing is left of it,
// and it must be opened again.
std::optional<MissingTokens> MissingTokensOf(const absl::Status& status);

// How many tokens are held, where an error says so: BeyondEnd does.
std::optional<int64_t> LengthOf(const absl::Status& status);

}  // namespace tributary
