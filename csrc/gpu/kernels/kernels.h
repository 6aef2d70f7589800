/* The interface of the library of CUDA kernels, in plain C. The GPU leg opens the library by dlopen and calls it
 * through these types, so that the two may be built by different compilers. Each call launches work on `stream` (a
 * cudaStream_t) and returns at once: 0, or the cudaError_t of the launch. No call allocates or waits. Thread-safe.
 *
 * Pointers inside the descriptors are addresses on the device; arrays of pointers are read before the call returns. */
#ifndef BAGUA_CUDA_KERNELS_H
#define BAGUA_CUDA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BAGUA_KERNELS_VERSION 2
#define BAGUA_KERNELS_MOST_INPUTS 16  /* raws + encodeds of one transcode */
#define BAGUA_KERNELS_MOST_REDUCED 64 /* inputs of one reduce */

/* The same as bagua::Transcode in codec/codec.h, with the same bits: y = (sum of raw + sum of encoded) * scale
 * [+ residual]; message = encode(y); residual = y - decode(message); decoded[j] = decode(message), or y if there is no
 * message. Codec numbers are those of bagua::Codec. raws + encodeds <= BAGUA_KERNELS_MOST_INPUTS, decodeds <= 4. */
typedef struct {
  uint8_t codec;
  uint16_t density;
  uint64_t count;
  const float* const* raw;
  int32_t raws;
  const void* const* encoded;
  int32_t encodeds;
  float scale;
  float* residual;
  void* message;
  float* const* decoded;
  int32_t decodeds;
} BaguaTranscode;

/* output[i] = op(inputs[0][i], ...), in the order of inputs; AVG divides by `divisor`. dtype and op have the numbers of
 * kernel/reduce.h, and results have its bits. `output` may be one of the inputs. */
typedef struct {
  uint8_t dtype;
  uint8_t op;
  uint64_t count;
  const void* const* inputs;
  int32_t input_count;
  void* output;
  int64_t divisor;
} BaguaReduce;

uint32_t bagua_kernels_version(void);
/* Loads all kernels to the current device. Otherwise the first launch of each kernel would load it, and that may wait
 * for all work of the device. Returns 0, or a cudaError_t if the kernels can't run there, such as on a GPU that they
 * were not compiled for. */
int bagua_kernels_load(void);
int bagua_kernels_transcode(const BaguaTranscode* work, void* stream);
int bagua_kernels_reduce(const BaguaReduce* work, void* stream);

/* The table that the engine fills by dlsym. */
typedef struct {
  uint32_t (*version)(void);
  int (*load)(void);
  int (*transcode)(const BaguaTranscode*, void*);
  int (*reduce)(const BaguaReduce*, void*);
} BaguaKernels;

#ifdef __cplusplus
}
#endif
#endif
