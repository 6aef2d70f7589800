/* A CUDA runtime on host memory: every stream is a thread with a queue. It counts misuse, so that tests can be strict.
 * What tests may call besides the functions of CUDA itself: */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Enqueues work: how the fakes of NCCL and of the kernels run in stream order. */
void fake_cuda_enqueue(void* stream, void (*work)(void*), void* context);
/* This thread's device and its bus id. The fake NCCL asks so, not by CUDA's names: a torch that was built for CUDA has
 * put the real runtime's into the process, and those would win. */
void fake_cuda_here(int* device, char* bus_id, int length);
/* Waits until a stream is idle; not counted as synchronisation. */
void fake_cuda_drain(void* stream);
/* "Kernels". */
void fake_cuda_fill(void* stream, float* data, uint64_t count, float value);
void fake_cuda_copy_slowly(void* stream, float* dst, const float* src, uint64_t count, uint32_t milliseconds);

/* As a call does that waits for a stream with the context's lock (a first launch of a kernel, a copy to memory that is
 * not pinned): whatever else uses this thread's device waits meanwhile. 0: the stream was not idle within 5 s. */
int fake_cuda_drain_with_the_lock(void* stream);
/* Streams of a device stand still, and all questions are answered: "not ready". */
void fake_cuda_stall(int device, int on);

/* From now on, synchronisation by this thread is counted. */
void fake_cuda_watch_this_thread(void);
/* Before the end, where waiting is allowed. */
void fake_cuda_unwatch_this_thread(void);
uint64_t fake_cuda_host_synchronisations(void);
/* Uses after destruction, copies from memory that is not pinned, calls in host functions, ... */
uint64_t fake_cuda_misuses(void);
void fake_cuda_note_misuse(const char* what);
const char* fake_cuda_first_misuse(void);
/* Streams, events, allocations and registrations that exist now. */
uint64_t fake_cuda_streams(void);
uint64_t fake_cuda_events(void);
uint64_t fake_cuda_allocated(void);
uint64_t fake_cuda_registered(void);
/* A bit for each device that has a context. Since CUDA 12 cudaSetDevice() makes one. */
uint64_t fake_cuda_contexts(void);
void fake_cuda_forget_contexts(void);
/* Sets the answer of cudaStreamIsCapturing. Meanwhile, calls that spoil a capture are misuse. */
void fake_cuda_set_capturing(void* stream, int status);
/* Every call fails with this code from now on; 0: none does. */
void fake_cuda_break(int code);

#ifdef __cplusplus
}
#endif
#endif
