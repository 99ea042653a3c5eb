/* The C interface of Tributary's client: caches, sequences and attention (libtributary.so.1).
 *
 * Every function that can fail returns a tributary_code, TRIBUTARY_OK for done. Its last argument,
 * which may be NULL, receives what else is known of a failure; the caller frees it
 * (tributary_error_free). After success it is not touched. No exception leaves the library.
 *
 * A client may be used from many threads at once. Every call ends by the client's timeout, repeats
 * included. Calls name positions, so one whose outcome is unknown (DEADLINE_EXCEEDED, UNAVAILABLE)
 * is settled by repeating it as it was.
 *
 * Structures begin with their own size: set it to sizeof, everything else that is not needed to 0.
 * A library that is newer than its caller takes what the caller does not know as 0.
 */
#ifndef TRIBUTARY_H
#define TRIBUTARY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The codes of gRPC. docs/api.md says which situation has which, and what a host does. */
typedef enum tributary_code {
  TRIBUTARY_OK = 0,
  TRIBUTARY_CANCELLED = 1,
  TRIBUTARY_UNKNOWN = 2,
  TRIBUTARY_INVALID_ARGUMENT = 3,
  TRIBUTARY_DEADLINE_EXCEEDED = 4,
  TRIBUTARY_NOT_FOUND = 5,
  TRIBUTARY_ALREADY_EXISTS = 6,
  TRIBUTARY_PERMISSION_DENIED = 7,
  TRIBUTARY_RESOURCE_EXHAUSTED = 8,
  TRIBUTARY_FAILED_PRECONDITION = 9,
  TRIBUTARY_ABORTED = 10,
  TRIBUTARY_OUT_OF_RANGE = 11,
  TRIBUTARY_UNIMPLEMENTED = 12,
  TRIBUTARY_INTERNAL = 13,
  TRIBUTARY_UNAVAILABLE = 14,
  TRIBUTARY_DATA_LOSS = 15,
  TRIBUTARY_UNAUTHENTICATED = 16
} tributary_code;

/* The name of a code, "OUT_OF_RANGE"; "UNKNOWN" of what is none. Never freed. */
const char* tributary_code_name(int code);
/* The library's version, "0.1.0". Never freed. */
const char* tributary_version(void);

/* What is known of a failure. Strings live as long as the error. */
typedef struct tributary_error tributary_error;
tributary_code tributary_error_code(const tributary_error* error);
const char* tributary_error_message(const tributary_error* error);
/* The field of the call that was refused, "entries[2].first_position"; "" when none is named. */
const char* tributary_error_field(const tributary_error* error);
/* Milliseconds after which the service asks for a repetition; -1 when it does not. */
int64_t tributary_error_retry_delay_ms(const tributary_error* error);
/* Tokens held, of a position beyond them; -1 when the error does not say. */
int64_t tributary_error_length(const tributary_error* error);
/* NULL is allowed. */
void tributary_error_free(tributary_error* error);

/* A connection to a service, with one stream for attention. */
typedef struct tributary_client tributary_client;

typedef struct tributary_options {
  size_t size;
  const char* target;           /* "host:port" or "unix:/path" */
  int64_t timeout_ms;           /* of every call, repeats included; 0: 30000 */
  uint64_t shared_memory_bytes; /* > 0: tensors travel in shared memory (same machine, same user) */
  int32_t max_attempts;         /* 0: as many as the timeout allows; 1: one */
  uint64_t max_message_bytes;   /* 0: 64 MiB; not more than the service's limit */
  /* Paths of PEM files and of a token's file; NULL or "": not used. */
  const char* tls_certificate;
  const char* tls_key;
  const char* tls_authorities;
  const char* token_file;
} tributary_options;

/* UNAVAILABLE when nobody answers within the timeout. */
tributary_code tributary_connect(const tributary_options* options, tributary_client** client,
                                 tributary_error** error);
/* Calls of tributary_attend_async that are in flight end with CANCELLED. Not from within a
 * callback, and not while another thread is in a call. NULL is allowed. */
void tributary_close(tributary_client* client);

typedef enum tributary_dtype {
  TRIBUTARY_F32 = 1,
  TRIBUTARY_BF16 = 2,
  TRIBUTARY_F16 = 3,
  TRIBUTARY_FP8_E4M3 = 4,
  TRIBUTARY_FP8_E5M2 = 5
} tributary_dtype;

/* What may differ from layer to layer. 0 and NULL stand for the cache's value or for none. */
typedef struct tributary_layer {
  size_t size;
  int32_t has_window_left; /* 1: a row at p sees keys from p - window_left on */
  int64_t window_left;
  const float* sinks; /* [q_heads] logits, natural log; NULL: none */
  int32_t sink_count;
  int32_t has_soft_cap; /* 1: soft_cap replaces the cache's; 0.0 means none */
  float soft_cap;
  float sm_scale;
  tributary_dtype kv_dtype;
  int32_t q_heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_head_dim;
  const float* k_scale; /* of FP8: real = stored * scale; 1 or kv_heads values; NULL: 1.0 */
  int32_t k_scale_count;
  const float* v_scale;
  int32_t v_scale_count;
} tributary_layer;

/* The attention geometry of one model. proto/tributary/v1/types.proto states the limits. */
typedef struct tributary_cache_spec {
  size_t size;
  int32_t layers;
  int32_t q_heads; /* a multiple of kv_heads, at most 16 times as many */
  int32_t kv_heads;
  int32_t head_dim;                   /* of queries and keys: 64, 80, 96, 128, 192 or 256 */
  int32_t value_head_dim;             /* 0: head_dim */
  int32_t page_size;                  /* local slots; 0: 16 */
  tributary_dtype kv_dtype;           /* 0: FP8_E4M3 */
  float sm_scale;                     /* 0: 1 / sqrt(head_dim) */
  float soft_cap;                     /* 0: none */
  int64_t capacity_tokens;            /* over all sequences */
  int64_t window_capacity_tokens;     /* > 0: layers with a window have pages of their own, for this
                                         many tokens */
  int64_t rollback_tokens;            /* 0: 1024 */
  const tributary_layer* layer_specs; /* layer_count of them; NULL: all layers are alike */
  int32_t layer_count;                /* 1 (for every layer) or `layers` */
} tributary_cache_spec;

typedef struct tributary_cache_info {
  size_t size;
  int32_t ranks; /* workers that the cache is spread over */
  int32_t page_size;
  int64_t capacity_tokens; /* rounded up to whole pages */
} tributary_cache_info;

/* Creates a cache; the same spec again is OK. `id`: 1 to 128 of A-Z a-z 0-9 . _ - ; `info` may be
 * NULL. */
tributary_code tributary_create_cache(tributary_client* client, const char* id,
                                      const tributary_cache_spec* spec, tributary_cache_info* info,
                                      tributary_error** error);
tributary_code tributary_delete_cache(tributary_client* client, const char* id,
                                      tributary_error** error);

/* Opens an empty sequence and tells its id. */
tributary_code tributary_open_sequence(tributary_client* client, const char* cache,
                                       uint64_t* sequence, tributary_error** error);
/* Opens a sequence that said DATA_LOSS again, empty. */
tributary_code tributary_reopen_sequence(tributary_client* client, const char* cache,
                                         uint64_t sequence, tributary_error** error);
/* A sequence that begins with the first `length` tokens of another; length < 0: with all of them.
 */
tributary_code tributary_fork_sequence(tributary_client* client, const char* cache, uint64_t parent,
                                       int64_t length, uint64_t* sequence, tributary_error** error);
/* Rolls back to at most `length` tokens. `held`, which may be NULL: tokens that are left. */
tributary_code tributary_truncate_sequence(tributary_client* client, const char* cache,
                                           uint64_t sequence, int64_t length, int64_t* held,
                                           tributary_error** error);
tributary_code tributary_close_sequence(tributary_client* client, const char* cache,
                                        uint64_t sequence, tributary_error** error);

typedef enum tributary_mode { TRIBUTARY_CAUSAL = 1, TRIBUTARY_DFLASH = 2 } tributary_mode;

typedef struct tributary_entry {
  uint64_t sequence;
  int64_t first_position; /* of the first row and of the first new token */
  int32_t rows;           /* query rows; of an append: tokens */
  int32_t new_tokens;     /* 0 or rows; not looked at by an append */
} tributary_entry;

/* One call of one layer. Dense row-major host memory of the caller, borrowed until the call is
 * done. */
typedef struct tributary_call {
  size_t size;
  const char* cache;
  int32_t layer;
  tributary_mode mode; /* 0: CAUSAL */
  const tributary_entry* entries;
  size_t entry_count;
  tributary_dtype dtype; /* of q, k, v and output: F32, BF16 or F16 */
  int32_t q_heads;       /* of an append: 0 */
  int32_t kv_heads;
  int32_t head_dim;       /* of q and k */
  int32_t value_head_dim; /* of v and output; 0: head_dim */
  const void* q;          /* [rows, q_heads, head_dim] */
  const void* k;          /* [new tokens, kv_heads, head_dim] */
  const void* v;          /* [new tokens, kv_heads, value_head_dim] */
  void* output;           /* [rows, q_heads, value_head_dim] */
  float* lse; /* [rows, q_heads], natural log, -inf where a row sees no key; NULL: not wanted */
} tributary_call;

/* Writes K/V and computes nothing. */
tributary_code tributary_append(tributary_client* client, const tributary_call* call,
                                tributary_error** error);
/* Appends the new tokens' K/V, and computes attention of the rows. */
tributary_code tributary_attend(tributary_client* client, const tributary_call* call,
                                tributary_error** error);

/* Runs once, on a thread of the client. `error` is NULL for OK and is gone when the callback
 * returns. */
typedef void (*tributary_done)(void* context, tributary_code code, const tributary_error* error);
/* The same without waiting. Calls of one sequence take effect in the order in which they are made.
 * What the call's fields point to other than tensors may be let go of when this returns. A call
 * that cannot be begun is told to `done` too. */
void tributary_attend_async(tributary_client* client, const tributary_call* call,
                            tributary_done done, void* context);

#ifdef __cplusplus
}
#endif

#endif /* TRIBUTARY_H */
