// What the parts of the extension module share. Nothing is decided here: shapes are checked,
// pointers handed on, failures raised. The GIL is released while a call waits.
#pragma once

#include <nanobind/nanobind.h>
#include <tributary.h>

#include <cstdint>
#include <exception>
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

// A client, closed with its last owner. Let go with the GIL, which is released meanwhile.
using Handle = std::shared_ptr<tributary_client>;
Handle Own(tributary_client* client);

void BindClient(nb::module_& m);
void BindService(nb::module_& m);
void BindSession(nb::module_& m);

}  // namespace tributary::python
