// A session as a Python object.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core.h"

namespace tributary::python {

// (sequence, first position, rows, new tokens, truncate to, fork from, tokens of the fork)
using StepEntries =
    std::vector<std::tuple<uint64_t, int64_t, int32_t, int32_t, std::optional<int64_t>,
                           std::optional<uint64_t>, std::optional<int64_t>>>;

class Session {
 public:
  Session(tributary_client* client, const tributary_session_options& options);
  // Joins another process's session.
  Session(tributary_client* client, const tributary_endpoint& endpoint);
  ~Session() { Abandon(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // (memory, max_rows, max_new_tokens, max_steps, return_lse, dtype, dtype of outputs)
  std::tuple<int, int, int, int, bool, int, int> Info() const;
  // (endpoint, endpoints, the session's number, the secret with which others join)
  std::tuple<int, int, uint64_t, nb::bytes> Endpoint() const;
  // What would make it faster, or "".
  const std::string& Warning() const { return warning_; }
  // (q_heads, kv_heads, head_dim, value_head_dim, first_q_head, first_kv_head)
  std::tuple<int, int, int, int, int, int> LayerShape(int layer);
  uint64_t Submit(int mode, int first_layer, int layers, const StepEntries& entries,
                  bool append_only);
  void Attend(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
              uintptr_t stream);
  // `rows`: new tokens, where k and v are none.
  void Append(nb::handle k, nb::handle v, int rows, uintptr_t stream);
  void Await(uint64_t step);
  void Status();
  void Close();
  void Abandon();

 private:
  // Runs `body(session, error)` without the GIL, and with no other thread in the session.
  template <typename Body>
  void InTurn(const Body& body);
  tributary_rows Rows(const char* field, nb::handle tensor, bool written);

  tributary_session_info info_{};
  std::string warning_;
  std::mutex turn_;
  tributary_session* session_ = nullptr;  // guarded by turn_
};

}  // namespace tributary::python
