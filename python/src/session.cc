#include "session.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace tributary::python {
namespace {

// Where a tensor of torch lies, as tributary.session states it: (address, dtype, on a GPU, shape,
// strides in elements). It saves the tensor's way through DLPack, which may not be gone while a
// CUDA graph is captured.
using Address = std::tuple<uintptr_t, int, bool, std::tuple<int, int, int>,
                           std::tuple<int64_t, int64_t, int64_t>>;

template <typename Array>
Address Locate(const char* field, const Array& array) {
  if (array.ndim() != 3) Refuse(Field(field, "shape"), "must be [rows, heads, dim]");
  const bool is_bytes = array.dtype() == nb::dtype<uint8_t>();
  const auto size = [&](int i) { return static_cast<int>(array.shape(i)); };
  return {reinterpret_cast<uintptr_t>(array.data()),
          is_bytes ? TRIBUTARY_FP8_E4M3 : DTypeOf(array.dtype(), field),
          array.device_type() != nb::device::cpu::value,
          {size(0), size(1), size(2)},
          {array.stride(0), array.stride(1), array.stride(2)}};
}

// Entries of a step, whose last parts may be left out.
std::vector<tributary_step_entry> TakeEntries(nb::handle given) {
  constexpr const char* kWanted = "must be a StepEntry: (sequence, first_position, rows, ...)";
  constexpr size_t kParts = 7;
  std::vector<tributary_step_entry> entries;
  const size_t count = Length(given, "entries", "must be a sequence of StepEntry");
  entries.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto field = [i](const char* part) { return Field("entries", i, part); };
    const nb::object of = Item(given, i);
    const size_t parts = Length(of, field(""), kWanted);
    if (parts < 3 || parts > kParts) Refuse(field(""), kWanted, of);
    // None: not stated.
    const auto part = [&](size_t at) { return at < parts ? Item(of, at) : nb::none(); };
    tributary_step_entry& entry = entries.emplace_back();
    entry.sequence = Integer<uint64_t>(part(0), field("sequence"));
    entry.first_position = Integer<int64_t>(part(1), field("first_position"));
    entry.rows = Integer<int32_t>(part(2), field("rows"));
    if (parts > 3) entry.new_tokens = Integer<int32_t>(part(3), field("new_tokens"));
    if (const nb::object to = part(4); !to.is_none()) {
      entry.has_truncate_to = 1;
      entry.truncate_to = Integer<int64_t>(to, field("truncate_to"));
    }
    if (const nb::object from = part(5); !from.is_none()) {
      entry.has_fork_from = 1;
      entry.fork_from = Integer<uint64_t>(from, field("fork_from"));
    }
    entry.fork_length = TakeLength(part(6), field("fork_length"));
  }
  return entries;
}

}  // namespace

Session::Session(tributary_client* client, const tributary_session_options& options) {
  info_.size = sizeof info_;
  Wait([&](tributary_error** error) {
    return tributary_open_session(client, &options, &session_, &info_, error);
  });
  warning_ = tributary_session_warning(session_);
}

Session::Session(tributary_client* client, const tributary_endpoint& endpoint) {
  info_.size = sizeof info_;
  Wait([&](tributary_error** error) {
    return tributary_join_session(client, &endpoint, &session_, &info_, error);
  });
  warning_ = tributary_session_warning(session_);
}

template <typename Body>
void Session::InTurn(const Body& body) {
  process_.Check("session");
  bool was_closed = false;
  Wait([&](tributary_error** error) {
    const std::lock_guard alone(turn_);
    was_closed = session_ == nullptr;
    return was_closed ? TRIBUTARY_OK : body(session_, error);
  });
  if (was_closed) Fail(TRIBUTARY_CANCELLED, "the session was closed", "");
}

std::tuple<int, int, int, int, bool, int, int> Session::Info() const {
  return {info_.memory,          info_.max_rows, info_.max_new_tokens, info_.max_steps,
          info_.return_lse != 0, info_.dtype,    info_.output_dtype};
}

std::tuple<int, int, uint64_t, nb::bytes> Session::Endpoint() const {
  return {info_.endpoint, info_.endpoints, info_.session,
          nb::bytes(info_.secret, sizeof info_.secret)};
}

std::tuple<int, int, int, int, int, int> Session::LayerShape(nb::handle layer) {
  const auto number = Integer<int32_t>(layer, "layer");
  tributary_layer_shape shape{};
  shape.size = sizeof shape;
  InTurn([&](tributary_session* session, tributary_error** error) {
    return tributary_session_layer_shape(session, number, &shape, error);
  });
  return {shape.q_heads,        shape.kv_heads,     shape.head_dim,
          shape.value_head_dim, shape.first_q_head, shape.first_kv_head};
}

uint64_t Session::Submit(int mode, nb::handle first_layer, nb::handle layers, nb::handle entries,
                         nb::handle append_only) {
  const std::vector<tributary_step_entry> stated = TakeEntries(entries);
  tributary_step step{};
  step.size = sizeof step;
  step.mode = static_cast<tributary_mode>(mode);
  step.first_layer = Integer<int32_t>(first_layer, "first_layer");
  step.layers = Integer<int32_t>(layers, "layers");
  step.entries = stated.data();
  step.entry_count = stated.size();
  step.append_only = Truth(append_only, "append_only");
  uint64_t number = 0;
  InTurn([&](tributary_session* session, tributary_error** error) {
    return tributary_session_submit(session, &step, &number, error);
  });
  return number;
}

tributary_rows Session::Rows(const char* field, nb::handle tensor, bool written) {
  tributary_rows rows{};
  if (tensor.is_none()) return rows;
  Address address;
  if (nb::isinstance<nb::tuple>(tensor)) {
    address = nb::cast<Address>(tensor);
  } else if (written) {
    address = Locate(field, Tensor<nb::ndarray<>>(tensor, field, /*may_copy=*/false));
  } else {
    address = Locate(field, Tensor<nb::ndarray<nb::ro>>(tensor, field, /*may_copy=*/false));
  }
  const auto& [data, dtype, on_gpu, shape, strides] = address;
  if (dtype != (written ? info_.output_dtype : info_.dtype))
    Refuse(field, "must have the dtype of the session");
  if (on_gpu != (info_.memory == TRIBUTARY_MEMORY_DEVICE))
    Refuse(field, on_gpu ? "is on a GPU, the session in host memory" : "must be on the GPU");
  if (std::get<2>(strides) != 1 && std::get<2>(shape) > 1)
    Refuse(Field(field, "strides"), "must be dense within a head");
  // 0 would stand for dense.
  const bool same = (std::get<0>(strides) == 0 && std::get<0>(shape) > 1) ||
                    (std::get<1>(strides) == 0 && std::get<1>(shape) > 1);
  if (same) Refuse(Field(field, "strides"), "must not be 0");
  rows.data = reinterpret_cast<const void*>(data);
  rows.rows = std::get<0>(shape);
  rows.heads = std::get<1>(shape);
  rows.dim = std::get<2>(shape);
  rows.row_stride = std::get<0>(strides);
  rows.head_stride = std::get<1>(strides);
  return rows;
}

void Session::Attend(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
                     uintptr_t stream) {
  tributary_session_layer layer{};
  layer.size = sizeof layer;
  layer.q = Rows("q", q, false);
  layer.k = Rows("k", k, false);
  layer.v = Rows("v", v, false);
  layer.output = Rows("out", out, true);
  layer.stream = reinterpret_cast<void*>(stream);
  if (nb::isinstance<nb::int_>(lse)) {  // of torch, checked by tributary.session
    layer.lse = reinterpret_cast<float*>(nb::cast<uintptr_t>(lse));
  } else if (!lse.is_none()) {
    const auto array =
        Tensor<nb::ndarray<nb::c_contig, nb::device::cpu>>(lse, "lse", /*may_copy=*/false);
    const bool fits = array.ndim() == 2 && array.shape(0) == layer.q.rows &&
                      array.shape(1) == layer.q.heads && array.dtype() == nb::dtype<float>();
    if (!fits) Refuse("lse", "must be float32 [rows, q_heads]");
    layer.lse = static_cast<float*>(array.data());
  }
  InTurn([&](tributary_session* session, tributary_error** error) {
    return tributary_session_attend(session, &layer, error);
  });
}

void Session::Append(nb::handle k, nb::handle v, nb::handle rows, uintptr_t stream) {
  tributary_session_layer layer{};
  layer.size = sizeof layer;
  layer.k = Rows("k", k, false);
  layer.v = Rows("v", v, false);
  if (layer.k.data == nullptr) layer.k.rows = Integer<int32_t>(rows, "rows");
  layer.stream = reinterpret_cast<void*>(stream);
  InTurn([&](tributary_session* session, tributary_error** error) {
    return tributary_session_append(session, &layer, error);
  });
}

void Session::Await(nb::handle step) {
  const auto number = Integer<uint64_t>(step, "step");
  InTurn([&](tributary_session* session, tributary_error** error) {
    return tributary_session_await(session, number, error);
  });
}

void Session::Status() {
  InTurn([](tributary_session* session, tributary_error** error) {
    return tributary_session_status(session, error);
  });
}

void Session::Close() {
  if (!process_.IsThis()) return;
  Wait([&](tributary_error** error) {
    const std::lock_guard alone(turn_);
    return tributary_session_close(std::exchange(session_, nullptr), error);
  });
}

void Session::Abandon() {
  if (!process_.IsThis()) return;
  Wait([&](tributary_error**) {
    const std::lock_guard alone(turn_);
    tributary_session_abandon(std::exchange(session_, nullptr));
    return TRIBUTARY_OK;
  });
}

void BindSession(nb::module_& m) {
  const auto any = nb::arg().none();  // as in client.cc
  nb::class_<Session>(m, "Session")
      .def("info", &Session::Info)
      .def("endpoint", &Session::Endpoint)
      .def("warning", &Session::Warning)
      .def("layer_shape", &Session::LayerShape, any)
      .def("submit", &Session::Submit, nb::arg(), any, any, any, any)
      .def("attend", &Session::Attend, any, any, any, any, any, nb::arg())
      .def("append", &Session::Append, any, any, any, nb::arg())
      .def("wait", &Session::Await, any)
      .def("status", &Session::Status)
      .def("close", &Session::Close)
      .def("abandon", &Session::Abandon);
}

}  // namespace tributary::python
