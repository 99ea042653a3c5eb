// What the parts of the extension module share. Nothing is decided here: shapes are checked,
// pointers handed on, failures raised. The GIL is released while a call waits.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <tributary.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tributary::python {

namespace nb = nanobind;

// A failure on its way to Python, where tributary.errors makes the exception of its code.
struct Failure : std::exception {
  int code = 0;
  std::string message, field;
  int64_t retry_delay_ms = -1, length = -1;
  // What a sequence has lost of a layer; empty ranges: nothing that is known.
  uint64_t lost_sequence = 0;
  int32_t lost_layer = 0;
  std::vector<std::pair<int64_t, int64_t>> missing;
};

// What the C interface said of a failure; `error` may be null.
Failure FailureOf(tributary_code code, const tributary_error* error);

[[noreturn]] void Fail(int code, std::string message, std::string field);

// Which argument is meant, or which part of one: "layer", "entries[2].rows". It becomes a text only
// for an error. The names are literals.
class Field {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): most are just a name
  Field(const char* name) : name_(name) {}
  Field(const char* whole, const char* part) : name_(whole), part_(part) {}
  // A part of an element of a list; "": the element itself.
  Field(const char* list, size_t index, const char* part)
      : name_(list), index_(static_cast<int64_t>(index)), part_(part) {}
  std::string Text() const;

 private:
  const char* name_;
  int64_t index_ = -1;  // -1: no list
  const char* part_ = "";
};

// An argument is not what it must be: INVALID_ARGUMENT of this field.
[[noreturn]] void Refuse(const Field& field, const std::string& what);
// The same, with what was given at the end.
[[noreturn]] void Refuse(const Field& field, const std::string& what, nb::handle given);

// The process that something was made in. A child of fork() has a copy of its memory and none of
// its threads: what is done to the copy there would wait for them for ever, or end what is the
// parent's.
class Process {
 public:
  bool IsThis() const { return id_ == getpid(); }
  // FAILED_PRECONDITION in any other; `what`: "client".
  void Check(const char* what) const;

 private:
  pid_t id_ = getpid();
};

// Called before anything that has threads is made. FAILED_PRECONDITION in a child of a process that
// has made such things: gRPC's threads are missing there.
void CheckNotForked();

// A whole number that T holds.
template <typename T>
T Integer(nb::handle given, const Field& field) {
  T value{};
  if (nb::try_cast(given, value)) return value;
  const auto text = [](T limit) { return std::to_string(limit); };
  Refuse(field,
         "must be a whole number from " + text(std::numeric_limits<T>::min()) + " to " +
             text(std::numeric_limits<T>::max()),
         given);
}

bool Truth(nb::handle given, const Field& field);

// A number as float32. One that is not 0 must not become it: 0 often stands for what is not stated.
float Real(nb::handle given, const Field& field);

// Seconds as milliseconds, rounded up: more than 0, and so few that 32 bits hold the milliseconds.
int64_t Milliseconds(nb::handle seconds, const Field& field);

// A length that may be None, for which the C interface has -1.
int64_t TakeLength(nb::handle given, const Field& field);

// A text without NUL, where C would take its end to be. It lives as long as `given`.
const char* Text(nb::handle given, const Field& field);

// One of a sequence's items; `given` has so many.
nb::object Item(nb::handle given, size_t index);
// How many items a sequence has; not of a text, nor of what is no sequence.
size_t Length(nb::handle given, const Field& field, const char* wanted);

// A tensor in place or, where `may_copy`, as a copy of the kind that Array stands for.
template <typename Array>
Array Tensor(nb::handle given, const char* field, bool may_copy) {
  Array array;
  if (nb::try_cast(given, array, may_copy)) return array;
  const nb::object why =
      nb::module_::import_("tributary._tensors").attr("why_not")(given, may_copy);
  Refuse(field, nb::cast<std::string>(why));
}

// The exception of tributary.errors for a failure. With the GIL.
nb::object ExceptionOf(const Failure& failure);

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
  Failure failure = FailureOf(code, error);
  tributary_error_free(error);
  throw failure;
}

// The dtype of a DLPack tensor; `field` is the tensor's name. uint16 is taken for bfloat16's bits,
// for numpy has no bfloat16.
tributary_dtype DTypeOf(const nb::dlpack::dtype& dtype, const char* field);

// A client, closed with its last owner. Let go with the GIL, which is released meanwhile. In
// another process than the one that made it, it is left as it is.
using Handle = std::shared_ptr<tributary_client>;
Handle Own(tributary_client* client);

void BindClient(nb::module_& m);
void BindService(nb::module_& m);
void BindSession(nb::module_& m);

}  // namespace tributary::python
