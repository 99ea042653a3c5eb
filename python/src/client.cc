#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core.h"
#include "session.h"

namespace tributary::python {
namespace {

// The shape must be [rows, heads, dim]; where `heads` and `dim` are 0 they are whatever they are.
void CheckShape(const char* field, size_t ndim, const int64_t* shape, int64_t rows, int64_t heads,
                int64_t dim) {
  const bool fits = ndim == 3 && shape[0] == rows && (heads == 0 || shape[1] == heads) &&
                    (dim == 0 || shape[2] == dim);
  if (fits) return;
  std::string given;
  for (size_t i = 0; i < ndim; ++i) given += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  const auto wanted = [](int64_t n) { return n == 0 ? std::string("any") : std::to_string(n); };
  Fail(TRIBUTARY_INVALID_ARGUMENT,
       std::string(field) + ": must be [" + std::to_string(rows) + ", " + wanted(heads) + ", " +
           wanted(dim) + "], is [" + given + "]",
       std::string(field) + ".shape");
}

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;
using MaybeInput = std::optional<Input>;
using MaybeOutput = std::optional<Output>;
using Timeout = std::optional<double>;  // seconds; none: the client's
using Entries = std::vector<std::tuple<uint64_t, int64_t, int32_t, int32_t>>;
// Of an output: its dtype (0: q's), its scale (0: the layer's), and dimensions of a head.
using OutputKind = std::tuple<int, float, int32_t>;

// A call's structure and the entries that it points to.
struct Call {
  Call(const std::string& cache, int32_t layer, const Entries& given) {
    for (const auto& [sequence, position, entry_rows, entry_new] : given) {
      entries.push_back({sequence, position, entry_rows, entry_new});
      rows += entry_rows;
      new_tokens += entry_new;
    }
    c.size = sizeof c;
    c.cache = cache.c_str();
    c.layer = layer;
    c.entries = entries.data();
    c.entry_count = entries.size();
  }
  void SetKv(const Input& k, const Input& v, int64_t tokens, int64_t head_dim) {
    CheckShape("k", k.ndim(), k.shape_ptr(), tokens, 0, head_dim);
    CheckShape("v", v.ndim(), v.shape_ptr(), tokens, k.shape(1), 0);
    if (DTypeOf(k.dtype(), "k") != c.dtype)
      Fail(TRIBUTARY_INVALID_ARGUMENT, "k: must have the dtype of q", "k");
    if (DTypeOf(v.dtype(), "v") != c.dtype)
      Fail(TRIBUTARY_INVALID_ARGUMENT, "v: must have the dtype of k", "v");
    c.kv_heads = static_cast<int32_t>(k.shape(1));
    c.value_head_dim = static_cast<int32_t>(v.shape(2));
    c.k = k.data();
    c.v = v.data();
  }
  void SetAttend(int mode, const Input& q, const MaybeInput& k, const MaybeInput& v,
                 const Output& out, const MaybeOutput& lse, int32_t yield_ms,
                 const OutputKind& kind) {
    CheckShape("q", q.ndim(), q.shape_ptr(), rows, 0, 0);
    c.mode = static_cast<tributary_mode>(mode);
    c.yield_ms = yield_ms;
    c.dtype = DTypeOf(q.dtype(), "q");
    c.q_heads = static_cast<int32_t>(q.shape(1));
    c.head_dim = static_cast<int32_t>(q.shape(2));
    c.q = q.data();
    if (new_tokens > 0) {
      if (!k.has_value())
        Fail(TRIBUTARY_INVALID_ARGUMENT, "k: is missing: entries have new tokens", "k");
      if (!v.has_value())
        Fail(TRIBUTARY_INVALID_ARGUMENT, "v: is missing: entries have new tokens", "v");
      SetKv(*k, *v, new_tokens, q.shape(2));
    }
    SetOutput(out, kind);
    if (!lse.has_value()) return;
    const bool fits = lse->ndim() == 2 && lse->shape(0) == rows && lse->shape(1) == q.shape(1) &&
                      lse->dtype() == nb::dtype<float>();
    if (!fits) Fail(TRIBUTARY_INVALID_ARGUMENT, "lse: must be float32 [rows, q_heads]", "lse");
    c.lse = static_cast<float*>(lse->data());
  }

  // When q's shape is known, and v's.
  void SetOutput(const Output& out, const OutputKind& kind) {
    const auto wrong = [](const char* what) { Fail(TRIBUTARY_INVALID_ARGUMENT, what, "out"); };
    const auto& [dtype, scale, dim] = kind;
    c.output_dtype = static_cast<tributary_dtype>(dtype);
    c.o_scale = scale;
    c.output = out.data();
    const bool is_bytes = out.dtype() == nb::dtype<uint8_t>();
    if (c.output_dtype == TRIBUTARY_NVFP4) {
      if (c.value_head_dim == 0) c.value_head_dim = dim;
      const uint64_t elements = static_cast<uint64_t>(rows) * c.q_heads * c.value_head_dim;
      const uint64_t bytes = tributary_output_bytes(TRIBUTARY_NVFP4, elements);
      if (!is_bytes || out.ndim() != 1 || out.shape(0) != bytes) {
        wrong("out: must be uint8 of as many bytes as the output has");
      }
      return;
    }
    CheckShape("out", out.ndim(), out.shape_ptr(), rows, c.q_heads, c.value_head_dim);
    c.value_head_dim = static_cast<int32_t>(out.shape(2));
    if (c.output_dtype == TRIBUTARY_FP8_E4M3) {
      if (!is_bytes) wrong("out: must be uint8");
    } else if (DTypeOf(out.dtype(), "out") != (dtype == 0 ? c.dtype : c.output_dtype)) {
      wrong(dtype == 0 ? "out: must have q's dtype" : "out: must have the output's dtype");
    }
  }

  std::vector<tributary_entry> entries;
  int64_t rows = 0, new_tokens = 0;
  tributary_call c{};
};

// A call that nobody waits for, and the tensors that it borrows.
struct Flight {
  nb::object done;
  std::tuple<Input, MaybeInput, MaybeInput, Output, MaybeOutput> tensors;
};

// Whether this thread runs a callback: a connection that ends here would wait for itself.
thread_local bool landing = false;

void Land(void* context, tributary_code code, const tributary_error* error) {
  const nb::gil_scoped_acquire with_python;
  const std::unique_ptr<Flight> flight(static_cast<Flight*>(context));
  landing = true;
  try {
    flight->done(code == TRIBUTARY_OK ? nb::none() : ExceptionOf(FailureOf(code, error)));
  } catch (nb::python_error& raised) {
    raised.discard_as_unraisable("tributary: the callback of a call");
  }
  flight->done.reset();
  landing = false;
}

class Client {
 public:
  Client(const std::string& target, double timeout, uint64_t shared_memory_bytes, int max_attempts,
         const std::string& certificate, const std::string& key, const std::string& authorities,
         const std::string& token_file, const std::string& lease) {
    tributary_options options{};
    options.size = sizeof options;
    options.target = target.c_str();
    options.timeout_ms = static_cast<int64_t>(timeout * 1000);
    options.shared_memory_bytes = shared_memory_bytes;
    options.max_attempts = max_attempts;
    options.tls_certificate = certificate.c_str();
    options.tls_key = key.c_str();
    options.tls_authorities = authorities.c_str();
    options.token_file = token_file.c_str();
    options.lease = lease.c_str();
    tributary_client* client = nullptr;
    Wait([&](tributary_error** error) { return tributary_connect(&options, &client, error); });
    client_ = Own(client);
  }

  std::string Options() const {
    const Handle client = Open(std::nullopt);
    std::string text(tributary_client_options(client.get(), nullptr, 0), '\0');
    tributary_client_options(client.get(), text.data(), text.size() + 1);
    return text;
  }

  // The connection goes when the last call of another thread has ended.
  void Close() { client_.reset(); }

  std::tuple<int, int, int64_t> CreateCache(const std::string& id, const nb::object& spec,
                                            Timeout timeout) {
    const auto number = [](const nb::object& of, const char* name) {
      return nb::cast<int64_t>(of.attr(name));
    };
    const auto real = [](const nb::object& of, const char* name) {
      return nb::cast<float>(of.attr(name));
    };
    std::vector<tributary_layer> layers;
    std::vector<std::vector<float>> values;  // what the layers point to
    const auto floats = [&](const nb::object& of, const char* name, int32_t& count) {
      values.push_back(nb::cast<std::vector<float>>(of.attr(name)));
      count = static_cast<int32_t>(values.back().size());
      return values.back().data();  // stays where it is when `values` grows
    };
    for (const nb::handle each : spec.attr("layer_specs")) {
      const nb::object of = nb::borrow(each);
      tributary_layer layer{};
      layer.size = sizeof layer;
      if (const auto left = nb::cast<std::optional<int64_t>>(of.attr("window_left"))) {
        layer.has_window_left = 1;
        layer.window_left = *left;
      }
      if (const auto cap = nb::cast<std::optional<float>>(of.attr("soft_cap"))) {
        layer.has_soft_cap = 1;
        layer.soft_cap = *cap;
      }
      if (const auto right = nb::cast<std::optional<int64_t>>(of.attr("window_right"))) {
        layer.has_window_right = 1;
        layer.window_right = *right;
      }
      layer.window_base =
          static_cast<tributary_window_base>(nb::cast<int>(of.attr("_window_base_code")));
      layer.causal_block = nb::cast<bool>(of.attr("causal_block"));
      layer.o_scale = real(of, "o_scale");
      layer.sinks = floats(of, "sinks", layer.sink_count);
      layer.k_scale = floats(of, "k_scale", layer.k_scale_count);
      layer.v_scale = floats(of, "v_scale", layer.v_scale_count);
      layer.sm_scale = real(of, "sm_scale");
      layer.kv_dtype = static_cast<tributary_dtype>(nb::cast<int>(of.attr("_kv_dtype_code")));
      layer.q_heads = static_cast<int32_t>(number(of, "q_heads"));
      layer.kv_heads = static_cast<int32_t>(number(of, "kv_heads"));
      layer.head_dim = static_cast<int32_t>(number(of, "head_dim"));
      layer.value_head_dim = static_cast<int32_t>(number(of, "value_head_dim"));
      layers.push_back(layer);
    }
    tributary_cache_spec c{};
    c.size = sizeof c;
    c.layers = static_cast<int32_t>(number(spec, "layers"));
    c.q_heads = static_cast<int32_t>(number(spec, "q_heads"));
    c.kv_heads = static_cast<int32_t>(number(spec, "kv_heads"));
    c.head_dim = static_cast<int32_t>(number(spec, "head_dim"));
    c.value_head_dim = static_cast<int32_t>(number(spec, "value_head_dim"));
    c.page_size = static_cast<int32_t>(number(spec, "page_size"));
    c.kv_dtype = static_cast<tributary_dtype>(nb::cast<int>(spec.attr("_kv_dtype_code")));
    c.sm_scale = real(spec, "sm_scale");
    c.soft_cap = real(spec, "soft_cap");
    c.capacity_tokens = number(spec, "capacity_tokens");
    c.window_capacity_tokens = number(spec, "window_capacity_tokens");
    c.rollback_tokens = number(spec, "rollback_tokens");
    std::vector<tributary_mode> modes;
    for (const int mode : nb::cast<std::vector<int>>(spec.attr("_mode_codes"))) {
      modes.push_back(static_cast<tributary_mode>(mode));
    }
    c.modes = modes.data();
    c.mode_count = static_cast<int32_t>(modes.size());
    c.interleave = static_cast<int32_t>(number(spec, "interleave"));
    c.fp8_queries = nb::cast<bool>(spec.attr("fp8_queries"));
    c.fp8_weights = nb::cast<bool>(spec.attr("fp8_weights"));
    if (const auto replicas = nb::cast<std::optional<int32_t>>(spec.attr("replicas"))) {
      c.has_replicas = 1;
      c.replicas = *replicas;
    }
    c.layer_specs = layers.data();
    c.layer_count = static_cast<int32_t>(layers.size());
    tributary_cache_info info{};
    info.size = sizeof info;
    const Handle client = Open(timeout);
    Wait([&](tributary_error** error) {
      return tributary_create_cache(client.get(), id.c_str(), &c, &info, error);
    });
    return {info.ranks, info.page_size, info.capacity_tokens};
  }

  void DeleteCache(const std::string& id, Timeout timeout) {
    const Handle client = Open(timeout);
    Wait([&](tributary_error** error) {
      return tributary_delete_cache(client.get(), id.c_str(), error);
    });
  }
  uint64_t OpenSequence(const std::string& cache, Timeout timeout) {
    const Handle client = Open(timeout);
    uint64_t sequence = 0;
    Wait([&](tributary_error** e) {
      return tributary_open_sequence(client.get(), cache.c_str(), &sequence, e);
    });
    return sequence;
  }
  void ReopenSequence(const std::string& cache, uint64_t sequence, Timeout timeout) {
    const Handle client = Open(timeout);
    Wait([&](tributary_error** e) {
      return tributary_reopen_sequence(client.get(), cache.c_str(), sequence, e);
    });
  }
  uint64_t ForkSequence(const std::string& cache, uint64_t parent, std::optional<int64_t> length,
                        Timeout timeout) {
    const Handle client = Open(timeout);
    uint64_t child = 0;
    Wait([&](tributary_error** e) {
      return tributary_fork_sequence(client.get(), cache.c_str(), parent, length.value_or(-1),
                                     &child, e);
    });
    return child;
  }
  int64_t TruncateSequence(const std::string& cache, uint64_t sequence, int64_t length,
                           Timeout timeout) {
    const Handle client = Open(timeout);
    int64_t held = 0;
    Wait([&](tributary_error** e) {
      return tributary_truncate_sequence(client.get(), cache.c_str(), sequence, length, &held, e);
    });
    return held;
  }
  void CloseSequence(const std::string& cache, uint64_t sequence, Timeout timeout) {
    const Handle client = Open(timeout);
    Wait([&](tributary_error** e) {
      return tributary_close_sequence(client.get(), cache.c_str(), sequence, e);
    });
  }
  // Each update is (kind, sequence, parent, length). Returns their sequences.
  std::vector<uint64_t> UpdateSequences(
      const std::string& cache,
      const std::vector<std::tuple<int, uint64_t, uint64_t, int64_t>>& given, Timeout timeout) {
    std::vector<tributary_update> updates;
    updates.reserve(given.size());
    for (const auto& [kind, sequence, parent, length] : given) {
      updates.push_back({static_cast<tributary_update_kind>(kind), sequence, parent, length});
    }
    const Handle client = Open(timeout);
    Wait([&](tributary_error** e) {
      return tributary_update_sequences(client.get(), cache.c_str(), updates.data(),
                                        static_cast<int32_t>(updates.size()), e);
    });
    std::vector<uint64_t> sequences;
    for (const tributary_update& update : updates) sequences.push_back(update.sequence);
    return sequences;
  }

  void Append(const std::string& cache, int layer, const Entries& entries, const Input& k,
              const Input& v, Timeout timeout) {
    const Handle client = Open(timeout);
    Call call(cache, layer, entries);
    call.c.dtype = DTypeOf(k.dtype(), "k");
    call.SetKv(k, v, call.rows, 0);
    call.c.head_dim = static_cast<int32_t>(k.shape(2));
    Wait([&](tributary_error** error) { return tributary_append(client.get(), &call.c, error); });
  }

  void Attend(const std::string& cache, int layer, int mode, const Entries& entries, const Input& q,
              const MaybeInput& k, const MaybeInput& v, const Output& out, const MaybeOutput& lse,
              int32_t yield_ms, const OutputKind& kind, Timeout timeout) {
    const Handle client = Open(timeout);
    Call call(cache, layer, entries);
    call.SetAttend(mode, q, k, v, out, lse, yield_ms, kind);
    Wait([&](tributary_error** error) { return tributary_attend(client.get(), &call.c, error); });
  }

  // Calls done(None), or done(the exception), once, on a thread of the client. A call whose tensors
  // do not fit raises instead. Returns a number for Cancel.
  uint64_t AttendAsync(const std::string& cache, int layer, int mode, const Entries& entries,
                       const Input& q, const MaybeInput& k, const MaybeInput& v, const Output& out,
                       const MaybeOutput& lse, int32_t yield_ms, const OutputKind& kind,
                       nb::object done, Timeout timeout) {
    const Handle client = Open(timeout);
    Call call(cache, layer, entries);
    call.SetAttend(mode, q, k, v, out, lse, yield_ms, kind);
    auto* flight = new Flight{std::move(done), {q, k, v, out, lse}};
    nb::gil_scoped_release others_run;  // a call that cannot be begun is told at once
    return tributary_attend_async(client.get(), &call.c, Land, flight);
  }

  // Whatever its timeout, a call has its number among those of the whole connection.
  void Cancel(uint64_t call) const {
    const Handle client = client_;
    if (client == nullptr) return;  // closing told it already
    nb::gil_scoped_release others_run;
    tributary_cancel(client.get(), call);
  }

  // `dtypes`: of q, k and v; of outputs, 0: the same.
  std::unique_ptr<Session> OpenSession(const std::string& cache, int memory, int max_rows,
                                       int max_new_tokens, std::pair<int, int> dtypes, bool lse,
                                       int max_steps, double wait_timeout, int endpoints,
                                       bool kv_replicated, Timeout timeout) {
    const Handle client = Open(timeout);
    tributary_session_options options{};
    options.size = sizeof options;
    options.cache = cache.c_str();
    options.memory = static_cast<tributary_memory>(memory);
    options.max_rows = max_rows;
    options.max_new_tokens = max_new_tokens;
    options.dtype = static_cast<tributary_dtype>(dtypes.first);
    options.output_dtype = static_cast<tributary_dtype>(dtypes.second);
    options.return_lse = lse;
    options.max_steps = max_steps;
    options.wait_timeout_ms = static_cast<int64_t>(std::ceil(wait_timeout * 1000));
    options.endpoints = endpoints;
    options.kv_replicated = kv_replicated;
    return std::make_unique<Session>(client.get(), options);
  }

  std::unique_ptr<Session> JoinSession(uint64_t session, nb::bytes secret, int number, int memory,
                                       Timeout timeout) {
    const Handle client = Open(timeout);
    tributary_endpoint endpoint{};
    endpoint.size = sizeof endpoint;
    endpoint.session = session;
    std::memcpy(endpoint.secret, secret.c_str(), std::min(secret.size(), sizeof endpoint.secret));
    endpoint.endpoint = number;
    endpoint.memory = static_cast<tributary_memory>(memory);
    return std::make_unique<Session>(client.get(), endpoint);
  }

 private:
  // Kept by a call for as long as it runs.
  Handle Open(Timeout timeout) const {
    if (client_ == nullptr) Fail(TRIBUTARY_CANCELLED, "the client was closed", "");
    if (!timeout.has_value()) return client_;
    tributary_client* other = nullptr;
    const auto ms = static_cast<int64_t>(std::ceil(*timeout * 1000));
    Wait([&](tributary_error** e) { return tributary_with_timeout(client_.get(), ms, &other, e); });
    return Own(other);
  }

  Handle client_;
};

}  // namespace

Handle Own(tributary_client* client) {
  return {client, [](tributary_client* last) {
            if (landing) {
              std::thread(tributary_close, last).detach();
              return;
            }
            nb::gil_scoped_release others_run;
            tributary_close(last);
          }};
}

void BindClient(nb::module_& m) {
  const auto timeout = nb::arg() = nb::none();
  nb::class_<Client>(m, "Client")
      .def(nb::init<const std::string&, double, uint64_t, int, const std::string&,
                    const std::string&, const std::string&, const std::string&,
                    const std::string&>())
      .def("close", &Client::Close)
      .def("options", &Client::Options)
      .def("create_cache", &Client::CreateCache, nb::arg(), nb::arg(), timeout)
      .def("delete_cache", &Client::DeleteCache, nb::arg(), timeout)
      .def("open_sequence", &Client::OpenSequence, nb::arg(), timeout)
      .def("reopen_sequence", &Client::ReopenSequence, nb::arg(), nb::arg(), timeout)
      .def("fork_sequence", &Client::ForkSequence, nb::arg(), nb::arg(), nb::arg().none(), timeout)
      .def("truncate_sequence", &Client::TruncateSequence, nb::arg(), nb::arg(), nb::arg(), timeout)
      .def("close_sequence", &Client::CloseSequence, nb::arg(), nb::arg(), timeout)
      .def("update_sequences", &Client::UpdateSequences, nb::arg(), nb::arg(), timeout)
      .def("append", &Client::Append, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           timeout)
      .def("attend", &Client::Attend, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg().none(), nb::arg().noconvert(), nb::arg().noconvert().none(),
           nb::arg(), nb::arg(), timeout)
      .def("attend_async", &Client::AttendAsync, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().noconvert(),
           nb::arg().noconvert().none(), nb::arg(), nb::arg(), nb::arg(), timeout)
      .def("cancel", &Client::Cancel, nb::arg())
      .def("open_session", &Client::OpenSession, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), timeout)
      .def("join_session", &Client::JoinSession, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           timeout);
}

}  // namespace tributary::python
