/* A host in C with a service of its own, whose socket's path is the argument. Ends with 0 when
 * everything holds; says what does not. */
#include <stdio.h>
#include <string.h>
#include <tributary_embedded.h>

enum { kHeads = 2, kDim = 64 };

static int failures = 0;
static void Check(int holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "embedded.c:%d: does not hold: %s\n", line, what);
  ++failures;
}
#define CHECK(condition) Check((condition), #condition, __LINE__)

static void Refusals(const char* socket) {
  tributary_service* none = NULL;
  tributary_error* error = NULL;
  tributary_service_options options = {.size = sizeof options, .socket = socket, .device = "tpu"};
  CHECK(tributary_serve(&options, &none, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "device") == 0);
  tributary_error_free(error);
  options.device = NULL;
  options.workers = -1;
  CHECK(tributary_serve(&options, &none, &error) == TRIBUTARY_INVALID_ARGUMENT);
  CHECK(strcmp(tributary_error_field(error), "workers") == 0);
  tributary_error_free(error);
  CHECK(none == NULL);
  tributary_service_stop(NULL, 0);
}

static void Calls(const char* target) {
  const tributary_options options = {.size = sizeof options, .target = target, .timeout_ms = 10000};
  tributary_client* client = NULL;
  CHECK(tributary_connect(&options, &client, NULL) == TRIBUTARY_OK);
  const tributary_cache_spec spec = {.size = sizeof spec,
                                     .layers = 1,
                                     .q_heads = kHeads,
                                     .kv_heads = kHeads,
                                     .head_dim = kDim,
                                     .kv_dtype = TRIBUTARY_BF16,
                                     .capacity_tokens = 64};
  tributary_cache_info info = {.size = sizeof info};
  CHECK(tributary_create_cache(client, "c", &spec, &info, NULL) == TRIBUTARY_OK);
  CHECK(info.ranks == 2);
  static float ones[kHeads][kDim];
  static float output[kHeads][kDim];
  for (int i = 0; i < kHeads * kDim; ++i) ones[0][i] = 1;
  tributary_entry entry = {.rows = 1, .new_tokens = 1};
  CHECK(tributary_open_sequence(client, "c", &entry.sequence, NULL) == TRIBUTARY_OK);
  const tributary_call call = {.size = sizeof call,
                               .cache = "c",
                               .entries = &entry,
                               .entry_count = 1,
                               .dtype = TRIBUTARY_F32,
                               .q = ones,
                               .k = ones,
                               .v = ones,
                               .q_heads = kHeads,
                               .kv_heads = kHeads,
                               .head_dim = kDim,
                               .output = output};
  CHECK(tributary_attend(client, &call, NULL) == TRIBUTARY_OK);
  CHECK(output[1][kDim - 1] == 1);
  tributary_close(client);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  Refusals(argv[1]);
  char target[200];
  snprintf(target, sizeof target, "unix:%s", argv[1]);
  for (int round = 0; round < 3; ++round) { /* one may follow another, at the same place */
    const tributary_service_options options = {
        .size = sizeof options, .socket = round < 2 ? argv[1] : NULL, .workers = 2, .threads = 2};
    tributary_service* service = NULL;
    tributary_error* error = NULL;
    if (tributary_serve(&options, &service, &error) != TRIBUTARY_OK) {
      fprintf(stderr, "%s\n", tributary_error_message(error));
      return 1;
    }
    CHECK((strcmp(tributary_service_target(service), target) == 0) == (round < 2));
    Calls(tributary_service_target(service));
    tributary_service_stop(service, 1000);
  }
  return failures > 0;
}
