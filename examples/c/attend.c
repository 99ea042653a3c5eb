/* A host in C: `attend TARGET` puts four tokens into a sequence and computes their attention, then
 * asks for a position beyond the end to show what an error tells. Build it with `cc attend.c
 * $(pkg-config --cflags --libs tributary)`. */
#include <stdio.h>
#include <tributary.h>

enum { kTokens = 4, kHeads = 2, kHeadDim = 64 };

/* Says what is wrong and frees the error. */
static int failed(const char* what, tributary_error* error) {
  fprintf(stderr, "%s: %s: %s\n", what, tributary_code_name(tributary_error_code(error)),
          tributary_error_message(error));
  tributary_error_free(error);
  return 1;
}

static int run(tributary_client* client) {
  tributary_error* error = NULL;
  const tributary_cache_spec spec = {.size = sizeof spec,
                                     .layers = 1,
                                     .q_heads = kHeads,
                                     .kv_heads = kHeads,
                                     .head_dim = kHeadDim,
                                     .kv_dtype = TRIBUTARY_BF16,
                                     .capacity_tokens = 1024};
  tributary_cache_info cache = {.size = sizeof cache};
  if (tributary_create_cache(client, "example", &spec, &cache, &error))
    return failed("create cache", error);
  printf("a cache of %lld tokens over %d workers\n", (long long)cache.capacity_tokens, cache.ranks);

  tributary_entry entry = {.first_position = 0, .rows = kTokens, .new_tokens = kTokens};
  if (tributary_open_sequence(client, "example", &entry.sequence, &error))
    return failed("open sequence", error);

  /* Equal keys: every row's output is the mean of the values that it sees, 0 .. row. */
  static float q[kTokens][kHeads][kHeadDim], k[kTokens][kHeads][kHeadDim],
      v[kTokens][kHeads][kHeadDim];
  static float output[kTokens][kHeads][kHeadDim];
  for (int token = 0; token < kTokens; ++token) {
    for (int head = 0; head < kHeads; ++head) {
      for (int i = 0; i < kHeadDim; ++i) v[token][head][i] = (float)token;
    }
  }
  const tributary_call call = {.size = sizeof call,
                               .cache = "example",
                               .entries = &entry,
                               .entry_count = 1,
                               .dtype = TRIBUTARY_F32,
                               .q_heads = kHeads,
                               .kv_heads = kHeads,
                               .head_dim = kHeadDim,
                               .q = q,
                               .k = k,
                               .v = v,
                               .output = output};
  if (tributary_attend(client, &call, &error)) return failed("attend", error);
  for (int token = 0; token < kTokens; ++token)
    printf("row %d: %.3f\n", token, output[token][0][0]);

  entry.first_position = 100;
  if (tributary_attend(client, &call, &error) != TRIBUTARY_OUT_OF_RANGE) return 1;
  printf("refused: %s, %lld tokens are held\n", tributary_error_field(error),
         (long long)tributary_error_length(error));
  tributary_error_free(error);
  error = NULL;
  if (tributary_close_sequence(client, "example", entry.sequence, &error))
    return failed("close sequence", error);
  if (tributary_delete_cache(client, "example", &error)) return failed("delete cache", error);
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: attend unix:/path | host:port\n");
    return 2;
  }
  const tributary_options options = {
      .size = sizeof options, .target = argv[1], .timeout_ms = 10000};
  tributary_client* client = NULL;
  tributary_error* error = NULL;
  if (tributary_connect(&options, &client, &error)) return failed("connect", error);
  const int result = run(client);
  tributary_close(client);
  return result;
}
