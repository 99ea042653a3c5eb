// A model host outside of the tree: one cache, one sequence, one token, and a refusal. `outside
// TARGET` ends with 0 when the service answered as it should.
#include <cmath>
#include <cstdio>
#include <vector>

#include "service/client/client.h"

namespace client = tributary::client;
namespace v1 = tributary::v1;

namespace {

int Fail(const char* what, const absl::Status& status) {
  std::fprintf(stderr, "%s: %s\n", what, status.ToString().c_str());
  return 1;
}

int Run(const char* target) {
  auto connected = client::Client::Connect({.target = target});
  if (!connected.ok()) return Fail("Connect", connected.status());
  client::Client& service = **connected;

  v1::CacheSpec spec;
  spec.set_layers(1);
  spec.set_q_heads(1);
  spec.set_kv_heads(1);
  spec.set_head_dim(64);
  spec.set_kv_dtype(v1::DTYPE_BF16);
  spec.set_capacity_tokens(256);
  if (auto s = service.CreateCache("outside", spec); !s.ok())
    return Fail("CreateCache", s.status());
  const auto sequence = service.OpenSequence("outside");
  if (!sequence.ok()) return Fail("OpenSequence", sequence.status());

  const std::vector<float> ones(64, 1.0f);
  std::vector<float> output(64);
  client::AttendCall call{.cache_id = "outside",
                          .entries = {{*sequence, 0, 1, 1}},
                          .q = ones.data(),
                          .k = ones.data(),
                          .v = ones.data(),
                          .q_heads = 1,
                          .kv_heads = 1,
                          .head_dim = 64,
                          .output = output.data()};
  if (auto s = service.Attend(call); !s.ok()) return Fail("Attend", s);
  // A row that sees one key gets that key's value.
  if (std::abs(output[0] - 1.0f) > 1e-2f) return Fail("output", absl::InternalError("is not 1"));

  call.entries[0].first_position = 7;
  const absl::Status beyond = service.Attend(call);
  if (!absl::IsOutOfRange(beyond) || client::LengthOf(beyond) != 1) return Fail("beyond", beyond);
  if (client::FieldOf(beyond) != "entries[0].first_position") return Fail("field", beyond);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return argc == 2 ? Run(argv[1]) : 2; }
