// The C interface as Python objects. Nothing is decided here: shapes are checked, pointers handed
// on, failures raised. The GIL is released while a call waits.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <tributary.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Entries = std::vector<std::tuple<uint64_t, int64_t, int32_t, int32_t>>;
using Handle = std::shared_ptr<tributary_client>;

// A failure on its way to Python, where tributary.errors makes the exception of its code.
struct Failure : std::exception {
  int code = 0;
  std::string message, field;
  int64_t retry_delay_ms = -1, length = -1;
};

[[noreturn]] void Fail(int code, std::string message, std::string field) {
  Failure failure;
  failure.code = code;
  failure.message = std::move(message);
  failure.field = std::move(field);
  throw failure;
}

// Waits without the GIL for a function of the C interface; `body` is given the place for its error.
template <typename Body>
void Wait(const Body& body) {
  tributary_error* error = nullptr;
  tributary_code code = TRIBUTARY_OK;
  {
    nb::gil_scoped_release others_run;
    code = body(&error);
  }
  if (code == TRIBUTARY_OK) return;
  Failure failure;
  failure.code = code;
  if (error != nullptr) {
    failure.message = tributary_error_message(error);
    failure.field = tributary_error_field(error);
    failure.retry_delay_ms = tributary_error_retry_delay_ms(error);
    failure.length = tributary_error_length(error);
    tributary_error_free(error);
  }
  throw failure;
}

tributary_dtype DTypeOf(const nb::dlpack::dtype& dtype, const char* field) {
  if (dtype == nb::dtype<float>()) return TRIBUTARY_F32;
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.bits == 16 && dtype.lanes == 1) {
    if (code == nb::dlpack::dtype_code::Float) return TRIBUTARY_F16;
    // numpy has no bfloat16: its bits come as uint16.
    if (code == nb::dlpack::dtype_code::Bfloat || code == nb::dlpack::dtype_code::UInt)
      return TRIBUTARY_BF16;
  }
  Fail(TRIBUTARY_INVALID_ARGUMENT, std::string(field) + ": must be float32, float16 or bfloat16",
       field);
}

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

  std::vector<tributary_entry> entries;
  int64_t rows = 0, new_tokens = 0;
  tributary_call c{};
};

class Client {
 public:
  Client(const std::string& target, double timeout, uint64_t shared_memory_bytes, int max_attempts,
         const std::string& certificate, const std::string& key, const std::string& authorities,
         const std::string& token_file) {
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
    tributary_client* client = nullptr;
    Wait([&](tributary_error** error) { return tributary_connect(&options, &client, error); });
    client_ = Handle(client, tributary_close);
  }

  // The connection goes when the last call of another thread has ended.
  void Close() {
    Handle client = std::move(client_);
    nb::gil_scoped_release others_run;
    client.reset();
  }

  std::tuple<int, int, int64_t> CreateCache(const std::string& id, const nb::object& spec) {
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
      layer.sinks = floats(of, "sinks", layer.sink_count);
      layer.k_scale = floats(of, "k_scale", layer.k_scale_count);
      layer.v_scale = floats(of, "v_scale", layer.v_scale_count);
      layer.sm_scale = real(of, "sm_scale");
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
    c.layer_specs = layers.data();
    c.layer_count = static_cast<int32_t>(layers.size());
    tributary_cache_info info{};
    info.size = sizeof info;
    const Handle client = Open();
    Wait([&](tributary_error** error) {
      return tributary_create_cache(client.get(), id.c_str(), &c, &info, error);
    });
    return {info.ranks, info.page_size, info.capacity_tokens};
  }

  void DeleteCache(const std::string& id) {
    const Handle client = Open();
    Wait([&](tributary_error** error) {
      return tributary_delete_cache(client.get(), id.c_str(), error);
    });
  }
  uint64_t OpenSequence(const std::string& cache) {
    const Handle client = Open();
    uint64_t sequence = 0;
    Wait([&](tributary_error** e) {
      return tributary_open_sequence(client.get(), cache.c_str(), &sequence, e);
    });
    return sequence;
  }
  void ReopenSequence(const std::string& cache, uint64_t sequence) {
    const Handle client = Open();
    Wait([&](tributary_error** e) {
      return tributary_reopen_sequence(client.get(), cache.c_str(), sequence, e);
    });
  }
  uint64_t ForkSequence(const std::string& cache, uint64_t parent, std::optional<int64_t> length) {
    const Handle client = Open();
    uint64_t child = 0;
    Wait([&](tributary_error** e) {
      return tributary_fork_sequence(client.get(), cache.c_str(), parent, length.value_or(-1),
                                     &child, e);
    });
    return child;
  }
  int64_t TruncateSequence(const std::string& cache, uint64_t sequence, int64_t length) {
    const Handle client = Open();
    int64_t held = 0;
    Wait([&](tributary_error** e) {
      return tributary_truncate_sequence(client.get(), cache.c_str(), sequence, length, &held, e);
    });
    return held;
  }
  void CloseSequence(const std::string& cache, uint64_t sequence) {
    const Handle client = Open();
    Wait([&](tributary_error** e) {
      return tributary_close_sequence(client.get(), cache.c_str(), sequence, e);
    });
  }

  void Append(const std::string& cache, int layer, const Entries& entries, const Input& k,
              const Input& v) {
    const Handle client = Open();
    Call call(cache, layer, entries);
    call.c.dtype = DTypeOf(k.dtype(), "k");
    call.SetKv(k, v, call.rows, 0);
    call.c.head_dim = static_cast<int32_t>(k.shape(2));
    Wait([&](tributary_error** error) { return tributary_append(client.get(), &call.c, error); });
  }

  void Attend(const std::string& cache, int layer, int mode, const Entries& entries, const Input& q,
              const std::optional<Input>& k, const std::optional<Input>& v, const Output& out,
              const std::optional<Output>& lse) {
    const Handle client = Open();
    Call call(cache, layer, entries);
    CheckShape("q", q.ndim(), q.shape_ptr(), call.rows, 0, 0);
    call.c.mode = static_cast<tributary_mode>(mode);
    call.c.dtype = DTypeOf(q.dtype(), "q");
    call.c.q_heads = static_cast<int32_t>(q.shape(1));
    call.c.head_dim = static_cast<int32_t>(q.shape(2));
    call.c.q = q.data();
    if (call.new_tokens > 0) {
      if (!k.has_value())
        Fail(TRIBUTARY_INVALID_ARGUMENT, "k: is missing: entries have new tokens", "k");
      if (!v.has_value())
        Fail(TRIBUTARY_INVALID_ARGUMENT, "v: is missing: entries have new tokens", "v");
      call.SetKv(*k, *v, call.new_tokens, q.shape(2));
    }
    CheckShape("out", out.ndim(), out.shape_ptr(), call.rows, q.shape(1), call.c.value_head_dim);
    if (DTypeOf(out.dtype(), "out") != call.c.dtype)
      Fail(TRIBUTARY_INVALID_ARGUMENT, "out: must have q's dtype", "out");
    call.c.value_head_dim = static_cast<int32_t>(out.shape(2));
    call.c.output = out.data();
    if (lse.has_value()) {
      const bool fits = lse->ndim() == 2 && lse->shape(0) == call.rows &&
                        lse->shape(1) == q.shape(1) && lse->dtype() == nb::dtype<float>();
      if (!fits) Fail(TRIBUTARY_INVALID_ARGUMENT, "lse: must be float32 [rows, q_heads]", "lse");
      call.c.lse = static_cast<float*>(lse->data());
    }
    Wait([&](tributary_error** error) { return tributary_attend(client.get(), &call.c, error); });
  }

 private:
  // Kept by a call for as long as it runs.
  Handle Open() const {
    if (client_ == nullptr) Fail(TRIBUTARY_CANCELLED, "the client was closed", "");
    return client_;
  }

  Handle client_;
};

void Raise(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    const nb::object error = nb::module_::import_("tributary.errors")
                                 .attr("of_code")(failure.code, failure.message, failure.field,
                                                  failure.retry_delay_ms, failure.length);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator(Raise);
  m.def("version", &tributary_version);
  nb::class_<Client>(m, "Client")
      .def(nb::init<const std::string&, double, uint64_t, int, const std::string&,
                    const std::string&, const std::string&, const std::string&>())
      .def("close", &Client::Close)
      .def("create_cache", &Client::CreateCache)
      .def("delete_cache", &Client::DeleteCache)
      .def("open_sequence", &Client::OpenSequence)
      .def("reopen_sequence", &Client::ReopenSequence)
      .def("fork_sequence", &Client::ForkSequence, nb::arg(), nb::arg(), nb::arg().none())
      .def("truncate_sequence", &Client::TruncateSequence)
      .def("close_sequence", &Client::CloseSequence)
      .def("append", &Client::Append)
      .def("attend", &Client::Attend, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg().none(), nb::arg().noconvert(), nb::arg().noconvert().none());
}
