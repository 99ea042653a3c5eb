// A service within this process, where the library has one.
#include <nanobind/stl/string.h>

#include "core.h"
#ifdef TRIBUTARY_HAS_EMBEDDED
#include <tributary_embedded.h>
#endif

namespace tributary::python {

#ifdef TRIBUTARY_HAS_EMBEDDED
namespace {

class EmbeddedService {
 public:
  EmbeddedService(nb::handle device, nb::handle workers) {
    CheckNotForked();
    tributary_service_options options{};
    options.size = sizeof options;
    options.device = Text(device, "device");
    options.workers = Integer<int32_t>(workers, "workers");
    Wait([&](tributary_error** error) { return tributary_serve(&options, &service_, error); });
  }
  ~EmbeddedService() { Stop(0); }
  EmbeddedService(const EmbeddedService&) = delete;
  EmbeddedService& operator=(const EmbeddedService&) = delete;

  std::string Target() const { return tributary_service_target(service_); }

  // Once. In a child of fork() the parent's service is left alone.
  void Stop(double drain) {
    if (!process_.IsThis()) return;
    tributary_service* service = std::exchange(service_, nullptr);
    nb::gil_scoped_release others_run;
    tributary_service_stop(service, static_cast<int64_t>(drain * 1000));
  }

 private:
  Process process_;
  tributary_service* service_ = nullptr;
};

}  // namespace
#endif

void BindService(nb::module_& m) {
#ifdef TRIBUTARY_HAS_EMBEDDED
  m.attr("has_embedded_service") = true;
  nb::class_<EmbeddedService>(m, "EmbeddedService")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg().none(), nb::arg().none())
      .def("target", &EmbeddedService::Target)
      .def("stop", &EmbeddedService::Stop);
#else
  m.attr("has_embedded_service") = false;
#endif
}

}  // namespace tributary::python
