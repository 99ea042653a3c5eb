// The C interface as Python objects.
#include "core.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>

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

std::string Field::Text() const {
  std::string text = name_;
  if (index_ >= 0) text += "[" + std::to_string(index_) + "]";
  return *part_ == '\0' ? text : text + "." + part_;
}

void Refuse(const Field& field, const std::string& what) {
  const std::string name = field.Text();
  Fail(TRIBUTARY_INVALID_ARGUMENT, name + ": " + what, name);
}

void Refuse(const Field& field, const std::string& what, nb::handle given) {
  constexpr size_t kMost = 100;  // of a text that may be an array's
  std::string text = nb::repr(given).c_str();
  if (text.size() > kMost) text = "of " + std::string(nb::repr(given.type()).c_str());
  Refuse(field, what + ", is " + text);
}

void Process::Check(const char* what) const {
  if (IsThis()) return;
  Fail(TRIBUTARY_FAILED_PRECONDITION,
       std::string("the ") + what + " was made in another process: a child of fork() cannot use it",
       "");
}

void CheckNotForked() {
  static const Process first;
  if (first.IsThis()) return;
  Fail(TRIBUTARY_FAILED_PRECONDITION,
       "the process that this one was forked from had clients or services: make the first of them "
       "after the fork, or start processes by spawn",
       "");
}

bool Truth(nb::handle given, const Field& field) {
  const int truth = PyObject_IsTrue(given.ptr());
  if (truth >= 0) return truth > 0;
  PyErr_Clear();  // of an array of many, say
  Refuse(field, "must be True or False", given);
}

float Real(nb::handle given, const Field& field) {
  double value = 0;
  if (!nb::try_cast(given, value)) Refuse(field, "must be a number", given);
  const auto single = static_cast<float>(value);
  const bool holds =
      (single != 0 || value == 0) && (std::isfinite(single) || !std::isfinite(value));
  if (!holds) Refuse(field, "must be a number that float32 holds", given);
  return single;
}

int64_t Milliseconds(nb::handle seconds, const Field& field) {
  double value = 0;
  if (nb::try_cast(seconds, value) && value > 0 && value <= 1e6) {
    return static_cast<int64_t>(std::ceil(value * 1000));
  }
  Refuse(field, "must be seconds, more than 0 and at most 1000000", seconds);
}

int64_t TakeLength(nb::handle given, const Field& field) {
  if (given.is_none()) return -1;
  const auto length = Integer<int64_t>(given, field);
  if (length < 0) Refuse(field, "must be >= 0", given);
  return length;
}

const char* Text(nb::handle given, const Field& field) {
  if (!nb::isinstance<nb::str>(given)) Refuse(field, "must be a text", given);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(given.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    Refuse(field, "must be a text that UTF-8 has", given);
  }
  if (std::strlen(text) != static_cast<size_t>(size)) Refuse(field, "must not have NUL", given);
  return text;
}

nb::object Item(nb::handle given, size_t index) {
  PyObject* item = PySequence_GetItem(given.ptr(), static_cast<Py_ssize_t>(index));
  if (item == nullptr) throw nb::python_error();
  return nb::steal(item);
}

size_t Length(nb::handle given, const Field& field, const char* wanted) {
  const bool is_text = nb::isinstance<nb::str>(given) || nb::isinstance<nb::bytes>(given);
  const Py_ssize_t size =
      is_text || PySequence_Check(given.ptr()) == 0 ? -1 : PySequence_Size(given.ptr());
  if (size >= 0) return static_cast<size_t>(size);
  PyErr_Clear();
  Refuse(field, wanted, given);
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
  Refuse(field, "must be float32, float16 or bfloat16");
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
  m.def(
      "milliseconds",
      [](nanobind::handle seconds, const char* field) {
        return tributary::python::Milliseconds(seconds, field);
      },
      nanobind::arg().none(), nanobind::arg());
  tributary::python::BindClient(m);
  tributary::python::BindService(m);
  tributary::python::BindSession(m);
}
