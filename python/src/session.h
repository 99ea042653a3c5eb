// A session as a Python object.
#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core.h"

namespace tributary::python {

class Session {
 public:
  Session(tributary_client* client, const tributary_session_options& options);
  // Joins another process's session.
  Session(tributary_client* client, const tributary_endpoint& endpoint);
  ~Session() { Abandon(); }  // in another process than that which made it, it is left as it is
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // (memory, max_rows, max_new_tokens, max_steps, return_lse, dtype, dtype of outputs)
  std::tuple<int, int, int, int, bool, int, int> Info() const;
  // (endpoint, endpoints, the session's number, the secret with which others join)
  std::tuple<int, int, uint64_t, nb::bytes> Endpoint() const;
  // What would make it faster, or "".
  const std::string& Warning() const { return warning_; }
  // (q_heads, kv_heads, head_dim, value_head_dim, first_q_head, first_kv_head)
  std::tuple<int, int, int, int, int, int> LayerShape(nb::handle layer);
  // Entries are as tributary.StepEntry has them.
  uint64_t Submit(int mode, nb::handle first_layer, nb::handle layers, nb::handle entries,
                  nb::handle append_only);
  void Attend(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
              uintptr_t stream);
  // `rows`: new tokens, where k and v are none.
  void Append(nb::handle k, nb::handle v, nb::handle rows, uintptr_t stream);
  void Await(nb::handle step);
  void Status();
  void Close();
  void Abandon();

 private:
  // Runs `body(session, error)` without the GIL, and with no other thread in the session. Fails in
  // another process than that which made the session, where another thread may seem to be in it.
  template <typename Body>
  void InTurn(const Body& body);
  tributary_rows Rows(const char* field, nb::handle tensor, bool written);

  Process process_;
  tributary_session_info info_{};
  std::string warning_;
  std::mutex turn_;
  tributary_session* session_ = nullptr;  // guarded by turn_
};

}  // namespace tributary::python
