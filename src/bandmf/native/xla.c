/* The handler that XLA calls for one tensor (or one device's part of it): bandmf/jax/noise/native_executor.py says
   what it is given. Gradient, history and prepared sums are changed in place. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "xla.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tables.h"
#include "threads.h"

enum { STEP, REFRESHED, KEY, SCALE, TABLE_STARTS, FEEDS, WEIGHTS, DECAYS, SPAN_STARTS, GRADIENT, HISTORY, PREPARED,
       ARGUMENTS };
enum { LENGTH, TENSOR, CIPHER_ROUNDS, KIND, STEPS, LOOKAHEAD, SETTINGS };

/* Calls at work in this process: devices that run side by side share its cores. */
static atomic_int calls;

static void *fail(const struct xla_call *call, const char *message, int32_t code) {
    struct xla_error_create error = {sizeof error, NULL, message, code};
    return call->api->error_create(&error);
}

static void *answer(const struct xla_metadata_extension *extension) {
    extension->metadata->api_version.major_version = XLA_MAJOR;
    extension->metadata->api_version.minor_version = XLA_MINOR;
    extension->metadata->traits = 0;
    return NULL;
}

static int64_t size_of(const struct xla_buffer *buffer) {
    int64_t size = 1;
    for (int64_t k = 0; k < buffer->rank; k++) size *= buffer->dims[k];
    return size;
}

static int32_t dtype_of(int32_t xla) {
    switch (xla) {
    case XLA_F32: return BANDMF_FLOAT32;
    case XLA_F64: return BANDMF_FLOAT64;
    case XLA_F16: return BANDMF_FLOAT16;
    case XLA_BF16: return BANDMF_BFLOAT16;
    default: return -1;
    }
}

/* NULL where everything has the kind and the size that the handler will take for granted. */
static const char *wrong(const struct xla_call *call, struct xla_buffer **arguments, const struct xla_array *settings) {
    static const int32_t dtypes[ARGUMENTS] = {XLA_S32, XLA_S32, XLA_U32, XLA_F32, XLA_S32, XLA_F32,
                                              XLA_F32, XLA_F32, XLA_U32, 0,       XLA_F32, XLA_F32};
    if (settings->dtype != XLA_S64 || settings->size != SETTINGS) return "bandmf: settings";
    for (int k = 0; k < ARGUMENTS; k++) {
        if (arguments[k]->struct_size < sizeof(struct xla_buffer)) return "bandmf: layout of a buffer";
        if (k != GRADIENT && arguments[k]->dtype != dtypes[k]) return "bandmf: dtype of an argument";
    }
    const int64_t *set = settings->data;
    const int64_t size = size_of(arguments[GRADIENT]), slots = arguments[HISTORY]->dims[0];
    if (dtype_of(arguments[GRADIENT]->dtype) < 0) return "bandmf: dtype of the gradient";
    if (arguments[FEEDS]->rank != 2 || arguments[WEIGHTS]->rank != 2 || arguments[SPAN_STARTS]->rank != 2)
        return "bandmf: rank of a table";
    if (size_of(arguments[KEY]) != 8 || size_of(arguments[SPAN_STARTS]) / 2 * set[LENGTH] != size ||
        size_of(arguments[HISTORY]) != slots * size ||
        size_of(arguments[PREPARED]) != (set[LOOKAHEAD] > 1 ? set[LOOKAHEAD] * size : 0) || set[LOOKAHEAD] < 1 ||
        set[STEPS] < 1 || arguments[TABLE_STARTS]->dims[0] < 1 || arguments[FEEDS]->dims[1] < 1 ||
        arguments[FEEDS]->dims[0] != arguments[TABLE_STARTS]->dims[0] ||
        arguments[WEIGHTS]->dims[0] != arguments[TABLE_STARTS]->dims[0] || arguments[WEIGHTS]->dims[1] < slots ||
        (set[KIND] == BANDMF_BUFFERS && size_of(arguments[DECAYS]) != slots))
        return "bandmf: size of an argument";
    for (int k = 0; k < 3; k++) {
        const struct xla_buffer *result = call->results.values[k], *given = arguments[GRADIENT + k];
        if (result->dtype != given->dtype || size_of(result) != size_of(given)) return "bandmf: a result";
    }
    return NULL;
}

static int threads_for(int at_work) {
    const int cores = bandmf_cores();
    return cores > at_work ? (cores + at_work) / (at_work + 1) : 1;
}

static void *take(const struct xla_call *call, struct xla_buffer **given, const int64_t *set, void *memory,
                  int64_t *starts) {
    const struct bandmf_tables tables = {
        set[KIND], set[STEPS], given[HISTORY]->dims[0], set[LOOKAHEAD],
        given[TABLE_STARTS]->dims[0], given[FEEDS]->dims[1], given[WEIGHTS]->dims[1],
        given[TABLE_STARTS]->data, given[FEEDS]->data, given[WEIGHTS]->data, given[DECAYS]->data,
    };
    const int64_t size = size_of(given[GRADIENT]), spans = given[SPAN_STARTS]->dims[1], i = *(int32_t *)given[STEP]->data;
    const uint32_t *places = given[SPAN_STARTS]->data;
    for (int64_t k = 0; k < spans; k++) starts[k] = (int64_t)places[k] * BANDMF_GROUP + places[spans + k];
    struct xla_buffer **results = (struct xla_buffer **)call->results.values;
    for (int k = 0; k < 3; k++) /* the same memory, unless XLA chose otherwise */
        if (results[k]->data != given[GRADIENT + k]->data) {
            const size_t bytes = k == 0 ? (size_t)size * (given[GRADIENT]->dtype == XLA_F64   ? 8
                                                          : given[GRADIENT]->dtype == XLA_F32 ? 4
                                                                                              : 2)
                                        : (size_t)size_of(results[k]) * 4;
            memcpy(results[k]->data, given[GRADIENT + k]->data, bytes);
        }
    struct bandmf_pass pass = {NULL, results[1]->data, results[2]->data, 0, 0, size, size, size};
    struct bandmf_step step = {.cipher_rounds = (int32_t)set[CIPHER_ROUNDS], .scale = *(float *)given[SCALE]->data,
                               .history_stride = size, .prepared_stride = size};
    const struct bandmf_slice slice = {results[0]->data, results[1]->data, results[2]->data, starts, spans,
                                       set[LENGTH], (uint32_t)set[TENSOR], dtype_of(given[GRADIENT]->dtype)};
    memcpy(step.key, given[KEY]->data, sizeof step.key);
    const int threads = threads_for(atomic_fetch_add(&calls, 1));
    int code = 0;
    if (bandmf_pass_of(&tables, i, *(int32_t *)given[REFRESHED]->data, memory, &pass)) code = bandmf_noise_pass(&pass, threads, 0);
    bandmf_step_of(&tables, i, memory, &step);
    if (!code) code = bandmf_noise_step(&step, &slice, 1, threads, 0);
    atomic_fetch_sub(&calls, 1);
    return code ? fail(call, "bandmf: the step failed", XLA_RESOURCE_EXHAUSTED) : NULL;
}

BANDMF_API void *bandmf_xla_step(struct xla_call *call) {
    if (call->extension_start && call->extension_start->type == XLA_METADATA)
        return answer((struct xla_metadata_extension *)call->extension_start);
    if (call->stage != XLA_EXECUTE) return NULL;
    if (call->struct_size < sizeof *call || call->arguments.size != ARGUMENTS || call->results.size != 3 ||
        call->attributes.size != 1 || call->attributes.types[0] != XLA_ARRAY)
        return fail(call, "bandmf: layout of the call", XLA_INVALID_ARGUMENT);
    struct xla_buffer **given = (struct xla_buffer **)call->arguments.values;
    const struct xla_array *settings = call->attributes.values[0];
    const char *message = wrong(call, given, settings);
    if (message) return fail(call, message, XLA_INVALID_ARGUMENT);
    const struct bandmf_tables sizes = {.slots = given[HISTORY]->dims[0], .feed_count = given[FEEDS]->dims[1],
                                        .lookahead = ((const int64_t *)settings->data)[LOOKAHEAD]};
    const size_t one = bandmf_step_memory(&sizes), other = bandmf_pass_memory(&sizes);
    void *memory = malloc(one > other ? one : other);
    int64_t *starts = malloc(sizeof(int64_t) * (size_t)(given[SPAN_STARTS]->dims[1] + 1));
    void *error = memory && starts ? take(call, given, settings->data, memory, starts)
                                   : fail(call, "bandmf: out of memory", XLA_RESOURCE_EXHAUSTED);
    free(memory);
    free(starts);
    return error;
}
