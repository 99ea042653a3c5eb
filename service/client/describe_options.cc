#include "service/client/describe_options.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tributary::client {
namespace {

std::string Text(const std::string& value) { return value; }
std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(int32_t value) { return absl::StrCat(value); }
std::string Text(uint64_t value) { return absl::StrCat(value); }
std::string Text(std::chrono::milliseconds value) { return absl::StrCat(value.count(), " ms"); }
std::string Text(std::chrono::nanoseconds value) { return absl::StrCat(value.count(), " ns"); }
std::string Text(v1::DType value) { return v1::DType_Name(value); }
std::string Text(v1::SessionMemory value) { return v1::SessionMemory_Name(value); }

std::string Bytes(uint64_t value) { return absl::StrCat(value, " bytes"); }
std::string Hidden(const std::string& secret) { return secret.empty() ? "" : "(set)"; }

// What every kind of session has.
struct SessionBasics {
  const std::string& cache_id;
  int32_t max_rows;
  int32_t max_new_tokens;
  v1::DType dtype;
  bool return_lse;
  int32_t max_steps;
  std::chrono::milliseconds wait_timeout;
};

std::vector<OptionValue> Session(const SessionBasics& basics,
                                 const std::vector<OptionValue>& others) {
  std::vector<OptionValue> all = {{"cache_id", Text(basics.cache_id)},
                                  {"max_rows", Text(basics.max_rows)},
                                  {"max_new_tokens", Text(basics.max_new_tokens)},
                                  {"dtype", Text(basics.dtype)},
                                  {"return_lse", Text(basics.return_lse)},
                                  {"max_steps", Text(basics.max_steps)},
                                  {"wait_timeout", Text(basics.wait_timeout)}};
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

}  // namespace

// The bindings name every member, so that an option that is added does not compile without a line
// here.
std::vector<OptionValue> Describe(const ConnectOptions& options) {
  const auto& [target, security, timeout, shared_memory_bytes, max_attempts, max_message_bytes,
               lease, wait_for_service] = options;
  const auto& [tls, server_name, token_file, join_secret_file] = security;
  const auto& [certificate, key, authorities] = tls;
  return {{"target", Text(target)},
          {"security.tls.certificate", Text(certificate)},
          {"security.tls.key", Text(key)},
          {"security.tls.authorities", Text(authorities)},
          {"security.server_name", Text(server_name)},
          {"security.token_file", Text(token_file)},
          {"security.join_secret_file", Text(join_secret_file)},
          {"timeout", Text(timeout)},
          {"shared_memory_bytes", Bytes(shared_memory_bytes)},
          {"max_attempts", Text(max_attempts)},
          {"max_message_bytes", Bytes(max_message_bytes)},
          {"lease", Hidden(lease)},
          {"wait_for_service", Text(wait_for_service)}};
}

std::vector<OptionValue> Describe(const HostSessionOptions& options) {
  const auto& [cache_id, max_rows, max_new_tokens, dtype, output_dtype, return_lse, max_steps,
               wait_timeout, memory, spin, endpoints, kv_replicated] = options;
  return Session({cache_id, max_rows, max_new_tokens, dtype, return_lse, max_steps, wait_timeout},
                 {{"output_dtype", Text(output_dtype)},
                  {"memory", Text(memory)},
                  {"spin", Text(spin)},
                  {"endpoints", Text(endpoints)},
                  {"kv_replicated", Text(kv_replicated)}});
}

std::vector<OptionValue> Describe(const DeviceSessionOptions& options) {
  const auto& [cache_id, max_rows, max_new_tokens, dtype, return_lse, max_steps, wait_timeout,
               endpoints, kv_replicated, timed] = options;
  return Session({cache_id, max_rows, max_new_tokens, dtype, return_lse, max_steps, wait_timeout},
                 {{"endpoints", Text(endpoints)},
                  {"kv_replicated", Text(kv_replicated)},
                  {"timed", Text(timed)}});
}

std::vector<OptionValue> Describe(const EndpointOptions& options) {
  const auto& [session_id, secret, endpoint, spin] = options;
  return {{"session_id", Text(session_id)},
          {"secret", Hidden(secret)},
          {"endpoint", Text(endpoint)},
          {"spin", Text(spin)}};
}

std::string OptionsText(const std::vector<OptionValue>& options) {
  std::string text;
  for (const OptionValue& option : options) {
    absl::StrAppend(&text, option.name, ": ", option.value, "\n");
  }
  return text;
}

}  // namespace tributary::client
