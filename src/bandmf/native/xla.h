/* The part of XLA's foreign function interface (typed FFI, version 0.3) that a handler for the CPU needs: layouts of
   what XLA passes, as facts, so that no header of jaxlib is needed to build. tests/test_native_xla.py compares them
   with jaxlib's own header; XLA itself refuses a handler whose version it does not support. */

#ifndef BANDMF_XLA_H
#define BANDMF_XLA_H

#include <stddef.h>
#include <stdint.h>

enum { XLA_MAJOR = 0, XLA_MINOR = 3 };
enum { XLA_METADATA = 1 };   /* kind of extension */
enum { XLA_EXECUTE = 3 };    /* stage */
enum { XLA_ARRAY = 1 };      /* kind of attribute */
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8 };
enum { XLA_S32 = 4, XLA_S64 = 5, XLA_U32 = 8, XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16 };

struct xla_extension {
    size_t struct_size;
    int32_t type;
    struct xla_extension *next;
};

struct xla_version {
    size_t struct_size;
    struct xla_extension *extension_start;
    int32_t major_version, minor_version;
};

struct xla_metadata {
    size_t struct_size;
    struct xla_version api_version;
    uint32_t traits;
};

struct xla_metadata_extension {
    struct xla_extension extension_base;
    struct xla_metadata *metadata;
};

struct xla_error_create {
    size_t struct_size;
    struct xla_extension *extension_start;
    const char *message;
    int32_t errc;
};

struct xla_api {
    size_t struct_size;
    struct xla_extension *extension_start;
    struct xla_version api_version;
    const void *internal_api;
    void *(*error_create)(struct xla_error_create *);
};

struct xla_buffer {
    size_t struct_size;
    struct xla_extension *extension_start;
    int32_t dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
};

struct xla_values { /* arguments, and results */
    size_t struct_size;
    struct xla_extension *extension_start;
    int64_t size;
    int32_t *types;
    void **values;
};

struct xla_attributes {
    size_t struct_size;
    struct xla_extension *extension_start;
    int64_t size;
    int32_t *types;
    void **names;
    void **values;
};

struct xla_array {
    int32_t dtype;
    size_t size;
    void *data;
};

struct xla_call {
    size_t struct_size;
    struct xla_extension *extension_start;
    const struct xla_api *api;
    void *context;
    int32_t stage;
    struct xla_values arguments, results;
    struct xla_attributes attributes;
};

#endif
