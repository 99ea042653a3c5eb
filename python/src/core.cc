// The C interface as Python objects.
#include "core.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

namespace tributary::python {

Failure FailureOf(tributary_code code, const tributary_error* error) {
  Failure failure;
  failure.code = code;
  if (error == nullptr) return failure;
  failure.message = tributary_error_message(error);
  failure.field = tributary_error_field(error);
  failure.retry_delay_ms = tributary_error_retry_delay_ms(error);
  failure.length = tributary_error_length(error);
  const tributary_range* ranges = nullptr;
  const int32_t count =
      tributary_error_missing(error, &failure.lost_sequence, &failure.lost_layer, &ranges);
  for (int32_t i = 0; i < count; ++i) failure.missing.emplace_back(ranges[i].begin, ranges[i].end);
  return failure;
}

void Fail(int code, std::string message, std::string field) {
  Failure failure;
  failure.code = code;
  failure.message = std::move(message);
  failure.field = std::move(field);
  throw failure;
}

nb::object ExceptionOf(const Failure& failure) {
  return nb::module_::import_("tributary.errors")
      .attr("of_code")(failure.code, failure.message, failure.field, failure.retry_delay_ms,
                       failure.length, failure.lost_sequence, failure.lost_layer, failure.missing);
}

tributary_dtype DTypeOf(const nb::dlpack::dtype& dtype, const char* field) {
  if (dtype == nb::dtype<float>()) return TRIBUTARY_F32;
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.bits == 16 && dtype.lanes == 1) {
    if (code == nb::dlpack::dtype_code::Float) return TRIBUTARY_F16;
    if (code == nb::dlpack::dtype_code::Bfloat || code == nb::dlpack::dtype_code::UInt)
      return TRIBUTARY_BF16;
  }
  Fail(TRIBUTARY_INVALID_ARGUMENT, std::string(field) + ": must be float32, float16 or bfloat16",
       field);
}

namespace {

void Raise(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Failure& failure) {
    const nb::object error = ExceptionOf(failure);
    PyErr_SetObject(error.type().ptr(), error.ptr());
  }
}

}  // namespace
}  // namespace tributary::python

NB_MODULE(_core, m) {
  // A client in a module's global outlives the module, which is no leak that its owner could mend.
  nanobind::set_leak_warnings(false);
  nanobind::register_exception_translator(tributary::python::Raise);
  m.def("version", &tributary_version);
  tributary::python::BindClient(m);
  tributary::python::BindService(m);
  tributary::python::BindSession(m);
}
